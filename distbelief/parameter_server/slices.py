"""Index ranges: which elements of the tensors and of a shard's vector a client holds.

    items                 w[0:2, 0:3]           b[0:2]
    tensors given         (6,)                  (2,)       flat, row-major
    shard 0 holds         w, elements 0 1 2     b 0 1      compact: 5 elements
    shard 1 holds         w, elements 6 7 8                compact: 3 elements

A rank of a model-parallel replica holds the regions of its partition and talks only to the shards
that hold some of them. No element is held twice; regions and whole views may be empty.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.core.vectors import ALIGNMENT, Element, Vector, block_bounds
from distbelief.errors import RemoteProtocolError
from distbelief.graph.region import Region
from distbelief.parameter_server.layout import (
    Layout,
    Segment,
    TensorCopier,
    TensorSpec,
    as_tensor,
    check_tensor,
    check_tensors,
    scatter_blocks,
)


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
        """Return the union of disjoint ranges; ValueError if two overlap."""
        none = cls(np.zeros(0, np.int64), np.zeros(0, np.int64))
        all_parts = [none, *parts]
        starts = np.concatenate([part.starts for part in all_parts])
        return cls.of(starts, np.concatenate([part.stops for part in all_parts]))

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
                f"{len(words)} numbers of {words.dtype} are not stripes: a stripe has "
                f"{_WORDS} numbers of int64"
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
                f"stripe (start {starts[i]}, length {lengths[i]}, stride {strides[i]}, "
                f"count {counts[i]}) does not fit a vector of {size} elements"
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

    def n_below(self, stop: int) -> int:
        return self.clipped(0, stop).n_elements

    def overlaps(self, other: "IndexRanges") -> bool:
        after = np.searchsorted(self.stops, other.starts, side="right")
        some = after < len(self.starts)
        return bool((self.starts[after[some]] < other.stops[some]).any())

    def mask(self, bounds: Indices) -> NDArray[np.bool_]:
        """Return for each [bounds[i], bounds[i + 1]) whether it is in the ranges.

        Args:
            bounds: Sorted; it contains every start and stop.
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
    """One client's part of one shard's vector: all of it, or ranges.

        shard's vector   0 1 2 3 4 5 6 7 8 9 ...      pushed, and fetched by blocks:
        a client holds       ^^^     ^^^^^            the compact vector 2 3 6 7 8

    A rank of a model-parallel replica "needs to communicate with just the subset of parameter
    server shards that hold the model parameters relevant to its partition" (Dean et al. 2012,
    section 4).
    """

    def __init__(
        self,
        n_elements: int,
        *,
        dtype: np.dtype[Element],
        ranges: IndexRanges | None = None,
        stripes: Vector | None = None,
    ) -> None:
        self.n_elements = n_elements  # of the compact vector
        self.dtype = dtype  # of the shard's vector
        self.ranges = ranges  # of the shard's vector; None for all of it
        self.stripes = stripes  # the ranges as on the wire
        # (start, stop) of each block of the compact vector.
        self.bounds = tuple(block_bounds(n_elements, itemsize=dtype.itemsize))
        # Equal for equal parts; empty for everything.
        self.key = b"" if ranges is None else ranges.key
        self._copiers: dict[int, RangeCopier] = {}  # by block
        self._copier: RangeCopier | None = None  # of all blocks at once

    @classmethod
    def whole(cls, layout: Layout, k: int) -> "ShardSlice":
        return cls(layout.shard_size(k), dtype=layout.dtype)

    @classmethod
    def of(cls, ranges: IndexRanges, layout: Layout) -> "ShardSlice":
        return cls(ranges.n_elements, dtype=layout.dtype, ranges=ranges, stripes=ranges.stripes())

    def within(self, start: int, stop: int) -> IndexRanges:
        if self.ranges is None:
            return IndexRanges.whole(start, stop)
        return self.ranges.clipped(start, stop)

    def positions_of(self, inner: IndexRanges) -> IndexRanges:
        return inner if self.ranges is None else self.ranges.positions_of(inner)

    def block(self, values: Vector, index: int) -> Vector:
        """Return block `index` of the compact vector of a shard's `values`; a view if possible."""
        start, stop = self.bounds[index]
        if self.ranges is None:
            return values[start:stop]
        if index not in self._copiers:
            self._copiers[index] = RangeCopier(self.ranges.part(start, stop))
        block = np.empty(stop - start, self.dtype)
        self._copiers[index].gather(as_tensor(values), as_tensor(block))
        return block

    def scatter(self, compact: Vector, values: Vector) -> None:
        if self.ranges is None:
            values[:] = compact
            return
        if self._copier is None:
            self._copier = RangeCopier(self.ranges)
        self._copier.scatter(as_tensor(compact), as_tensor(values))


