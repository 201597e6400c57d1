"""Local response normalisation: each map against its neighbours, place by place.

    kind      "local_response"
    inputs    (maps, *space)
    options   size: maps of the window; alpha, beta, k: as in torch.nn.LocalResponseNorm

    y = x / (k + alpha * mean of x^2 over the window of maps)^beta

A part needs a halo of maps, and nothing else of space than its own.
Source: Krizhevsky, Sutskever and Hinton 2012, section 3.3; torch's alpha is for the
mean over the window where theirs is for the sum.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Operator, Step, Work
from distbelief.graph.ops.windows import Weights, gaussian, safe_sqrt, window_sums
from distbelief.graph.region import Interval, Region


# Local contrast normalisation: each place against the maps around it.
#
#     kind      "local_contrast"
#     inputs    maps, rows, columns
#     options   size: of the square window, odd; epsilon: the constant c below
#
#     g = x - mean of x in the window, over all maps                      (subtractive)
#     y = g / max(c, sqrt(mean of g^2 in the window, over all maps))      (divisive)
#
# Means are weighted by a Gaussian of deviation size / 4 whose weights sum to one over the
# window and all maps; at borders the weights of the places inside the image are
# scaled to sum to one, so that a constant image gives zero everywhere. A part needs all
# maps, and a halo of twice the window's radius. The module is
# `LocalContrastNorm2d(size=9, *, epsilon=0.01)`.
# Source: Jarrett et al. 2009, "What is the best multi-stage architecture for object
# recognition?", section 2.1; with the constant c of Le et al. 2012, section 3.2
# (Jarrett's is the mean deviation of the image). Borders both leave open.


@final
class LocalContrastNorm2d(nn.Module):
    """Subtractive, then divisive normalisation over space and all maps.

    Args:
        size: Of the square window, odd.
        epsilon: The least deviation that is divided by.

    Raises:
        ValueError: the window has no middle, or epsilon lets zero through.
    """

    def __init__(self, size: int = 9, *, epsilon: float = 0.01) -> None:
        super().__init__()
        if size < 1 or size % 2 == 0:
            raise ValueError(f"size is {size}; use an odd number: a window has a middle")
        if epsilon <= 0:
            raise ValueError(f"epsilon is {epsilon}; use a number above 0")
        self.size = size
        self.epsilon = epsilon

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, maps, rows, columns), normalised."""
        return _normalised(
            x,
            Region.of(*x.shape[2:]),
            Region.of(*x.shape[2:]),
            size=self.size,
            epsilon=self.epsilon,
        )

    @override
    def extra_repr(self) -> str:
        """Return the options."""
        return f"size={self.size}, epsilon={self.epsilon}"


