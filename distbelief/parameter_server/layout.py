"""The layout of the tensors on the shards: which shard holds which element, and where.

    "a" (parameter, 300 elements)   [0 ........ 128)[128 ............. 300)
    "b" (parameter,   5 elements)   [0 5)                  (small: goes whole)
    "m" (buffer,      2 elements)   [0 2)                  (small: goes whole)

    shard 0   a[0:128] | b[0:5] 0...0 | m[0:2] 0...0      offsets   0, 128, 192
    shard 1   a[128:300] 0........0                        offsets   0
              ^ parameters, n_gradient ^^ buffers  ^

Names, shapes, kinds and the number of shards alone decide it. Parameters come first, then
buffers, then counters.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, final

import msgspec
import numpy as np
import torch
from typing_extensions import override

from distbelief.core import vectors
from distbelief.core.vectors import ALIGNMENT, Vector, padded
from distbelief.graph.region import Region
from distbelief.parameter_server.ranges import N_RANGES_MAX, N_STRIPES_MAX, IndexRanges
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.tensor_copies import Piece, TensorCopier
from distbelief.protocol.push_fetch import N_SHOWN_MAX


__all__ = [
    "ElementType",
    "Layout",
    "LayoutSpec",
    "PartialView",
    "Segment",
    "TensorSpec",
    "first_difference",
    "in_one_memory",
    "kind_of",
]


# --- tensors ---

Kind = Literal["parameter", "buffer", "counter"]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a model: name, shape and kind.

    Gradients update a "parameter". A "buffer" (BatchNorm statistics, a frozen parameter) is
    averaged over the clients, which push its values. Of a "counter", a buffer of integers, they
    push what they have added, and the mean of that is added: an average would lose counts.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = "parameter"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor has no name; give each tensor its own")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has shape {self.shape}; sizes are 0 or more")

    @override
    def __str__(self) -> str:
        name = int(self.name) if self.name.isdecimal() else self.name  # of own loops: a position
        return f"{self.kind} {name} of shape {list(self.shape)}"

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


def first_difference(there: Iterable[object], here: Iterable[object]) -> str:
    """Return where two lists of tensors, as text, differ first; or ""."""
    for one, other in zip_longest(map(str, there), map(str, here), fillvalue="nothing more"):
        if one != other:
            return f"{one}, not {other}"
    return ""


def kind_of(tensor: torch.Tensor) -> Kind:
    """Return what a model's tensor is to the shards."""
    if tensor.requires_grad:
        return "parameter"
    is_real = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    return "buffer" if is_real or isinstance(tensor, torch.nn.Parameter) else "counter"


def in_one_memory(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    """Yield the names of parameters that have elements of another tensor, and of that."""
    real = [(name, one) for name, one in named if one.layout == torch.strided and not one.is_meta]
    kept = sorted((*_span(one), i, name, one) for i, (name, one) in enumerate(real) if one.numel())
    for i, (_, stop, _, name, one) in enumerate(kept):
        for start, _, _, other, another in kept[i + 1 :]:
            if start >= stop:
                break
            if any(isinstance(each, torch.nn.Parameter) for each in (one, another)) and _share(
                one, another
            ):
                yield name, other


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the one after the last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors whose memory overlaps share an element; views may alternate."""
    if one.dtype != other.dtype:
        return True
    (start, stop), (second, end) = _span(one), _span(other)
    size = one.element_size()
    found = torch.zeros((max(stop, end) - start) // size, dtype=torch.bool)
    found.as_strided(one.shape, one.stride()).fill_(value=True)
    return bool(found.as_strided(other.shape, other.stride(), (second - start) // size).any())


# --- cuts ---


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of one tensor, at vector[offset : offset + n_elements]."""

    tensor_index: int
    start: int
    stop: int
    offset: int

    @property
    def n_elements(self) -> int:
        return self.stop - self.start


def cut(tensors: Sequence[TensorSpec], *, n_shards: int) -> list[list[tuple[int, int, int]]]:
    """Return what each shard holds: (tensor index, start, stop).

    Each shard gets a range of *every* large tensor, so all shards have equal load whichever layer a
    client reads (Dean et al. 2012, section 4.1: each of 10 shards stores 1/10 of the parameters).
    """
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(n_shards)]
    loads = [0] * n_shards
    small: list[int] = []
    for index, tensor in enumerate(tensors):
        if tensor.n_elements < ALIGNMENT * n_shards:
            small.append(index)
            continue
        for k in range(n_shards):
            start = _cut_at(tensor.n_elements, k, n_shards=n_shards)
            stop = _cut_at(tensor.n_elements, k + 1, n_shards=n_shards)
            pieces[k].append((index, start, stop))
            loads[k] += padded(stop - start)
    # Largest first, each to the lightest shard: Graham 1969, within 4/3 of the best.
    small.sort(key=lambda index: (-tensors[index].n_elements, index))
    for index in small:
        n_elements = tensors[index].n_elements
        if n_elements:
            k = loads.index(min(loads))
            pieces[k].append((index, 0, n_elements))
            loads[k] += padded(n_elements)
    return pieces


