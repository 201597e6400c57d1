"""Compiled dataflows, executed and compared with the graph itself."""

import copy
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.graph.operator import Step
from distbelief.graph.ops.norms import running_averages
from distbelief.graph.ops.views import Cat
from distbelief.plans.compiler import Compiled, compile_plan
from distbelief.plans.step_graph import statistics_of
from distbelief.worker.in_process import LocalGroup, StepOutput
from tests.distbelief.graph.reference import evaluate
from tests.distbelief.graph.zoo.catalogue import MODELS, ZOO, Applied
from tests.distbelief.graph.zoo.comparison import tensors_of, whole_modules
from tests.distbelief.plans.plans import captured, random_plan


pytestmark = pytest.mark.untraced

BATCH = 2
TOLERANCE = 1e-10
SEED = 5


@pytest.mark.parametrize("name", MODELS)
def test_programs_of_random_plans_compute_what_the_graph_computes(name: str) -> None:
    generator = np.random.default_rng([0, *name.encode()])
    check(name, generator, n_machines=int(generator.integers(1, 9)))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n_machines", range(1, 9))
@pytest.mark.parametrize("name", ZOO)
def test_every_model_on_one_to_eight_ranks(name: str, n_machines: int) -> None:
    generator = np.random.default_rng([n_machines, *name.encode()])
    check(name, generator, n_machines=n_machines)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ZOO)
def test_float32_is_as_near_to_float64_as_one_process_is(name: str) -> None:
    model, graph = captured(name)
    inputs, tensors = inputs_of(graph, n_values=ZOO[name].n_values or 2), tensors_of(model)
    exact = gradients_of(
        graph, inputs, tensors, Step(training=True, modules=whole_modules(graph, model))
    )
    rounded_model = copy.deepcopy(model).float()
    modules = whole_modules(graph, rounded_model)
    inputs, tensors = in_float32(inputs), in_float32(tensors)
    rounded = gradients_of(graph, inputs, tensors, Step(training=True, modules=modules))
    generator = np.random.default_rng(list(name.encode()))
    group = LocalGroup(
        compiled=compile_plan(
            graph, random_plan(graph, generator, n_machines=4), batch=BATCH, n_machines=4
        ),
        dtype=torch.float32,
        modules=modules,
        seeds=frozenset(graph.outputs),
        seed_gradient=lambda _layer, output, _n: slope(output),
    )
    found = group.step(inputs, tensors, seed=SEED).gradients
    assert distance(found, exact) <= 3 * distance(rounded, exact)


def in_float32(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().float().requires_grad_(value.requires_grad)
        if value.is_floating_point()
        else value
        for name, value in values.items()
    }


def gradients_of(
    graph: LayerGraph,
    inputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    step: Step,
) -> dict[str, torch.Tensor]:
    """Return the gradient of the objective for every trained tensor that has one."""
    values = evaluate(graph, inputs, tensors, step=step)
    trained = [name for name, use in graph.tensors.items() if use.trains]
    gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        objective([values[name] for name in graph.outputs]),
        [tensors[name] for name in trained],
        allow_unused=True,
    )
    pairs = zip(trained, gradients, strict=True)
    return {name: gradient for name, gradient in pairs if gradient is not None}


