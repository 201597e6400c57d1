"""Locally connected layers: convolutions whose weights are not shared between positions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final, NamedTuple, Protocol, final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Call, Work
from distbelief.graph.ops.windows import Window, Windowed, pair, tile_of
from distbelief.graph.region import Region


# --- product of patches and weights ---
#
# All patches of a batch take as much memory as the image times the window's area. So a few rows
# of patches at a time are copied, multiplied while they are in the cache, and dropped; the
# backward pass copies them again. Inside, samples come last: then the columns of a patch's row
# are contiguous, and copies are long. Outside, images and gradients have samples first and are
# contiguous, because another layout would slow down the layers before and after (a pooling by a
# fifth, its gradient by half).

# Elements of all patches in the cache at once: 2 MiB of float32.
N_ELEMENTS_MAX: Final = 1 << 19


def local_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Multiply every patch of an image with a matrix of its own, in bounded memory.

        y[n, o, r, q] = sum over c, i, j of w[r, q, o, (c, i, j)] x[n, c, r s + i, q t + j]

    x is padded, and no larger than what is read; the weight is (rows out, columns out, outputs,
    channels * window rows * columns), the bias that is added (rows out, columns out, outputs).
    """
    last, geometry = _samples_last(x.detach()), _Geometry(*size, *stride)
    # Two functions, so that a caller that needs one gradient does not compute the other.
    product: torch.Tensor = _Images.apply(  # type: ignore[no-untyped-call]
        _ImageProduct.apply(x, last, weight.detach(), geometry),  # type: ignore[no-untyped-call]
        _WeightGradient.apply(weight, last, geometry),  # type: ignore[no-untyped-call]
    )
    return product if bias is None else product + bias.permute(2, 0, 1)


class _Geometry(NamedTuple):
    # Window size and stride.

    rows: int
    columns: int
    row_stride: int
    column_stride: int


class _Context(Protocol):
    # What autograd keeps between the passes.

    geometry: _Geometry
    shape: torch.Size
    saved_tensors: tuple[torch.Tensor]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


def _samples_last(x: torch.Tensor) -> torch.Tensor:
    # Images as (channels, rows, columns, samples).
    # Transposed as one matrix, torch works in blocks; else in strides of powers of two.
    return x.flatten(1).t().contiguous().view(*x.shape[1:], x.shape[0])


