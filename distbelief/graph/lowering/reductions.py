"""Lowering rules for reductions, softmax and normalisation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import nn

from distbelief.graph.graph import GraphError, Option
from distbelief.graph.lowering.lower import (
    Lowerer,
    NotSplitError,
    Operation,
    Value,
    lowers,
    lowers_module,
)
from distbelief.graph.lowering.pointwise import pointwise
from distbelief.graph.module_calls import LeafCall
from distbelief.graph.ops.norms import (
    batch_norm_layers,
    group_norm_layers,
    instance_norm_layers,
    layer_norm_layers,
    rms_norm_layers,
)
from distbelief.graph.ops.reductions import reduction_layer, softmax_layers
from distbelief.graph.region import Shape


def _reduced(
    op: Operation,
    value: Value,
    function: str,
    dims: Sequence[int],
    *,
    keep: bool,
    **options: Any,  # noqa: ANN401
) -> Value:
    """Add a reduction over torch's dimensions."""
    if value.layer.is_integer:
        raise NotSplitError("its input is integers")
    torchs = [dim % value.n_dims for dim in dims] or list(range(value.n_dims))
    own = sorted(value.dim(dim) for dim in torchs)
    layer = reduction_layer(
        op.free_name, [value.layer], function=function, dims=own, keep=keep, **options
    )
    if function == "maximum":
        layer = msgspec.structs.replace(layer, options={**layer.options, "gradient": True})
    layer = op.builder[op.builder.add_layer(layer)]
    batch = value.batch
    if batch is not None and not keep:
        batch -= sum(dim < batch for dim in torchs)
    return replace(value, layer=layer, batch=batch)


@lowers("mean", "sum")
def mean_or_sum(op: Operation) -> object:
    function = str(op.target).split(".")[1]
    value = op.value("self")
    dims = op.arguments.get("dim") or []
    keep = bool(op.arguments.get("keepdim"))
    if op.lowerer.joins and value.batch is not None and not (op.result.shape or keep):
        # Of all elements of all samples.
        own = tuple(range(len(value.layer.shape)))
        source = [value.layer]
        if value.layer.is_integer:
            raise NotSplitError("its input is integers")
        layer = reduction_layer(
            op.free_name, source, function=function, dims=own, keep=False, batch=True
        )
        return Value(op.builder[op.builder.add_layer(layer)], batch=None)
    return _reduced(op, value, function, dims, keep=keep)


@lowers("amax")
def maximum(op: Operation) -> object:
    return _reduced(op, op.value("self"), "maximum", op["dim"], keep=bool(op["keepdim"]))


@lowers("var", "std", "var_mean")
def variance(op: Operation) -> object:
    value = op.value("self")
    correction = op.arguments.get("correction")
    if "unbiased" in op.arguments:
        correction = int(bool(op["unbiased"]))
    correction = 1 if correction is None else int(correction)
    dims = op.arguments.get("dim") or []
    keep = bool(op.arguments.get("keepdim"))
    mean = _reduced(op, value, "mean", dims, keep=True)
    own = mean.layer.options["dims"]
    assert isinstance(own, tuple)
    torchs = [dim % value.n_dims for dim in dims] or list(range(value.n_dims))
    layer = reduction_layer(
        op.free_name,
        [value.layer, mean.layer],
        function="variance",
        dims=own,
        keep=keep,
        correction=correction,
    )
    batch = value.batch
    if batch is not None and not keep:
        batch -= sum(dim < batch for dim in torchs)
    spread = replace(value, layer=op.builder[op.builder.add_layer(layer)], batch=batch)
    if ".std" in str(op.target):
        return pointwise(op, [spread], "sqrt")
    if "var_mean" in str(op.target):
        return [spread, mean if keep else _reduced(op, value, "mean", dims, keep=False)]
    return spread


