"""Another shape for the same elements in the same order: flatten, view, unflatten.

    kind      "reshape"
    inputs    x
    options   none: the shapes say it all

Dimensions are matched up in blocks with equal numbers of elements:

    (16, 5, 5, 3) -> (400, 3)        blocks 16 5 5 -> 400, 3 -> 3

Cuts of a block lie where both sides have a box: of 400 at multiples of 25, of
400 -> (16, 25) in the first dimension only. Any other region works too, but reads a
box around what it needs.
"""

import math
from collections.abc import Mapping, Sequence, Set as AbstractSet
from itertools import accumulate
from operator import mul
from typing import ClassVar, NamedTuple, final

import torch
from typing_extensions import override

from distbelief.graph.kind import Cut, LayerKind, Step, Work
from distbelief.graph.layer import GraphError, Layer
from distbelief.graph.region import Interval, Region, Shape


class Block(NamedTuple):
    """Dimensions of the input, and of the output, that hold the same elements.

    Attributes:
        before: Which dimensions of the input; none has extent 1.
        after: Of the output, likewise.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]


@final
class Reshape(LayerKind):
    """The same elements in row-major order."""

    name: ClassVar[str] = "reshape"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        found = []
        for before, after in blocks(layer.input_shapes[0], layer.shape):
            behind = math.prod(layer.input_shapes[0][dim] for dim in before[1:])
            inner = math.prod(layer.shape[dim] for dim in after[1:])
            found.append(Cut(after[0], behind // math.gcd(behind, inner)))
        return tuple(found)

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
    def work(self, layer: Layer, output: Region) -> Work:
        return Work()

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        (read,) = self.reads(layer, output)
        tile = inputs[0]
        if read.n_elements != output.n_elements:
            tile = _needed(layer, output, read, tile)
        return tile.reshape(tile.shape[0], *output.shape)


def reshape_layer(name: str, source: Layer, *, shape: Shape) -> Layer:
    """Return the layer that gives `source` another shape, the batch not counted."""
    return Layer(
        name=name,
        kind=Reshape.name,
        inputs=(source.name,),
        input_shapes=(source.shape,),
        shape=shape,
        is_integer=source.is_integer,
    )


def blocks(before: Shape, after: Shape) -> list[Block]:
    """Return the finest blocks of dimensions that hold the same elements.

    Raises:
        GraphError: the shapes have different numbers of elements, or none.
    """
    if math.prod(before) != math.prod(after) or not math.prod(before):
        raise GraphError(
            f"{list(before)} cannot be reshaped to {list(after)}: the elements are "
            f"{math.prod(before)} and {math.prod(after)}"
        )
    ends = set(accumulate(before, mul)) & set(accumulate(after, mul))
    return [Block(*pair) for pair in zip(_groups(before, ends), _groups(after, ends), strict=True)]


def _groups(shape: Shape, ends: AbstractSet[int]) -> list[tuple[int, ...]]:
    """Return the dimensions that end where the product of all so far is in `ends`."""
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
    """Return the smallest interval of row-major indices that holds a box."""
    first, last = 0, 0
    for extent, (start, stop) in zip(shape, box, strict=True):
        first = first * extent + start
        last = last * extent + stop - 1
    return (first, last + 1)


def _hull(shape: Shape, span: Interval) -> list[Interval]:
    """Return the smallest box that holds an interval of row-major indices."""
    if not shape:
        return []
    inner = math.prod(shape[1:])
    first, last = span[0] // inner, (span[1] - 1) // inner
    if first < last:
        return [(first, last + 1), *((0, extent) for extent in shape[1:])]
    below = (span[0] - first * inner, span[1] - first * inner)
    return [(first, first + 1), *_hull(shape[1:], below)]


def _needed(layer: Layer, output: Region, read: Region, tile: torch.Tensor) -> torch.Tensor:
    """Return what `output` needs of a tile that holds more, (batch, n_elements)."""
    flat = torch.zeros((), dtype=torch.int64, device=tile.device)
    for extent, (start, stop) in zip(layer.shape, output, strict=True):
        places = torch.arange(start, stop, device=tile.device)
        flat = flat.unsqueeze(-1) * extent + places
    flat = flat.flatten()
    local, stride = torch.zeros_like(flat), 1
    for extent, (start, stop) in zip(
        reversed(layer.input_shapes[0]), reversed(read.intervals), strict=True
    ):
        local += (flat % extent - start) * stride
        flat //= extent
        stride *= stop - start
    return tile.flatten(1).index_select(1, local)
