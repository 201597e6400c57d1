from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import GraphError, LayerGraph
from distbelief.graph.operator import Step
from tests.distbelief.graph.ops.comparison import close, close_gradients
from tests.distbelief.graph.reference import evaluate


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def model(*shape: int) -> tuple[nn.Module, LayerGraph]:
    """Scores between 0 and 1, from 3 inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(3, torch.Size(shape).numel()), nn.Sigmoid(), nn.Unflatten(1, shape)
        ).double()
    return module, capture(module, [InputSpec(shape=(3,))])


def one_vs_all(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Logistic regression for each class, summed over classes."""
    targets = functional.one_hot(labels, scores.shape[1]).to(scores.dtype)
    losses = functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")
    return losses.sum(1).mean()


LABELS: dict[str, Loss] = {
    "cross_entropy": functional.cross_entropy,
    "nll_loss": functional.nll_loss,
    "one_vs_all": one_vs_all,
    "multi_margin": functional.multi_margin_loss,
}
PLACES: dict[str, Loss] = {
    "mse": functional.mse_loss,
    "l1_loss": functional.l1_loss,
    "smooth_l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "binary_cross_entropy": functional.binary_cross_entropy,
    "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
    "poisson_nll": functional.poisson_nll_loss,
    "soft_margin": functional.soft_margin_loss,
    "kl_div": lambda x, t: functional.kl_div(x, t, reduction="batchmean"),
    "hinge_embedding": functional.hinge_embedding_loss,
    "multilabel_soft_margin": functional.multilabel_soft_margin_loss,
}


def compare(module: nn.Module, graph: LayerGraph, function: Loss, targets: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    step = Step(training=True)
    parameters = dict(module.named_parameters())
    inputs = {"input": x, "targets": targets}
    found = evaluate(graph, inputs, parameters, step=step)["loss"].mean()
    expected = function(module(x), targets)
    close(found, expected)
    close_gradients(found, expected, list(parameters.values()))


@pytest.mark.parametrize("name", LABELS)
def test_losses_of_labels_are_torchs(name: str) -> None:
    module, graph = model(5)
    graph = append_loss(graph, name)
    assert graph["targets"].shape == ()
    assert graph["targets"].is_integer
    assert graph.outputs == ("1", "loss")
    compare(module, graph, LABELS[name], torch.tensor([0, 4, 2, 2]))


@pytest.mark.parametrize("name", PLACES)
def test_elementwise_losses_are_torchs(name: str) -> None:
    module, graph = model(2, 5)
    graph = append_loss(graph, name)
    generator = torch.Generator().manual_seed(2)
    targets = torch.rand(4, 2, 5, generator=generator, dtype=torch.float64)
    if name in {"soft_margin", "hinge_embedding"}:
        targets = targets.sub(0.5).sign()
    compare(module, graph, PLACES[name], targets)


def test_positions_and_probabilities_are_targets_too() -> None:
    module, graph = model(5, 2)
    labels = append_loss(graph, "cross_entropy")
    assert labels["targets"].shape == (2,)
    targets = torch.tensor([[0, 4], [1, 1], [3, 2], [2, 0]])
    compare(module, labels, functional.cross_entropy, targets)
    soft = append_loss(graph, "cross_entropy", soft=True)
    assert not soft["targets"].is_integer
    chances = torch.rand(4, 5, 2, dtype=torch.float64).softmax(1)
    compare(module, soft, functional.cross_entropy, chances)


def test_a_loss_without_a_split_rule_is_computed_whole() -> None:
    module, graph = model(5)
    graph = append_loss(graph, "multilabel_margin_loss")
    assert graph["loss"].whole == "multilabel_margin has no split rule"
    targets = torch.tensor([[3, 0, -1, -1, -1], [1, -1, -1, -1, -1], [4, 2, 0, 1, 3], [-1] * 5])
    compare(module, graph, functional.multilabel_margin_loss, targets)


def test_losses_that_do_not_fit_are_refused() -> None:
    _, graph = model(5)
    with pytest.raises(GraphError, match="no loss 'cross':"):
        append_loss(graph, "cross")
    with pytest.raises(GraphError, match=r"targets of 'mse' .* shape \[5\], got \[4\]"):
        append_loss(graph, "mse", targets=(4,))
    with pytest.raises(GraphError, match="dim is 1"):
        append_loss(graph, "cross_entropy", dim=1)
    two = LayerGraph(graph.layers, ("0", "1"))
    with pytest.raises(GraphError, match=r"has 2 outputs \(0, 1\), and a loss needs one"):
        append_loss(two, "mse")
