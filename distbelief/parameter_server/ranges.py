"""Ranges of a vector's elements, and copies from and to them.

columns 2 to 4 of a 4 x 6 matrix at element 64 of a vector

ranges    [66, 69) [72, 75) [78, 81) [84, 87)      compact: 12 elements
stripes   start 66, length 3, stride 6, count 4
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.vectors import Vector


Indices = NDArray[np.int64]

N_STRIPES_MAX: Final = 8192
"""Limit of one client's part of a shard: a quarter of what fits into an array frame."""

N_RANGES_MAX: Final = 1 << 20

_STRIPE_MIN: Final = 1024
"""Elements from which a strided copy is cheaper than a copy by index."""

_WORDS: Final = 4  # start, length, stride, count


@final
class IndexRanges:
    """Sorted, disjoint ranges of a vector's elements.

    The elements of the ranges, by rising index, make the *compact* vector. Touching ranges are
    merged, so equal sets of elements have equal ranges. On the wire ranges are stripes (rows of
    equal length at equal distance), so that a slice of a large matrix takes a few numbers.
    """

    def __init__(self, starts: Indices, stops: Indices) -> None:
        self.starts = starts  # (n,)
        self.stops = stops  # (n,); no range is empty, and no two touch
        ends = np.cumsum(stops - starts)
        # (n,) where each range begins in the compact vector.
        self.offsets: Indices = ends - (stops - starts)
        self.n_elements = int(ends[-1]) if len(ends) else 0  # of all ranges

    @classmethod
    def of(cls, starts: Indices, stops: Indices) -> "IndexRanges":
        """Return these ranges, sorted and merged, without empty ones; ValueError if two overlap."""
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        some = stops > starts
        starts, stops = starts[some], stops[some]
        overlaps = np.flatnonzero(starts[1:] < stops[:-1])
        if len(overlaps):
            i = int(overlaps[0])
            raise ValueError(
                f"ranges [{starts[i]}, {stops[i]}) and [{starts[i + 1]}, {stops[i + 1]}) overlap"
            )
        opens = np.ones(len(starts), np.bool_)
        opens[1:] = starts[1:] > stops[:-1]
        closes = np.roll(opens, -1)
        return cls(starts[opens], stops[closes])

    @classmethod
    def union(cls, parts: Iterable["IndexRanges"]) -> "IndexRanges":
        none = cls(np.zeros(0, np.int64), np.zeros(0, np.int64))
        all_parts = [none, *parts]
        starts = np.concatenate([part.starts for part in all_parts])
        order = np.argsort(starts, kind="stable")
        stops = np.concatenate([part.stops for part in all_parts])[order]
        ends = np.maximum.accumulate(stops)
        # What an earlier one has counts once.
        starts = np.maximum(starts[order], np.append(0, ends[:-1])[: len(ends)])
        return cls.of(starts, np.maximum(starts, stops))

    @classmethod
    def whole(cls, start: int, stop: int) -> "IndexRanges":
        """Return the one range [start, stop); none if it is empty."""
        ends = ([start], [stop]) if start < stop else ([], [])
        return cls(*(np.array(end, np.int64) for end in ends))

    @classmethod
    def from_wire(cls, words: Vector, *, size: int) -> "IndexRanges":
        """Return the ranges of these stripes; RemoteProtocolError if they do not fit `size`."""
        if words.dtype != np.int64 or len(words) % _WORDS:
            raise RemoteProtocolError(
                f"{len(words)} numbers of {words.dtype} are not stripes of {_WORDS} int64 each"
            )
        n = len(words) // _WORDS
        if n > N_STRIPES_MAX:
            raise RemoteProtocolError(
                f"{n} stripes; the most is {N_STRIPES_MAX}: use fewer regions, or more shards"
            )
        stripes: Indices = words.astype(np.int64, copy=False).reshape(n, _WORDS)
        starts, lengths, strides, counts = stripes.T
        # Check everything before memory of this size is allocated.
        in_range = (starts >= 0) & (lengths >= 1) & (counts >= 1)
        in_range &= (starts < size) & (lengths <= size - starts)
        in_range &= (strides >= lengths) & (strides <= max(size, 1))
        # A division, because the product of hostile numbers may overflow.
        room = (size - starts - lengths) // np.maximum(strides, 1)
        in_range &= counts - 1 <= room
        if not in_range.all():
            i = int(np.argmin(in_range))
            raise RemoteProtocolError(
                f"stripe {stripes[i].tolist()} does not fit a vector of {size} elements"
            )
        n_ranges = sum(counts.tolist())
        if n_ranges > N_RANGES_MAX:
            raise RemoteProtocolError(
                f"{n_ranges} ranges; the most is {N_RANGES_MAX}: use fewer regions, or more shards"
            )
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.arange(n_ranges, dtype=np.int64) - firsts
        begins = np.repeat(starts, counts) + rows * np.repeat(strides, counts)
        try:
            return cls.of(begins, begins + np.repeat(lengths, counts))
        except ValueError as error:
            raise RemoteProtocolError(f"stripes overlap: {error}") from None

    @staticmethod
    def ends(parts: Iterable["IndexRanges"]) -> Indices:
        """Return every start and stop of these ranges, sorted; at least one is needed."""
        return np.unique(np.concatenate([end for one in parts for end in (one.starts, one.stops)]))

    @property
    def key(self) -> bytes:
        digest = hashlib.sha256(self.starts.tobytes())
        digest.update(self.stops.tobytes())
        return digest.digest()

    def stripes(self) -> Indices:
        """Return the ranges for the wire: (4 n,) start, length, stride, count of each stripe."""
        starts, lengths = self.starts, self.stops - self.starts
        n = len(starts)
        # Distance to the next range if both have the same length, else 0.
        links = np.where(lengths[1:] == lengths[:-1], starts[1:] - starts[:-1], 0)
        changes = np.append(np.flatnonzero(links[1:] != links[:-1]) + 1, n - 1)
        words: list[int] = []
        first = 0
        while first < n:
            stride, last = int(lengths[first]), first
            if first < n - 1 and links[first]:
                stride = int(links[first])
                last = int(changes[np.searchsorted(changes, first, side="right")])
            words += [int(starts[first]), int(lengths[first]), stride, last - first + 1]
            first = last + 1
        return np.array(words, np.int64)

    def clipped(self, start: int, stop: int) -> "IndexRanges":
        first = int(np.searchsorted(self.stops, start, side="right"))
        last = int(np.searchsorted(self.starts, stop, side="left"))
        return IndexRanges(
            np.maximum(self.starts[first:last], start), np.minimum(self.stops[first:last], stop)
        )

    def shifted(self, by: int) -> "IndexRanges":
        return IndexRanges(self.starts + by, self.stops + by)

    def part(self, start: int, stop: int) -> "IndexRanges":
        """Return the elements [start, stop) of the compact vector."""
        ends = self.offsets + (self.stops - self.starts)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(self.offsets, stop, side="left"))
        offsets = self.offsets[first:last]
        before = np.maximum(start - offsets, 0)
        beyond = np.maximum(ends[first:last] - stop, 0)
        return IndexRanges(self.starts[first:last] + before, self.stops[first:last] - beyond)

    def positions_of(self, inner: "IndexRanges") -> "IndexRanges":
        """Return where `inner`, each range inside one of these, lies in the compact vector."""
        at = np.searchsorted(self.starts, inner.starts, side="right") - 1
        starts = self.offsets[at] + inner.starts - self.starts[at]
        return IndexRanges.of(starts, starts + (inner.stops - inner.starts))

    def intersection(self, other: "IndexRanges") -> "IndexRanges":
        bounds = IndexRanges.ends([self, other])
        both = self.mask(bounds) & other.mask(bounds)
        return IndexRanges.of(bounds[:-1][both], bounds[1:][both])

    def overlaps(self, other: "IndexRanges") -> bool:
        after = np.searchsorted(self.stops, other.starts, side="right")
        some = after < len(self.starts)
        return bool((self.starts[after[some]] < other.stops[some]).any())

    def mask(self, bounds: Indices) -> NDArray[np.bool_]:
        """Return for each [bounds[i], bounds[i + 1]) whether it is in the ranges.

        The bounds are sorted and contain every start and stop.
        """
        steps = np.zeros(len(bounds), np.int64)
        steps[np.searchsorted(bounds, self.starts)] += 1
        steps[np.searchsorted(bounds, self.stops)] -= 1
        return np.cumsum(steps)[:-1] > 0


