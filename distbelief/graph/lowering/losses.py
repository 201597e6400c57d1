"""Lowering rules for losses that a model or a user's function computes: means over the batch.

Losses of single samples come first, then their mean; the whole of it is split like the losses that
have a name. Only a captured loss may join samples: `Context.joins`.
"""

from typing import Final

from distbelief.graph.lowering.operation import Operation, lowers
from distbelief.graph.lowering.values import NotSplitError, Value
from distbelief.graph.ops.losses import cross_entropy_layers, elementwise_loss_layer
from distbelief.graph.ops.reductions import reduction_layer


_MEAN: Final = 1  # torch's number of the reduction


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
    return _mean(op, losses) if op["reduction"] == _MEAN else losses


@lowers("mse_loss", "l1_loss", "binary_cross_entropy_with_logits")
def elementwise(op: Operation) -> object:
    scores, targets = _pair(op)
    if scores.layer.shape != targets.layer.shape or targets.layer.is_integer:
        raise NotSplitError("its targets have another shape")
    if op.arguments.get("pos_weight") is not None:
        raise NotSplitError("it has weights")
    function = str(op.target).split(".")[1]
    if op["reduction"] != _MEAN:
        raise NotSplitError("it is no mean")
    layer = elementwise_loss_layer(op.free_name, (scores.layer, targets.layer), function=function)
    return _mean(op, op.extend(scores, [layer]))


def _pair(op: Operation) -> tuple[Value, Value]:
    reduction = op["reduction"]
    if (
        not op.context.joins
        or reduction not in {0, _MEAN}
        or op.arguments.get("weight") is not None
    ):
        raise NotSplitError("it is no plain mean over the batch")
    scores, targets = op.value("self"), op.value("target")
    if scores.batch is None or (scores.batch, scores.before, scores.after) != (
        targets.batch,
        targets.before,
        targets.after,
    ):
        raise NotSplitError("its targets are arranged in another way")
    return scores, targets


def _mean(op: Operation, losses: Value) -> Value:
    layer = reduction_layer(
        op.builder.free_name(f"{losses.layer.name}.mean"),
        [losses.layer],
        function="mean",
        dims=(),
        keep=False,
        batch=True,
    )
    return Value(op.builder.add_layer(layer), batch=None)
