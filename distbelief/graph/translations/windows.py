"""Translations of pooling."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from distbelief.graph.building import Builder
from distbelief.graph.kinds.adaptive_pooling import adaptive_pool_layers
from distbelief.graph.layer import Option
from distbelief.graph.operation import Operation, Translated
from distbelief.graph.translation import translates, translates_function
from distbelief.graph.wholes import whole_module


Sizes = int | tuple[int, ...] | None


@translates(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def max_pool(builder: Builder, module: _MaxPoolNd, operation: Operation) -> Translated:
    """Add a maximum over windows."""
    if module.return_indices:
        reason = "return_indices has no split rule"
        return whole_module(builder, module, operation, reason=reason)
    return _pool(
        builder,
        operation,
        "max_pool",
        [module.kernel_size, module.stride, module.padding],
        {"dilation": module.dilation, "ceil": module.ceil_mode},
    )


@translates(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def average_pool(builder: Builder, module: _AvgPoolNd, operation: Operation) -> Translated:
    """Add an average over windows."""
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


@translates_function(
    *(functional.max_pool1d, functional.max_pool2d, functional.max_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
)
def max_pool_function(builder: Builder, operation: Operation) -> Translated:
    """Add a maximum over windows."""
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


@translates_function(functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
def average_pool_function(builder: Builder, operation: Operation) -> Translated:
    """Add an average over windows."""
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
    """Return a number per dimension of space."""
    if sizes is None:
        return (0,) * n_dims
    if isinstance(sizes, int):
        return (sizes,) * n_dims
    return tuple(sizes) if len(sizes) == n_dims else tuple(sizes) * n_dims


@translates(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def adaptive_average(builder: Builder, module: nn.Module, operation: Operation) -> Translated:
    """Add an average over windows as they come out."""
    del module
    return _adaptive(builder, operation, maximum=False)


@translates(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def adaptive_maximum(builder: Builder, module: nn.Module, operation: Operation) -> Translated:
    """Add a maximum over windows as they come out."""
    del module
    return _adaptive(builder, operation, maximum=True)


@translates_function(
    functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d
)
def adaptive_average_function(builder: Builder, operation: Operation) -> Translated:
    """Add an average over windows as they come out."""
    return _adaptive(builder, operation, maximum=False)


def _adaptive(builder: Builder, operation: Operation, *, maximum: bool) -> str:
    source = builder[operation.operands[0].name]
    name = builder.free_name(operation.name)
    sizes = operation.output[1:]
    layers = adaptive_pool_layers(name, source, sizes=sizes, maximum=maximum)
    return builder.extend(layers)
