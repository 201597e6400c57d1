"""A shard's vector: index ranges, all copies from and to them, and memory shared with clients.

    encode          rounds numbers to the words of bfloat16
    IndexRanges     sorted, disjoint ranges of indices
    RangeCopier     copies between a vector and the compact vector of some ranges
    ShardSlice      the elements of a shard's vector that one client reads and writes
    TensorCopier    copies between a client's tensors and such elements
    SeqlockVector   the whole vector, in memory that clients on this host read

Nothing here knows a message, a role or how tensors lie on shards.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.core.memory import Memory, Region
from distbelief.core.vectors import ALIGNMENT, Element, Vector, block_bounds
from distbelief.errors import RemoteProtocolError


Bounds = Sequence[tuple[int, int]]  # (start, stop) of each block of a vector


def padded(n_elements: int) -> int:
    return -(-n_elements // ALIGNMENT) * ALIGNMENT


def as_tensor(vector: Vector) -> torch.Tensor:
    """Return the same memory as a tensor: words as bfloat16, and read-only arrays unmarked."""
    if vector.dtype == WORD:
        return as_tensor(vector.view(np.int16)).view(torch.bfloat16)
    if vector.flags.writeable:
        return torch.from_numpy(vector)
    return torch.from_numpy(np.asarray(_Writeable(vector)))


@final
# Torch has no read-only tensors and warns about read-only arrays.
class _Writeable:
    def __init__(self, vector: Vector) -> None:
        address, _ = vector.__array_interface__["data"]
        self._vector = vector  # keeps the memory alive
        self.__array_interface__ = vector.__array_interface__ | {"data": (address, False)}


# --- numbers as sent ---
#
#     payload      parameters           buffers
#     dense        4 bytes (double: 8)  the same
#     bfloat16     2 bytes, rounded     4 bytes, from an even word on
#
# Buffers stay exact: among them are counters, indices and frozen parameters. Bfloat16 is the upper
# half of a float32, so it has the same exponents and each conversion back is exact.

WORD: Final = np.dtype(np.uint16)
"""The element type of a vector in bfloat16."""

_ROUNDED_PIECE: Final = 1 << 15  # elements; torch starts its threads for more
_INFINITY: Final = 0x7F80  # as a word; NaN is beyond
_LARGEST: Final = torch.finfo(torch.bfloat16).max


def encode(values: torch.Tensor, words: Vector) -> bool:
    """Round numbers, (n,), to the nearest bfloat16, ties to even; return whether all are finite.

    A finite number that would round to infinity becomes the largest bfloat16, which is within one
    step of it: what is finite here must be finite at the peer, where it would spoil a whole model.
    """
    target, is_finite = as_tensor(words), True
    for start in range(0, len(words), _ROUNDED_PIECE):
        piece = slice(start, start + _ROUNDED_PIECE)
        numbers = values[piece].to("cpu", torch.float32)
        target[piece].copy_(numbers)
        if np.max(words[piece].view(np.uint16) & 0x7FFF) >= _INFINITY:
            here = numbers.isfinite()
            is_finite = is_finite and bool(here.all())
            target[piece].copy_(torch.where(here, numbers.clamp(-_LARGEST, _LARGEST), numbers))
    return is_finite


def decode(words: Vector, target: torch.Tensor) -> None:
    source = as_tensor(words)
    for start in range(0, len(words), _ROUNDED_PIECE):
        piece = slice(start, start + _ROUNDED_PIECE)
        target[piece].copy_(source[piece])


def word_count(n_elements: int, n_parameters: int) -> int:
    """Return how many words these parameters and buffers take, the parameters first."""
    return n_parameters + n_parameters % 2 + 2 * (n_elements - n_parameters)


def parts(vector: Vector, n_parameters: int) -> tuple[Vector, Vector]:
    """Return the parameters and the buffers of a vector, or of its words."""
    if vector.dtype != WORD:
        return vector[:n_parameters], vector[n_parameters:]
    buffers = vector[n_parameters + n_parameters % 2 :].view(np.float32)
    # A small message may lie at any address.
    return vector[:n_parameters], buffers if buffers.flags.aligned else buffers.copy()


def convert(source: Vector, target: Vector, *, n_parameters: int) -> int:
    """Copy a vector, or its words, into another one, or into words; return the source's size."""
    parameters, buffers = parts(source, n_parameters)
    to_parameters, to_buffers = parts(target, n_parameters)
    if source.dtype == target.dtype:
        np.copyto(to_parameters, parameters)
    elif target.dtype == WORD:
        encode(as_tensor(parameters), to_parameters)
    else:
        decode(parameters, as_tensor(to_parameters))
    np.copyto(to_buffers, buffers)
    return len(source)


