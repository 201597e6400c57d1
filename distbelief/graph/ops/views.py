"""Views and moves of elements: permute, slice, expand, pad, reshape, concatenate, parameters."""

import math
from collections.abc import Mapping, Sequence, Set as AbstractSet
from itertools import accumulate
from operator import mul
from typing import ClassVar, NamedTuple, final

import torch
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.ops.windows import Window, padded, read_by
from distbelief.graph.region import Interval, Region, Shape


@final
class Permute(Operator):
    """Dimensions in another order."""

    # options   dims: of x without the batch, as in torch.permute
    name: ClassVar[str] = "permute"
    per_element: ClassVar[Work | None] = Work(n_elements=2.0)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        intervals = dict(zip(layer.integers("dims"), output, strict=True))
        return (Region(tuple(intervals[dim] for dim in sorted(intervals))),)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return call.inputs[0].permute(0, *(dim + 1 for dim in call.layer.integers("dims")))


@final
class Slice(Operator):
    """x[start::step] in each dimension, as long as the shape says."""

    # options   starts, steps: a number per dimension, steps >= 1
    # select, narrow, chunk and split are a slice, and a reshape to drop a dimension.
    name: ClassVar[str] = "slice"
    per_element: ClassVar[Work | None] = Work(n_elements=1.0)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        intervals = []
        for start, step, (first, stop) in zip(
            layer.integers("starts"), layer.integers("steps"), output, strict=True
        ):
            low = start + first * step
            intervals.append((low, low + max(0, (stop - first - 1) * step + 1)))
        return (Region(tuple(intervals)),)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        steps = call.layer.integers("steps")
        return call.inputs[0][(slice(None), *(slice(None, None, step) for step in steps))]


@final
class Expand(Operator):
    """Dimensions of extent 1 repeated to the output's shape."""

    name: ClassVar[str] = "expand"
    per_element: ClassVar[Work | None] = Work(n_elements=1.0)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return call.inputs[0].expand(-1, *call.region.shape)


@final
class Pad(Operator):
    """The input with a constant around it."""

    # options   before, after: a number >= 0 per dimension; value
    name: ClassVar[str] = "pad"
    per_element: ClassVar[Work | None] = Work(n_elements=2.0)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        read = read_by(_borders(layer), output.intervals, layer.input_shapes[0])
        return (Region(tuple(read)),)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        return padded(
            call.inputs[0],
            _borders(layer),
            call.region.intervals,
            layer.input_shapes[0],
            value=layer.number("value"),
        )


def _borders(layer: Layer) -> list[Window]:
    return [Window(size=1, padding=before) for before in layer.integers("before")]


@final
class Parameter(Operator):
    """A tensor of the model as a layer: position embeddings, class tokens, scales."""

    # tensors   value: of the layer's shape, or with a dimension of extent 1 before it, which is
    #           then the batch (as position embeddings often have)
    # output    does not depend on the sample: (1, *shape), which broadcasts
    name: ClassVar[str] = "parameter"
    per_element: ClassVar[Work | None] = Work(n_elements=1.0)

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return True

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return ()

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        batch = ((0, 1),) if _has_batch(layer) else ()
        return {"value": Region((*batch, *output))}

    @override
    def compute(self, call: Call) -> torch.Tensor:
        value = call.tensors["value"]
        value = value if _has_batch(call.layer) else value.unsqueeze(0)
        return value.to(torch.int64) if call.layer.is_integer else value


def _has_batch(layer: Layer) -> bool:
    return len(layer.tensors["value"].shape) > len(layer.shape)


class Block(NamedTuple):
    """Dimensions of the input and of the output that hold the same elements."""

    before: tuple[int, ...]  # dimensions of the input, none of extent 1
    after: tuple[int, ...]  # dimensions of the output, none of extent 1


