"""Regions: boxes of indices of one layer's output, without the batch dimension.

    one image of 3 maps, 6 x 8        Region.of(3, 6, 8)
    its upper half                    Region(((0, 3), (0, 3), (0, 8)))
                                          maps    rows    columns

A region is a product of half-open intervals, so that what two ranks share is a region too, and
what one sends to the other is a slice of a tensor. It may be empty. For many regions at
once there are arrays of boxes, (n_boxes, n_dims, 2): start and stop of each dimension.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Self, final

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override


Interval = tuple[int, int]  # [start, stop)
Shape = tuple[int, ...]


@final
class Region(msgspec.Struct, frozen=True, cache_hash=True):
    """A box of indices: [start, stop) in each dimension; no dimension for a scalar."""

    intervals: tuple[Interval, ...]

    def __post_init__(self) -> None:
        for start, stop in self.intervals:
            if not 0 <= start <= stop:
                raise ValueError(f"invalid interval [{start}, {stop}): use 0 <= start <= stop")

    @classmethod
    def of(cls, *shape: int) -> Self:
        """Return the region of a whole tensor of this shape."""
        return cls(tuple((0, extent) for extent in shape))

    @property
    def shape(self) -> Shape:
        return tuple([stop - start for start, stop in self.intervals])

    @property
    def n_elements(self) -> int:
        n = 1  # a loop is faster than math.prod, and planners call this a million times
        for start, stop in self.intervals:
            n *= stop - start
        return n

    @property
    def slices(self) -> "tuple[slice[int, int, None], ...]":
        """Slices that cut the region out of the whole tensor, batch dimension excluded."""
        return tuple(slice(start, stop) for start, stop in self.intervals)

    def __and__(self, other: "Region") -> "Region":
        """Return the intersection; empty dimensions begin at the later start."""
        return Region(
            tuple(
                (max(a, c), max(a, c, min(b, d)))
                for (a, b), (c, d) in zip(self.intervals, other.intervals, strict=True)
            )
        )

    def __contains__(self, other: "Region") -> bool:
        """Return whether every index of `other` lies in this region."""
        return not other.n_elements or all(
            a <= c and d <= b
            for (a, b), (c, d) in zip(self.intervals, other.intervals, strict=True)
        )

    def minus(self, other: "Region") -> list["Region"]:
        """Return disjoint regions that cover the difference, at most two per dimension."""
        common = self & other
        if not common.n_elements:
            return [self] if self.n_elements else []
        # Cut one slab off each side of each dimension; what is left shrinks to the intersection.
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
        return Region(
            tuple(
                (a - start, b - start)
                for (a, b), (start, _) in zip(self.intervals, origin.intervals, strict=True)
            )
        )

    def replaced(self, dim: int, interval: Interval) -> "Region":
        """Return it with another interval; a negative dimension counts from the end."""
        intervals = list(self.intervals)
        intervals[dim] = interval
        return Region(tuple(intervals))

    def without(self, dim: int) -> "Region":
        return Region((*self.intervals[:dim], *self.intervals[dim + 1 :]))

    def broadcast(self, shape: Shape) -> "Region":
        """Return the region of a tensor of this shape that broadcasts to this one.

        As in torch, dimensions are aligned at the last one, and those of extent 1 are repeated.
        """
        last = self.intervals[len(self.intervals) - len(shape) :]
        return Region(
            tuple(
                (0, 1) if extent == 1 and start < stop else (start, stop)
                for extent, (start, stop) in zip(shape, last, strict=True)
            )
        )

    def cut(self, dim: int, weights: Sequence[float], *, unit: int = 1) -> list["Region"]:
        """Split the region along `dim` into consecutive parts, in proportion to `weights`.

        Weights are not negative, and not all zero. Parts begin at multiples of `unit`, for example
        the channels of a group; they are empty if there are fewer units than parts.
        """
        start, stop = self.intervals[dim]
        ends = cuts(stop - start, weights, unit=unit)
        bounds = [start, *(start + end for end in ends)]
        return [self.replaced(dim, (a, b)) for a, b in pairwise(bounds)]

    def __iter__(self) -> Iterator[Interval]:
        return iter(self.intervals)

    @override
    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in self.intervals) + "]"


def cuts(extent: int, weights: Sequence[float], *, unit: int = 1) -> list[int]:
    """Return the ends of consecutive parts of [0, extent), closest to these proportions.

    ValueError if a weight is negative, or all are zero.
    """
    total = math.fsum(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights are {list(weights)}: use numbers >= 0, one above 0")
    n_units = -(-extent // unit)
    ends, so_far = [], 0.0
    for weight in weights:
        so_far += weight
        ends.append(min(extent, unit * round(n_units * so_far / total)))
    ends[-1] = extent
    return ends


IntArray = npt.NDArray[np.int64]


def disjoint(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return disjoint, non-empty regions with the same union as these."""
    # Largest first: later ones are then often covered and dropped early.
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
    """Return the regions as boxes (n_regions, n_dims, 2)."""
    rows = [region.intervals for region in regions]
    return np.array(rows, dtype=np.int64).reshape(len(rows), n_dims, 2)


def to_regions(boxes: IntArray) -> tuple[Region, ...]:
    rows: list[list[list[int]]] = boxes.tolist()
    return tuple(Region(tuple((a, b) for a, b in row)) for row in rows)


def n_elements(boxes: IntArray) -> IntArray:
    """Return the number of indices in each box: (n_boxes,)."""
    lengths: IntArray = boxes[:, :, 1] - boxes[:, :, 0]
    return np.asarray(lengths.prod(axis=1), dtype=np.int64)


def overlaps(ours: IntArray, theirs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the non-empty intersections of all pairs of boxes.

    They are indices into ours and theirs, (k,) each, and the boxes, (k, n_dims, 2).
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
    """Return disjoint, non-empty regions, each with all users that use it.

    The regions of one user are disjoint; users are in the order of `uses`.
    """
    users = list(uses)
    boxes = to_array([r for regions in uses.values() for r in regions], n_dims)
    if not len(boxes):
        return []
    # All edges of all boxes form a grid; each cell of it is used as a whole or not at all.
    edges = [np.unique(boxes[:, dim]) for dim in range(n_dims)]
    marks = np.zeros((*(len(edge) - 1 for edge in edges), len(users)), dtype=np.bool_)
    for index, regions in enumerate(uses.values()):
        for region in regions:
            slices: list[slice[int, int, None] | int] = []
            for edge, (start, stop) in zip(edges, region, strict=True):
                first, last = np.searchsorted(edge, (start, stop)).tolist()
                slices.append(slice(first, last))
            marks[(*slices, index)] = True
    # Group cells by their set of users, packed into bits.
    cells: dict[bytes, list[Region]] = {}
    packed = np.packbits(marks, axis=-1)
    intervals = [list(pairwise(edge.tolist())) for edge in edges]
    for cell_index in np.ndindex(*marks.shape[:-1]):
        cell = Region(tuple(row[k] for row, k in zip(intervals, cell_index, strict=True)))
        cells.setdefault(packed[cell_index].tobytes(), []).append(cell)
    found = []
    for code, regions in cells.items():
        bits = np.unpackbits(np.frombuffer(code, dtype=np.uint8), count=len(users))
        used_by = tuple(users[index] for index in np.flatnonzero(bits))
        found += [(used_by, region) for region in merged(regions) if used_by]
    return found


def merged(cells: Sequence[Region]) -> list[Region]:
    """Merge neighbours along each dimension; `cells` are disjoint."""
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