@lowers("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(op: Operation) -> object:
    value = op.value("self")
    layers = softmax_layers(
        op.free_name, value.layer, dim=value.dim(op["dim"]), log="log" in str(op.target)
    )
    return op.extend(value, layers)


# --- normalisation ---


def _last_dims(value: Value, n_dims: int) -> None:
    if value.batch is not None and value.n_dims - value.batch <= n_dims:
        raise NotSplitError("it works along the batch")


@lowers("layer_norm", "native_layer_norm")
def layer_norm(op: Operation) -> object:
    value = op.value("input")
    n_dims = len(op["normalized_shape"])
    _last_dims(value, n_dims)
    layers = layer_norm_layers(
        op.free_name,
        value.layer,
        n_dims=n_dims,
        tensors=op.uses("weight", "bias"),
        epsilon=float(op["eps"]),
    )
    found = op.extend(value, layers)
    return [found, None, None] if isinstance(op.result, tuple | list) else found


@lowers("rms_norm")
def rms_norm(op: Operation) -> object:
    value = op.value("input")
    n_dims = len(op["normalized_shape"])
    _last_dims(value, n_dims)
    epsilon = op["eps"]
    if epsilon is None:  # torch: what its numbers are precise to
        epsilon = torch.finfo(op.result.dtype).eps
    layers = rms_norm_layers(
        op.free_name, value.layer, n_dims=n_dims, tensors=op.uses("weight"), epsilon=float(epsilon)
    )
    return op.extend(value, layers)


@lowers("group_norm")
def group_norm(op: Operation) -> object:
    value = op.plain("input")
    layers = group_norm_layers(
        op.free_name,
        value.layer,
        n_groups=op["num_groups"],
        tensors=op.uses("weight", "bias"),
        epsilon=float(op["eps"]),
    )
    return op.extend(value, layers)


@lowers("instance_norm")
def instance_norm(op: Operation) -> object:
    if op["running_mean"] is not None:
        raise GraphError(
            f"{op.name} keeps running statistics, which would be lost: give it "
            "track_running_stats=False"
        )
    value = op.plain("input")
    layers = instance_norm_layers(
        op.free_name, value.layer, tensors=op.uses("weight", "bias"), epsilon=float(op["eps"])
    )
    return op.extend(value, layers)


@lowers("batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training")
def batch_norm(op: Operation) -> object:
    value = op.value("input")
    trains = bool(op.arguments.get("training", False))
    if value.batch is None and trains and op["running_mean"] is None:
        return _standardised(op, value)
    folds = value.batch == 0 and value.after and not value.before
    if folds:  # statistics of all tokens: (tokens, channels, ...) -> (channels, tokens, ...)
        value = _swapped(op, value)
    elif not value.is_plain:
        raise NotSplitError("the batch is not its first dimension")
    tensors = op.uses("weight", "bias", "running_mean", "running_var")
    layers = batch_norm_layers(
        op.free_name,
        value.layer,
        tensors=tensors,
        epsilon=float(op["eps"]),
        momentum=float(op["momentum"]),
        before={word: op.builder.replacing(use.name) for word, use in tensors.items()},
        frozen="running_mean" in tensors and not trains,
    )
    found = op.extend(value, layers)
    found = _swapped(op, found) if folds else found
    return [found, *[None] * 4] if isinstance(op.result, tuple | list) else found


def _swapped(op: Operation, value: Value) -> Value:
    dims = (1, 0, *range(2, len(value.layer.shape)))
    shape = tuple(value.layer.shape[dim] for dim in dims)
    return op.add("permute", [value], shape, options={"dims": dims})


def _standardised(op: Operation, value: Value) -> Value:
    # A weight whose channels get mean 0 and variance 1: (1, channels, ...), one for all samples.
    n_channels, *rest = value.layer.shape[1:]
    row = value.to(op.reshaped(value, (n_channels, *rest)))
    layers = instance_norm_layers(op.free_name, row.layer, tensors={}, epsilon=float(op["eps"]))
    found = op.extend(row, layers)
    for word, function in (("weight", "multiply"), ("bias", "add")):
        if op[word] is not None:
            given = op.value(word)
            given = given.to(op.reshaped(given, (n_channels, *(1,) * len(rest))))
            found = pointwise(op, [found, given], function)
    return found.to(op.reshaped(found, value.layer.shape))


@lowers("_weight_norm", "_weight_norm_interface")
def weight_norm(op: Operation) -> object:
    value, size = op.value("v"), op.value("g")
    dims = [dim for dim in range(value.n_dims) if dim != op["dim"] % value.n_dims]
    squares = pointwise(op, [value], "square")
    total = _reduced(op, squares, "sum", dims, keep=True)
    factor = pointwise(op, [size, pointwise(op, [total], "sqrt")], "divide")
    found = pointwise(op, [value, factor], "multiply")
    return [found, None] if isinstance(op.result, tuple | list) else found


@lowers_module(nn.LocalResponseNorm)
def local_response(
    lowerer: Lowerer, module: nn.Module, call: LeafCall, inputs: Sequence[object]
) -> object:
    assert isinstance(module, nn.LocalResponseNorm)
    value = lowerer.as_value(inputs[0])
    options = {
        "size": module.size,
        "alpha": float(module.alpha),
        "beta": float(module.beta),
        "k": float(module.k),
    }
    return [_added(lowerer, call, "local_response", value, value.layer.shape, options)]


def _added(
    lowerer: Lowerer,
    call: LeafCall,
    kind: str,
    value: Value,
    shape: Shape,
    options: Mapping[str, Option],
) -> Value:
    if not value.is_plain:
        raise NotSplitError("the batch is not its first dimension")
    name = lowerer.builder.add(call.path, kind, [value.layer.name], shape, options=options)
    return Value(lowerer.builder[name])
