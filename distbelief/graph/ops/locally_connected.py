"""Locally connected layers: convolutions whose weights are not shared between positions."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    x: torch.Tensor, weight: torch.Tensor, *, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Multiply every patch of an image with a matrix of its own, in bounded memory.

        y[n, o, r, q] = sum over c, i, j of w[r, q, o, (c, i, j)] x[n, c, r s + i, q t + j]

    x is padded, and no larger than what is read; the weight is (rows out, columns out, outputs,
    channels * window rows * columns).
    """
    last: torch.Tensor = _Moved.apply(x, _samples_last, _samples_first)  # type: ignore[no-untyped-call]
    geometry = _Geometry(*size, *stride)
    # Two functions, so that a caller that needs one gradient does not compute the other.
    product: torch.Tensor = _JoinGradients.apply(  # type: ignore[no-untyped-call]
        _ImageProduct.apply(last, weight.detach(), geometry),  # type: ignore[no-untyped-call]
        _WeightGradient.apply(weight, last.detach(), geometry),  # type: ignore[no-untyped-call]
    )
    result: torch.Tensor = _Moved.apply(product, _as_images, _as_product)  # type: ignore[no-untyped-call]
    return result


class _Tile(NamedTuple):
    # Outputs that are computed together: [row, row_end), [column, column_end).

    row: int
    row_end: int
    column: int
    column_end: int


class _Geometry(NamedTuple):
    # Window size and stride.

    rows: int
    columns: int
    row_stride: int
    column_stride: int


_Move = Callable[[torch.Tensor], torch.Tensor]


class _Context(Protocol):
    # What autograd keeps between the passes.

    geometry: _Geometry
    shape: torch.Size
    back: _Move
    saved_tensors: tuple[torch.Tensor]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


@final
class _Moved(torch.autograd.Function):
    # Elements in another order, contiguous in both passes.

    @staticmethod
    @override
    def forward(ctx: _Context, x: torch.Tensor, there: _Move, back: _Move) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None


def _samples_last(x: torch.Tensor) -> torch.Tensor:
    # Images as (channels, rows, columns, samples).
    # Transposed as one matrix, torch works in blocks; else in strides of powers of two.
    return x.flatten(1).t().contiguous().view(*x.shape[1:], x.shape[0])


def _samples_first(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 2).t().contiguous().view(x.shape[3], *x.shape[:3])


def _as_images(product: torch.Tensor) -> torch.Tensor:
    # Products (rows, columns, outputs, samples) as images.
    return product.permute(3, 2, 0, 1).contiguous()


def _as_product(images: torch.Tensor) -> torch.Tensor:
    return images.permute(2, 3, 1, 0).contiguous()


@final
class _ImageProduct(torch.autograd.Function):
    # The product, with a gradient for images only.

    @staticmethod
    @override
    def forward(
        ctx: _Context, x: torch.Tensor, weight: torch.Tensor, geometry: _Geometry
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.shape = geometry, x.shape
        product = x.new_empty(*weight.shape[:3], x.shape[3])
        for tile in _tiles(weight, x):
            patches = _patches(x, tile, geometry)
            torch.bmm(_part(weight, tile), patches, out=_part(product, tile))
        return product

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        for_x = gradient.new_zeros(ctx.shape)
        for tile in _tiles(weight, for_x):
            products = _part(gradient, tile)
            patches = torch.bmm(_part(weight, tile).transpose(1, 2), products)
            _add_patches(for_x, patches, tile, ctx.geometry)
        return for_x, None, None


@final
class _WeightGradient(torch.autograd.Function):
    # Zeros shaped like the product, with a gradient for weights only.

    @staticmethod
    @override
    def forward(
        ctx: _Context, weight: torch.Tensor, x: torch.Tensor, geometry: _Geometry
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.geometry, ctx.shape = geometry, weight.shape
        return x.new_zeros(()).expand(*weight.shape[:3], x.shape[3])

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        for_weight = gradient.new_empty(ctx.shape)
        for tile in _tiles(for_weight, x):
            patches = _patches(x, tile, ctx.geometry).transpose(1, 2)
            torch.bmm(_part(gradient, tile), patches, out=_part(for_weight, tile))
        return for_weight, None, None


@final
class _JoinGradients(torch.autograd.Function):
    # Returns the first argument; both get the gradient.

    @staticmethod
    @override
    def forward(ctx: object, product: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        del ctx, zeros
        return product.view_as(product)

    @staticmethod
    @override
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del ctx
        return gradient, gradient


def _part(of: torch.Tensor, tile: _Tile) -> torch.Tensor:
    # Matrices of a tile of (rows, columns, *, *): (n positions, *, *).
    part = of[tile.row : tile.row_end, tile.column : tile.column_end]
    return part.flatten(0, 1)


def _tiles(weight: torch.Tensor, x: torch.Tensor) -> Iterator[_Tile]:
    # Whole rows, or pieces of one row, whose patches fit the cache.
    n_rows, n_columns, _, n_weights = weight.shape
    n_positions = max(1, N_ELEMENTS_MAX // max(1, n_weights * x.shape[3]))
    if x.is_meta:  # no memory, so one tile
        n_positions = n_rows * n_columns
    rows, columns = max(1, n_positions // n_columns), min(n_positions, n_columns)
    for row in range(0, n_rows, rows):
        for column in range(0, n_columns, columns):
            yield _Tile(row, min(row + rows, n_rows), column, min(column + columns, n_columns))


def _patches(x: torch.Tensor, tile: _Tile, window: _Geometry) -> torch.Tensor:
    # Patches of a tile: (n positions, channels * window, samples).
    channels, rows, columns, samples = x.stride()
    view = x.as_strided(
        (
            tile.row_end - tile.row,
            tile.column_end - tile.column,
            x.shape[0],
            window.rows,
            window.columns,
            x.shape[3],
        ),
        (
            rows * window.row_stride,
            columns * window.column_stride,
            channels,
            rows,
            columns,
            samples,
        ),
        x.storage_offset()
        + tile.row * window.row_stride * rows
        + tile.column * window.column_stride * columns,
    )
    n_positions = view.shape[0] * view.shape[1]
    return view.reshape(n_positions, math.prod(view.shape[2:5]), x.shape[3])


def _add_patches(x: torch.Tensor, patches: torch.Tensor, tile: _Tile, window: _Geometry) -> None:
    # The inverse of _patches: adds them to where they were copied from.
    n_rows, n_columns = tile.row_end - tile.row, tile.column_end - tile.column
    parts = patches.view(n_rows, n_columns, x.shape[0], window.rows, window.columns, x.shape[3])
    width = (n_columns - 1) * window.column_stride + 1
    for index in range(n_rows):
        row = (tile.row + index) * window.row_stride
        band = x[:, row : row + window.rows]
        part = parts[index].permute(1, 2, 0, 3, 4)
        for offset in range(window.columns):
            # Targets do not overlap if one column of each window is added at a time.
            column = tile.column * window.column_stride + offset
            target = band[:, :, column : column + width : window.column_stride]
            target += part[:, :, :, offset]


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
        return _connected(x, self.weight, self.bias, size=self.kernel_size, stride=self.stride)

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
        operations = 2.0 * output.n_elements * n_weights
        (read,) = self.reads(layer, output)
        n_patches = output.n_elements // max(1, output.shape[0])
        return Work(
            forward=operations,
            backward=2 * operations,
            n_elements=float(output.n_elements + read.n_elements + n_patches * n_weights),
        )

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        return _connected(
            tile_of(call),
            call.tensors["weight"],
            call.tensors.get("bias"),
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
