"""All ranks of a plan in one process, compared with one process without a plan."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.plans.compiler import compile_plan
from distbelief.plans.placement import Placement
from distbelief.worker.batches import micro_sizes
from distbelief.worker.execution.executor import inference_of
from distbelief.worker.in_process import LocalGroup, StepOutput
from tests.distbelief.plans.plans import random_plan


def input_names(graph: LayerGraph) -> list[str]:
    """Return the names of the inputs: the model's first, then the targets."""
    return [layer.name for layer in graph.layers if layer.kind == INPUT]


def net(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 12),
        nn.Tanh(),
        nn.Linear(12, 5),
    )


SPECS = [InputSpec(shape=(2, 8, 8))]


def captured(module: nn.Module) -> LayerGraph:
    return append_loss(capture(module, SPECS), "cross_entropy")


def batch_of(graph: LayerGraph, n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = input_names(graph)
    return {
        inputs: torch.randn(n, 2, 8, 8, generator=generator, dtype=torch.float64),
        targets: torch.randint(5, (n,), generator=generator),
    }


def step(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    module: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    micro_batches: int = 1,
    n_machines: int = 4,
) -> StepOutput:
    n = len(next(iter(batch.values())))
    compiled = compile_plan(graph, placements, batch=n // micro_batches, n_machines=n_machines)
    group = LocalGroup(
        compiled=compiled, dtype=torch.float64, micro_batches=micro_batches, loss=graph.outputs[-1]
    )
    tensors = {name: value.double() for name, value in module.named_parameters()}
    return group.step(batch, tensors, seed=7)


class Twice(nn.Module):
    """Calls one BatchNorm for both of a pair of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4, momentum=0.3)
        self.classes = nn.Linear(4 * 6 * 6, 5)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layer(x).relu())
        y = self.norm(self.layer(x.square()).relu()) - y
        scores: torch.Tensor = self.classes(y.flatten(1))
        return scores


@pytest.mark.parametrize("seed", range(4))
def test_a_norm_that_is_called_twice_averages_twice(seed: int) -> None:
    """Regression: the second call's average started where the first one's had, and replaced it.

    Gradients were right; evaluation of the trained model was not.
    """
    torch.manual_seed(1)
    module = Twice().double()
    graph = captured(module)
    names = input_names(graph)
    batch = batch_of(graph, 7)
    placements = random_plan(graph, np.random.default_rng(seed), n_machines=4)
    compiled = compile_plan(graph, placements, batch=7, n_machines=4)
    group = LocalGroup(compiled=compiled, dtype=torch.float64, loss=graph.outputs[-1])
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    found = group.step(batch, tensors)
    functional.cross_entropy(module(batch[names[0]]), batch[names[1]]).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found.gradients[name], parameter.grad)
    assert found.averages.keys() == {"norm.running_mean", "norm.running_var"}
    for name, value in found.averages.items():
        torch.testing.assert_close(value, module.get_buffer(name))


def test_dropout_does_not_depend_on_plan_or_micro_batches() -> None:
    module = net(dropout=0.5)
    graph, batch = captured(module), batch_of(captured(module), 6)
    found = [
        step(
            graph,
            random_plan(graph, np.random.default_rng(seed), n_machines=4),
            module,
            batch,
            micro_batches=micro_batches,
        )
        for seed, micro_batches in [(0, 1), (1, 1), (2, 2), (3, 6)]
    ]
    for one in found[1:]:
        assert one.loss == pytest.approx(found[0].loss, rel=1e-12)
        torch.testing.assert_close(one.gradients["0.weight"], found[0].gradients["0.weight"])


@pytest.mark.parametrize("seed", range(3))
def test_inference_leaves_out_the_loss_and_ends_on_rank_0(seed: int) -> None:
    module = net(dropout=0.5).eval()
    graph = captured(module.train())
    batch = batch_of(graph, 5)
    placements = random_plan(graph, np.random.default_rng(seed), n_machines=4)
    compiled = inference_of(graph, placements, outputs=[graph.outputs[0]], batch=5, n_machines=4)
    (end,) = compiled.graph.outputs
    assert compiled.placements[end].computing == {0}
    assert len([layer for layer in compiled.graph.layers if layer.kind == INPUT]) == 1
    group = LocalGroup(
        compiled=compiled, dtype=torch.float64, training=False, outputs=frozenset({end})
    )
    inputs, _ = batch.values()
    tensors = {name: value.double() for name, value in module.named_parameters()}
    found = group.step({input_names(graph)[0]: inputs}, tensors)
    expected = module.eval().double()(inputs)
    torch.testing.assert_close(found.outputs[end], expected.detach())
    assert found.loss is None
    assert not found.gradients


def test_inference_needs_existing_layers() -> None:
    graph = captured(net())
    with pytest.raises(GraphError, match="no layer 'nothing'"):
        inference_of(graph, {}, outputs=["nothing"], batch=1, n_machines=1)
    with pytest.raises(GraphError, match="no output is named"):
        inference_of(graph, {}, outputs=[], batch=1, n_machines=1)


def test_no_micro_batch_is_empty() -> None:
    assert micro_sizes(7, 3) == [2, 2, 3]
    assert micro_sizes(2, 5) == [1, 1]


def test_a_failing_layer_is_named() -> None:
    """Regression: ranks reported "step 3 failed: IndexError: index out of range in self"."""
    module = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 5))
    graph = append_loss(capture(module, [InputSpec(shape=(2,), n_values=5)]), "cross_entropy")
    inputs, targets = input_names(graph)
    batch = {inputs: torch.tensor([[0, 4], [1, 5]]), targets: torch.tensor([0, 1])}
    placements = random_plan(graph, np.random.default_rng(0), n_machines=2)
    said = r"layer '0' \(embedding\) failed on inputs of shape \[2, .*: IndexError: "
    with pytest.raises(JobError, match=said):
        step(graph, placements, module, batch, n_machines=2)
