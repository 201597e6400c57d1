"""Lowering rules for pooling, upsampling and this library's locally connected modules."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from distbelief.graph.graph import Builder, GraphError, Option, uses
from distbelief.graph.lowering.registry import lowers, lowers_function, source_of
from distbelief.graph.opaque import opaque_module
from distbelief.graph.operation import Lowered, Operation
from distbelief.graph.ops.local_norms import LocalContrastNorm2d
from distbelief.graph.ops.locally_connected import LocallyConnected2d
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.ops.windows import L2Pool2d, adaptive_pool_layers


@lowers(LocallyConnected2d)
def locally_connected(
    builder: Builder, module: LocallyConnected2d, operation: Operation
) -> Lowered:
    return builder.add(
        operation.name,
        "locally_connected",
        operation.inputs,
        operation.output,
        options={"size": module.kernel_size, "stride": module.stride, "padding": module.padding},
        tensors=uses(module, operation.target),
    )


@lowers(L2Pool2d)
def l2_pool(builder: Builder, module: L2Pool2d, operation: Operation) -> Lowered:
    return builder.add(
        operation.name,
        "l2_pool",
        operation.inputs,
        operation.output,
        options={
            "size": module.kernel_size,
            "stride": module.stride,
            "padding": module.padding,
            "epsilon": module.epsilon,
            "gaussian": module.gaussian,
        },
    )


@lowers(LocalContrastNorm2d, like_input=True)
def local_contrast(builder: Builder, module: LocalContrastNorm2d, operation: Operation) -> Lowered:
    return builder.add(
        operation.name,
        "local_contrast",
        operation.inputs,
        operation.output,
        options={"size": module.size, "epsilon": module.epsilon},
    )


@lowers(nn.Upsample, nn.UpsamplingNearest2d)
def upsample(builder: Builder, module: nn.Upsample, operation: Operation) -> Lowered:
    # Modes other than nearest are opaque.
    name = _repeated(builder, operation, module.mode)
    if name is not None:
        return name
    reason = f"enlarging with mode {module.mode!r} to this size has no split rule"
    return opaque_module(builder, module, operation, reason=reason)


@lowers_function(functional.interpolate)
def interpolate(builder: Builder, operation: Operation) -> Lowered:
    mode = cast("str", operation.argument(3, "mode", "nearest"))
    name = _repeated(builder, operation, mode)
    if name is None:
        raise GraphError(
            f"{operation.name} with mode {mode!r} to {list(operation.output)} has no "
            "split rule: use nn.Upsample, which is then opaque"
        )
    return name


def _repeated(builder: Builder, operation: Operation, mode: str) -> str | None:
    # (c, h, w) -> (c, h, 1, w, 1) -> (c, h, a, w, b) -> (c, h a, w b).
    name, source, (n_channels, *sizes) = source_of(builder, operation)
    extents = source.shape[1:]
    if mode not in {"nearest", "nearest-exact"} or any(
        size % extent for size, extent in zip(sizes, extents, strict=True)
    ):
        return None
    thin, wide = [n_channels], [n_channels]
    for size, extent in zip(sizes, extents, strict=True):
        thin += [extent, 1]
        wide += [extent, size // extent]
    apart = builder.add_layer(reshape_layer(f"{name}.apart", source, shape=tuple(thin)))
    repeated = builder.add(f"{name}.repeated", "expand", [apart], tuple(wide))
    last = reshape_layer(name, builder[repeated], shape=(n_channels, *sizes))
    return builder.add_layer(last)


Sizes = int | tuple[int, ...] | None


@lowers(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def max_pool(builder: Builder, module: _MaxPoolNd, operation: Operation) -> Lowered:
    if module.return_indices:
        reason = "return_indices has no split rule"
        return opaque_module(builder, module, operation, reason=reason)
    return _pool(
        builder,
        operation,
        "max_pool",
        [module.kernel_size, module.stride, module.padding],
        {"dilation": module.dilation, "ceil": module.ceil_mode},
    )


@lowers(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def average_pool(builder: Builder, module: _AvgPoolNd, operation: Operation) -> Lowered:
    divisor = cast("int | None", getattr(module, "divisor_override", None))
    return _pool(
        builder,
        operation,
        "average_pool",
        [getattr(module, word) for word in ("kernel_size", "stride", "padding")],
        {
            "ceil": bool(module.ceil_mode),
            "count_include_pad": bool(module.count_include_pad),
            "divisor": divisor,
        },
    )


@lowers_function(
    *(functional.max_pool1d, functional.max_pool2d, functional.max_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
)
def max_pool_function(builder: Builder, operation: Operation) -> Lowered:
    argument = operation.argument
    return _pool(
        builder,
        operation,
        "max_pool",
        [argument(1, "kernel_size"), argument(2, "stride"), argument(3, "padding", 0)],
        {
            "dilation": cast("Option", argument(4, "dilation", 1)),
            "ceil": bool(argument(5, "ceil_mode", default=False)),
        },
    )


@lowers_function(functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
def average_pool_function(builder: Builder, operation: Operation) -> Lowered:
    argument = operation.argument
    return _pool(
        builder,
        operation,
        "average_pool",
        [argument(1, "kernel_size"), argument(2, "stride"), argument(3, "padding", 0)],
        {
            "ceil": bool(argument(4, "ceil_mode", default=False)),
            "count_include_pad": bool(argument(5, "count_include_pad", default=True)),
            "divisor": cast("Option", argument(6, "divisor_override")),
        },
    )


def _pool(
    builder: Builder,
    operation: Operation,
    kind: str,
    sizes: Sequence[object],
    options: dict[str, Option],
) -> str:
    n_dims = len(operation.output) - 1
    size, stride, padding = (cast("Sizes", given) for given in sizes)
    options = {
        "size": _several(size, n_dims),
        "stride": _several(stride or size, n_dims),  # torch: () and None are the size
        "padding": _several(padding, n_dims),
        **options,
    }
    if "dilation" in options:
        options["dilation"] = _several(cast("Sizes", options["dilation"]), n_dims)
    return builder.add(
        operation.name, kind, operation.inputs[:1], operation.output, options=options
    )


def _several(sizes: Sizes, n_dims: int) -> tuple[int, ...]:
    if sizes is None:
        return (0,) * n_dims
    if isinstance(sizes, int):
        return (sizes,) * n_dims
    return tuple(sizes) if len(sizes) == n_dims else tuple(sizes) * n_dims


@lowers(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def adaptive_average(builder: Builder, module: nn.Module, operation: Operation) -> Lowered:
    del module
    return _adaptive(builder, operation, maximum=False)


@lowers(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def adaptive_maximum(builder: Builder, module: nn.Module, operation: Operation) -> Lowered:
    del module
    return _adaptive(builder, operation, maximum=True)


@lowers_function(
    functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d
)
def adaptive_average_function(builder: Builder, operation: Operation) -> Lowered:
    return _adaptive(builder, operation, maximum=False)


def _adaptive(builder: Builder, operation: Operation, *, maximum: bool) -> str:
    source = builder[operation.operands[0].name]
    name = builder.free_name(operation.name)
    sizes = operation.output[1:]
    layers = adaptive_pool_layers(name, source, sizes=sizes, maximum=maximum)
    return builder.extend(layers)