@final
class LocalContrast(Operator):
    """What `LocalContrastNorm2d` computes."""

    name: ClassVar[str] = "local_contrast"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        n_maps, *extents = layer.input_shapes[0]
        halo = 2 * (layer.integer("size") // 2)
        spans = [
            _grown(interval, halo, extent)
            for interval, extent in zip(output.intervals[1:], extents, strict=True)
        ]
        return (Region(((0, n_maps), *spans)),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        # The window's sums are of one map, the sum of all, first along columns.
        (read,) = self.reads(layer, output)
        n_places = read.n_elements / max(1, read.shape[0])
        operations = 4.0 * read.n_elements + 8.0 * layer.integer("size") * n_places
        return Work(
            forward=operations,
            backward=2 * operations,
            n_elements=4.0 * read.n_elements + output.n_elements,
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
        y = _normalised(
            inputs[0],
            Region(output.intervals[1:]),
            Region.of(*layer.shape[1:]),
            size=layer.integer("size"),
            epsilon=layer.number("epsilon"),
        )
        return y[:, output.slices[0]]


def _normalised(
    x: torch.Tensor, wanted: Region, image: Region, *, size: int, epsilon: float
) -> torch.Tensor:
    """Return the places `wanted` of all maps.

    Args:
        x: The image as far as two radii around them: (batch, maps, rows, columns).
        wanted: Rows and columns.
        image: Rows and columns of the whole.
        size: Of the window.
        epsilon: The least deviation.
    """
    radius = size // 2
    near = Region(
        tuple(
            _grown(interval, radius, extent)
            for interval, extent in zip(wanted, image.shape, strict=True)
        )
    )
    far = Region(
        tuple(
            _grown(interval, 2 * radius, extent)
            for interval, extent in zip(wanted, image.shape, strict=True)
        )
    )
    inner = (slice(None), slice(None), *near.within(far).slices)
    centred = x[inner] - _local_mean(x.mean(1, keepdim=True), far, near, size)
    power = _local_mean(centred.square().mean(1, keepdim=True), near, wanted, size)
    middle = (slice(None), slice(None), *wanted.within(near).slices)
    # Of the one map of deviations, not of each map by them: that costs twice as much.
    return centred[middle] * safe_sqrt(power).clamp_min(epsilon).reciprocal()


def _local_mean(maps: torch.Tensor, given: Region, wanted: Region, size: int) -> torch.Tensor:
    """Return Gaussian means of one map at the places `wanted`.

    Args:
        maps: (batch, 1, rows, columns) of the places `given`.
        given: All places of the image that windows around `wanted` hold.
        wanted: Rows and columns.
        size: Of the window.
    """
    weights = gaussian(size)
    for dim, (span, interval) in enumerate(zip(given, wanted, strict=True)):
        before = interval[0] - size // 2
        pads = (span[0] - before, interval[1] + size // 2 - span[1])
        padding = (*pads, 0, 0) if dim == 1 else (0, 0, *pads)
        inside = [1, 1, 1, 1]
        inside[dim + 2] = span[1] - span[0]
        sums = _along(dim, functional.pad(maps, padding), weights)
        maps = sums / _along(dim, functional.pad(maps.new_ones(inside), padding), weights)
    return maps


def _along(dim: int, maps: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return weighted sums along rows (0) or columns (1)."""
    rows, columns = (weights, (1.0,)) if dim == 0 else ((1.0,), weights)
    return window_sums(maps, rows=rows, columns=columns)


def _grown(interval: Interval, radius: int, extent: int) -> Interval:
    """Return the interval with `radius` more on both sides, where the image goes on."""
    if interval[0] == interval[1]:
        return (0, 0)
    return (max(0, interval[0] - radius), min(extent, interval[1] + radius))


@final
class LocalResponse(Operator):
    """What `torch.nn.LocalResponseNorm` computes."""

    name: ClassVar[str] = "local_response"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        before, after = _reach(layer)
        start, stop = output.intervals[0]
        if start == stop:
            return (output,)
        span = (max(0, start - before), min(layer.shape[0], stop + after))
        return (output.replaced(0, span),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements)
        operations = n * (layer.integer("size") + 10)
        return Work(forward=operations, backward=2 * operations, n_elements=4 * n)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        x = inputs[0]
        before, after = _reach(layer)
        start, stop = output.intervals[0]
        first = max(0, start - before)
        pads = (before - (start - first), max(0, stop + after - layer.shape[0]))
        squares = x.square().flatten(2) if x.dim() > 2 else x.square().unsqueeze(2)
        columns = functional.pad(squares, (0, 0, *pads)).unfold(1, layer.integer("size"), 1)
        means = columns.mean(3).view(x.shape[0], stop - start, *x.shape[2:])
        scale = layer.number("k") + layer.number("alpha") * means
        return x[:, start - first : stop - first] / scale ** layer.number("beta")


def _reach(layer: Layer) -> tuple[int, int]:
    """Return how many maps the window holds before its own, and after it."""
    size = layer.integer("size")
    return (size // 2, (size - 1) // 2)