@final
class _ImageProduct(torch.autograd.Function):
    # The product, with a gradient for images only; `last` are the images with samples last.

    @staticmethod
    @override
    def forward(
        ctx: _Context,
        x: torch.Tensor,
        last: torch.Tensor,
        weight: torch.Tensor,
        geometry: _Geometry,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.shape = geometry, last.shape
        product = last.new_empty(*weight.shape[:3], x.shape[0])
        for tile in _tiles(weight, last):
            patches = _patches(last, tile, geometry)
            torch.bmm(_part(weight, tile), patches, out=_part(product, tile))
        return product

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        for_x = gradient.new_zeros(ctx.shape)
        for tile in _tiles(weight, for_x):
            patches = torch.bmm(_part(weight, tile).transpose(1, 2), _part(gradient, tile))
            # Targets do not overlap if one column of each window is added at a time.
            places = _windows(for_x, ctx.geometry)[tile]
            for row, part in zip(places, patches.view(places.shape), strict=True):
                for column in range(ctx.geometry.columns):
                    row[:, :, :, column].add_(part[:, :, :, column])
        images = for_x.flatten(0, 2).t().contiguous()
        return images.view(for_x.shape[3], *for_x.shape[:3]), None, None, None


@final
class _WeightGradient(torch.autograd.Function):
    # Zeros shaped like the product, with a gradient for weights only.

    @staticmethod
    @override
    def forward(
        ctx: _Context, weight: torch.Tensor, last: torch.Tensor, geometry: _Geometry
    ) -> torch.Tensor:
        ctx.save_for_backward(last)
        ctx.geometry, ctx.shape = geometry, weight.shape
        return last.new_zeros(()).expand(*weight.shape[:3], last.shape[3])

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (last,) = ctx.saved_tensors
        for_weight = gradient.new_empty(ctx.shape)
        for tile in _tiles(for_weight, last):
            patches = _patches(last, tile, ctx.geometry).transpose(1, 2)
            torch.bmm(_part(gradient, tile), patches, out=_part(for_weight, tile))
        return for_weight, None, None


@final
class _Images(torch.autograd.Function):
    # The product, (rows, columns, outputs, samples), as images; both arguments get the gradient.

    @staticmethod
    @override
    def forward(ctx: object, product: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        del ctx, zeros
        return product.permute(3, 2, 0, 1).contiguous()

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del ctx
        gradient = gradient.permute(2, 3, 1, 0).contiguous()
        return gradient, gradient


# Outputs that are computed together: of some rows and columns.
_Tile = tuple["slice[int, int, None]", "slice[int, int, None]"]


def _tiles(weight: torch.Tensor, last: torch.Tensor) -> Iterator[_Tile]:
    # Whole rows, or pieces of one row, whose patches fit the cache.
    n_rows, n_columns, _, n_weights = weight.shape
    n_positions = max(1, N_ELEMENTS_MAX // max(1, n_weights * last.shape[3]))
    if last.is_meta:  # no memory, so one tile
        n_positions = n_rows * n_columns
    rows, columns = max(1, n_positions // n_columns), min(n_positions, n_columns)
    for row in range(0, n_rows, rows):
        for column in range(0, n_columns, columns):
            yield slice(row, row + rows), slice(column, column + columns)


def _part(of: torch.Tensor, tile: _Tile) -> torch.Tensor:
    # Matrices of a tile of (rows, columns, *, *): (n positions, *, *).
    return of[tile].flatten(0, 1)


def _windows(last: torch.Tensor, window: _Geometry) -> torch.Tensor:
    # A view: (rows out, columns out, channels, window rows, window columns, samples).
    views = last.unfold(1, window.rows, window.row_stride)
    return views.unfold(2, window.columns, window.column_stride).permute(1, 2, 0, 4, 5, 3)


def _patches(last: torch.Tensor, tile: _Tile, window: _Geometry) -> torch.Tensor:
    # Patches of a tile: (n positions, channels * window, samples).
    return _windows(last, window)[tile].flatten(2, 4).flatten(0, 1)


@final
class LocallyConnected2d(nn.Module):
    """A convolution with its own weights at every position.

    Weights come position-first, so that the weights of a part of the image are contiguous.

    Source: Le et al. 2012, "Building high-level features using large scale unsupervised learning",
    section 3; the paper's vision model has 10 x 10 windows.

    Arguments are named as for `torch.nn.Conv2d`; `input_size` is rows and columns of the input, or
    one number for both. ValueError if the window does not fit into the input.
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
        """Draw new values, uniform as for torch's convolutions."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels out, rows out, columns out) for (batch, channels in, ...)."""
        if tuple(x.shape[1:]) != (self.in_channels, *self.input_size):
            raise ValueError(
                f"x has shape {list(x.shape)}, but this layer has weights for "
                f"(batch, {self.in_channels}, {self.input_size[0]}, {self.input_size[1]})"
            )
        rows, columns = self.padding
        if rows or columns:
            x = functional.pad(x, (columns, columns, rows, rows))
        return local_product(x, self.weight, self.bias, size=self.kernel_size, stride=self.stride)

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, "
            f"kernel_size={self.kernel_size}, input_size={self.input_size}, "
            f"stride={self.stride}, padding={self.padding}, "
            f"bias={self.bias is not None}"
        )


@final
class LocallyConnected(Windowed):
    # Split in space, a part needs a halo of its input and the weights of its own positions, which
    # no other part uses: only gradients of the halo are summed.
    # tensors   weight (rows out, columns out, channels out, channels in * window rows * columns);
    #           bias (rows out, columns out, channels out)
    # options   size, stride, padding
    name: ClassVar[str] = "locally_connected"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        (read,) = super().reads(layer, output)
        return (read.replaced(0, (0, layer.input_shapes[0][0])),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        channels, rows, columns = output
        return {
            name: Region((rows, columns, channels, *((0, n) for n in use.shape[3:])))
            for name, use in layer.tensors.items()
        }

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n_weights = layer.tensors["weight"].shape[-1]
        work = self.product_work(layer, output, 2.0 * output.n_elements * n_weights)
        n_patches = output.n_elements // max(1, output.shape[0])
        return replace(work, n_elements=work.n_elements + n_patches * n_weights)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        return local_product(
            tile_of(call),
            call.tensors["weight"],
            call.tensors.get("bias"),
            size=layer.integers("size"),
            stride=layer.integers("stride"),
        )