@final
class Reshape(Operator):
    """The same elements in row-major order, in another shape."""

    name: ClassVar[str] = "reshape"
    per_element: ClassVar[Work | None] = Work()

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        # Split where both sides of a block have a box: 400 <- (16, 5, 5) at multiples of 25,
        # 400 -> (16, 25) in the first dimension only. Other regions read more than they need.
        splits = []
        for before, after in blocks(layer.input_shapes[0], layer.shape):
            inner_before = math.prod(layer.input_shapes[0][dim] for dim in before[1:])
            inner_after = math.prod(layer.shape[dim] for dim in after[1:])
            splits.append(Cut(after[0], inner_before // math.gcd(inner_before, inner_after)))
        return tuple(splits)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        shape = layer.input_shapes[0]
        if not output.n_elements:
            return (Region(((0, 0),) * len(shape)),)
        intervals = [(0, extent) for extent in shape]
        for before, after in blocks(shape, layer.shape):
            span = _span(
                tuple(layer.shape[dim] for dim in after), [output.intervals[dim] for dim in after]
            )
            hull = _hull(tuple(shape[dim] for dim in before), span)
            for dim, interval in zip(before, hull, strict=True):
                intervals[dim] = interval
        return (Region(tuple(intervals)),)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        (read,) = self.reads(call.layer, call.region)
        tile = call.inputs[0]
        if read.n_elements != call.region.n_elements:
            tile = _selected(call.layer, call.region, read, tile)
        return tile.reshape(tile.shape[0], *call.region.shape)


def reshape_layer(name: str, source: Layer, *, shape: Shape) -> Layer:
    """Return the layer that gives `source` another shape, the batch not counted."""
    return Layer.of(name, Reshape.name, [source], shape, is_integer=source.is_integer)


def blocks(before: Shape, after: Shape) -> list[Block]:
    """Return the finest blocks of dimensions that hold the same elements.

        (16, 5, 5, 3) -> (400, 3)        blocks 16 5 5 -> 400, 3 -> 3

    GraphError if the shapes have different numbers of elements, or none.
    """
    if math.prod(before) != math.prod(after) or not math.prod(before):
        raise GraphError(
            f"{list(before)} cannot be reshaped to {list(after)}: they have "
            f"{math.prod(before)} and {math.prod(after)} elements"
        )
    ends = set(accumulate(before, mul)) & set(accumulate(after, mul))
    return [Block(*pair) for pair in zip(_groups(before, ends), _groups(after, ends), strict=True)]


def _groups(shape: Shape, ends: AbstractSet[int]) -> list[tuple[int, ...]]:
    # Groups of dimensions that end where the product of all extents so far is in `ends`.
    groups: list[tuple[int, ...]] = []
    group: tuple[int, ...] = ()
    product = 1
    for dim, extent in enumerate(shape):
        if extent == 1:
            continue
        product *= extent
        group = (*group, dim)
        if product in ends:
            groups.append(group)
            group = ()
    return groups


def _span(shape: Shape, box: Sequence[Interval]) -> Interval:
    # The smallest interval of row-major indices that contains a box.
    first, last = 0, 0
    for extent, (start, stop) in zip(shape, box, strict=True):
        first = first * extent + start
        last = last * extent + stop - 1
    return (first, last + 1)


def _hull(shape: Shape, span: Interval) -> list[Interval]:
    # The smallest box that contains an interval of row-major indices.
    if not shape:
        return []
    inner = math.prod(shape[1:])
    first, last = span[0] // inner, (span[1] - 1) // inner
    if first < last:
        return [(first, last + 1), *((0, extent) for extent in shape[1:])]
    below = (span[0] - first * inner, span[1] - first * inner)
    return [(first, first + 1), *_hull(shape[1:], below)]


def _selected(layer: Layer, output: Region, read: Region, tile: torch.Tensor) -> torch.Tensor:
    # What `output` needs of a tile that holds more: (batch, n_elements).
    places = torch.zeros(layer.input_shapes[0], dtype=torch.int64, device=tile.device)
    places[read.slices] = torch.arange(read.n_elements, device=tile.device).view(read.shape)
    return tile.flatten(1).index_select(1, places.view(layer.shape)[output.slices].flatten())


@final
class Cat(Operator):
    """The inputs joined along a dimension."""

    # inputs    any number; their extents differ in dimension `dim` only
    # options   dim: without the batch, from 0
    name: ClassVar[str] = "cat"
    per_element: ClassVar[Work | None] = Work(n_elements=2.0)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        dim = layer.integer("dim")
        start, stop = output.intervals[dim]
        reads, offset = [], 0
        for shape in layer.input_shapes:
            extent = shape[dim]
            low = min(max(start - offset, 0), extent)
            high = max(min(stop - offset, extent), low)
            reads.append(output.replaced(dim, (low, high)))
            offset += extent
        return tuple(reads)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        n_samples = max(value.shape[0] for value in call.inputs)
        expanded = [value.expand(n_samples, *value.shape[1:]) for value in call.inputs]
        return torch.cat(expanded, dim=call.layer.integer("dim") + 1)
