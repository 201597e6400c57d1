"""Compiled programs, executed, against the graph itself: they are complete."""

import numpy as np
import pytest
import torch

from distbelief.graph.evaluation import evaluate
from distbelief.graph.kind import Step
from distbelief.graph.layer import INPUT, LayerGraph
from distbelief.program.compilation import compile_plan
from tests.distbelief.graph.zoo.catalogue import ZOO
from tests.distbelief.graph.zoo.comparison import tensors_of, whole_modules
from tests.distbelief.program.interpreter import World, objective
from tests.distbelief.program.plans import captured, random_plan


BATCH = 2
TOLERANCE = 1e-10


LARGE = {"alexnet", "vgg16", "resnet18", "resnet50"}
CASES = [(name, seed) for name in ZOO for seed in range(1 if name in LARGE else 3)]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_programs_of_random_plans_compute_what_the_graph_computes(
    name: str, seed: int
) -> None:
    model, graph = captured(name)
    inputs = inputs_of(graph, name)
    tensors = tensors_of(model)
    step = Step(training=True, seed=5, modules=whole_modules(graph, model))
    expected = evaluate(graph, inputs, tensors, step=step)
    generator = np.random.default_rng([seed, *name.encode()])
    n_machines = int(generator.integers(1, 6))
    plan = random_plan(graph, generator, n_machines=n_machines)
    compiled = compile_plan(graph, plan, batch=BATCH, n_machines=n_machines)
    world = World(compiled, inputs, tensors, step)
    computers = world.run()
    for layer in graph.layers:
        if layer.kind != INPUT:
            for machine, region in plan[layer.name].owners(layer):
                value = computers[machine].states.cut(layer.name, region)
                wanted = expected[layer.name][(slice(None), *region.slices)]
                torch.testing.assert_close(
                    value, wanted.detach(), rtol=TOLERANCE, atol=TOLERANCE
                )
    assert_gradients(world, expected)


def inputs_of(graph: LayerGraph, name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    found = {}
    for layer in graph.layers:
        if layer.kind == INPUT:
            shape = (BATCH, *layer.shape)
            if layer.is_integer:
                n_values = ZOO[name].n_values or 2
                value = torch.randint(n_values, shape, generator=generator)
            else:
                value = torch.randn(shape, generator=generator, dtype=torch.float64)
            found[layer.name] = value
    return found


def assert_gradients(world: World, expected: dict[str, torch.Tensor]) -> None:
    """Check that what was pushed is the gradient, all of it and once."""
    graph = world.graph
    trained = [name for name, use in graph.tensors.items() if use.trains]
    leaves = [world.tensors[name] for name in trained]
    total = objective([expected[name] for name in graph.outputs])
    gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        total, leaves, allow_unused=True
    )
    for name, gradient in zip(trained, gradients, strict=True):
        if name not in world.pushed.values:
            assert gradient is None or not gradient.any(), name
            continue
        wanted = torch.zeros_like(world.tensors[name]) if gradient is None else gradient
        assert wanted[~world.pushed.known[name]].count_nonzero() == 0, name
        torch.testing.assert_close(
            world.pushed.values[name],
            wanted,
            rtol=TOLERANCE,
            atol=TOLERANCE * max(1.0, float(wanted.abs().max())),
            msg=name,
        )
