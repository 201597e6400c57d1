"""Appends a loss to a graph as its last layers, with the targets as one more input.

    ... --> fc8 [21000] --> loss.maximum --> loss.sums --> loss []
                                targets [] ---^

Its output is () per sample; the loss of a batch is the mean over the samples. Names are torch's,
with or without "_loss". Sums over classes or elements are split like other layers; other
losses and user functions are opaque, computed by the module `OpaqueLoss`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, final

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Builder, GraphError, Layer, LayerGraph
from distbelief.graph.ops.losses import cross_entropy_layers, elementwise_loss_layer
from distbelief.graph.region import Shape


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Sums over elements, by torch's names.
ELEMENTWISE: Final[Mapping[str, str]] = {
    "one_vs_all": "binary_cross_entropy_with_logits",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "binary_cross_entropy": "binary_cross_entropy",
    "kl_div": "kl_div",
    **{
        name: f"{name}_loss"
        for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin", "poisson_nll")
    },
}
# The others are means over the elements of a sample.
_SUMS: Final = frozenset({"one_vs_all", "kl_div"})

# torch's losses without a split rule.
OPAQUE: Final[Mapping[str, Loss]] = {
    "hinge_embedding": functional.hinge_embedding_loss,
    "multi_margin": functional.multi_margin_loss,
    "multilabel_margin": functional.multilabel_margin_loss,
    "multilabel_soft_margin": functional.multilabel_soft_margin_loss,
}

# Losses whose targets are labels: integers, without the class dimension.
LABELS: Final = frozenset({"cross_entropy", "nll", "one_vs_all", "multi_margin"})


@final
class OpaqueLoss(nn.Module):
    """A loss function as a module that one rank computes.

    Args:
        function: f(outputs, targets) -> mean over the samples of the batch.
    """

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    @override
    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return (batch,): the loss for each sample, so that the mean is the function's value."""
        return self.function(outputs, targets).reshape(()).expand(outputs.shape[0])


def append_loss(
    graph: LayerGraph,
    loss: str | Loss,
    *,
    targets: Shape | None = None,
    soft: bool = False,
    dim: int = 0,
) -> LayerGraph:
    """Return the graph with a loss; its outputs are the former ones, then the loss.

    The layer is called "loss" and its input "targets", with a number if these names are taken. For
    an opaque loss, `Step.modules` needs the module of `opaque_loss` under the layer's name.

    Args:
        graph: Graph of a model.
        loss: A name ("one_vs_all" is logistic, summed over classes), or a function f(outputs,
            targets) -> mean over the samples of the batch.
        targets: Shape of the targets, without the batch; by default that of the output, without the
            class dimension for losses of labels.
        soft: Whether the targets of a loss of labels are probabilities instead.
        dim: The class dimension, the batch not counted.

    Raises:
        GraphError: There is no such loss, the model has several outputs, or shapes do not fit.
    """
    if len(graph.outputs) != 1:
        raise GraphError(
            f"the model has {len(graph.outputs)} outputs ({', '.join(graph.outputs)}), and a loss "
            "needs one: let the forward return one, or plan without a loss"
        )
    scores = graph[graph.outputs[0]]
    name = loss.removesuffix("_loss") if isinstance(loss, str) else ""
    known = {"cross_entropy", "nll", *ELEMENTWISE, *OPAQUE}
    if isinstance(loss, str) and name not in known:
        raise GraphError(
            f"there is no loss {loss!r}: use {', '.join(sorted(known))}, or a function "
            "of outputs and targets"
        )
    labels = name in LABELS and not soft
    builder = Builder.of(graph)
    expected = _target_shape(scores, loss, labels=labels, dim=dim)
    if targets is not None and isinstance(loss, str) and targets != expected:
        raise GraphError(
            f"targets of {loss!r} on {scores.name!r} must have shape {list(expected)}, "
            f"got {list(targets)}"
        )
    target = builder.input(
        builder.free_name("targets"), expected if targets is None else targets, is_integer=labels
    )
    last = builder.extend(_layers(builder.free_name("loss"), (scores, target), loss=name, dim=dim))
    return replace(builder.finish([*graph.outputs, last.name]), fields=graph.fields)


def opaque_loss(loss: str | Loss) -> OpaqueLoss | None:
    """Return the module of an opaque loss; None if the loss can be split."""
    if not isinstance(loss, str):
        return OpaqueLoss(loss)
    function = OPAQUE.get(loss.removesuffix("_loss"))
    return None if function is None else OpaqueLoss(function)


def _target_shape(scores: Layer, loss: str | Loss, *, labels: bool, dim: int) -> Shape:
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
    scores, targets = sources
    layer = Layer.of(
        name,
        "whole",
        [scores, targets],
        (),
        options={"module": name},
        whole=f"{loss} has no split rule" if loss else "a user-defined loss function",
    )
    return [layer]
