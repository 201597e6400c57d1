"""Local contrast normalization, over neighboring places and maps."""

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Call, Operator, Work
from distbelief.graph.ops.windows import Window, gaussian, read_by, safe_sqrt, sums_along
from distbelief.graph.region import Region


@final
class LocalContrastNorm2d(nn.Module):
    """Subtractive, then divisive normalization over a window in space and all maps.

        g = x - mean of x                                (subtractive)
        y = g / max(epsilon, sqrt(mean of g^2))          (divisive)

    Means are over a window and all maps, weighted by a Gaussian of deviation size / 4. At borders
    the weights inside the image are scaled to sum to one, so that a constant image gives zero.

    Source: Jarrett et al. 2009, "What is the best multi-stage architecture for object
    recognition?", section 2.1, with the constant c of Le et al. 2012, section 3.2, as `epsilon`
    (Jarrett uses the mean deviation of the image). Neither says what happens at borders.

    ValueError if size, of the square window, is not odd and positive, or epsilon is not positive.
    """

    def __init__(self, size: int = 9, *, epsilon: float = 0.01) -> None:
        super().__init__()
        if size < 1 or size % 2 == 0:
            raise ValueError(f"size must be odd and positive, got {size}")
        if epsilon <= 0:
            raise ValueError(f"epsilon must be above 0, got {epsilon}")
        self.size = size
        self.epsilon = epsilon

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, maps, rows, columns)."""
        return _normalized(
            x, Region.of(*x.shape[2:]), x.shape[2:], size=self.size, epsilon=self.epsilon
        )

    @override
    def extra_repr(self) -> str:
        return f"size={self.size}, epsilon={self.epsilon}"


@final
class LocalContrast(Operator):
    """What `LocalContrastNorm2d` computes; a part needs all maps and a halo of twice the radius."""

    # input     shape (maps, rows, columns)
    # options   size, epsilon: as in the module
    name: ClassVar[str] = "local_contrast"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        n_maps, *extents = layer.input_shapes[0]
        halo = 2 * (layer.integer("size") // 2)
        return (Region(((0, n_maps), *_with_halo(output.without(0), halo, extents))),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        # Window sums run over one map, the sum of all maps, and are separable.
        (read,) = self.reads(layer, output)
        n_positions = read.n_elements / max(1, read.shape[0])
        operations = 4.0 * read.n_elements + 8.0 * layer.integer("size") * n_positions
        return Work(
            forward=operations,
            backward=2 * operations,
            n_elements=4.0 * read.n_elements + output.n_elements,
        )

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        y = _normalized(
            call.inputs[0],
            call.region.without(0),
            layer.shape[1:],
            size=layer.integer("size"),
            epsilon=layer.number("epsilon"),
        )
        return y[:, call.region.slices[0]]


def _normalized(
    x: torch.Tensor, output: Region, extents: Sequence[int], *, size: int, epsilon: float
) -> torch.Tensor:
    # Normalizes the places `output` (rows, columns) of all maps.
    # x holds the image as far as two radii around them: (batch, maps, rows, columns).
    radius = size // 2
    near = _with_halo(output, radius, extents)
    far = _with_halo(output, 2 * radius, extents)
    inner = (slice(None), slice(None), *near.within(far).slices)
    centered = x[inner] - _local_mean(x.mean(1, keepdim=True), far, near, size)
    power = _local_mean(centered.square().mean(1, keepdim=True), near, output, size)
    middle = (slice(None), slice(None), *output.within(near).slices)
    # One reciprocal of the map of deviations is half the cost of dividing every map by it.
    return centered[middle] * safe_sqrt(power).clamp_min(epsilon).reciprocal()


def _local_mean(maps: torch.Tensor, given: Region, output: Region, size: int) -> torch.Tensor:
    # Gaussian means of one map at the places `output`.
    # maps is (batch, 1, rows, columns) of the places `given`: all that windows around `output`
    # hold.
    weights = gaussian(size)
    for dim, (span, interval) in enumerate(zip(given, output, strict=True)):
        before = interval[0] - size // 2
        pads = (span[0] - before, interval[1] + size // 2 - span[1])
        padding = (*pads, 0, 0) if dim == 1 else (0, 0, *pads)
        inside = [1, 1, 1, 1]
        inside[dim + 2] = span[1] - span[0]
        sums, all_weights = (
            sums_along(functional.pad(values, padding), dim - 2, weights)
            for values in (maps, maps.new_ones(inside))
        )
        maps = sums / all_weights
    return maps


def _with_halo(places: Region, radius: int, extents: Sequence[int]) -> Region:
    window = Window(size=2 * radius + 1, padding=radius)
    return Region(tuple(read_by([window] * 2, places.intervals, extents)))
