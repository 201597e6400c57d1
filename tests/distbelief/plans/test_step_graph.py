"""Steps of several micro-batches."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import GraphError
from distbelief.plans.cluster import Machine, uniform
from distbelief.plans.compiler import compile_plan
from distbelief.plans.placement import Placement
from distbelief.plans.step_cost import StepCost, step_cost
from distbelief.plans.step_graph import statistics_of
from tests.distbelief.plans.plans import captured, chain, random_plan
from tests.distbelief.plans.test_step_cost import PerElement, cluster


def stages(n: int, micro_batches: int, *, bandwidth: float = math.inf) -> StepCost:
    """A chain of n equal layers, each on a machine of its own."""
    graph = chain([4] * (n + 1))
    names = [layer.name for layer in graph.layers if layer.inputs]
    plan = {name: Placement.whole(1, place) for place, name in enumerate(names)}
    compiled = compile_plan(graph, plan, batch=2, n_machines=n)
    on = cluster(n, bandwidth=bandwidth)
    return step_cost(compiled, on, PerElement(), micro_batches=micro_batches)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_stages_are_idle_only_while_the_pipeline_fills_and_empties(
    n: int, micro_batches: int
) -> None:
    once = 4.0 + 8.0  # forward and backward of a layer
    expected = (micro_batches + n - 1) * once
    assert stages(n, micro_batches).step_seconds == pytest.approx(expected)


def test_states_are_sent_and_kept_per_micro_batch() -> None:
    once, thrice = stages(3, 1), stages(3, 3)
    assert thrice.link_bytes == {pair: 3 * n_bytes for pair, n_bytes in once.link_bytes.items()}
    for one, three in zip(once.memory_bytes, thrice.memory_bytes, strict=True):
        assert one < three < 3 * one  # parameters are there once


@pytest.mark.parametrize("name", ["vision transformer", "local"])
@pytest.mark.parametrize("seed", range(3))
def test_every_task_and_message_runs_once_in_any_plan(name: str, seed: int) -> None:
    _, graph = captured(name)
    plan = random_plan(graph, np.random.default_rng(seed), n_machines=3)
    compiled = compile_plan(graph, plan, batch=2, n_machines=3)
    slow = Machine(flops=1.0, memory_rate=1.0, bandwidth=1e6)
    on = uniform("slow", slow, 3, latency=1e-3)
    once = step_cost(compiled, on, PerElement())
    twice = step_cost(compiled, on, PerElement(), micro_batches=2)
    assert len(twice.tasks) == 2 * len(once.tasks)
    assert twice.step_seconds > once.step_seconds
    shared = {"parameter", "parameter_gradient"}
    for way in once.traffic:
        count = sum((other.kind, other.name) == (way.kind, way.name) for other in twice.traffic)
        assert count == (1 if way.kind in shared else 2)


def test_statistics_of_the_batch_forbid_micro_batches() -> None:
    _, graph = captured("resnet18")
    plan = random_plan(graph, np.random.default_rng(0), n_machines=2)
    compiled = compile_plan(graph, plan, batch=2, n_machines=2)
    with pytest.raises(GraphError, match="statistics of the whole batch"):
        step_cost(compiled, cluster(2), PerElement(), micro_batches=2)


class Resemblance(nn.Module):
    """Weighs samples by their products with each other, in a way that no rule can read."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.T, -1) @ x


def test_opaque_modules_may_mix_samples_and_forbid_micro_batches() -> None:
    """Regression: pipelines computed them on each micro-batch alone."""
    model = nn.Sequential(nn.Linear(4, 4), Resemblance(), nn.Linear(4, 2))
    assert statistics_of(capture(model, [InputSpec(shape=(4,))])) == ["1"]
    assert statistics_of(capture(model[0], [InputSpec(shape=(4,))])) == []