@final
class RangeCopier:
    """Copies between a vector and the compact vector of some of its ranges.

    Long stripes are copied as strided views, the elements of short ones by index.
    """

    def __init__(self, ranges: IndexRanges) -> None:
        words = ranges.stripes().reshape(-1, _WORDS)
        sizes = words[:, 1] * words[:, 3]
        self.n_elements = ranges.n_elements
        offsets = np.cumsum(sizes) - sizes
        long = sizes >= _STRIPE_MIN
        self._stripes = [
            (*map(int, row), int(offset))
            for row, offset in zip(words[long], offsets[long], strict=True)
        ]
        self._here, self._there = _indices(words[~long], offsets[~long])

    def gather(self, vector: torch.Tensor, compact: torch.Tensor) -> None:
        """Copy the ranges of `vector` into `compact`, (n_elements,)."""
        for view, part in self._views(vector, compact):
            part.copy_(rounded(view, part))
        if self._here is not None and self._there is not None:
            found = rounded(vector[self._there], compact)
            compact[self._here] = found.to(compact.dtype)

    def scatter(self, compact: torch.Tensor, vector: torch.Tensor) -> None:
        """Copy `compact`, (n_elements,), into the ranges of `vector`."""
        for view, part in self._views(vector, compact):
            view.copy_(part)
        if self._here is not None and self._there is not None:
            vector[self._there] = compact[self._here].to(vector.dtype)

    def _views(
        self, vector: torch.Tensor, compact: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = vector.storage_offset()
        for start, length, stride, count, offset in self._stripes:
            view = vector.as_strided((count, length), (stride, 1), first + start)
            part = compact[offset : offset + count * length]
            yield view, part.view(count, length)


def rounded(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # Averages of integer buffers are not integers.
    return values if target.is_floating_point() else values.round()


def _indices(words: Indices, offsets: Indices) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not len(words):
        return None, None
    here, there = [], []
    for (start, length, stride, count), offset in zip(words, offsets, strict=True):
        rows = np.arange(count)[:, None] * stride + np.arange(length)
        there.append(start + rows.reshape(-1))
        here.append(np.arange(offset, offset + length * count))
    return torch.from_numpy(np.concatenate(here)), torch.from_numpy(np.concatenate(there))
