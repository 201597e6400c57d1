"""What a client holds of the tensors: regions of them, and where those lie on shards.

    items                 w[0:2, 0:3]           b[0:2]
    tensors given         (6,)                  (2,)       flat, row-major
    shard 0 holds         w, elements 0 1 2     b 0 1      compact: 5 elements
    shard 1 holds         w, elements 6 7 8                compact: 3 elements

A machine of a model-parallel replica gives the regions that its partition owns; shards
that hold nothing of them never hear from it. Rules:

* No element is held twice. Regions may be empty, and so may a selection.
* Of one item a shard holds consecutive elements, for it holds a range of each tensor.
* Whoever holds everything needs none (`Part.whole`): its tensors are copied whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from distbelief.graph.region import Region
from distbelief.parameter_server.layout.exchange import Exchange, scatter_blocks
from distbelief.parameter_server.layout.holding import Holding
from distbelief.parameter_server.layout.layout import Layout
from distbelief.parameter_server.layout.ranges import N_RANGES_MAX, N_STRIPES_MAX, Copier, Ranges
from distbelief.parameter_server.layout.segments import Segment
from distbelief.parameter_server.layout.tensors import (
    TensorSpec,
    as_tensor,
    check_tensor,
    check_tensors,
)
from distbelief.vectors import ALIGNMENT, Vector


@final
@dataclass(frozen=True, slots=True)
class _Piece:
    """What one shard holds of one item."""

    item_index: int
    start: int  # elements [start, stop) of the item
    stop: int
    ranges: Ranges  # of the shard's vector


@final
class Selection:
    """Regions of a layout's tensors, and what each shard has of them.

    Attributes:
        items: Tensor and region of each item, as given.
        tensors: What the client copies from and to, one per item: (n_elements,).
        shards: Indices of the shards that hold something of it.
    """

    def __init__(self, layout: Layout, items: Sequence[tuple[str, Region]]) -> None:
        self.items = tuple(items)
        self.tensors = tuple(_spec_of(layout, name, region) for name, region in items)
        self._layout = layout
        self._pieces = _placed(layout, self.items)
        self.shards = tuple(k for k, pieces in enumerate(self._pieces) if pieces)
        self._ranges = {k: _united(self._pieces[k], self.items, k=k) for k in self.shards}

    @classmethod
    def of(cls, layout: Layout, items: Sequence[tuple[str, Region]]) -> "Selection":
        """Return the selection of these regions, each of the named tensor.

        Raises:
            ValueError: there is no such tensor or region, or two regions overlap, or
                they cut a shard into too many pieces.
        """
        return cls(layout, items)

    @property
    def fingerprint(self) -> str:
        """Of the layout that it belongs to."""
        return self._layout.fingerprint

    def n_elements(self, k: int) -> int:
        """Return how many elements of shard k's vector it holds."""
        return sum(piece.stop - piece.start for piece in self._pieces[k])

    def part(self, k: int) -> "Part":
        """Return what it holds of shard k, which is one of `shards`."""
        return Part(Holding.of(self._ranges[k], self._layout), self._layout, k, selection=self)

    def pieces(self, k: int) -> tuple[_Piece, ...]:
        """Return what shard k holds of each item."""
        return self._pieces[k]


