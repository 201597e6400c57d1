"""Appends a loss to a graph as its last layers, with the targets as one more input.

    ... --> fc8 [21000] --> loss.maximum --> loss.sums --> loss []
                                targets [] ---^

Its output is () per sample; the loss of a batch is the mean over the samples. Names are torch's,
with or without "_loss". Sums over classes or elements are split like other layers; the others are
computed whole.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from distbelief.graph.graph import Builder, GraphError, Layer, LayerGraph, Option
from distbelief.graph.ops.loss_layers import cross_entropy_layers, elementwise_loss_layer
from distbelief.graph.region import Shape


# Sums over elements, by torch's names.
ELEMENTWISE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("one_vs_all", "binary_cross_entropy_with_logits", "multilabel_soft_margin"),
        "binary_cross_entropy_with_logits",
    ),
    "binary_cross_entropy": "binary_cross_entropy",
    "kl_div": "kl_div",
    **{
        name: f"{name}_loss"
        for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin", "poisson_nll")
    },
    "hinge_embedding": "hinge_embedding_loss",
}
# The others are means over the elements of a sample.
_SUMS: Final = frozenset({"one_vs_all", "kl_div"})

# torch's losses without a split rule.
_WHOLE: Final = frozenset({"multi_margin", "multilabel_margin"})

# Losses whose targets are labels: integers, without the class dimension.
LABELS: Final = frozenset({"cross_entropy", "nll", "one_vs_all", "multi_margin"})


def append_loss(
    graph: LayerGraph, loss: str, *, targets: Shape | None = None, soft: bool = False, dim: int = 0
) -> LayerGraph:
    """Return the graph with a loss; its outputs are the former ones, then the loss.

    The layer is called "loss" and its input "targets", with a number if these names are taken.

    Args:
        graph: Graph of a model.
        loss: Its name; "one_vs_all" is logistic, summed over classes.
        targets: Shape of the targets, without the batch; by default that of the output, without the
            class dimension for losses of labels.
        soft: Whether the targets of a loss of labels are probabilities instead.
        dim: The class dimension, the batch not counted.

    GraphError if there is no such loss, the model has several outputs, or shapes do not fit.
    """
    if len(graph.outputs) != 1:
        raise GraphError(
            f"the model has {len(graph.outputs)} outputs ({', '.join(graph.outputs)}), and a loss "
            "needs one: let the forward return one, or plan without a loss"
        )
    scores = graph[graph.outputs[0]]
    name = loss.removesuffix("_loss")
    known = {"cross_entropy", "nll", *ELEMENTWISE, *_WHOLE}
    if name not in known:
        raise GraphError(
            f"there is no loss {loss!r}: use {', '.join(sorted(known))}, or a function "
            "of outputs and targets"
        )
    labels = name in LABELS and not soft
    builder = Builder.of(graph)
    expected = _target_shape(scores, loss, labels=labels, dim=dim)
    if targets not in {None, expected}:
        raise GraphError(
            f"targets of {loss!r} on {scores.name!r} must have shape {list(expected)}, "
            f"got {list(targets or ())}"
        )
    target = builder.input(builder.free_name("targets"), expected, is_integer=labels)
    last = builder.extend(_layers(builder.free_name("loss"), (scores, target), loss=name, dim=dim))
    return replace(builder.finish([*graph.outputs, last.name]), fields=graph.fields)


def _target_shape(scores: Layer, loss: str, *, labels: bool, dim: int) -> Shape:
    if not labels:
        return scores.shape
    if not 0 <= dim < len(scores.shape):
        raise GraphError(
            f"{loss!r} needs a class dimension: {scores.name!r} has shape "
            f"{list(scores.shape)}, and dim is {dim}"
        )
    return (*scores.shape[:dim], *scores.shape[dim + 1 :])


def _layers(name: str, sources: tuple[Layer, Layer], *, loss: str, dim: int) -> list[Layer]:
    if loss in {"cross_entropy", "nll"}:
        return cross_entropy_layers(name, sources, dim=dim, normalised=loss == "nll")
    if loss in ELEMENTWISE:
        function, mean = ELEMENTWISE[loss], loss not in _SUMS
        return [elementwise_loss_layer(name, sources, function=function, mean=mean, dim=dim)]
    # A loss for each sample, of whole samples.
    scores, targets = ({"input": index, "batch": 0} for index in range(2))
    keywords = {"self": scores, "target": targets | {"dtype": "int64"}, "reduction": 0}
    options: dict[str, Option] = {
        "operation": f"aten.{loss}_loss.default",
        "arguments": json.dumps({"arguments": [], "keywords": keywords}),
        "batch": 0,
    }
    whole = f"{loss} has no split rule"
    return [Layer.of(name, "call", sources, (), options=options, whole=whole)]