def distance(found: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative error of a tensor, tensors of pure rounding left out.

    A bias before BatchNorm has a gradient of zero: what remains is rounding, with no meaningful
    relative error.
    """
    largest = max(float(value.norm()) for value in exact.values())
    return max(
        float((found[name] - value).norm()) / max(float(value.norm()), 1e-3 * largest)
        for name, value in exact.items()
        if float(value.norm()) > 1e-12 * largest
    )


SMALL = ["mobilenet", "inception", "lstm", "encoder", "local"]


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(SMALL),
    seed=st.integers(0, 1 << 32),
    n_machines=st.integers(1, 8),
    micro_batches=st.integers(1, 3),
)
def test_any_plan_in_any_micro_batches_computes_what_the_graph_computes(
    name: str, seed: int, n_machines: int, micro_batches: int
) -> None:
    _, graph = captured(name)
    check(
        name,
        np.random.default_rng(seed),
        n_machines=n_machines,
        # Statistics of a part of the batch would be others.
        micro_batches=1 if statistics_of(graph) else micro_batches,
    )


def test_one_sample_for_the_whole_batch_stays_one_in_micro_batches() -> None:
    check("encoder", np.random.default_rng(0), n_machines=1, micro_batches=2)


def test_a_batch_of_as_many_samples_as_another_dimension_is_still_moved_to_the_front() -> None:
    """The last states of two recurrent layers are (2, samples, width)."""
    check("lstm", np.random.default_rng(0), n_machines=1, micro_batches=2)


def bias_of_parts() -> tuple[nn.Module, LayerGraph]:
    model = Applied(
        lambda x, w, b: functional.linear(x, w, torch.cat([b[:4], b.new_zeros(4), b[4:]])),
        weight=nn.Parameter(torch.rand(12, 3, dtype=torch.float64)),
        bias=nn.Parameter(torch.rand(8, dtype=torch.float64)),
    )
    return model, capture(model, [InputSpec(shape=(3,))])


@pytest.mark.parametrize("seed", range(3))
def test_one_sample_for_the_whole_batch_stays_one_where_a_part_is_empty(seed: int) -> None:
    """A bias that Swin V2 of torchvision makes of parts had a row for each sample on some ranks."""
    check_graph(*bias_of_parts(), np.random.default_rng(seed), n_machines=3)


def test_numbers_that_a_forward_makes_have_the_precision_of_the_step() -> None:
    """In float64, to which --verify turns where rounding decides, a plan of DETR failed."""
    model = Applied(lambda x, f: x + f(torch.arange(3.0)), layer=nn.Linear(3, 3))
    graph = capture(model, [InputSpec(shape=(3,))])
    plan = random_plan(graph, np.random.default_rng(0), n_machines=2)
    group = LocalGroup(
        compiled=compile_plan(graph, plan, batch=BATCH, n_machines=2),
        dtype=torch.float64,
        outputs=frozenset(graph.outputs),
        seeds=frozenset(graph.outputs),
        seed_gradient=lambda _layer, output, _n: slope(output),
    )
    inputs, tensors = inputs_of(graph), tensors_of(model.double())
    found = group.step(inputs, tensors, seed=SEED).outputs[graph.outputs[0]]
    row = functional.linear(torch.arange(3.0).double(), *model.get_submodule("layer").parameters())
    torch.testing.assert_close(found, inputs["x"] + row.detach())


def test_a_message_of_another_size_is_an_error_of_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its receiver rejected it, and waited for ever."""
    compute = Cat.compute
    monkeypatch.setattr(Cat, "compute", lambda self, call: compute(self, call).expand(BATCH, -1))
    with pytest.raises(
        GraphError, match=r"state 'cat'.* has shape \(2, \d+\), but its receiver expects \(1, \d+\)"
    ):
        check_graph(*bias_of_parts(), np.random.default_rng(1), n_machines=3)


def spectrum(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    found: torch.Tensor = last(torch.fft.rfft(first(x)).abs())
    return found


def chosen(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    h = first(x)
    h[h < 0] *= 0.1
    found: torch.Tensor = last(h[:, :3])
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("function", [spectrum, chosen])
def test_complex_numbers_and_sizes_that_depend_on_data_stay_on_one_rank(
    function: Callable[..., torch.Tensor], seed: int
) -> None:
    """Gradients of complex numbers did not travel; tensors of chosen elements stopped the step."""
    torch.manual_seed(seed)
    parts = {"first": nn.Linear(6, 4), "last": nn.Linear(3, 2)}
    inner = nn.Sequential(nn.Linear(6, 6), Applied(function, **parts), nn.Linear(2, 2)).double()
    graph = capture(inner, [InputSpec(shape=(6,))])
    assert [layer.name for layer in graph.layers if layer.whole] == ["1"]
    check_graph(inner, graph, np.random.default_rng(seed), n_machines=3)


def check(
    name: str, generator: np.random.Generator, *, n_machines: int, micro_batches: int = 1
) -> None:
    model, graph = captured(name)
    check_graph(
        model,
        graph,
        generator,
        n_machines=n_machines,
        micro_batches=micro_batches,
        n_values=ZOO[name].n_values or 2,
    )


def check_graph(
    model: nn.Module,
    graph: LayerGraph,
    generator: np.random.Generator,
    *,
    n_machines: int,
    micro_batches: int = 1,
    n_values: int = 2,
) -> None:
    """Check all outputs, gradients and running statistics of one random plan."""
    inputs, tensors = inputs_of(graph, n_values=n_values), tensors_of(model)
    modules = whole_modules(graph, model)
    step = Step(training=True, seed=SEED, modules=modules)
    expected = evaluate(graph, inputs, tensors, step=step)
    compiled = compile_plan(
        graph,
        random_plan(graph, generator, n_machines=n_machines),
        batch=BATCH,
        n_machines=n_machines,
    )
    names = [layer.name for layer in graph.layers if layer.kind != INPUT]
    group = LocalGroup(
        compiled=compiled,
        dtype=torch.float64,
        micro_batches=micro_batches,
        modules=modules,
        outputs=frozenset(names),
        seeds=frozenset(graph.outputs),
        seed_gradient=lambda _layer, output, _n: slope(output),
    )
    found = group.step(inputs, tensors, seed=SEED)
    for layer in names:
        torch.testing.assert_close(
            found.outputs[layer], expected[layer].detach(), rtol=TOLERANCE, atol=TOLERANCE
        )
    assert_gradients(compiled, found, tensors, expected)
    for tensor, layer in running_averages(graph).items():
        torch.testing.assert_close(found.averages[tensor], expected[layer][0].detach())


def objective(outputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(value * value.atan()).sum() for value in outputs]).sum()


def slope(output: torch.Tensor) -> torch.Tensor:
    leaf = output.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective([leaf]), [leaf])
    return gradient


def inputs_of(graph: LayerGraph, *, n_values: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    found = {}
    for layer in graph.layers:
        if layer.kind == INPUT:
            shape = (BATCH, *layer.shape)
            if layer.is_integer:
                value = torch.randint(n_values, shape, generator=generator)
            else:
                value = torch.randn(shape, generator=generator, dtype=torch.float64)
            found[layer.name] = value
    return found


def assert_gradients(
    compiled: Compiled,
    found: StepOutput,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> None:
    """Check that the pushed regions are the gradient, complete and without overlap."""
    graph = compiled.graph
    trained = [name for name, use in graph.tensors.items() if use.trains]
    leaves = [tensors[name] for name in trained]
    total = objective([expected[name] for name in graph.outputs])
    gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        total, leaves, allow_unused=True
    )
    for name, gradient in zip(trained, gradients, strict=True):
        wanted = torch.zeros_like(tensors[name]) if gradient is None else gradient
        pushed = torch.zeros_like(tensors[name])
        for region in found.pushed.get(name, ()):
            pushed[region.slices] += 1
        assert pushed.max() <= 1, name
        assert not wanted[pushed == 0].any(), name
        torch.testing.assert_close(
            found.gradients.get(name, torch.zeros_like(wanted)),
            wanted,
            rtol=TOLERANCE,
            atol=TOLERANCE * max(1.0, float(wanted.abs().max())),
            msg=name,
        )