NOTHING: Final = ShardSlice(0, dtype=np.dtype(np.float32))
"""The part of a client without an open session."""


@final
class SliceTable:
    """The parts of all clients of one shard; clients with equal parts share one object."""

    def __init__(self, layout: Layout, k: int) -> None:
        self._layout = layout
        self._size = layout.shard_size(k)
        self.whole = ShardSlice.whole(layout, k)  # the part that is everything
        self._known: dict[bytes, ShardSlice] = {}

    def get(self, stripes: Vector | None) -> ShardSlice:
        """Return the part with these stripes; None for everything."""
        if stripes is None:
            return self.whole
        words = stripes.tobytes()
        known = self._known.get(words)
        if known is None:
            ranges = IndexRanges.from_wire(stripes, size=self._size)
            known = ShardSlice(
                ranges.n_elements, dtype=self._layout.dtype, ranges=ranges, stripes=stripes.copy()
            )
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()  # sessions keep their own references
            self._known[words] = known
        return known


@final
@dataclass(frozen=True, slots=True)
class _Piece:
    item_index: int
    start: int  # [start, stop) of the item's elements
    stop: int
    ranges: IndexRanges  # of the shard's vector


@final
class PartialView:
    """Regions of a layout's tensors, and what each shard has of them."""

    def __init__(self, layout: Layout, items: Sequence[tuple[str, Region]]) -> None:
        self.items = tuple(items)  # tensor and region of each item, as given
        # The client's tensors, one per item: (n_elements,).
        self.tensors = tuple(_spec_of(layout, name, region) for name, region in items)
        self._layout = layout
        self._pieces = _placed(layout, self.items)
        # Indices of the shards that hold something of them.
        self.shards = tuple(k for k, pieces in enumerate(self._pieces) if pieces)
        self._ranges = {k: _united(self._pieces[k], self.items, k=k) for k in self.shards}

    @classmethod
    def of(cls, layout: Layout, items: Sequence[tuple[str, Region]]) -> "PartialView":
        """Return the view of these regions, each of the named tensor.

        Raises:
            ValueError: A tensor or region does not exist, two regions overlap, or they cut a shard
                into too many pieces.
        """
        return cls(layout, items)

    @property
    def fingerprint(self) -> str:
        return self._layout.fingerprint

    def n_elements(self, k: int) -> int:
        return sum(piece.stop - piece.start for piece in self._pieces[k])

    def part(self, k: int) -> "SliceCopier":
        return SliceCopier(
            ShardSlice.of(self._ranges[k], self._layout), self._layout, k, selection=self
        )

    def pieces(self, k: int) -> tuple[_Piece, ...]:
        return self._pieces[k]