@final
class Part:
    """What one client holds of one shard, and how to copy it.

    Attributes:
        holding: The same, as the shard knows it.
    """

    def __init__(
        self, holding: Holding, layout: Layout, k: int, *, selection: Selection | None
    ) -> None:
        self.holding = holding
        self._layout = layout
        self._k = k
        self._selection = selection

    @classmethod
    def whole(cls, layout: Layout, k: int) -> "Part":
        """Return everything of shard k."""
        return cls(Holding.whole(layout, k), layout, k, selection=None)

    @classmethod
    def of(cls, selection: Selection | None, layout: Layout, k: int) -> "Part":
        """Return what is selected of shard k; everything if there is no selection."""
        return cls.whole(layout, k) if selection is None else selection.part(k)

    @property
    def fingerprint(self) -> str:
        """Of the layout."""
        return self._layout.fingerprint

    @property
    def shard_size(self) -> int:
        """Elements of the shard's vector."""
        return self._layout.shard_size(self._k)

    @property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.float64]:
        """Of the shard's vector."""
        return self._layout.dtype

    @property
    def n_bytes(self) -> int:
        """Of the compact vector."""
        return self.holding.n_elements * self.dtype.itemsize

    def stripes_of(self, tensors: Sequence[object | None]) -> Vector | None:
        """Return the stripes of the shard's vector where tensors lie that are given.

        Padding goes with the tensor before it, so that ranges end at multiples of
        `ALIGNMENT`: there rules round as for the whole vector.

        Args:
            tensors: In the order of the layout; None for those that are not given.

        Returns:
            None if all are given.
        """
        assert self._selection is None
        segments = self._layout.segments(self._k)
        given = [one for one in segments if tensors[one.tensor_index] is not None]
        if len(given) == len(segments):
            return None
        starts = np.array([one.offset for one in given], np.int64)
        sizes = np.array([one.n_elements for one in given], np.int64)
        return Ranges.of(starts, starts + -(-sizes // ALIGNMENT) * ALIGNMENT).stripes()

    def exchange(self, compact: Vector) -> "TensorExchange":
        """Return what copies between tensors and the compact vector."""
        if self._selection is None:
            return self._layout.exchange(self._k, compact)
        pieces = [
            (piece, self.holding.places(piece.ranges)) for piece in self._selection.pieces(self._k)
        ]
        return RegionExchange(self._selection.tensors, pieces, compact)

    def exchange_blocks(self, blocks: Sequence[Vector]) -> "BlockExchange":
        """Return what copies the compact vector, in blocks, to tensors."""
        return BlockExchange(self, blocks)

    def scatter(self, blocks: Sequence[Vector], tensors: Sequence[torch.Tensor]) -> None:
        """Copy the compact vector, in blocks, to tensors; see `Exchange.scatter`."""
        if self._selection is None:
            segments = self._layout.segments(self._k)
            scatter_blocks(self._layout.tensors, segments, blocks, tensors)
        else:
            self.exchange(np.concatenate(blocks)).scatter(tensors)

    def exchange_in_place(self, vector: Vector) -> "TensorExchange":
        """Return what copies between tensors and the shard's own vector."""
        if self._selection is None:
            return self._layout.exchange(self._k, vector)
        pieces = [(piece, piece.ranges) for piece in self._selection.pieces(self._k)]
        return RegionExchange(self._selection.tensors, pieces, vector)


@final
class BlockExchange:
    """The compact vector in blocks, as they came."""

    def __init__(self, part: Part, blocks: Sequence[Vector]) -> None:
        self._part = part
        self._blocks = blocks

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy all of it to where it belongs; see `Exchange.scatter`."""
        self._part.scatter(self._blocks, tensors)


@final
class RegionExchange:
    """What `Exchange` is for whole tensors, for flat tensors of regions.

    Args:
        tensors: One per item.
        pieces: Of each item what the shard has, and where it lies in `vector`.
        vector: The shard's, or the compact one.
    """

    def __init__(
        self,
        tensors: tuple[TensorSpec, ...],
        pieces: Sequence[tuple[_Piece, Ranges]],
        vector: Vector,
    ) -> None:
        self._tensors = tensors
        self._vector = as_tensor(vector)
        self._copiers = {piece.item_index: (piece, Copier(ranges)) for piece, ranges in pieces}

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy what the shard has of `tensors` into the vector.

        Args:
            tensors: Each (n_elements,), in the selection's order, of any real dtype;
                None stands for zeros.

        Raises:
            ValueError: a tensor is missing, or has another shape.
        """
        check_tensors(self._tensors, tensors)
        for index in self._copiers:
            self._put(index, tensors[index])

    def put(self, index: int, tensor: torch.Tensor | None) -> None:
        """Copy what the shard has of one tensor; see `gather`."""
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
        """Nothing: the compact vector has none."""

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what the shard has of `tensors` into them.

        Args:
            tensors: Each (n_elements,), in the selection's order. Tensors of integers
                receive the nearest integer: averages of counts are none.

        Raises:
            ValueError: a tensor is missing, or has another shape.
        """
        check_tensors(self._tensors, tensors)
        with torch.no_grad():
            for index, (piece, copier) in self._copiers.items():
                part = tensors[index][piece.start : piece.stop]
                copier.gather(self._vector, part)


TensorExchange = Exchange | RegionExchange


def _spec_of(layout: Layout, name: str, region: Region) -> TensorSpec:
    """Return the flat tensor of this region.

    Raises:
        ValueError: there is none.
    """
    spec = next((spec for spec in layout.tensors if spec.name == name), None)
    if spec is None:
        names = [spec.name for spec in layout.tensors]
        raise ValueError(f"the layout has no tensor {name!r}; it has {names}")
    whole = Region.of(*spec.shape)
    if len(region.intervals) != len(spec.shape) or region not in whole:
        raise ValueError(f"tensor {name!r} has shape {spec.shape}; it has no region {region}")
    return TensorSpec(name=name, shape=(region.n_elements,), kind=spec.kind)


def _placed(layout: Layout, items: Sequence[tuple[str, Region]]) -> list[tuple[_Piece, ...]]:
    """Return per shard what it has of which item."""
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


def _in_segment(flat: Ranges, segment: Segment) -> Ranges:
    """Return where ranges of a tensor's elements lie in the shard's vector."""
    clipped = flat.clipped(segment.start, segment.stop)
    return clipped.shifted(segment.offset - segment.start)


def _flat(shape: tuple[int, ...], region: Region) -> Ranges:
    """Return the elements of a region of a tensor of this shape, row-major."""
    starts = np.zeros(1, np.int64)
    stride, run = 1, 1
    is_run = True  # do the dimensions so far make one run of elements?
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
        return Ranges.whole(0, 0)
    if len(starts) > N_RANGES_MAX:
        raise ValueError(
            f"region {region} of a tensor of shape {shape} is {len(starts)} separate "
            f"runs of elements; the most is {N_RANGES_MAX}: cut it along an earlier "
            "dimension"
        )
    return Ranges.of(starts, starts + run)


def _united(pieces: Sequence[_Piece], items: Sequence[tuple[str, Region]], *, k: int) -> Ranges:
    """Return all that a shard has of the items."""
    try:
        ranges = Ranges.union(piece.ranges for piece in pieces)
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
    """Return the error that names two regions which overlap; there are such."""
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
