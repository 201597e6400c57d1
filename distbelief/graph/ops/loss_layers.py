"""Losses that can be split: elementwise losses, and cross-entropy over split classes.

The output is () per sample; the loss of a batch is the mean over its samples, which the code
that runs the graph takes. As in torch, the mean of a cross-entropy is over all labels of the
batch that count: the sum over a sample's positions has the factor samples / (labels that
count). Without any such label the loss is 0 (torch: nan).
"""

import math
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Call, Cut, Sums, Work
from distbelief.graph.ops.reductions import reduction_layer
from distbelief.graph.region import Region


# --- elementwise losses ---


@final
class ElementwiseLoss(Sums):
    """The sum or mean of f(x, target) over all elements of a sample."""

    # inputs    x; target of the same shape, or integer labels without dimension `dim`
    # options   function: its name in torch.nn.functional
    #           mean: over the elements of a sample, or the sum
    #           labels: whether target is labels: class c has target 1 if it is the label
    #           dim: the class dimension of x, the batch not counted; -1 if labels is False
    name: ClassVar[str] = "place_loss"
    per_element: ClassVar[Work] = Work(forward=4.0, backward=4.0, n_elements=2.0)

    @override
    def reads(self, layer: Layer, part: Region) -> tuple[Region, ...]:
        return (part, part.without(layer.integer("dim")) if layer.options["labels"] else part)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        x, target = call.inputs
        if layer.options["labels"]:
            dim = layer.integer("dim")
            target = one_hot(target, call.region, dim=dim)
        function = getattr(functional, layer.text("function"))
        losses: torch.Tensor = function(x, target.to(x.dtype), reduction="none")
        n_elements = math.prod(layer.input_shapes[0]) if layer.options["mean"] else 1
        return per_sample(losses) / n_elements


def elementwise_loss_layer(
    name: str, sources: tuple[Layer, Layer], *, function: str, mean: bool = True, dim: int = 0
) -> Layer:
    """Return a loss that is a sum over elements; options as in `ElementwiseLoss`.

    The targets are labels if they are integers and have one dimension less than x.
    """
    x, target = sources
    labels = target.is_integer and len(target.shape) < len(x.shape)
    return Layer.of(
        name,
        ElementwiseLoss.name,
        [x, target],
        (),
        options={
            "function": function,
            "mean": mean,
            "labels": labels,
            "dim": dim if labels else -1,
        },
    )


def per_sample(losses: torch.Tensor) -> torch.Tensor:
    """Return the sum over all dimensions but the batch: (batch,)."""
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def one_hot(labels: torch.Tensor, part: Region, *, dim: int) -> torch.Tensor:
    """Return where the class of labels (batch, *positions) is, for a part of the scores."""
    start, stop = part.intervals[dim]
    classes = torch.arange(start, stop, device=labels.device)
    classes = classes.view(-1, *(1,) * (len(part.intervals) - dim - 1))
    return labels.unsqueeze(dim + 1) == classes


# --- cross-entropy ---


@final
class ClassSums(Sums):
    """Sums over classes from which the cross-entropy follows."""

    # inputs    scores; labels (integers without dimension `dim`, or probabilities of the scores'
    #           shape); maximum of the scores over `dim`, with extent 1, or absent
    # options   dim: the class dimension; smoothing: share of the label's weight that is spread
    #           over all classes; soft: whether labels are probabilities
    # output    extent 3 in `dim`: sums of exp(s), of q s, of q, where s = score - maximum and q is
    #           the label's distribution; without a maximum, scores are log-probabilities and the
    #           first sum is 0
    name: ClassVar[str] = "class_sums"
    per_element: ClassVar[Work] = Work(forward=8.0, backward=4.0, n_elements=2.0)

    @override
    def cuts_of_output(self, layer: Layer) -> tuple[Cut, ...]:
        return _other_dims(layer)

    @override
    def reduced(self, layer: Layer, output: Region) -> Region:
        dim = layer.integer("dim")
        return output.replaced(dim, (0, layer.input_shapes[0][dim]))

    @override
    def reads(self, layer: Layer, part: Region) -> tuple[Region, ...]:
        dim = layer.integer("dim")
        labels = part if layer.options["soft"] else part.without(dim)
        return (part, labels, part.replaced(dim, (0, 1)))[: len(layer.inputs)]

    @override
    def writes(self, layer: Layer, part: Region) -> Region:
        return part.replaced(layer.integer("dim"), (0, 3))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        dim = layer.integer("dim")
        scores, labels, *maximum = call.inputs
        scores = scores - maximum[0] if maximum else scores
        if layer.options["soft"]:
            expected, weight = (labels * scores).sum(dim + 1), labels.sum(dim + 1)
        else:
            expected, weight = _label_scores(scores, labels, call.region, dim=dim)
        smoothing = layer.number("smoothing")
        if smoothing:
            share = smoothing / layer.input_shapes[0][dim]
            expected = (1 - smoothing) * expected + share * scores.sum(dim + 1)
            weight = (1 - smoothing) * weight + share * scores.shape[dim + 1]
        total = scores.exp().sum(dim + 1) if maximum else torch.zeros_like(weight)
        return torch.stack([total, expected, weight], dim + 1)