def _cut_at(n_elements: int, k: int, *, n_shards: int) -> int:
    if k == n_shards:
        return n_elements
    unit = ALIGNMENT * n_shards
    # The multiple of 64 nearest to k/S of the elements. With aligned cuts, vectorised kernels
    # (which treat the last elements of an array differently) round alike for any number of
    # shards.
    return (2 * k * n_elements + unit) // (2 * unit) * ALIGNMENT


def place(
    tensors: Sequence[TensorSpec], pieces: Sequence[tuple[int, int, int]]
) -> tuple[tuple[Segment, ...], tuple[int, ...]]:
    """Return the segments of one shard, and the ends of its parameters, buffers and counters."""
    segments: list[Segment] = []
    ends: list[int] = []
    offset = 0
    kinds: tuple[Kind, ...] = ("parameter", "buffer", "counter")
    for kind in kinds:
        for index, start, stop in sorted(pieces):
            if tensors[index].kind == kind:
                segments.append(Segment(index, start, stop, offset))
                offset += padded(stop - start)
        ends.append(offset)
    return tuple(segments), tuple(ends)


# --- layouts ---

ElementType = Literal["float32", "float64"]

_CUTTING = 1
"""Version of the layout rules; part of the fingerprint, so that no vector is read with rules
other than its own."""


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that determines a layout; it travels as JSON."""

    tensors: tuple[TensorSpec, ...]
    n_shards: int
    dtype: ElementType = "float32"

    def __post_init__(self) -> None:
        if self.n_shards < 1:
            raise ValueError(f"n_shards is {self.n_shards}; use at least 1")
        counts = Counter(tensor.name for tensor in self.tensors)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(
                f"tensors {twice} are given more than once; give each (and tied ones) one name"
            )


@final
class Layout:
    """Where every element of every tensor lies."""

    def __init__(self, spec: LayoutSpec) -> None:
        tensors = tuple(sorted(spec.tensors, key=lambda tensor: tensor.name))
        # What it was made from, with tensors sorted by name.
        self.spec = msgspec.structs.replace(spec, tensors=tensors)
        pieces = cut(tensors, n_shards=spec.n_shards)
        placed = [place(tensors, pieces[k]) for k in range(spec.n_shards)]
        self._segments = [segments for segments, _ in placed]
        self._ends = [ends for _, ends in placed]
        text = msgspec.json.encode([_CUTTING, ALIGNMENT, self.spec])
        # 16 hexadecimal digits, equal for equal layouts only.
        self.fingerprint = hashlib.sha256(text).hexdigest()[:16]

    @classmethod
    def of(
        cls, tensors: Sequence[TensorSpec], *, n_shards: int, dtype: ElementType = "float32"
    ) -> "Layout":
        """Return the layout of these tensors, given in any order; ValueError if it is invalid."""
        return cls(LayoutSpec(tensors=tuple(tensors), n_shards=n_shards, dtype=dtype))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.spec.tensors

    @property
    def n_shards(self) -> int:
        return self.spec.n_shards

    @property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.float64]:
        return np.dtype(np.float64) if self.spec.dtype == "float64" else np.dtype(np.float32)

    def shown(self) -> tuple[str, ...]:
        """Return the first tensors as text, few enough for a message."""
        return tuple(str(one)[:128] for one in self.tensors[:N_SHOWN_MAX])

    def shard_size(self, k: int) -> int:
        """Elements of shard k's vector, padding included: a multiple of 64."""
        return self._ends[k][2]

    def n_gradient(self, k: int) -> int:
        """Elements of the parameter part of shard k's vector: a multiple of 64."""
        return self._ends[k][0]

    def n_averaged(self, k: int) -> int:
        """Elements of shard k's vector before its counters: a multiple of 64."""
        return self._ends[k][1]

    def segments(self, k: int) -> tuple[Segment, ...]:
        """What lies on shard k, by rising offset."""
        return self._segments[k]


