"""Translations of torch's layers with weights: linear, convolution."""

from torch import nn
from torch.nn.modules.conv import _ConvNd

from distbelief.graph.building import Builder
from distbelief.graph.translation import (
    Operation,
    Translated,
    translates,
    uses,
    whole_module,
)


@translates(nn.Linear)
def linear(builder: Builder, module: nn.Linear, operation: Operation) -> Translated:
    """Add a fully connected layer."""
    return builder.add(
        operation.name,
        "linear",
        operation.inputs,
        operation.output,
        tensors=uses(module, operation.target),
    )


@translates(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(builder: Builder, module: _ConvNd, operation: Operation) -> Translated:
    """Add a convolution; one that pads with other than zeros is computed whole."""
    if module.padding_mode != "zeros":
        reason = f"padding_mode {module.padding_mode!r} has no split rule"
        return whole_module(builder, module, operation, reason=reason)
    n_dims = len(module.kernel_size)
    padding, extra = (0,) * n_dims, (0,) * n_dims
    if module.padding == "same":
        totals = [
            (size - 1) * dilation
            for size, dilation in zip(module.kernel_size, module.dilation, strict=True)
        ]
        padding = tuple(total // 2 for total in totals)
        extra = tuple(total % 2 for total in totals)
    elif not isinstance(module.padding, str):
        padding = tuple(int(size) for size in module.padding)
    return builder.add(
        operation.name,
        "convolution",
        operation.inputs,
        operation.output,
        options={
            "stride": tuple(module.stride),
            "padding": padding,
            "extra": extra,
            "dilation": tuple(module.dilation),
            "groups": module.groups,
        },
        tensors=uses(module, operation.target),
    )
