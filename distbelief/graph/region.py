"""Regions: boxes of indices of one layer's output, the batch dimension kept apart.

    one image of 3 maps, 6 x 8        Region.of(3, 6, 8)
    its upper half                    Region(((0, 3), (0, 3), (0, 8)))
                                          maps    rows    columns

A region is a product of half-open intervals, so that what two machines share is one
more region, and what travels between them is a slice of a tensor. It may be empty.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, final

from typing_extensions import override


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
