"""Convolutions in one to three dimensions: split by channels and in space.

    tensors   weight (channels out, channels in / groups, *window); bias (channels out,)
    options   stride, padding, extra, dilation: a number per dimension of space; groups

Cut in space, a part needs a halo of its input, and the whole weight: it is replicated,
and its gradient has to be summed. Cut by channels it needs the whole input, or, with
groups, the channels of its groups.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import Cut, LayerKind, Step, Work
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region, Shape
from distbelief.graph.window import Window


_FUNCTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


@final
class Convolution(LayerKind):
    """What `torch.nn.Conv1d`, `Conv2d` and `Conv3d` compute, with zero padding."""

    name: ClassVar[str] = "convolution"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        groups = layer.integer("groups")
        unit = layer.shape[0] // groups if groups > 1 else 1
        return (Cut(0, unit), *(Cut(dim) for dim in range(1, len(layer.shape))))

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        n_channels, *extents = layer.input_shapes[0]
        channels = _groups(layer, output)
        n_per_group = n_channels // layer.integer("groups")
        spans = [
            window.reads(interval, extent=extent)
            for window, interval, extent in zip(
                windows(layer), output.intervals[1:], extents, strict=True
            )
        ]
        read = (channels[0] * n_per_group, channels[1] * n_per_group)
        return (Region((read, *spans)),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        return {
            word: Region.of(*use.shape).replaced(0, output.intervals[0])
            for word, use in layer.tensors.items()
        }

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n_weights = math.prod(layer.tensors["weight"].shape[1:])
        operations = 2.0 * output.n_elements * n_weights
        (read,) = self.reads(layer, output)
        return Work(
            forward=operations,
            backward=2 * operations,
            n_elements=float(output.n_elements + read.n_elements),
        )

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        tile = padded(inputs[0], windows(layer), output, layer.input_shapes[0])
        first, last = _groups(layer, output)
        convolve = _FUNCTIONS[len(layer.shape) - 2]
        return convolve(
            tile,
            tensors["weight"],
            tensors.get("bias"),
            stride=layer.integers("stride"),
            dilation=layer.integers("dilation"),
            groups=last - first,
        )


def windows(layer: Layer) -> tuple[Window, ...]:
    """Return the window of each dimension of space."""
    sizes = layer.tensors["weight"].shape[2:]
    words = ("stride", "padding", "extra", "dilation")
    return _windows(sizes, *(tuple(layer.integers(word)) for word in words))


@lru_cache(maxsize=256)
def _windows(
    sizes: Shape, stride: Shape, padding: Shape, extra: Shape, dilation: Shape
) -> tuple[Window, ...]:
    """Return the windows; kept, for planners ask for those of a layer very often."""
    return tuple(
        Window(size=k, stride=s, padding=p, extra=e, dilation=d)
        for k, s, p, e, d in zip(sizes, stride, padding, extra, dilation, strict=True)
    )


def padded(
    tile: torch.Tensor,
    windows: Sequence[Window],
    output: Region,
    input_shape: Sequence[int],
    *,
    value: float = 0.0,
) -> torch.Tensor:
    """Return `tile`, (batch, channels, *space), with the padding that `output` sees."""
    pads: list[int] = []
    for window, interval, extent in zip(
        windows, output.intervals[1:], input_shape[1:], strict=True
    ):
        pads = [*window.pads(interval, extent=extent), *pads]  # torch: last dim first
    return functional.pad(tile, pads, value=value) if any(pads) else tile


def _groups(layer: Layer, output: Region) -> tuple[int, int]:
    """Return the groups whose channels `output` holds, [first, last)."""
    groups = layer.integer("groups")
    start, stop = output.intervals[0]
    if groups == 1:
        return (0, 1)
    n_per_group = layer.shape[0] // groups
    if start % n_per_group or stop % n_per_group:
        raise ValueError(
            f"channels {start}:{stop} of {layer.name!r} cut through a group of {n_per_group}"
        )
    return (start // n_per_group, stop // n_per_group)
