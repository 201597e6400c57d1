"""Locally connected layers: convolutions whose weights are not shared between places.

    kind      "locally_connected"
    inputs    (channels in, rows, columns)
    tensors   weight (rows out, columns out, channels out, channels in * window rows *
              window columns); bias (rows out, columns out, channels out)
    options   size, stride, padding: a number for rows, one for columns

The module is `LocallyConnected2d(in_channels, out_channels, kernel_size, *, input_size,
stride=1, padding=0, bias=True)`. Weights come position-first, so that what a part of
the image uses is contiguous. Cut in space, a part needs a halo of its input and the
weights of its own places, which nobody else has: nothing is summed but halo gradients.
Source: Le et al. 2012, "Building high-level features using large scale unsupervised
learning", section 3; the paper's vision model has 10 x 10 windows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.kinds.convolution import padded
from distbelief.graph.kinds.l2_pooling import pair
from distbelief.graph.kinds.local_product import local_product
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region
from distbelief.graph.window import Window


@final
class LocallyConnected2d(nn.Module):
    """A convolution with weights of its own at every place.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output: nodes that see the same window.
        kernel_size: Of the window: rows and columns, or one number for both.
        input_size: Rows and columns of the input, or one number for both.
        stride: Between windows.
        padding: Zeros around the input.
        bias: Whether every output has a bias of its own.
        device: Where its tensors are; "meta" for nowhere.
        dtype: Of its tensors.

    Raises:
        ValueError: the window does not fit into the input.
    """

    def __init__(  # noqa: PLR0913 -- those of torch.nn.Conv2d
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        input_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = pair(kernel_size)
        self.input_size = pair(input_size)
        self.stride = pair(stride)
        self.padding = pair(padding)
        self.output_size = tuple(
            Window(size=size, stride=step, padding=around).n_outputs(extent)
            for size, step, around, extent in zip(
                self.kernel_size, self.stride, self.padding, self.input_size, strict=True
            )
        )
        if not all(self.output_size):
            raise ValueError(
                f"a window of {self.kernel_size} does not fit into input_size "
                f"{self.input_size} with padding {self.padding}"
            )
        n_weights = in_channels * math.prod(self.kernel_size)
        shape = (*self.output_size, out_channels)
        self.weight = nn.Parameter(torch.empty(*shape, n_weights, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values, uniform as torch's convolutions have them."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels out, rows out, columns out).

        Args:
            x: (batch, channels in, rows, columns).

        Raises:
            ValueError: it has another shape.
        """
        if tuple(x.shape[1:]) != (self.in_channels, *self.input_size):
            raise ValueError(
                f"x has shape {list(x.shape)}; this layer has weights for "
                f"(batch, {self.in_channels}, {self.input_size[0]}, "
                f"{self.input_size[1]})"
            )
        rows, columns = self.padding
        if rows or columns:
            x = functional.pad(x, (columns, columns, rows, rows))
        return _connected(x, self.weight, self.bias, size=self.kernel_size, stride=self.stride)

    @override
    def extra_repr(self) -> str:
        """Return the options."""
        return (
            f"{self.in_channels}, {self.out_channels}, "
            f"kernel_size={self.kernel_size}, input_size={self.input_size}, "
            f"stride={self.stride}, padding={self.padding}, "
            f"bias={self.bias is not None}"
        )


@final
class LocallyConnected(LayerKind):
    """What `LocallyConnected2d` computes."""

    name: ClassVar[str] = "locally_connected"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        n_channels, *extents = layer.input_shapes[0]
        spans = [
            window.reads(interval, extent=extent)
            for window, interval, extent in zip(
                _windows(layer), output.intervals[1:], extents, strict=True
            )
        ]
        return (Region(((0, n_channels), *spans)),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        channels, rows, columns = output
        return {
            word: Region((rows, columns, channels, *((0, n) for n in use.shape[3:])))
            for word, use in layer.tensors.items()
        }

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        operations = 2.0 * output.n_elements * layer.tensors["weight"].shape[-1]
        (read,) = self.reads(layer, output)
        n_patches = output.n_elements // max(1, output.shape[0])
        return Work(
            forward=operations,
            backward=2 * operations,
            n_elements=float(output.n_elements + read.n_elements)
            + n_patches * layer.tensors["weight"].shape[-1],
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
        return _connected(
            padded(inputs[0], _windows(layer), output, layer.input_shapes[0]),
            tensors["weight"],
            tensors.get("bias"),
            size=layer.integers("size"),
            stride=layer.integers("stride"),
        )


def _connected(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    product = local_product(x, weight, size=size, stride=stride)
    return product if bias is None else product + bias.permute(2, 0, 1)


def _windows(layer: Layer) -> list[Window]:
    rows = zip(
        layer.integers("size"), layer.integers("stride"), layer.integers("padding"), strict=True
    )
    return [Window(size=size, stride=stride, padding=padding) for size, stride, padding in rows]
