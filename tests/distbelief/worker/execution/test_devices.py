"""Execution on another device than the host's memory: `device`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from distbelief.plans.compiler import compile_plan
from distbelief.worker.in_process import LocalGroup, StepOutput
from tests.distbelief.graph.zoo.catalogue import ZOO
from tests.distbelief.graph.zoo.comparison import tensors_of, whole_modules
from tests.distbelief.plans.plans import captured, random_plan
from tests.distbelief.worker.execution.test_execution import BATCH, SEED, inputs_of, slope


pytestmark = pytest.mark.untraced

VARIED = ["mobilenet", "lstm", "encoder", "vision transformer", "local"]

has_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def found_on(name: str, device: str, *, n_machines: int = 3) -> StepOutput:
    """Return what a step by a random plan comes to, the same one on any device."""
    model, graph = captured(name)
    placements = random_plan(graph, np.random.default_rng(5), n_machines=n_machines)
    group = LocalGroup(
        compiled=compile_plan(graph, placements, batch=BATCH, n_machines=n_machines),
        dtype=torch.float64,
        modules=whole_modules(graph, model),
        outputs=frozenset(graph.outputs),
        seeds=frozenset(graph.outputs),
        seed_gradient=lambda _layer, output, _n: slope(output),
        device=device,
    )
    with Elsewhere() if device == "meta" else nullcontext():
        return group.step(inputs_of(graph), tensors_of(model), seed=SEED)


class Elsewhere(TorchFunctionMode):
    """Returns zeros for tensors without values, as if copied from another device."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given, other = [*args, None, None][:2]
        if func is torch.Tensor.copy_ and isinstance(other, torch.Tensor) and other.is_meta:
            return given
        if isinstance(given, torch.Tensor) and given.is_meta:
            if func is torch.Tensor.cpu:
                return torch.zeros(given.shape, dtype=given.dtype)
            if func is torch.Tensor.__float__:
                return 0.0
            if func is torch.Tensor.__int__:
                return 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", VARIED)
def test_all_that_is_computed_with_is_on_the_device(name: str) -> None:
    """Operations on tensors of two devices fail, even if one of them has no values.

    So a test without a GPU finds tensors that were left on the host.
    """
    found, expected = found_on(name, "meta"), found_on(name, "cpu")
    assert found.n_bytes == expected.n_bytes
    assert {n: v.shape for n, v in found.outputs.items()} == {
        n: v.shape for n, v in expected.outputs.items()
    }
    assert found.pushed == expected.pushed


@has_gpu
@pytest.mark.parametrize("name", ZOO)
def test_a_gpu_computes_what_the_processor_does(name: str) -> None:
    found, expected = found_on(name, "cuda"), found_on(name, "cpu")
    assert found.n_bytes == expected.n_bytes
    for mine, others in (
        (found.outputs, expected.outputs),
        (found.gradients, expected.gradients),
        (found.averages, expected.averages),
    ):
        for key, value in others.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-9, atol=1e-9)
