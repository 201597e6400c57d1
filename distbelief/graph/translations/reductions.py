"""Translations of sums, means, maxima over dimensions, and of softmax."""

from collections.abc import Mapping
from typing import Final

import msgspec
import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.building import Builder
from distbelief.graph.kinds.reduction import reduction_layer
from distbelief.graph.kinds.softmax import softmax_layers
from distbelief.graph.layer import GraphError, Layer
from distbelief.graph.operation import Operation, Translated
from distbelief.graph.translation import (
    FunctionTranslation,
    source_of,
    translates,
    translates_function,
)


_REDUCTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "mean": (torch.mean, "mean"),
    "sum": (torch.sum, "sum"),
    "maximum": (torch.amax, "amax"),
}


def _reduction(function: str) -> FunctionTranslation:
    def translate(builder: Builder, operation: Operation) -> Translated:
        operation.only("input", "dim", "keepdim")
        return builder.add_layer(_reduced(builder, operation, function))

    return translate


def _reduced(builder: Builder, operation: Operation, function: str) -> Layer:
    source = builder[operation.operand(0, "input").name]
    given = operation.argument(1, "dim", ())
    several = given if isinstance(given, tuple) else (given,)
    dims = [operation.dim(dim, source.shape) for dim in several]
    if not dims:
        raise GraphError(
            f"{operation.name} over all dimensions joins the batch: say dim=; a "
            "loss is added by distbelief.graph.losses.append_loss"
        )
    layer = reduction_layer(
        builder.free_name(operation.name),
        [source],
        function=function,
        dims=sorted(dims),
        keep=bool(operation.argument(2, "keepdim", default=False)),
    )
    if function != "maximum":
        return layer
    return msgspec.structs.replace(layer, options={**layer.options, "gradient": True})


for _function, _targets in _REDUCTIONS.items():
    translates_function(*_targets)(_reduction(_function))


@translates(nn.Softmax)
def softmax(builder: Builder, module: nn.Softmax, operation: Operation) -> Translated:
    """Add a softmax."""
    return _softmax(builder, operation, module.dim)


@translates(nn.LogSoftmax)
def log_softmax(builder: Builder, module: nn.LogSoftmax, operation: Operation) -> Translated:
    """Add the logarithm of a softmax."""
    return _softmax(builder, operation, module.dim, log=True)


@translates(nn.Softmax2d)
def softmax_2d(builder: Builder, module: nn.Softmax2d, operation: Operation) -> Translated:
    """Add a softmax over channels."""
    del module
    return _softmax(builder, operation, -3)


@translates_function(functional.softmax, torch.softmax, "softmax")
def softmax_function(builder: Builder, operation: Operation) -> Translated:
    """Add a softmax."""
    operation.only("input", "dim", "_stacklevel")
    return _softmax(builder, operation, operation.argument(1, "dim"))


@translates_function(functional.log_softmax, torch.log_softmax, "log_softmax")
def log_softmax_function(builder: Builder, operation: Operation) -> Translated:
    """Add the logarithm of a softmax."""
    operation.only("input", "dim", "_stacklevel")
    return _softmax(builder, operation, operation.argument(1, "dim"), log=True)


def _softmax(builder: Builder, operation: Operation, dim: object, *, log: bool = False) -> str:
    name, source, shape = source_of(builder, operation)
    layers = softmax_layers(name, source, dim=operation.dim(dim, shape), log=log)
    return builder.extend(layers)


@translates_function(torch.var, "var", torch.std, "std")
def variance(builder: Builder, operation: Operation) -> Translated:
    """Add a variance over dimensions, or its root."""
    operation.only("input", "dim", "keepdim", "correction", "unbiased")
    source = builder[operation.operand(0, "input").name]
    given = operation.argument(1, "dim")
    several = given if isinstance(given, tuple) else (given,)
    dims = sorted(operation.dim(dim, source.shape) for dim in several)
    unbiased = operation.keywords.get("unbiased", True)
    correction = operation.keywords.get("correction", int(bool(unbiased)))
    positional = operation.arguments[2:]
    if positional or not isinstance(correction, int):
        raise GraphError(f"{operation.name}: give correction= and keepdim= by name")
    name = builder.free_name(operation.name)
    mean = reduction_layer(f"{name}.mean", [source], function="mean", dims=dims)
    root = operation.target == "std"
    spread = reduction_layer(
        f"{name}.variance" if root else name,
        [source, mean],
        function="variance",
        dims=dims,
        keep=bool(operation.keywords.get("keepdim", False)),
        correction=correction,
    )
    last = builder.extend([mean, spread])
    if not root:
        return last
    options = {"function": "sqrt"}
    return builder.add(name, "pointwise", [last], spread.shape, options=options)