# --- ranges ---
#
#     columns 2 to 4 of a 4 x 6 matrix at element 64 of a vector
#
#     ranges    [66, 69) [72, 75) [78, 81) [84, 87)      compact: 12 elements
#     stripes   start 66, length 3, stride 6, count 4

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


# --- a client's part of a shard ---

_N_KNOWN_MAX = 1024


@final
class ShardSlice:
    """The elements of a shard's vector that one client reads and writes: all, or ranges.

        shard's vector   0 1 2 3 4 5 6 7 8 9 ...      pushed, and fetched by blocks:
        a client holds       ^^^     ^^^^^            the compact vector 2 3 6 7 8

    A rank of a model-parallel replica "needs to communicate with just the subset of parameter
    server shards that hold the model parameters relevant to its partition" (Dean et al. 2012,
    section 4).
    """

    def __init__(
        self,
        size: int,  # of the vector
        *,
        dtype: np.dtype[Element],
        ranges: IndexRanges | None = None,
        n_gradient: int | None = None,  # elements of the vector before its buffers; None: all
    ) -> None:
        # Of the compact vector.
        self.n_elements = n_elements = size if ranges is None else ranges.n_elements
        self.dtype = dtype  # of the shard's vector
        self.ranges = ranges  # of the shard's vector; None for all of it
        self._size = size
        self._n_gradient = size if n_gradient is None else n_gradient
        self.n_parameters = self.within(0, self._n_gradient).n_elements
        self.stripes = None if ranges is None else ranges.stripes()  # the ranges as on the wire
        # (start, stop) of each block of the compact vector.
        self.bounds: Bounds = tuple(block_bounds(n_elements, itemsize=dtype.itemsize))
        # Equal for equal parts; empty for everything.
        self.key = b"" if ranges is None else ranges.key
        # By block, for parameters and buffers.
        self._copiers: dict[int, tuple[RangeCopier, RangeCopier]] = {}
        self._copier: RangeCopier | None = None  # for all blocks at once

    @property
    def all_stripes(self) -> Indices:
        """The ranges as on the wire, of everything too."""
        return IndexRanges.whole(0, self._size).stripes() if self.stripes is None else self.stripes

    def within(self, start: int, stop: int) -> IndexRanges:
        if self.ranges is None:
            return IndexRanges.whole(start, stop)
        return self.ranges.clipped(start, stop)

    def positions_of(self, inner: IndexRanges) -> IndexRanges:
        return inner if self.ranges is None else self.ranges.positions_of(inner)

    def contains(self, other: "ShardSlice") -> bool:
        if self.ranges is None or other.ranges is None:
            return self.ranges is None
        return self.ranges.intersection(other.ranges).n_elements == other.n_elements

    def n_blocks_within(self, stop: int) -> int:
        """Return how many blocks lie in elements [0, stop) of the shard's vector."""
        n_elements = self.within(0, stop).n_elements
        return sum(end <= n_elements for _, end in self.bounds)

    def room(self, memory: Vector, *, words: bool) -> Vector:
        """Return a compact vector, or its words, in memory of at least `n_elements` numbers."""
        if words:
            return memory.view(WORD)[: word_count(self.n_elements, self.n_parameters)]
        return memory[: self.n_elements]

    def sent_bounds(self, index: int, dtype: np.dtype[Element]) -> tuple[int, int]:
        """Return the start and stop of a block in a compact vector of this type, or its words."""
        return self.sent_range(*self.bounds[index], dtype)

    def sent_range(self, start: int, stop: int, dtype: np.dtype[Element]) -> tuple[int, int]:
        """Return where elements [start, stop) are in a compact vector, or in its words."""
        if dtype != WORD:
            return start, stop
        n = self.n_parameters
        first, last = (end if end < n else word_count(end, n) for end in (start, stop))
        return first, last

    def n_parameters_within(self, start: int, stop: int) -> int:
        """Return how many of these elements of the compact vector are no buffers."""
        return min(max(self.n_parameters - start, 0), stop - start)

    def check_block(self, index: int, values: Vector, *, words: bool, sender: str) -> None:
        """Raise RemoteProtocolError unless these values, or words, are a block."""
        if index >= len(self.bounds):
            raise RemoteProtocolError(
                f"{sender} sent block {index} of a vector of {len(self.bounds)}: use one layout"
            )
        if words and self.dtype != np.float32:
            raise RemoteProtocolError(f"{sender} sent bfloat16 for a vector of {self.dtype}")
        dtype = WORD if words else self.dtype
        start, stop = self.sent_bounds(index, dtype)
        if values.dtype != dtype or values.size != stop - start:
            raise RemoteProtocolError(
                f"{sender} sent {values.size} elements of {values.dtype} as block {index}, which "
                f"has {stop - start} of {dtype}: use one layout"
            )

    def block(self, values: Vector, index: int) -> Vector:
        """Return block `index` of the compact vector of a shard's `values`, or of their words.

        It is a view if possible.
        """
        start, stop = self.sent_bounds(index, values.dtype)
        if self.ranges is None:
            return values[start:stop]
        if index not in self._copiers:
            ranges, n = self.ranges.part(*self.bounds[index]), self._n_gradient
            buffers = ranges.clipped(n, self._size).shifted(-n)
            self._copiers[index] = RangeCopier(ranges.clipped(0, n)), RangeCopier(buffers)
        block = np.zeros(stop - start, values.dtype)
        for copier, source, target in zip(
            self._copiers[index],
            parts(values, self._n_gradient),
            parts(block, self.n_parameters_within(*self.bounds[index])),
            strict=True,
        ):
            copier.gather(as_tensor(source), as_tensor(target))
        return block

    def scatter(self, compact: Vector, values: Vector) -> None:
        if self.ranges is None:
            values[:] = compact
            return
        self._copier = self._copier or RangeCopier(self.ranges)
        self._copier.scatter(as_tensor(compact), as_tensor(values))