@final
class SliceCopier:
    """Copies between a client's tensors and its part of one shard."""

    def __init__(
        self, shard_slice: ShardSlice, layout: Layout, k: int, *, selection: PartialView | None
    ) -> None:
        self.shard_slice = shard_slice  # the part, as the shard knows it
        self._layout = layout
        self._k = k
        self._selection = selection

    @classmethod
    def whole(cls, layout: Layout, k: int) -> "SliceCopier":
        return cls(ShardSlice.whole(layout, k), layout, k, selection=None)

    @classmethod
    def of(cls, selection: PartialView | None, layout: Layout, k: int) -> "SliceCopier":
        return cls.whole(layout, k) if selection is None else selection.part(k)

    @property
    def fingerprint(self) -> str:
        return self._layout.fingerprint

    @property
    def shard_size(self) -> int:
        return self._layout.shard_size(self._k)

    @property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.float64]:
        return self._layout.dtype

    @property
    def n_bytes(self) -> int:
        return self.shard_slice.n_elements * self.dtype.itemsize

    def stripes_of(self, tensors: Sequence[object | None]) -> Vector | None:
        """Return the stripes of the given tensors in the shard's vector, or None if all are given.

        Padding goes with the tensor before it, so that ranges end at multiples of `ALIGNMENT` and
        update rules round as for the whole vector.

        Args:
            tensors: In the order of the layout; None for tensors that are not given.
        """
        assert self._selection is None
        segments = self._layout.segments(self._k)
        given = [one for one in segments if tensors[one.tensor_index] is not None]
        if len(given) == len(segments):
            return None
        starts = np.array([one.offset for one in given], np.int64)
        sizes = np.array([one.n_elements for one in given], np.int64)
        return IndexRanges.of(starts, starts + -(-sizes // ALIGNMENT) * ALIGNMENT).stripes()

    def exchange(self, compact: Vector) -> "Copier":
        if self._selection is None:
            return self._layout.exchange(self._k, compact)
        pieces = [
            (piece, self.shard_slice.positions_of(piece.ranges))
            for piece in self._selection.pieces(self._k)
        ]
        return RegionCopier(self._selection.tensors, pieces, compact)

    def block_copier(self, blocks: Sequence[Vector]) -> "BlockCopier":
        return BlockCopier(self, blocks)

    def scatter(self, blocks: Sequence[Vector], tensors: Sequence[torch.Tensor]) -> None:
        """Copy the compact vector, in blocks, to tensors; see `TensorCopier.scatter`."""
        if self._selection is None:
            segments = self._layout.segments(self._k)
            scatter_blocks(self._layout.tensors, segments, blocks, tensors)
        else:
            self.exchange(np.concatenate(blocks)).scatter(tensors)

    def copier_in_place(self, vector: Vector) -> "Copier":
        """Return the copier between tensors and the shard's own vector."""
        if self._selection is None:
            return self._layout.exchange(self._k, vector)
        pieces = [(piece, piece.ranges) for piece in self._selection.pieces(self._k)]
        return RegionCopier(self._selection.tensors, pieces, vector)


@final
class BlockCopier:
    def __init__(self, part: SliceCopier, blocks: Sequence[Vector]) -> None:
        self._part = part
        self._blocks = blocks

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        self._part.scatter(self._blocks, tensors)


@final
class RegionCopier:
    """`TensorCopier` for flat tensors of regions.

    Args:
        tensors: One per item.
        pieces: What the shard has of each item, and where it lies in `vector`.
        vector: The shard's vector, or the compact one.
    """

    def __init__(
        self,
        tensors: tuple[TensorSpec, ...],
        pieces: Sequence[tuple[_Piece, IndexRanges]],
        vector: Vector,
    ) -> None:
        self._tensors = tensors
        self._vector = as_tensor(vector)
        self._copiers = {piece.item_index: (piece, RangeCopier(ranges)) for piece, ranges in pieces}

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the shard's part of `tensors` into the vector; see `TensorCopier.gather`."""
        check_tensors(self._tensors, tensors)
        for index in self._copiers:
            self._put(index, tensors[index])

    def put(self, index: int, tensor: torch.Tensor | None) -> None:
        check_tensor(self._tensors[index], tensor)
        self._put(index, tensor)

    def _put(self, index: int, tensor: torch.Tensor | None) -> None:
        if index not in self._copiers:
            return
        piece, copier = self._copiers[index]
        with torch.no_grad():
            if tensor is None:
                part = torch.zeros(1, dtype=self._vector.dtype).expand(piece.stop - piece.start)
            else:
                part = tensor[piece.start : piece.stop]
            copier.scatter(part, self._vector)

    def zero_padding(self) -> None:
        """Do nothing: the compact vector has no padding."""

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the vector's elements into `tensors`; see `TensorCopier.scatter`."""
        check_tensors(self._tensors, tensors)
        with torch.no_grad():
            for index, (piece, copier) in self._copiers.items():
                part = tensors[index][piece.start : piece.stop]
                copier.gather(self._vector, part)


Copier = TensorCopier | RegionCopier


def _spec_of(layout: Layout, name: str, region: Region) -> TensorSpec:
    spec = next((spec for spec in layout.tensors if spec.name == name), None)
    if spec is None:
        names = [spec.name for spec in layout.tensors]
        raise ValueError(f"the layout has no tensor {name!r}; it has {names}")
    whole = Region.of(*spec.shape)
    if len(region.intervals) != len(spec.shape) or region not in whole:
        raise ValueError(f"tensor {name!r} has shape {spec.shape}; it has no region {region}")
    return TensorSpec(name=name, shape=(region.n_elements,), kind=spec.kind)


def _placed(layout: Layout, items: Sequence[tuple[str, Region]]) -> list[tuple[_Piece, ...]]:
    indices = {spec.name: index for index, spec in enumerate(layout.tensors)}
    flat = [_flat(layout.tensors[indices[name]].shape, region) for name, region in items]
    of_tensor: dict[int, list[int]] = {}
    for item_index, (name, _) in enumerate(items):
        of_tensor.setdefault(indices[name], []).append(item_index)
    return [
        tuple(
            _Piece(i, start := flat[i].n_below(segment.start), start + n, placed)
            for segment in layout.segments(k)
            for i in of_tensor.get(segment.tensor_index, ())
            for placed in [_in_segment(flat[i], segment)]
            if (n := placed.n_elements)
        )
        for k in range(layout.n_shards)
    ]


def _in_segment(flat: IndexRanges, segment: Segment) -> IndexRanges:
    clipped = flat.clipped(segment.start, segment.stop)
    return clipped.shifted(segment.offset - segment.start)


def _flat(shape: tuple[int, ...], region: Region) -> IndexRanges:
    starts = np.zeros(1, np.int64)
    stride, run = 1, 1
    is_run = True  # whether the dimensions so far make one run of elements
    for extent, (start, stop) in zip(reversed(shape), reversed(region.intervals), strict=True):
        if is_run:
            starts += start * stride
            run *= stop - start
        else:
            rows = np.arange(start, stop, dtype=np.int64) * stride
            starts = (rows[:, None] + starts).reshape(-1)
        is_run = is_run and (start, stop) == (0, extent)
        stride *= extent
    if not region.n_elements:
        return IndexRanges.whole(0, 0)
    if len(starts) > N_RANGES_MAX:
        raise ValueError(
            f"region {region} of a tensor of shape {shape} is {len(starts)} separate "
            f"runs of elements; the most is {N_RANGES_MAX}: cut it along an earlier "
            "dimension"
        )
    return IndexRanges.of(starts, starts + run)


def _united(
    pieces: Sequence[_Piece], items: Sequence[tuple[str, Region]], *, k: int
) -> IndexRanges:
    try:
        ranges = IndexRanges.union(piece.ranges for piece in pieces)
    except ValueError:
        raise _overlap(pieces, items) from None
    n = len(ranges.stripes()) // 4
    if n > N_STRIPES_MAX or len(ranges.starts) > N_RANGES_MAX:
        raise ValueError(
            f"the regions cut the vector of shard {k} into {len(ranges.starts)} ranges "
            f"or {n} stripes; the most is {N_RANGES_MAX} or {N_STRIPES_MAX}: use more "
            "shards, or cut tensors along their first dimension"
        )
    return ranges


def _overlap(pieces: Sequence[_Piece], items: Sequence[tuple[str, Region]]) -> ValueError:
    regions = [items[piece.item_index] for piece in pieces]
    name, one, other = next(
        (name, one, other)
        for i, (name, one) in enumerate(regions)
        for tensor, other in regions[i + 1 :]
        if tensor == name and (one & other).n_elements
    )
    return ValueError(
        f"regions {one} and {other} of tensor {name!r} overlap: each element is held once"
    )
