"""Lowering rules for reductions, softmax and normalization."""

from collections.abc import Mapping
from typing import Final, cast

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from distbelief.graph.graph import Builder, GraphError, Layer, Option, uses
from distbelief.graph.lowering.layers import owned
from distbelief.graph.lowering.registry import FunctionLowering, lowers, lowers_function, source_of
from distbelief.graph.opaque import opaque_module
from distbelief.graph.operation import Lowered, Operation
from distbelief.graph.ops.norms import (
    batch_norm_layers,
    group_norm_layers,
    instance_norm_layers,
    layer_norm_layers,
    rms_norm_layers,
)
from distbelief.graph.ops.reductions import reduction_layer, softmax_layers


# --- normalization ---


# like_input: running one of these without memory takes torch milliseconds.
@lowers(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, like_input=True)
def batch_norm(builder: Builder, module: _BatchNorm, operation: Operation) -> Lowered:
    # A frozen one, in evaluation mode while the model trains, uses its running statistics.
    name, source, _ = source_of(builder, operation)
    if source.shape[0] != module.num_features:
        raise GraphError(
            f"{operation.name} is for {module.num_features} features, but "
            f"{source.name!r} has {source.shape[0]}"
        )
    tensors = uses(module, operation.target)
    tensors.pop("num_batches_tracked", None)
    layers = batch_norm_layers(
        name,
        source,
        tensors=tensors,
        epsilon=module.eps,
        momentum=module.momentum,
        before={word: builder.replacing(use.name) for word, use in tensors.items()},
        frozen="running_mean" in tensors and not operation.trains,
    )
    return builder.extend(layers)


@lowers(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(builder: Builder, module: _InstanceNorm, operation: Operation) -> Lowered:
    if module.track_running_stats:
        reason = "InstanceNorm with running statistics has no split rule"
        return opaque_module(builder, module, operation, reason=reason)
    name, source, _ = source_of(builder, operation)
    tensors = uses(module, operation.target)
    layers = instance_norm_layers(name, source, tensors=tensors, epsilon=module.eps)
    return builder.extend(layers)


@lowers(nn.GroupNorm)
def group_norm(builder: Builder, module: nn.GroupNorm, operation: Operation) -> Lowered:
    name, source, _ = source_of(builder, operation)
    layers = group_norm_layers(
        name,
        source,
        n_groups=module.num_groups,
        tensors=uses(module, operation.target),
        epsilon=module.eps,
    )
    return builder.extend(layers)


@lowers(nn.LayerNorm)
def layer_norm(builder: Builder, module: nn.LayerNorm, operation: Operation) -> Lowered:
    name, source, _ = source_of(builder, operation)
    layers = layer_norm_layers(
        name,
        source,
        n_dims=len(module.normalized_shape),
        tensors=uses(module, operation.target),
        epsilon=module.eps,
    )
    return builder.extend(layers)


@lowers_function(functional.layer_norm)
def layer_norm_function(builder: Builder, operation: Operation) -> Lowered:
    name, source, _ = source_of(builder, operation)
    shape = operation.argument(1, "normalized_shape")
    assert isinstance(shape, tuple), shape
    tensors = {
        word: owned(builder, operation, operation.operand(position, word))
        for position, word in ((2, "weight"), (3, "bias"))
        if operation.argument(position, word) is not None
    }
    epsilon = operation.argument(4, "eps", 1e-5)
    assert isinstance(epsilon, float), epsilon
    layers = layer_norm_layers(name, source, n_dims=len(shape), tensors=tensors, epsilon=epsilon)
    return builder.extend(layers)


@lowers(nn.RMSNorm)
def rms_norm(builder: Builder, module: nn.RMSNorm, operation: Operation) -> Lowered:
    name, source, _ = source_of(builder, operation)
    epsilon = module.eps
    if epsilon is None:  # torch: what its numbers are precise to
        weight = cast("torch.Tensor | None", module.weight)
        dtype = torch.get_default_dtype() if weight is None else weight.dtype
        epsilon = torch.finfo(dtype).eps
    layers = rms_norm_layers(
        name,
        source,
        n_dims=len(module.normalized_shape),
        tensors=uses(module, operation.target),
        epsilon=epsilon,
    )
    return builder.extend(layers)


@lowers(nn.LocalResponseNorm)
def local_response(builder: Builder, module: nn.LocalResponseNorm, operation: Operation) -> Lowered:
    return _local_response(
        builder,
        operation,
        size=module.size,
        alpha=float(module.alpha),
        beta=float(module.beta),
        k=float(module.k),
    )


@lowers_function(functional.local_response_norm)
def local_response_function(builder: Builder, operation: Operation) -> Lowered:
    words = {"alpha": 1e-4, "beta": 0.75, "k": 1.0}
    numbers = {}
    for position, (word, usual) in enumerate(words.items(), start=2):
        value = operation.argument(position, word, usual)
        assert isinstance(value, int | float), (word, value)
        numbers[word] = float(value)
    size = operation.argument(1, "size")
    assert isinstance(size, int), size
    return _local_response(builder, operation, size=size, **numbers)


def _local_response(builder: Builder, operation: Operation, **options: Option) -> str:
    return builder.add(
        operation.name, "local_response", operation.inputs[:1], operation.output, options=options
    )


_REDUCTIONS: Final[Mapping[str, tuple[object, ...]]] = {
    "mean": (torch.mean, "mean"),
    "sum": (torch.sum, "sum"),
    "maximum": (torch.amax, "amax"),
}


def _reduction(function: str) -> FunctionLowering:
    def lower(builder: Builder, operation: Operation) -> Lowered:
        operation.only("input", "dim", "keepdim")
        return builder.add_layer(_reduced(builder, operation, function))

    return lower


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
    lowers_function(*_targets)(_reduction(_function))


@lowers(nn.Softmax)
def softmax(builder: Builder, module: nn.Softmax, operation: Operation) -> Lowered:
    return _softmax(builder, operation, module.dim)


@lowers(nn.LogSoftmax)
def log_softmax(builder: Builder, module: nn.LogSoftmax, operation: Operation) -> Lowered:
    return _softmax(builder, operation, module.dim, log=True)


@lowers(nn.Softmax2d)
def softmax_2d(builder: Builder, module: nn.Softmax2d, operation: Operation) -> Lowered:
    del module
    return _softmax(builder, operation, -3)


@lowers_function(functional.softmax, torch.softmax, "softmax")
def softmax_function(builder: Builder, operation: Operation) -> Lowered:
    operation.only("input", "dim", "_stacklevel")
    return _softmax(builder, operation, operation.argument(1, "dim"))


@lowers_function(functional.log_softmax, torch.log_softmax, "log_softmax")
def log_softmax_function(builder: Builder, operation: Operation) -> Lowered:
    operation.only("input", "dim", "_stacklevel")
    return _softmax(builder, operation, operation.argument(1, "dim"), log=True)


def _softmax(builder: Builder, operation: Operation, dim: object, *, log: bool = False) -> str:
    name, source, shape = source_of(builder, operation)
    layers = softmax_layers(name, source, dim=operation.dim(dim, shape), log=log)
    return builder.extend(layers)


@lowers_function(torch.var, "var", torch.std, "std")
def variance(builder: Builder, operation: Operation) -> Lowered:
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
