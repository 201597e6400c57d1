"""Parts of a vector: sorted, disjoint ranges of its elements.

    a slice of columns of a matrix of 4 rows, 6 columns, at element 64 of a vector

    ranges    [66, 69) [72, 75) [78, 81) [84, 87)      compact: 12 elements
    stripes   start 66, length 3, stride 6, count 4

Rules:

* The elements of the ranges, by rising index, make the *compact* vector.
* Ranges that touch are one. Equal sets of elements have equal ranges, and equal keys.
* On the wire they are stripes: rows of equal length at equal distance, so that a slice
  of a large matrix is a few numbers. What comes from there is checked before memory of
  its size is taken.
* Copies are made by stripes; the elements of those too short for that, by their index.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.errors import RemoteProtocolError
from distbelief.vectors import Vector


Indices = NDArray[np.int64]

N_STRIPES_MAX: Final = 8192
"""Of one client's part of a shard: a quarter of what fits into an array frame."""

N_RANGES_MAX: Final = 1 << 20

_STRIPE_MIN: Final = 1024
"""Elements from which on a copy of a stripe is cheaper than one by index."""

_WORDS: Final = 4  # start, length, stride, count


@final
class Ranges:
    """Sorted, disjoint ranges.

    Attributes:
        starts: (n,) of each.
        stops: (n,) of each; none is empty, and no two touch.
        offsets: (n,) where each begins in the compact vector.
        n_elements: Of all.
    """

    def __init__(self, starts: Indices, stops: Indices) -> None:
        self.starts = starts
        self.stops = stops
        ends = np.cumsum(stops - starts)
        self.offsets: Indices = ends - (stops - starts)
        self.n_elements = int(ends[-1]) if len(ends) else 0

    @classmethod
    def of(cls, starts: Indices, stops: Indices) -> "Ranges":
        """Return these, in whatever order they are given; empty ones do not count.

        Raises:
            ValueError: two of them overlap.
        """
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
    def union(cls, parts: Iterable["Ranges"]) -> "Ranges":
        """Return all of them.

        Raises:
            ValueError: two of them overlap.
        """
        none = cls(np.zeros(0, np.int64), np.zeros(0, np.int64))
        all_parts = [none, *parts]
        starts = np.concatenate([part.starts for part in all_parts])
        return cls.of(starts, np.concatenate([part.stops for part in all_parts]))

    @classmethod
    def whole(cls, start: int, stop: int) -> "Ranges":
        """Return the one range [start, stop); none if it is empty."""
        ends = ([start], [stop]) if start < stop else ([], [])
        return cls(*(np.array(end, np.int64) for end in ends))

    @classmethod
    def read(cls, words: Vector, *, size: int) -> "Ranges":
        """Return what stripes from the wire say of a vector of `size` elements.

        Raises:
            RemoteProtocolError: they cannot be parts of it.
        """
        if words.dtype != np.int64 or len(words) % _WORDS:
            raise RemoteProtocolError(
                f"{len(words)} numbers of {words.dtype} are no stripes: those are "
                f"{_WORDS} numbers of int64 each"
            )
        n = len(words) // _WORDS
        if n > N_STRIPES_MAX:
            raise RemoteProtocolError(
                f"{n} stripes; the most is {N_STRIPES_MAX}: use fewer regions, or more shards"
            )
        stripes: Indices = words.astype(np.int64, copy=False).reshape(n, _WORDS)
        starts, lengths, strides, counts = stripes.T
        in_range = (starts >= 0) & (lengths >= 1) & (counts >= 1)
        in_range &= (starts < size) & (lengths <= size - starts)
        in_range &= (strides >= lengths) & (strides <= max(size, 1))
        # Not multiplied before it is known to be small.
        room = (size - starts - lengths) // np.maximum(strides, 1)
        in_range &= counts - 1 <= room
        if not in_range.all():
            i = int(np.argmin(in_range))
            raise RemoteProtocolError(
                f"stripe (start {starts[i]}, length {lengths[i]}, stride {strides[i]}, "
                f"count {counts[i]}) is no part of a vector of {size} elements"
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
            raise RemoteProtocolError(f"stripes that overlap: {error}") from None

    @property
    def key(self) -> bytes:
        """Of these elements, and of no others."""
        digest = hashlib.sha256(self.starts.tobytes())
        digest.update(self.stops.tobytes())
        return digest.digest()

    def stripes(self) -> Indices:
        """Return them as on the wire: (4 n,) start, length, stride, count of each."""
        starts, lengths = self.starts, self.stops - self.starts
        n = len(starts)
        # How each is linked to the next: by a distance, if they are of equal length.
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

    def clipped(self, start: int, stop: int) -> "Ranges":
        """Return what of them lies in [start, stop)."""
        first = int(np.searchsorted(self.stops, start, side="right"))
        last = int(np.searchsorted(self.starts, stop, side="left"))
        return Ranges(
            np.maximum(self.starts[first:last], start), np.minimum(self.stops[first:last], stop)
        )

    def shifted(self, by: int) -> "Ranges":
        """Return the ranges that lie so many elements later."""
        return Ranges(self.starts + by, self.stops + by)

    def part(self, start: int, stop: int) -> "Ranges":
        """Return the elements [start, stop) of the compact vector."""
        ends = self.offsets + (self.stops - self.starts)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(self.offsets, stop, side="left"))
        offsets = self.offsets[first:last]
        before = np.maximum(start - offsets, 0)
        beyond = np.maximum(ends[first:last] - stop, 0)
        return Ranges(self.starts[first:last] + before, self.stops[first:last] - beyond)

    def places(self, inner: "Ranges") -> "Ranges":
        """Return where `inner`, each range in one of these, lies in the compact one."""
        at = np.searchsorted(self.starts, inner.starts, side="right") - 1
        starts = self.offsets[at] + inner.starts - self.starts[at]
        return Ranges.of(starts, starts + (inner.stops - inner.starts))

    def n_below(self, stop: int) -> int:
        """Return how many elements have an index below `stop`."""
        return self.clipped(0, stop).n_elements

    def meets(self, other: "Ranges") -> bool:
        """Return whether they have an element in common."""
        after = np.searchsorted(self.stops, other.starts, side="right")
        some = after < len(self.starts)
        return bool((self.starts[after[some]] < other.stops[some]).any())

    def marks(self, bounds: Indices) -> NDArray[np.bool_]:
        """Return whether each [bounds[i], bounds[i + 1]) lies in them.

        Args:
            bounds: Sorted; each start and stop is among them.
        """
        steps = np.zeros(len(bounds), np.int64)
        steps[np.searchsorted(bounds, self.starts)] += 1
        steps[np.searchsorted(bounds, self.stops)] -= 1
        return np.cumsum(steps)[:-1] > 0


@final
class Copier:
    """Copies between a vector and the compact vector of some of its ranges."""

    def __init__(self, ranges: Ranges) -> None:
        self.n_elements = ranges.n_elements
        words = ranges.stripes().reshape(-1, _WORDS)
        sizes = words[:, 1] * words[:, 3]
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
            part.copy_(_rounded(view, part))
        if self._here is not None and self._there is not None:
            found = _rounded(vector[self._there], compact)
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


def _rounded(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `values`, the nearest integers if `target` holds integers."""
    return values if target.is_floating_point() else values.round()


def _indices(words: Indices, offsets: Indices) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return indices in the compact vector, and in the other, of these stripes."""
    if not len(words):
        return None, None
    here, there = [], []
    for (start, length, stride, count), offset in zip(words, offsets, strict=True):
        rows = np.arange(count)[:, None] * stride + np.arange(length)
        there.append(start + rows.reshape(-1))
        here.append(np.arange(offset, offset + length * count))
    return torch.from_numpy(np.concatenate(here)), torch.from_numpy(np.concatenate(there))