@final
class CrossEntropy(Sums):
    """The loss of each sample, from its class sums."""

    # Positions are summands; each part reads all labels, to know how many count.
    # inputs    class sums; labels, if they are not probabilities
    # options   dim; ignore: the label that does not count; mean: over the labels that count, or
    #           the sum over positions; soft: as above; normalised: scores are log-probabilities
    #           (torch's nll_loss)
    name: ClassVar[str] = "cross_entropy"
    per_element: ClassVar[Work] = Work(forward=4.0, backward=4.0, n_elements=1.0)

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return _other_dims(layer)

    @override
    def reads(self, layer: Layer, part: Region) -> tuple[Region, ...]:
        return (part, *(Region.of(*shape) for shape in layer.input_shapes[1:]))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        dim = layer.integer("dim")
        total, expected, weight = call.inputs[0].unbind(dim + 1)
        losses = -expected if layer.options["normalised"] else weight * total.log() - expected
        n_positions = math.prod(layer.input_shapes[0]) // layer.input_shapes[0][dim]
        factor = 1.0 / n_positions
        if not layer.options["soft"]:
            labels = call.inputs[1]
            counts = labels != layer.integer("ignore")
            losses = losses * counts[(slice(None), *call.region.without(dim).slices)]
            factor = labels.shape[0] / max(1, int(counts.sum()))
        return per_sample(losses) * (factor if layer.options["mean"] else 1.0)


def cross_entropy_layers(
    name: str,
    sources: tuple[Layer, Layer],
    *,
    dim: int = 0,
    smoothing: float = 0.0,
    ignore: int = -100,
    mean: bool = True,
    normalised: bool = False,
) -> list[Layer]:
    """Return the layers of a cross-entropy; the last one's output is () per sample.

    Sources are scores, and labels (integers, without the class dimension `dim`) or probabilities
    (of the scores' shape). Options are those of `ClassSums` and `CrossEntropy`.
    """
    scores, labels = sources
    soft = not labels.is_integer
    maximum = reduction_layer(f"{name}.maximum", [scores], function="maximum", dims=[dim])
    reads = [scores, labels] if normalised else [scores, labels, maximum]
    sums = Layer.of(
        f"{name}.sums",
        ClassSums.name,
        reads,
        (*scores.shape[:dim], 3, *scores.shape[dim + 1 :]),
        options={"dim": dim, "smoothing": smoothing, "soft": soft},
    )
    loss = Layer.of(
        name,
        CrossEntropy.name,
        [sums] if soft else [sums, labels],
        (),
        options={
            "dim": dim,
            "ignore": ignore,
            "mean": mean,
            "soft": soft,
            "normalised": normalised,
        },
    )
    return [sums, loss] if normalised else [maximum, sums, loss]


def _other_dims(layer: Layer) -> tuple[Cut, ...]:
    dim = layer.integer("dim")
    return tuple(Cut(d) for d in range(len(layer.input_shapes[0])) if d != dim)


def _label_scores(
    scores: torch.Tensor, labels: torch.Tensor, part: Region, *, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    # Scores of the labels whose class is in the part, and 1 there.
    # No product with zeros: scores of excluded classes may be -inf.
    start, stop = part.intervals[dim]
    inside = (labels >= start) & (labels < stop)
    index = (labels - start).clamp(0, stop - start - 1).unsqueeze(dim + 1)
    picked = scores.gather(dim + 1, index).squeeze(dim + 1)
    return torch.where(inside, picked, 0.0), inside.to(scores.dtype)
