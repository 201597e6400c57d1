"""Many regions at once: unions as disjoint regions, and arrays of them.

An array of boxes is (n_boxes, n_dims, 2): start and stop of each dimension.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, final

import numpy as np
import numpy.typing as npt
from typing_extensions import override


# Regions: boxes of indices of one layer's output, the batch dimension kept apart.
#
#     one image of 3 maps, 6 x 8        Region.of(3, 6, 8)
#     its upper half                    Region(((0, 3), (0, 3), (0, 8)))
#                                           maps    rows    columns
#
# A region is a product of half-open intervals, so that what two machines share is one
# more region, and what travels between them is a slice of a tensor. It may be empty.

Interval = tuple[int, int]  # [start, stop)
Shape = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Region:
    """A box of indices.

    Attributes:
        intervals: [start, stop) in each dimension; none for a single number.
    """

    intervals: tuple[Interval, ...]

    def __post_init__(self) -> None:
        for start, stop in self.intervals:
            if not 0 <= start <= stop:
                raise ValueError(f"interval [{start}, {stop}): use 0 <= start <= stop")

    @classmethod
    def of(cls, *shape: int) -> Self:
        """Return the whole of a tensor of this shape."""
        return cls(tuple((0, extent) for extent in shape))

    @property
    def shape(self) -> Shape:
        """Its extent in each dimension."""
        return tuple([stop - start for start, stop in self.intervals])

    @property
    def n_elements(self) -> int:
        """How many indices it holds."""
        n = 1  # a loop, for planners ask a million times
        for start, stop in self.intervals:
            n *= stop - start
        return n

    @property
    def slices(self) -> "tuple[slice[int, int, None], ...]":
        """What cuts it out of a tensor of the whole, after the batch dimension."""
        return tuple(slice(start, stop) for start, stop in self.intervals)

    def __and__(self, other: "Region") -> "Region":
        """Return what both hold; empty dimensions begin at the later start."""
        self._check(other)
        return Region(
            tuple(
                (max(a, c), max(a, c, min(b, d)))
                for (a, b), (c, d) in zip(self.intervals, other.intervals, strict=True)
            )
        )

    def __contains__(self, other: "Region") -> bool:
        """Return whether every index of `other` lies in it."""
        self._check(other)
        return not other.n_elements or all(
            a <= c and d <= b
            for (a, b), (c, d) in zip(self.intervals, other.intervals, strict=True)
        )

    def hull(self, other: "Region") -> "Region":
        """Return the smallest region that holds both."""
        self._check(other)
        if not self.n_elements:
            return other
        if not other.n_elements:
            return self
        return Region(
            tuple(
                (min(a, c), max(b, d))
                for (a, b), (c, d) in zip(self.intervals, other.intervals, strict=True)
            )
        )

    def minus(self, other: "Region") -> list["Region"]:
        """Return disjoint regions that hold what `other` does not; at most two per dim.

        Args:
            other: Need not lie inside.
        """
        common = self & other
        if not common.n_elements:
            return [self] if self.n_elements else []
        rest: list[Region] = []
        left = list(self.intervals)
        for dim, (start, stop) in enumerate(common.intervals):
            rest += [
                Region((*left[:dim], piece, *left[dim + 1 :]))
                for piece in ((left[dim][0], start), (stop, left[dim][1]))
                if piece[0] < piece[1]
            ]
            left[dim] = (start, stop)
        return rest

    def within(self, origin: "Region") -> "Region":
        """Return the same indices, counted from the start of `origin`."""
        self._check(origin)
        return Region(
            tuple(
                (a - start, b - start)
                for (a, b), (start, _) in zip(self.intervals, origin.intervals, strict=True)
            )
        )

    def replaced(self, dim: int, interval: Interval) -> "Region":
        """Return it with another interval in dimension `dim`."""
        return Region((*self.intervals[:dim], interval, *self.intervals[dim + 1 :]))

    def cut(self, dim: int, weights: Sequence[float], *, unit: int = 1) -> list["Region"]:
        """Return it cut along `dim` into consecutive parts, in proportion to `weights`.

        Args:
            dim: Which dimension.
            weights: One per part, none negative, not all zero.
            unit: Cuts lie at multiples of this (channels of a group, say). Parts may be
                empty if there are fewer units than parts.
        """
        start, stop = self.intervals[dim]
        ends = cuts(stop - start, weights, unit=unit)
        bounds = [start, *(start + end for end in ends)]
        return [self.replaced(dim, (a, b)) for a, b in pairwise(bounds)]

    def __iter__(self) -> Iterator[Interval]:
        """Iterate over the intervals."""
        return iter(self.intervals)

    @override
    def __str__(self) -> str:
        """Write it as slices: [0:3, 0:3, 0:8]."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in self.intervals) + "]"

    def _check(self, other: "Region") -> None:
        if len(self.intervals) != len(other.intervals):
            raise ValueError(
                f"{self} has {len(self.intervals)} dimensions, {other} "
                f"{len(other.intervals)}: they are of different layers"
            )