NOTHING: Final = ShardSlice(0, dtype=np.dtype(np.float32))
"""The part of a client without an open session."""


@final
class SliceTable:
    """The slices of all clients of one shard; clients with equal parts share one object."""

    def __init__(
        self, size: int, *, dtype: np.dtype[Element], n_gradient: int | None = None
    ) -> None:
        self._n_gradient = n_gradient
        # The slice that is everything.
        self.whole = ShardSlice(size, dtype=dtype, n_gradient=n_gradient)
        self._known: dict[bytes, ShardSlice] = {}

    def get(self, stripes: Vector | None) -> ShardSlice:
        """Return the slice with these stripes, None for everything; RemoteProtocolError if none."""
        if stripes is None:
            return self.whole
        words = stripes.tobytes()
        known = self._known.get(words)
        if known is None:
            size, dtype = self.whole.n_elements, self.whole.dtype
            ranges = IndexRanges.from_wire(stripes, size=size)
            known = ShardSlice(size, dtype=dtype, ranges=ranges, n_gradient=self._n_gradient)
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()  # sessions keep their own references
            self._known[words] = known
        return known


# --- tensors ---

_PIECE: Final = 1 << 16  # elements copied and summed at a time

Sizes = Sequence[tuple[str, int]]  # name and elements of each of a client's tensors

Piece = tuple[int, int, int, int | IndexRanges]
"""Elements [start, stop) of a tensor, and where they lie in a vector: index of the tensor, start,
stop, and the first element there or their ranges."""


def _check_tensor(size: tuple[str, int], tensor: torch.Tensor) -> None:
    name, n_elements = size
    if tensor.shape != (n_elements,):
        raise ValueError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}; flatten it to ({n_elements},), "
            "and give tensors in the layout's order (by name)"
        )
    if tensor.is_complex():
        raise ValueError(f"tensor {name!r} is {tensor.dtype}: make it real with torch.view_as_real")


_TORCH_TYPES: Final = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


def _array(tensor: torch.Tensor, *, like: Vector) -> Vector | None:
    """Return a tensor's memory as an array, or None if it lies elsewhere or has another type."""
    if tensor.dtype != _TORCH_TYPES.get(like.dtype) or not tensor.is_cpu or tensor.is_neg():
        return None
    array: Vector = tensor.detach().numpy()
    return array


