"""Weighted sums over the windows of images: along rows, then along columns.

    y[r, q] = sum over j of v[j] (sum over i of u[i] x[r s + i, q t + j])

Window after window, k * k numbers are added for each place; rows first, 2 k. And each
addition goes over all maps, in the order of memory: a pooling of 5 x 5 takes a third of
the time that `avg_pool2d` does, and a Gaussian mean of one map less than with `conv2d`,
whose gradient is made for many channels.
"""

import math
from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch.autograd.function import once_differentiable
from typing_extensions import override


_ROWS, _COLUMNS = -2, -1


Weights = tuple[float, ...]
"""Of the places of a window, along one dimension."""


def gaussian(size: int) -> Weights:
    """Return the weights of a Gaussian of deviation size / 4; they sum to one."""
    middle = (size - 1) / 2
    weights = [math.exp(-0.5 * ((i - middle) / (size / 4)) ** 2) for i in range(size)]
    return tuple(weight / sum(weights) for weight in weights)


def window_sums(
    x: torch.Tensor, *, rows: Weights, columns: Weights, stride: Sequence[int] = (1, 1)
) -> torch.Tensor:
    """Return (*maps, rows out, columns out).

    Args:
        x: (*maps, rows, columns).
        rows: Weights of a window's rows.
        columns: Of its columns.
        stride: Between windows: rows, columns.

    Raises:
        ValueError: no window fits.
    """
    sums: torch.Tensor = _WindowSums.apply(  # type: ignore[no-untyped-call]
        x, rows, columns, tuple(stride)
    )
    return sums


class _Context(Protocol):
    """What autograd keeps between the passes."""

    weights: tuple[Weights, Weights]
    stride: tuple[int, int]
    shape: torch.Size


@final
class _WindowSums(torch.autograd.Function):
    """The sums; of a gradient each element goes to all places of its window."""

    @staticmethod
    @override
    def forward(
        ctx: _Context, x: torch.Tensor, rows: Weights, columns: Weights, stride: tuple[int, int]
    ) -> torch.Tensor:
        ctx.weights, ctx.stride, ctx.shape = (rows, columns), stride, x.shape
        sums = _summed(x, _ROWS, weights=rows, stride=stride[0])
        return _summed(sums, _COLUMNS, weights=columns, stride=stride[1])

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        for dim in (_COLUMNS, _ROWS):
            gradient = _spread(
                gradient,
                dim,
                weights=ctx.weights[dim],
                stride=ctx.stride[dim],
                extent=ctx.shape[dim],
            )
        return gradient, None, None, None


def _summed(x: torch.Tensor, dim: int, *, weights: Weights, stride: int) -> torch.Tensor:
    """Return the sums of windows along one dimension."""
    n_windows = (x.shape[dim] - len(weights)) // stride + 1
    if n_windows < 1:
        raise ValueError(f"a window of {len(weights)} does not fit into {x.shape[dim]} places")
    total = _every(x, dim, 0, n_windows, stride) * weights[0]
    for i, weight in enumerate(weights[1:], 1):
        total.add_(_every(x, dim, i, n_windows, stride), alpha=weight)
    return total


def _spread(
    gradient: torch.Tensor, dim: int, *, weights: Weights, stride: int, extent: int
) -> torch.Tensor:
    """Return what each of `extent` places gets of the windows that it is in."""
    shape = list(gradient.shape)
    shape[dim] = extent
    total = gradient.new_zeros(shape)
    for i, weight in enumerate(weights):
        part = _every(total, dim, i, gradient.shape[dim], stride)
        part.add_(gradient, alpha=weight)
    return total


def _every(x: torch.Tensor, dim: int, first: int, n: int, stride: int) -> torch.Tensor:
    """Return n elements along a dimension, each `stride` after the one before."""
    places = slice(first, first + (n - 1) * stride + 1, stride)
    return x[..., places, :] if dim == _ROWS else x[..., places]