def cuts(extent: int, weights: Sequence[float], *, unit: int = 1) -> list[int]:
    """Return where consecutive parts of [0, extent) end, nearest to these proportions.

    Raises:
        ValueError: the weights say nothing.
    """
    total = math.fsum(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights are {list(weights)}; use numbers >= 0, one above 0")
    n_units = -(-extent // unit)
    ends, so_far = [], 0.0
    for weight in weights:
        so_far += weight
        ends.append(min(extent, unit * round(n_units * so_far / total)))
    ends[-1] = extent
    return ends


def tile(whole: Region, parts: Iterable[Region]) -> bool:
    """Return whether the parts hold every index of `whole` exactly once."""
    parts = [part for part in parts if part.n_elements]
    if sum(part.n_elements for part in parts) != whole.n_elements:
        return False
    if not all(part in whole for part in parts):
        return False
    # Equal counts and no overlap leave no gap.
    return not any((a & b).n_elements for i, a in enumerate(parts) for b in parts[i + 1 :])


IntArray = npt.NDArray[np.int64]


def disjoint(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return disjoint regions, none empty, that hold what any of these holds."""
    found: list[Region] = []
    for region in sorted(set(regions), key=lambda r: (-r.n_elements, r.intervals)):
        rest = [region] if region.n_elements else []
        for other in found:
            rest = [piece for part in rest for piece in part.minus(other)]
            if not rest:
                break
        found += rest
    return tuple(sorted(found, key=lambda r: r.intervals))


def to_array(regions: Sequence[Region], n_dims: int) -> IntArray:
    """Return them as (n_regions, n_dims, 2)."""
    rows = [region.intervals for region in regions]
    return np.array(rows, dtype=np.int64).reshape(len(rows), n_dims, 2)


def to_regions(boxes: IntArray) -> tuple[Region, ...]:
    """Return (n_boxes, n_dims, 2) as regions."""
    rows: list[list[list[int]]] = boxes.tolist()
    return tuple(Region(tuple((a, b) for a, b in row)) for row in rows)


def n_elements(boxes: IntArray) -> IntArray:
    """Return how many indices each box holds: (n_boxes,)."""
    lengths: IntArray = boxes[:, :, 1] - boxes[:, :, 0]
    return np.asarray(lengths.prod(axis=1), dtype=np.int64)


def overlaps(ours: IntArray, theirs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return what every two boxes, one of each, have in common.

    Args:
        ours: (n, n_dims, 2)
        theirs: (m, n_dims, 2)

    Returns:
        Which of ours and which of theirs, (k,) each, in this order, and their
        common boxes, (k, n_dims, 2); none is empty.
    """
    meet = np.ones((len(ours), len(theirs)), dtype=np.bool_)
    for dim in range(ours.shape[1]):
        start = np.maximum.outer(ours[:, dim, 0], theirs[:, dim, 0])
        meet &= start < np.minimum.outer(ours[:, dim, 1], theirs[:, dim, 1])
    i, j = np.nonzero(meet)
    starts = np.maximum(ours[i, :, 0], theirs[j, :, 0])
    stops = np.minimum(ours[i, :, 1], theirs[j, :, 1])
    return i, j, np.stack([starts, stops], axis=2)


def shared_by(
    uses: Mapping[int, Sequence[Region]], n_dims: int
) -> list[tuple[tuple[int, ...], Region]]:
    """Return regions, each with all who use it: disjoint, none empty.

    Args:
        uses: What each uses; disjoint.
        n_dims: Of the tensor.

    Returns:
        Users, in the order of `uses`, and region.
    """
    users = list(uses)
    boxes = to_array([r for regions in uses.values() for r in regions], n_dims)
    if not len(boxes):
        return []
    edges = [np.unique(boxes[:, dim]) for dim in range(n_dims)]
    marks = np.zeros((*(len(edge) - 1 for edge in edges), len(users)), dtype=np.bool_)
    for index, regions in enumerate(uses.values()):
        for region in regions:
            where: list[slice[int, int, None] | int] = []
            for edge, (start, stop) in zip(edges, region, strict=True):
                first, last = np.searchsorted(edge, (start, stop)).tolist()
                where.append(slice(first, last))
            marks[(*where, index)] = True
    cells: dict[bytes, list[Region]] = {}
    packed = np.packbits(marks, axis=-1)
    intervals = [list(pairwise(edge.tolist())) for edge in edges]
    for place in np.ndindex(*marks.shape[:-1]):
        cell = Region(tuple(row[k] for row, k in zip(intervals, place, strict=True)))
        cells.setdefault(packed[place].tobytes(), []).append(cell)
    found = []
    for code, regions in cells.items():
        bits = np.unpackbits(np.frombuffer(code, dtype=np.uint8), count=len(users))
        who = tuple(users[index] for index in np.flatnonzero(bits))
        found += [(who, region) for region in joined_up(regions) if who]
    return found


def joined_up(cells: Sequence[Region]) -> list[Region]:
    """Return the same as fewer regions: neighbours along one dimension become one.

    Args:
        cells: Disjoint.
    """
    regions = list(cells)
    n_dims = len(regions[0].intervals) if regions else 0
    for dim in reversed(range(n_dims)):
        rows: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
        for region in regions:
            others = (*region.intervals[:dim], *region.intervals[dim + 1 :])
            rows.setdefault(others, []).append(region.intervals[dim])
        regions = [
            Region((*others[:dim], interval, *others[dim:]))
            for others, intervals in rows.items()
            for interval in _runs(intervals)
        ]
    return regions


def _runs(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
