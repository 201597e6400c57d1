"""Losses that are a sum over places: one-vs-all logistic, squares, absolute values.

    kind      "place_loss": sum or mean over all places of f(x, target)
    inputs    x; target of the same shape, or (labels) whole numbers without dim `dim`
    options   function: "logistic" "mse" "l1" "smooth_l1" "huber" "soft_margin"
              "binary_cross_entropy" "poisson_nll" "kl_div"
              argument: beta of smooth_l1, delta of huber; else 0.0
              mean: over the places of a sample, or the sum
              labels: whether target is labels; place c has target 1 if it is the label
              dim: the dimension of x that labels choose from; -1 if labels is False

The output is () for each sample: the loss of the batch is the mean of it over samples,
which is the business of who runs the graph. Split over any dimension, as partial sums.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import Cut, PartialSums, Step, Work
from distbelief.graph.kinds.sum_of_parts import SumOfParts
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


Loss = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

FUNCTIONS: Final[Mapping[str, Loss]] = {
    "logistic": lambda x, t, _: functional.binary_cross_entropy_with_logits(x, t, reduction="none"),
    "binary_cross_entropy": lambda x, t, _: functional.binary_cross_entropy(x, t, reduction="none"),
    "mse": lambda x, t, _: (x - t).square(),
    "l1": lambda x, t, _: (x - t).abs(),
    "smooth_l1": lambda x, t, beta: functional.smooth_l1_loss(x, t, reduction="none", beta=beta),
    "huber": lambda x, t, delta: functional.huber_loss(x, t, reduction="none", delta=delta),
    "soft_margin": lambda x, t, _: -functional.logsigmoid(x * t),
    "poisson_nll": lambda x, t, _: x.exp() - t * x,
    "kl_div": lambda x, t, _: functional.kl_div(x, t, reduction="none"),
}


@final
class PlaceLossParts(PartialSums):
    """Any box of x gives a summand."""

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return tuple(Cut(dim) for dim in range(len(layer.input_shapes[0])))

    @override
    def reads(self, layer: Layer, part: Region) -> tuple[Region, ...]:
        if not layer.options["labels"]:
            return (part, part)
        dim = layer.integer("dim")
        return (part, Region((*part.intervals[:dim], *part.intervals[dim + 1 :])))

    @override
    def compute(
        self,
        layer: Layer,
        part: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        x, target = inputs
        if layer.options["labels"]:
            dim = layer.integer("dim")
            target = one_of(target, part, dim=dim)
        losses = FUNCTIONS[layer.text("function")](x, target.to(x.dtype), layer.number("argument"))
        n_places = math.prod(layer.input_shapes[0]) if layer.options["mean"] else 1
        return per_sample(losses) / n_places


@final
class PlaceLoss(SumOfParts):
    """The sum or mean of f(x, target) over all places of a sample."""

    name: ClassVar[str] = "place_loss"
    partial: ClassVar[PartialSums | None] = PlaceLossParts()

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(math.prod(layer.input_shapes[0]))
        return Work(forward=4 * n, backward=4 * n, n_elements=2 * n)


def place_loss_layer(
    name: str,
    sources: tuple[Layer, Layer],
    *,
    function: str,
    argument: float = 0.0,
    mean: bool = True,
    dim: int = 0,
) -> Layer:
    """Return a loss that is a sum over places.

    Args:
        name: Of the layer.
        sources: x and the target; labels if it has one dimension less than x, whole
            numbers.
        function: One of `FUNCTIONS`.
        argument: beta of "smooth_l1", delta of "huber".
        mean: Over the places of a sample; or the sum.
        dim: The dimension of x that labels choose from.
    """
    x, target = sources
    labels = target.is_integer and len(target.shape) < len(x.shape)
    return Layer(
        name=name,
        kind=PlaceLoss.name,
        inputs=(x.name, target.name),
        input_shapes=(x.shape, target.shape),
        shape=(),
        options={
            "function": function,
            "argument": argument,
            "mean": mean,
            "labels": labels,
            "dim": dim if labels else -1,
        },
    )


def per_sample(losses: torch.Tensor) -> torch.Tensor:
    """Return the sum over all but the batch: (batch,)."""
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def one_of(labels: torch.Tensor, part: Region, *, dim: int) -> torch.Tensor:
    """Return, for a part of the scores, where the label's class is.

    Args:
        labels: (batch, *positions).
        part: Of the scores.
        dim: That of the classes, the batch not counted.
    """
    start, stop = part.intervals[dim]
    classes = torch.arange(start, stop, device=labels.device)
    classes = classes.view(-1, *(1,) * (len(part.intervals) - dim - 1))
    return labels.unsqueeze(dim + 1) == classes
