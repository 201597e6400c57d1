import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import Layer
from distbelief.graph.operator import Work, operator_of
from distbelief.graph.ops.pointwise import COMPARISONS, PARAMETRIC, SEVERAL, UNARY
from distbelief.graph.region import Region
from distbelief.program.compiler import with_gradient
from tests.distbelief.graph.ops.comparison import (
    check,
    inputs_of,
    layer_of,
    leaf,
    parts_of,
    random,
    values_of,
)
from tests.distbelief.graph.reference import evaluate
from tests.distbelief.graph.zoo.catalogue import Applied


SHAPE = (4, 6)
REDUCED: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


@pytest.mark.parametrize("function", sorted({*UNARY, *PARAMETRIC, *SEVERAL} - {"detach"}))
@given(data=st.data())
@settings(max_examples=5)
def test_a_pointwise_function_in_parts_is_the_whole(function: str, data: st.DataObject) -> None:
    n_inputs = 3 if function in SEVERAL else 1
    shapes = ((3, 4),) * n_inputs
    layer = layer_of("pointwise", (3, 4), *shapes, function=function, argument=0.3)
    inputs = {name: leaf(x.detach().abs() + 0.1) for name, x in inputs_of(layer).items()}
    if function in SEVERAL:
        expected = reduce(REDUCED[function], inputs.values())
    elif function in UNARY:
        expected = UNARY[function](inputs["x"])
    else:
        expected = PARAMETRIC[function](inputs["x"], 0.3)
    check(data, layer, expected, inputs)


@given(st.sampled_from(sorted(COMPARISONS)), st.data())
@settings(max_examples=30)
def test_a_comparison_in_parts_is_ones_and_zeros(function: str, data: st.DataObject) -> None:
    x, y = random(2, *SHAPE).round(), random(2, 1, 6).round()
    layer = layer_of("comparison", SHAPE, SHAPE, (1, 6), function=function)
    expected = COMPARISONS[function](x, y).to(x.dtype)
    assert set(expected.flatten().tolist()) <= {0.0, 1.0}
    parts = {"comparison": data.draw(parts_of(layer))}
    found = values_of([layer], {"x": x, "y": y}, parts=parts)["comparison"]
    torch.testing.assert_close(found, expected)


@given(st.data())
@settings(max_examples=20)
def test_a_choice_in_parts_is_the_whole(data: st.DataObject) -> None:
    mask = random(2, 6).round()
    x, y = leaf(random(2, *SHAPE)), leaf(random(2, 4, 1))
    layer = layer_of("where", SHAPE, (6,), SHAPE, (4, 1))
    expected = torch.where(mask[:, None, :] != 0, x, y)
    check(data, layer, expected, {"x": mask, "y": x, "z": y})


def test_numbers_replace_inputs() -> None:
    x = random(2, *SHAPE)
    filled = layer_of("where", SHAPE, SHAPE, SHAPE, yes=-2.5)
    expected = x.masked_fill(x.round() != 0, -2.5)
    torch.testing.assert_close(compute(filled, x.round(), x), expected)
    least = layer_of("comparison", SHAPE, SHAPE, function="less", argument=0.25)
    torch.testing.assert_close(compute(least, x), (x < 0.25).to(x.dtype))
    words = torch.zeros(2, *SHAPE, dtype=torch.int64)
    none = layer_of("comparison", SHAPE, SHAPE, function="equal", argument=0.0)
    assert compute(none, words).dtype == torch.get_default_dtype()


def test_work_is_the_numbers_that_are_chosen() -> None:
    part = Region(((0, 2), (1, 4)))
    compared = layer_of("comparison", SHAPE, SHAPE, SHAPE, function="less")
    wanted = Work(forward=6.0, backward=0.0, n_elements=18.0)
    assert operator_of(compared).work(compared, part) == wanted
    chosen = layer_of("where", SHAPE, SHAPE, SHAPE, SHAPE)
    wanted = Work(forward=6.0, backward=18.0, n_elements=24.0)
    assert operator_of(chosen).work(chosen, part) == wanted


def compute(layer: Layer, *inputs: torch.Tensor) -> torch.Tensor:
    return values_of([layer], dict(zip(layer.inputs, inputs, strict=True)))[layer.name]


def calling(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    return Applied(lambda x, linear: function(linear(x)), linear=nn.Linear(6, 6))


def causal() -> nn.Module:
    """Scores hidden by a buffer of the model."""
    return Applied(
        lambda x, linear, later: (
            (linear(x) @ x.transpose(1, 2)).masked_fill(later[:4, :4], float("-inf")).softmax(-1)
        ),
        linear=nn.Linear(6, 6),
        later=torch.ones(6, 6, dtype=torch.bool).triu(1),
    )


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "where of a number": lambda x: torch.where(x <= 0.5, -1.0, x),
    "a number first": lambda x: x * (0.25 > x),  # noqa: SIM300 -- that is what is tested
    "method": lambda x: x.where(x >= 0, x * x),
    "keywords": lambda x: torch.where(condition=x > 0, input=x, other=x + 1),
    "masked fill": lambda x: x.masked_fill((x < 0).transpose(1, 2).transpose(1, 2), 2),
    "in place": lambda x: (x * 2).masked_fill_(x.abs() < 0.2, 0.0),
    "both": lambda x: x * ((x > -0.5) & (x < 0.5)),
    "either, not": lambda x: x * ~((x < -0.5) | torch.gt(x, 0.5)),
    "logical": lambda x: torch.logical_not(torch.logical_or(x > 1, x < -1)).float() * x,
    "two": lambda x: (x != x * x) * x,
    "sum of masks": lambda x: x * ((x > 0) + (x < -1)),
    "integers": lambda x: x * torch.where(x > 0, 1, 2),
    "whole numbers": lambda x: x * (x > 0).to(torch.int64),
    "bits": lambda x: x * ((x > 0) & 3),
}


@pytest.mark.parametrize("what", [*FUNCTIONS, "a buffer"])
def test_masks_are_captured_in_layers_that_can_be_split(what: str) -> None:
    assert_captured(calling(FUNCTIONS[what]) if what in FUNCTIONS else causal())


def assert_captured(model: nn.Module) -> None:
    """Check values and the gradient; comparisons have none."""
    graph = capture(model, [InputSpec(shape=(4, 6))])
    assert not any(layer.whole for layer in graph.layers)
    compared = {layer.name for layer in graph.layers if layer.kind == "comparison"}
    assert not compared & with_gradient(graph)
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = evaluate(graph, {"x": x}, tensors)[graph.outputs[0]]
    expected = model(x)
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(y.pow(2).sum(), [*model.parameters()]) for y in (found, expected)]
    torch.testing.assert_close(*slopes)


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mask": lambda x: x.masked_fill(torch.eye(4, 6, dtype=torch.bool), 0.0),
    "values": lambda x: torch.where(x > 0, x, torch.ones(4, 6)),
}


@pytest.mark.parametrize("what", MADE)
def test_masks_and_values_that_the_forward_makes_are_layers(what: str) -> None:
    assert_captured(calling(MADE[what]))