# --- what a client holds ---


@final
class PartialView:
    """What a client holds of a layout's tensors: everything, or regions of them.

        items                 w[0:2, 0:3]           b[0:2]
        tensors given         (6,)                  (2,)       flat, row-major
        shard 0 holds         w, elements 0 1 2     b 0 1      compact: 5 elements
        shard 1 holds         w, elements 6 7 8                compact: 3 elements

    A rank of a model-parallel replica holds the regions of its partition and talks only to the
    shards that hold some of them. No element is held twice; regions and views may be empty.
    ValueError if a tensor or region does not exist, or they cut a shard into too many pieces.

    Tensors that are `frozen` come with the first fetch alone (`first`), and are never pushed.
    """

    def __init__(
        self,
        layout: Layout,
        items: Sequence[tuple[str, Region]] | None = None,
        *,
        frozen: Collection[str] = (),
    ) -> None:
        self.layout = layout
        self.frozen = frozenset(frozen)
        self.first = PartialView(layout, items) if frozen else self
        if frozen and items is None:
            items = [(spec.name, Region.of(*spec.shape)) for spec in layout.tensors]
        self.is_whole = items is None  # else the items are names of tensors with a region each
        self.tensors = layout.tensors  # the client's tensors, one per item: (n_elements,)
        self.slices: dict[int, ShardSlice] = {}  # by shard: what the client holds of its vector
        self._pieces: list[list[Piece]] = []  # per shard, in its vector
        if items is not None:
            self.tensors = tuple(_spec_of(layout, name, region) for name, region in items)
            self._pieces = _placed(layout, items)
        if frozen:
            self._pieces = [
                [piece for piece in pieces if self.tensors[piece[0]].name not in frozen]
                for pieces in self._pieces
            ]
        for k in range(layout.n_shards):
            if items is None:
                ranges, held = None, layout.segments(k)
                self._pieces.append([(s.tensor_index, s.start, s.stop, s.offset) for s in held])
            elif self._pieces[k] or (frozen and k in self.first.slices):
                ranges = _united(self._pieces[k], k=k)
            else:
                continue
            self.slices[k] = ShardSlice(
                layout.shard_size(k),
                dtype=layout.dtype,
                ranges=ranges,
                n_gradient=layout.n_gradient(k),
            )
        self.shards = tuple(self.slices)  # those that hold something of the tensors
        self.sizes = tuple((spec.name, spec.n_elements) for spec in self.tensors)

    def copier(self, k: int, *, compact: bool = False) -> TensorCopier:
        """Return the copier between the tensors and shard k's vectors, or the compact ones."""
        return TensorCopier(
            self.sizes,
            self._compact_pieces(k) if compact else self._pieces[k],
            has_padding=self.is_whole,
            n_parameters=self.slices[k].n_parameters if compact else self.layout.n_gradient(k),
        )

    def block_copier(self, k: int, index: int) -> TensorCopier:
        """Return the copier between the tensors and one block of shard k's compact vector."""
        start, stop = self.slices[k].bounds[index]
        pieces = (_clipped(one, start, stop) for one in self._compact_pieces(k))
        return TensorCopier(
            self.sizes,
            (one for one in pieces if one),
            has_padding=False,
            n_parameters=self.slices[k].n_parameters_within(start, stop),
        )

    def blocks_of(self, k: int) -> dict[int, range]:
        """Return, by tensor, the blocks of shard k's compact vector that may have some of it."""
        per_block = vectors.BLOCK_BYTES // self.layout.dtype.itemsize
        found = {}
        for index, start, stop, place in self._compact_pieces(k):
            if isinstance(place, IndexRanges):
                first, end = int(place.starts[0]), int(place.stops[-1])
            else:
                first, end = place, place + stop - start
            found[index] = range(first // per_block, (end - 1) // per_block + 1)
        return found

    def _compact_pieces(self, k: int) -> Iterator[Piece]:
        for index, start, stop, place in self._pieces[k]:
            if isinstance(place, IndexRanges):
                place = self.slices[k].positions_of(place)  # noqa: PLW2901 -- now the compact one
            yield index, start, stop, place

    def placed_parameters(self) -> "list[tuple[int, int, list[slice[int, int, None]]]]":
        """Return the parameters in pieces, in their own order, whatever the number of shards.

        Each: its index, the shard, and where the piece lies in that shard's compact vector.
        """
        found = [
            (index, start, k, place)
            for k in self.shards
            for index, start, stop, piece in self._compact_pieces(k)
            if self.tensors[index].kind == "parameter"
            for place in [_slices(piece, stop - start)]
        ]
        found.sort(key=lambda one: one[:2])
        return [(index, k, place) for index, _, k, place in found]

    def stripes_of(self, k: int, tensors: Sequence[object | None]) -> Vector | None:
        """Return the stripes in shard k's vector of tensors that are not None; None for all.

        Padding goes with the tensor before it, so that ranges end at multiples of `ALIGNMENT` and
        update rules round as for the whole vector.
        """
        if not self.is_whole:
            pieces = [piece for piece in self._pieces[k] if tensors[piece[0]] is not None]
            return None if len(pieces) == len(self._pieces[k]) else _united(pieces, k=k).stripes()
        segments = self.layout.segments(k)
        given = [one for one in segments if tensors[one.tensor_index] is not None]
        if len(given) == len(segments):
            return None
        starts = np.array([one.offset for one in given], np.int64)
        sizes = np.array([padded(one.n_elements) for one in given], np.int64)
        return IndexRanges.of(starts, starts + sizes).stripes()


def _slices(place: int | IndexRanges, n: int) -> "list[slice[int, int, None]]":
    if isinstance(place, int):
        return [slice(place, place + n)]
    ends = zip(place.starts.tolist(), place.stops.tolist(), strict=True)
    return [slice(start, stop) for start, stop in ends]


def _clipped(piece: Piece, start: int, stop: int, *, to: int = 0) -> Piece | None:
    index, begin, end, place = piece
    if isinstance(place, IndexRanges):
        begin += place.clipped(0, start).n_elements
        inside = place.clipped(start, stop)
        n = inside.n_elements
        return (index, begin, begin + n, inside.shifted(to - start)) if n else None
    first, last = max(place, start), min(place + end - begin, stop)
    if first >= last:
        return None
    return index, begin + first - place, begin + last - place, first + to - start


def _spec_of(layout: Layout, name: str, region: Region) -> TensorSpec:
    spec = next((spec for spec in layout.tensors if spec.name == name), None)
    if spec is None:
        names = [spec.name for spec in layout.tensors]
        raise ValueError(f"the layout has no tensor {name!r}; it has {names}")
    whole = Region.of(*spec.shape)
    if len(region.intervals) != len(spec.shape) or region not in whole:
        raise ValueError(f"tensor {name!r} has shape {spec.shape}; it has no region {region}")
    return TensorSpec(name=name, shape=(region.n_elements,), kind=spec.kind)


def _placed(layout: Layout, items: Sequence[tuple[str, Region]]) -> list[list[Piece]]:
    indices = {spec.name: index for index, spec in enumerate(layout.tensors)}
    flat = [_flat(layout.tensors[indices[name]].shape, region) for name, region in items]
    of_tensor: dict[int, list[int]] = {}
    for item_index, (name, region) in enumerate(items):
        others = of_tensor.setdefault(indices[name], [])
        for other in others:
            if (items[other][1] & region).n_elements:
                raise ValueError(
                    f"regions {items[other][1]} and {region} of tensor {name!r} overlap"
                )
        others.append(item_index)
    return [
        [
            piece
            for segment in layout.segments(k)
            for i in of_tensor.get(segment.tensor_index, ())
            for whole in [(i, 0, flat[i].n_elements, flat[i])]
            if (piece := _clipped(whole, segment.start, segment.stop, to=segment.offset))
        ]
        for k in range(layout.n_shards)
    ]


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
            f"region {region} of a tensor of shape {shape} has {len(starts)} runs of elements, "
            f"at most {N_RANGES_MAX}: cut it along an earlier dimension"
        )
    return IndexRanges.of(starts, starts + run)


def _united(pieces: Sequence[Piece], *, k: int) -> IndexRanges:
    ranges = IndexRanges.union(place for *_, place in pieces if isinstance(place, IndexRanges))
    n = len(ranges.stripes()) // 4
    if n > N_STRIPES_MAX or len(ranges.starts) > N_RANGES_MAX:
        raise ValueError(
            f"the regions cut shard {k} into {len(ranges.starts)} ranges or {n} stripes, of "
            f"{N_RANGES_MAX} or {N_STRIPES_MAX} at most: use more shards"
        )
    return ranges
