"""Products of every patch of an image with a matrix of its own, in bounded memory.

    y[r, q, o, n] = sum over c, i, j of w[r, q, o, (c, i, j)] x[c, r s + i, q t + j, n]

All patches of a batch together are as much as the image times the window's area: too
much to keep, or to pass through slow memory. So a few rows of them at a time are
copied, multiplied while they are in the cache, and forgotten; the backward pass copies
them again. Samples n come last, for then the columns of a patch's row are contiguous,
and copies are of long runs.

Images come and go with samples first, contiguous, and so do their gradients: the layers
before and after would pay for a layout that is not theirs, at every step, and who
measures them alone would not know (a pooling takes a fifth longer, its gradient half).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol, final

import torch
from torch.autograd.function import once_differentiable
from typing_extensions import override


N_ELEMENTS_MAX: Final = 1 << 19
"""Elements of the patches that are in the cache at once: 2 MiB of float32."""


def local_product(
    x: torch.Tensor, weight: torch.Tensor, *, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return (samples, outputs, rows out, columns out).

    Args:
        x: (samples, channels, rows, columns), padded, and no larger than is read.
        weight: (rows out, columns out, outputs, channels * window rows * columns).
        size: Of the window: rows, columns.
        stride: Between windows: rows, columns.
    """
    last: torch.Tensor = _SamplesLast.apply(x)  # type: ignore[no-untyped-call]
    geometry = _Geometry(*size, *stride)
    # Functions of their own: who asks for one gradient waits for that one only.
    product: torch.Tensor = _Both.apply(  # type: ignore[no-untyped-call]
        _OfImages.apply(last, weight.detach(), geometry),  # type: ignore[no-untyped-call]
        _OfWeights.apply(weight, last.detach(), geometry),  # type: ignore[no-untyped-call]
    )
    result: torch.Tensor = _SamplesFirst.apply(product)  # type: ignore[no-untyped-call]
    return result


class _Tile(NamedTuple):
    """Outputs that are computed together: [row, row_end), [column, column_end)."""

    row: int
    row_end: int
    column: int
    column_end: int


class _Geometry(NamedTuple):
    """Of windows."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int


class _Context(Protocol):
    """What autograd keeps between the passes."""

    geometry: _Geometry
    shape: torch.Size
    saved_tensors: tuple[torch.Tensor]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


@final
class _SamplesLast(torch.autograd.Function):
    """Images as (channels, rows, columns, samples); both ways contiguous."""

    @staticmethod
    @override
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        # As one matrix: torch goes through it in blocks, else along powers of two.
        return x.flatten(1).t().contiguous().view(*x.shape[1:], x.shape[0])

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        flat = gradient.flatten(0, 2).t().contiguous()
        return flat.view(gradient.shape[3], *gradient.shape[:3])


@final
class _SamplesFirst(torch.autograd.Function):
    """Products, (rows, columns, outputs, samples), as images; both ways contiguous."""

    @staticmethod
    @override
    def forward(ctx: object, product: torch.Tensor) -> torch.Tensor:
        del ctx
        return product.permute(3, 2, 0, 1).contiguous()

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradient.permute(2, 3, 1, 0).contiguous()


@final
class _OfImages(torch.autograd.Function):
    """The product, of which images get a gradient."""

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
class _OfWeights(torch.autograd.Function):
    """Zeros like the product, of which weights get its gradient."""

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
class _Both(torch.autograd.Function):
    """The first, as it is; its gradient is the gradient of both."""

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
    """Return the matrices of a tile of (rows, columns, *, *): (n places, *, *)."""
    part = of[tile.row : tile.row_end, tile.column : tile.column_end]
    return part.flatten(0, 1)


def _tiles(weight: torch.Tensor, x: torch.Tensor) -> Iterator[_Tile]:
    """Cut the outputs into whole rows, or a row into pieces, that fit the cache."""
    n_rows, n_columns, _, n_weights = weight.shape
    n_places = max(1, N_ELEMENTS_MAX // max(1, n_weights * x.shape[3]))
    if x.is_meta:  # has no patches, and no cache
        n_places = n_rows * n_columns
    rows, columns = max(1, n_places // n_columns), min(n_places, n_columns)
    for row in range(0, n_rows, rows):
        for column in range(0, n_columns, columns):
            yield _Tile(row, min(row + rows, n_rows), column, min(column + columns, n_columns))


def _patches(x: torch.Tensor, tile: _Tile, window: _Geometry) -> torch.Tensor:
    """Return the patches of a tile: (n places, channels * window, samples)."""
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
    n_places = view.shape[0] * view.shape[1]
    return view.reshape(n_places, math.prod(view.shape[2:5]), x.shape[3])


def _add_patches(x: torch.Tensor, patches: torch.Tensor, tile: _Tile, window: _Geometry) -> None:
    """Add patches to where they were copied from."""
    n_rows, n_columns = tile.row_end - tile.row, tile.column_end - tile.column
    parts = patches.view(n_rows, n_columns, x.shape[0], window.rows, window.columns, x.shape[3])
    across = (n_columns - 1) * window.column_stride + 1
    for index in range(n_rows):
        row = (tile.row + index) * window.row_stride
        band = x[:, row : row + window.rows]
        part = parts[index].permute(1, 2, 0, 3, 4)
        for offset in range(window.columns):
            # Places do not overlap if one column of each window is taken at a time.
            column = tile.column * window.column_stride + offset
            target = band[:, :, column : column + across : window.column_stride]
            target += part[:, :, :, offset]
