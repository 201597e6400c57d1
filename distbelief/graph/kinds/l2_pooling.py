"""L2 pooling: the root of the sum of squares over a window, as complex cells do.

    kind      "l2_pool"
    inputs    (channels, rows, columns)
    options   size, stride, padding: a number for rows, one for columns; epsilon: added
              under the root; gaussian: whether squares are weighted by a Gaussian of
              deviation size / 4 in each dimension, whose weights sum to one

The module is `L2Pool2d(kernel_size, *, stride=None, padding=0, epsilon=0.0,
gaussian=False)`; a stride of None is the window's size. A window of zeros has gradient
zero, where a plain root has none.
Source: Hyvarinen and Hoyer 2000, "Emergence of phase and shift invariant features";
plain in Le et al. 2012, section 3.1; weighted in Sermanet et al. 2012, "Convolutional
neural networks applied to house numbers digit classification", section 2.1.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import Step
from distbelief.graph.kinds.convolution import padded
from distbelief.graph.kinds.pooling import Pooling, windows
from distbelief.graph.kinds.window_sums import gaussian, window_sums
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


@final
class L2Pool2d(nn.Module):
    """sqrt(epsilon + sum of squares over each window).

    Args:
        kernel_size: Of the window: rows and columns, or one number for both.
        stride: Between windows; None for the window's size.
        padding: Zeros around the maps.
        epsilon: Keeps the gradient of weak windows small.
        gaussian: Whether to weight the squares, more in the middle of the window.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        *,
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        epsilon: float = 0.0,
        gaussian: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = pair(kernel_size)
        self.stride = self.kernel_size if stride is None else pair(stride)
        self.padding = pair(padding)
        self.epsilon = epsilon
        self.gaussian = gaussian

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the pooled maps: (batch, maps, rows, columns)."""
        rows, columns = self.padding
        if rows or columns:
            x = functional.pad(x, (columns, columns, rows, rows))
        return _pooled(
            x, self.kernel_size, self.stride, epsilon=self.epsilon, weighted=self.gaussian
        )

    @override
    def extra_repr(self) -> str:
        """Return the options."""
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, epsilon={self.epsilon}, gaussian={self.gaussian}"
        )


@final
class L2Pool(Pooling):
    """sqrt(epsilon + sum of squares over the window)."""

    name: ClassVar[str] = "l2_pool"

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        return _pooled(
            padded(inputs[0], windows(layer), output, layer.input_shapes[0]),
            layer.integers("size"),
            layer.integers("stride"),
            epsilon=layer.number("epsilon"),
            weighted=bool(layer.options["gaussian"]),
        )


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Return a number for rows and one for columns."""
    return value if isinstance(value, tuple) else (value, value)


def _pooled(
    tile: torch.Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    epsilon: float,
    weighted: bool,
) -> torch.Tensor:
    rows, columns = (gaussian(n) if weighted else (1.0,) * n for n in size)
    sums = window_sums(tile.square(), rows=rows, columns=columns, stride=stride)
    return safe_sqrt(sums + epsilon)


def safe_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Return the root, with gradient 0 where x is 0 (a unit that is silent)."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)
