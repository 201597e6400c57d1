"""Pooling to a given size: output o of n reads [floor(o H / n), ceil((o + 1) H / n)).

    kinds     "adaptive_average_pool", "adaptive_max_pool"
    inputs    (channels, *space), one to three dimensions of space
    options   none: the layer's shape says it all

`adaptive_pool_layers(name, source, *, sizes, maximum)` returns the best layer for it:
the mean over all places (a sum of parts), plain pooling where windows are equal, or one
of these two kinds.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import msgspec
import torch
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.kinds.reduction import reduction_layer
from distbelief.graph.layer import Layer, Option
from distbelief.graph.region import Interval, Region, Shape


class _AdaptivePool(LayerKind, ABC):
    maximum: ClassVar[bool]

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (_read(layer, output),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(_read(layer, output).n_elements)
        return Work(forward=n, backward=n, n_elements=n + output.n_elements)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        return _pooled(layer, output, inputs[0], maximum=self.maximum)


@final
class AdaptiveAveragePool(_AdaptivePool):
    """The mean of each window: means over rows, then over columns."""

    name: ClassVar[str] = "adaptive_average_pool"
    maximum: ClassVar[bool] = False


@final
class AdaptiveMaxPool(_AdaptivePool):
    """The largest of each window; of equals the first has the gradient."""

    name: ClassVar[str] = "adaptive_max_pool"
    maximum: ClassVar[bool] = True


def adaptive_pool_layers(name: str, source: Layer, *, sizes: Shape, maximum: bool) -> list[Layer]:
    """Return the layer that pools (channels, *space) to (channels, *sizes)."""
    extents = source.shape[1:]
    if set(sizes) == {1} and not maximum:
        dims = range(1, len(source.shape))
        return [reduction_layer(name, [source], function="mean", dims=dims)]
    layer = Layer(
        name=name,
        kind=AdaptiveMaxPool.name if maximum else AdaptiveAveragePool.name,
        inputs=(source.name,),
        input_shapes=(source.shape,),
        shape=(source.shape[0], *sizes),
    )
    if any(extent % size for extent, size in zip(extents, sizes, strict=True)):
        return [layer]
    window = tuple(extent // size for extent, size in zip(extents, sizes, strict=True))
    zeros, ones = (0,) * len(sizes), (1,) * len(sizes)
    plain: dict[str, Option] = {"size": window, "stride": window, "padding": zeros}
    if maximum:
        options = plain | {"dilation": ones, "ceil": False}
    else:
        options = plain | {"ceil": False, "count_include_pad": True, "divisor": None}
    kind = "max_pool" if maximum else "average_pool"
    return [msgspec.structs.replace(layer, kind=kind, options=options)]


def _window(output: int, extent: int, n_outputs: int) -> Interval:
    return (output * extent // n_outputs, -(-(output + 1) * extent // n_outputs))


def _read(layer: Layer, output: Region) -> Region:
    spans = []
    for (start, stop), extent, size in zip(
        output.intervals[1:], layer.input_shapes[0][1:], layer.shape[1:], strict=True
    ):
        if start == stop:
            spans.append((0, 0))
            continue
        first, last = _window(start, extent, size), _window(stop - 1, extent, size)
        spans.append((first[0], last[1]))
    return Region((output.intervals[0], *spans))


def _pooled(layer: Layer, output: Region, tile: torch.Tensor, *, maximum: bool) -> torch.Tensor:
    # Columns first: of equal values the first row, and in it the first column, wins.
    read = _read(layer, output)
    for dim in reversed(range(1, len(layer.shape))):
        offset = read.intervals[dim][0]
        extent, size = layer.input_shapes[0][dim], layer.shape[dim]
        slices = []
        for index in range(*output.intervals[dim]):
            start, stop = _window(index, extent, size)
            window = tile.narrow(dim + 1, start - offset, stop - start)
            if maximum:
                slices.append(window.max(dim + 1).values)
            else:
                slices.append(window.mean(dim + 1))
        tile = torch.stack(slices, dim + 1)
    return tile
