"""Lowering rules for reductions, softmax, normalisation and losses."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from distbelief.graph.graph import GraphError, TensorUse
from distbelief.graph.lowering.calls import elementwise
from distbelief.graph.lowering.operation import Operation, lowers
from distbelief.graph.lowering.values import Held, NotSplitError, Value
from distbelief.graph.lowering.views import swapped
from distbelief.graph.ops.loss_layers import cross_entropy_layers, elementwise_loss_layer
from distbelief.graph.ops.norms import batch_norm_layers, group_norm_layers, norm_layers
from distbelief.graph.ops.reductions import reduction_layer, softmax_layers


_ATEN: Final = torch.ops.aten
_MEAN: Final = 1  # torch's number of the reduction


def _reduced(
    op: Operation, value: Value, function: str, dims: Sequence[int] | None, *, keep: bool
) -> Value:
    # Over torch's dimensions, by default all.
    if value.layer.is_integer:
        raise NotSplitError("its input is integers")
    torchs = [dim % value.n_dims for dim in dims or range(value.n_dims)]
    own = sorted(value.dim(dim) for dim in torchs)
    layer = reduction_layer(op.free_name, [value.layer], function=function, dims=own, keep=keep)
    layer = op.builder.add_layer(layer)
    return value.to(layer) if keep else value.without(layer, torchs)


@lowers("mean", "sum")
def mean_or_sum(op: Operation) -> object:
    function = str(op.target).split(".")[1]
    value = op.value("self")
    keep = bool(op.arguments.get("keepdim"))
    if not op.context.joins or value.batch is None or op.result.shape or keep:
        return _reduced(op, value, function, op.arguments.get("dim"), keep=keep)
    if value.layer.is_integer:
        raise NotSplitError("its input is integers")
    return _over_samples(op, value, function)


def _over_samples(op: Operation, value: Value, function: str, name: str = "") -> Value:
    # Of all elements of all samples.
    name, own = op.builder.free_name(name or op.name), range(len(value.layer.shape))
    sums = reduction_layer(name, [value.layer], function=function, dims=own, keep=False, batch=True)
    return Value(op.builder.add_layer(sums), batch=None)


@lowers("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(op: Operation) -> object:
    value = op.value("self")
    layers = softmax_layers(
        op.free_name, value.layer, dim=value.dim(op["dim"]), log="log" in str(op.target)
    )
    return op.extend(value, layers)


# --- normalisation ---


@lowers("layer_norm", "native_layer_norm", "rms_norm")
def layer_norm(op: Operation) -> object:
    value = op.value("input")
    n_dims, n = len(op["normalized_shape"]), len(value.layer.shape)
    if value.batch is not None and value.n_dims - value.batch <= n_dims:
        raise NotSplitError("it works along the batch")
    epsilon = op["eps"]
    if epsilon is None:  # torch: what its numbers are precise to
        epsilon = torch.finfo(op.result.dtype).eps
    words = {word: op[word] for word in ("weight", "bias") if word in op.arguments}
    # As Nemotron's weight plus one.
    computed = any(given is not None and not isinstance(given, Held) for given in words.values())
    layers = norm_layers(
        op.free_name,
        value.layer,
        over=range(n - n_dims, n),
        tensors={} if computed else op.uses(*words),
        epsilon=float(epsilon),
        centred="bias" in words,
    )
    found = op.extend(value, layers)
    if computed:
        for word, given in words.items():
            target = _ATEN.add.Tensor if word == "bias" else _ATEN.mul.Tensor
            found = found if given is None else elementwise(op, target, found, given)
    return [found, None, None] if isinstance(op.result, tuple | list) else found


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
    return _over_space(op, op.plain("input"), op.uses("weight", "bias"))


def _over_space(op: Operation, value: Value, tensors: Mapping[str, TensorUse]) -> Value:
    # Normalises each channel of each sample.
    space = range(1, len(value.layer.shape))
    epsilon = float(op["eps"])
    layers = norm_layers(
        op.free_name, value.layer, over=space, tensors=tensors, epsilon=epsilon, dims=[0]
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
        value = swapped(op, value)
    else:
        value.plain()
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
    found = swapped(op, found) if folds else found
    return [found, *[None] * 4] if isinstance(op.result, tuple | list) else found


def _standardised(op: Operation, value: Value) -> Value:
    # A weight whose channels get mean 0 and variance 1: (1, channels, ...), one for all samples.
    n_channels, *rest = value.layer.shape[1:]
    row = value.to(op.reshaped(value, (n_channels, *rest)))
    found = _over_space(op, row, {})
    for word, function in (("weight", _ATEN.mul.Tensor), ("bias", _ATEN.add.Tensor)):
        if op[word] is not None:
            given = op.value(word)
            given = given.to(op.reshaped(given, (n_channels, *(1,) * len(rest))))
            found = elementwise(op, function, found, given)
    return found.to(op.reshaped(found, value.layer.shape))


@lowers("_weight_norm", "_weight_norm_interface")
def weight_norm(op: Operation) -> object:
    value, size = op.value("v"), op.value("g")
    dims = [dim for dim in range(value.n_dims) if dim != op["dim"] % value.n_dims]
    squares = elementwise(op, _ATEN.square.default, value)
    total = _reduced(op, squares, "sum", dims, keep=True)
    length = elementwise(op, _ATEN.sqrt.default, total)
    factor = elementwise(op, _ATEN.div.Tensor, size, length)
    found = elementwise(op, _ATEN.mul.Tensor, value, factor)
    return [found, None] if isinstance(op.result, tuple | list) else found


# --- losses that a model or a user's function computes: means over the batch ---
#
# Losses of single samples come first, then their mean; the whole of it is split like the losses
# that have a name. Only a captured loss may join samples: `Context.joins`.


@lowers("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def cross_entropy(op: Operation) -> object:
    scores, labels = _pair(op)
    dim = scores.dim(1)
    shape = scores.layer.shape
    if labels.layer.shape != (*shape[:dim], *shape[dim + 1 :]) or not labels.layer.is_integer:
        raise NotSplitError("its targets are no labels")
    if op["reduction"] != _MEAN and labels.layer.shape:
        raise NotSplitError("its losses are those of positions")
    layers = cross_entropy_layers(
        op.free_name,
        (scores.layer, labels.layer),
        dim=dim,
        smoothing=float(op.arguments.get("label_smoothing") or 0.0),
        ignore=int(op["ignore_index"]),
        mean=op["reduction"] == _MEAN,
        normalised="nll" in str(op.target),
    )
    losses = op.extend(scores, layers)
    if op["reduction"] != _MEAN:
        return losses
    return _over_samples(op, losses, "mean", f"{losses.layer.name}.mean")


@lowers("mse_loss", "l1_loss", "binary_cross_entropy_with_logits")
def elementwise_loss(op: Operation) -> object:
    scores, targets = _pair(op)
    if scores.layer.shape != targets.layer.shape or targets.layer.is_integer:
        raise NotSplitError("its targets have another shape")
    if op.arguments.get("pos_weight") is not None:
        raise NotSplitError("it has weights")
    function = str(op.target).split(".")[1]
    if op["reduction"] != _MEAN:
        raise NotSplitError("it is no mean")
    layer = elementwise_loss_layer(op.free_name, (scores.layer, targets.layer), function=function)
    losses = op.extend(scores, [layer])
    return _over_samples(op, losses, "mean", f"{losses.layer.name}.mean")


def _pair(op: Operation) -> tuple[Value, Value]:
    reduction = op["reduction"]
    weighted = op.arguments.get("weight") is not None
    if not op.context.joins or reduction not in {0, _MEAN} or weighted:
        raise NotSplitError("it is no plain mean over the batch")
    scores, targets = op.value("self"), op.value("target")
    if scores.batch is None:
        raise NotSplitError("its scores have no samples")
    scores.refuse_others(targets)
    return scores, targets