@final
class TensorCopier:
    """Copies between a client's tensors and vectors of one kind; made once for many copies.

    Tensors are flat, in the order of `sizes` and of any real dtype; those that do not fit raise
    ValueError.
    """

    def __init__(
        self,
        sizes: Sizes,
        pieces: Iterable[Piece],
        *,
        has_padding: bool,  # a gap of zeros follows a piece that ends at no multiple of 64
        n_parameters: int,  # of the vectors; buffers follow
    ) -> None:
        self._sizes = sizes
        self._n_parameters = n_parameters
        # By tensor: start, stop, whether it is a buffer, and where it lies in that part.
        self._pieces: dict[int, tuple[int, int, bool, int | RangeCopier]] = {}
        self._padding: list[tuple[int, int, bool]] = []
        for index, start, stop, place in pieces:
            if isinstance(place, IndexRanges):
                is_buffer = bool(len(place.starts)) and int(place.starts[0]) >= n_parameters
                copier = RangeCopier(place.shifted(-n_parameters if is_buffer else 0))
                self._pieces[index] = start, stop, is_buffer, copier
                continue
            is_buffer = place >= n_parameters
            offset = place - n_parameters if is_buffer else place
            self._pieces[index] = start, stop, is_buffer, offset
            end = offset + stop - start
            if has_padding and end % ALIGNMENT:
                self._padding.append((end, padded(end), is_buffer))

    def put(self, index: int, tensor: torch.Tensor | None, vector: Vector) -> float:
        """Copy the elements of one tensor, None for zeros, into a vector or its words.

        Return their sum, or NaN if words cannot hold them. The sum shows NaN and infinity at a
        fortieth of the cost of a look at each element. It may also overflow although all elements
        are finite.
        """
        if tensor is not None:
            _check_tensor(self._sizes[index], tensor)
        if index not in self._pieces:
            return 0.0
        start, stop, is_buffer, place = self._pieces[index]
        vector = parts(vector, self._n_parameters)[is_buffer]
        with torch.no_grad():
            if isinstance(place, RangeCopier):
                return _put_ranges(place, None if tensor is None else tensor[start:stop], vector)
            here = vector[place : place + stop - start]
            if tensor is None:
                here[:] = 0
                return 0.0
            if here.dtype == WORD:
                return 0.0 if encode(tensor[start:stop], here) else math.nan
            array, total = _array(tensor, like=vector), 0.0
            for first in range(start, stop, _PIECE):  # summed while it is in the cache
                piece = slice(first, min(first + _PIECE, stop))
                target = here[piece.start - start : piece.stop - start]
                summed = torch.from_numpy(target)
                if array is None:
                    summed.copy_(tensor[piece])
                else:  # torch would read the target before it writes it
                    np.copyto(target, array[piece])
                total += summed.sum().item()
        return total

    def put_all(self, tensors: Mapping[int, torch.Tensor], vector: Vector) -> list[float]:
        """Put these tensors; return the sum of each, as `put` does."""
        return [self.put(index, tensor, vector) for index, tensor in tensors.items()]

    def zero_padding(self, vector: Vector) -> None:
        """Fill the gaps between pieces with zeros; update rules keep them zero."""
        both = parts(vector, self._n_parameters)
        for start, stop, is_buffer in self._padding:
            both[is_buffer][start:stop] = 0

    def scatter(self, vector: Vector, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the elements of a vector, or its words, into `tensors`; other elements stay."""
        if len(tensors) != len(self._sizes):
            raise ValueError(
                f"{len(tensors)} tensors given, the layout has {len(self._sizes)}: give all of them"
            )
        both = parts(vector, self._n_parameters)
        with torch.no_grad():
            for index, (start, stop, is_buffer, place) in self._pieces.items():
                tensor = tensors[index]
                _check_tensor(self._sizes[index], tensor)
                if isinstance(place, RangeCopier):
                    place.gather(as_tensor(both[is_buffer]), tensor[start:stop])
                    continue
                values = both[is_buffer][place : place + stop - start]
                array = _array(tensor, like=values)
                if array is not None:
                    np.copyto(array[start:stop], values)
                elif values.dtype == WORD:
                    decode(values, tensor[start:stop])
                else:
                    tensor[start:stop].copy_(_rounded(as_tensor(values), tensor))


def _put_ranges(copier: RangeCopier, tensor: torch.Tensor | None, vector: Vector) -> float:
    whole = as_tensor(vector)
    if tensor is None:
        copier.scatter(torch.zeros(1, dtype=whole.dtype).expand(copier.n_elements), whole)
        return 0.0
    if vector.dtype != WORD:
        copier.scatter(tensor, whole)
        return float(tensor.sum(dtype=whole.dtype))
    words = np.empty(len(tensor), WORD)
    is_finite = encode(tensor, words)
    copier.scatter(as_tensor(words), whole)
    return 0.0 if is_finite else math.nan


# --- memory shared with clients ---

HEADER_BYTES: Final = 64

_VERSION, _CLOCK = range(2)


@final
class SeqlockVector:
    """One vector under a seqlock: one writer, many readers, nobody waits.

        | version, clock, 0 ... (64 bytes) | values (n elements) |

    The writer makes the version odd before it writes the values and even afterwards. A reader
    copies between two reads of the version; if they differ or are odd, the copy is torn: it mixes
    two versions, and the reader must try again later. The version is odd until the first write is
    complete, and stays odd if the writer dies while it writes.
    """

    def __init__(self, name: str, region: Region, *, dtype: np.dtype[Element]) -> None:
        self.name = name  # of its region; "" if the vector lies in memory of this process alone
        self._header = region[:HEADER_BYTES].view(np.int64)
        # (n,) the vector itself. Only the writer may use it without `read`.
        self.values: Vector = region[HEADER_BYTES:].view(dtype)

    @classmethod
    def create(
        cls, memory: Memory | None, name: str, *, n_elements: int, dtype: np.dtype[Element]
    ) -> "SeqlockVector":
        """Return a vector that others may attach but not yet read, or raise StorageError.

        Without `memory` it lies in memory of this process alone.
        """
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        if memory is None:
            name, region = "", np.zeros(n_bytes, np.uint8)
        else:
            region = memory.create(name, n_bytes=n_bytes)
        published = cls(name, region, dtype=dtype)
        published.begin()
        return published

    @classmethod
    def attach(
        cls, memory: Memory, name: str, *, n_elements: int, dtype: np.dtype[Element]
    ) -> "SeqlockVector":
        """Attach another role's vector, or raise MemoryGoneError, or RemoteProtocolError."""
        region = memory.attach(name)
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        if region.nbytes != n_bytes:
            raise RemoteProtocolError(
                f"region {name!r} has {region.nbytes} bytes, not {n_bytes}: use one layout"
            )
        return cls(name, region, dtype=dtype)

    @property
    def version(self) -> int:
        return int(self._header[_VERSION])

    @property
    def clock(self) -> int:
        return int(self._header[_CLOCK])

    def begin(self) -> None:
        assert self.version % 2 == 0, f"{self.name!r} is being written already"
        self._header[_VERSION] += 1

    def end(self, *, clock: int) -> None:
        """Mark the values as complete, with `clock` applied pushes."""
        assert self.version % 2 == 1, f"{self.name!r} is not being written"
        # x86 keeps the order of stores, which is all that a seqlock needs. On other processors
        # the order comes from the locks that a driver takes between `handle` and work.
        self._header[_CLOCK] = clock
        self._header[_VERSION] += 1

    def read(self, copy: Callable[[], object]) -> int | None:
        """Call `copy` and return the clock of what it copied, or None if the copy is torn.

        `copy` is not called if a write is in progress.
        """
        version = self.version
        if version % 2:
            return None
        copy()
        clock = self.clock
        return clock if self.version == version else None


# --- push buffers ---

N_PUSH_BUFFERS: Final = 2


def push_buffer_bytes(n_elements: int, *, itemsize: int) -> int:
    """Return the size of a region of two push buffers; never 0, which no region can have."""
    return max(N_PUSH_BUFFERS * n_elements * itemsize, 64)


def push_buffer_views(
    region: Region, *, n_elements: int, dtype: np.dtype[Element]
) -> tuple[Vector, Vector]:
    """Return both push buffers, each (n_elements,); RemoteProtocolError if the size differs."""
    n_bytes = push_buffer_bytes(n_elements, itemsize=dtype.itemsize)
    if region.nbytes != n_bytes:
        raise RemoteProtocolError(
            f"push buffers have {region.nbytes} bytes, not {n_bytes}: use one layout"
        )
    whole = region[: N_PUSH_BUFFERS * n_elements * dtype.itemsize].view(dtype)
    return whole[:n_elements], whole[n_elements:]
