"""Pooling over sliding windows: the maximum or the average.

    kinds     "max_pool", "average_pool"
    inputs    (channels, *space), one to three dimensions of space
    options   size, stride, padding: a number per dimension of space
              max_pool: dilation likewise; ceil: whether a last window may end outside
              average_pool: ceil; count_include_pad; divisor: a number, or None

Stride is never None here: who captures a module whose stride is None writes its size.
"""

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.kinds.convolution import padded
from distbelief.graph.layer import Layer
from distbelief.graph.region import Interval, Region
from distbelief.graph.window import Window


_MAXIMA: Final = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGES: Final = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


class Pooling(LayerKind, ABC):
    """A kind that looks at every place of every window."""

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (_read(layer, output),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements * math.prod(layer.integers("size")))
        n_read = _read(layer, output).n_elements
        return Work(forward=n, backward=n, n_elements=float(output.n_elements + n_read))


@final
class MaxPool(Pooling):
    """The largest of each window; of equals the first has the gradient."""

    name: ClassVar[str] = "max_pool"

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        tile = padded(inputs[0], windows(layer), output, layer.input_shapes[0], value=-math.inf)
        pool = _MAXIMA[len(layer.shape) - 2]
        pooled: torch.Tensor = pool(
            tile,
            layer.integers("size"),
            stride=layer.integers("stride"),
            dilation=layer.integers("dilation"),
        )
        return pooled


@final
class AveragePool(Pooling):
    """The sum of each window over its size, or over what of it counts."""

    name: ClassVar[str] = "average_pool"

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        n = math.prod(layer.integers("size"))
        pooled = means(layer, output, inputs[0])
        if layer.options["divisor"] is not None:
            return pooled * (n / layer.number("divisor"))
        counts = [
            _counts(layer, dim, window, interval)
            for dim, (window, interval) in enumerate(
                zip(windows(layer), output.intervals[1:], strict=True), start=1
            )
        ]
        if counts == [
            [size] * len(count) for size, count in zip(layer.integers("size"), counts, strict=True)
        ]:
            return pooled
        factor = pooled.new_full((), float(n))
        for count in counts:
            factor = factor.unsqueeze(-1) / pooled.new_tensor(count)
        return pooled * factor


def windows(layer: Layer) -> list[Window]:
    """Return the window of each dimension of space."""
    n_dims = len(layer.shape) - 1
    dilations = layer.options.get("dilation", (1,) * n_dims)
    assert isinstance(dilations, tuple), (layer.name, dilations)
    rows = zip(
        layer.integers("size"),
        layer.integers("stride"),
        layer.integers("padding"),
        dilations,
        strict=True,
    )
    ceil = bool(layer.options.get("ceil", False))
    return [
        Window(size=size, stride=stride, padding=padding, dilation=dilation, ceil=ceil)
        for size, stride, padding, dilation in rows
    ]


def _read(layer: Layer, output: Region) -> Region:
    """Return the region of the input that windows over `output` hold."""
    spans = [
        window.reads(interval, extent=extent)
        for window, interval, extent in zip(
            windows(layer), output.intervals[1:], layer.input_shapes[0][1:], strict=True
        )
    ]
    return Region((output.intervals[0], *spans))


def means(layer: Layer, output: Region, tile: torch.Tensor) -> torch.Tensor:
    """Return the mean of each window, padding counted as zeros."""
    tile = padded(tile, windows(layer), output, layer.input_shapes[0])
    average = _AVERAGES[len(layer.shape) - 2]
    return average(tile, layer.integers("size"), stride=layer.integers("stride"))


def _counts(layer: Layer, dim: int, window: Window, interval: Interval) -> list[int]:
    """Return over how many places along `dim` torch takes each output's average."""
    extent = layer.input_shapes[0][dim]
    pads = window.padding if layer.options["count_include_pad"] else 0
    counts = []
    for output in range(*interval):
        first = output * window.stride - window.padding
        last = min(first + window.size, extent + pads)
        counts.append(last - max(first, -pads))
    return counts
