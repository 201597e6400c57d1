from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.operator import Work, operator_of
from distbelief.graph.ops.call import operation_of
from distbelief.graph.region import Region
from distbelief.plans.compiler import with_gradient
from tests.distbelief.graph.ops.comparison import (
    call_of,
    check,
    inputs_of,
    parts_of,
    random,
    values_of,
)
from tests.distbelief.graph.reference import evaluate
from tests.distbelief.graph.zoo.catalogue import Applied


SHAPE = (4, 6)
OPERATIONS = {
    "aten.gelu.default": (SHAPE,),
    "aten.leaky_relu.default": (SHAPE,),
    "aten.rsub.Scalar": (SHAPE,),
    "aten.sub.Tensor": (SHAPE, (6,)),
    "aten.maximum.default": ((4, 1), SHAPE),
    "aten.addcmul.default": (SHAPE, (6,), (4, 1)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@given(data=st.data())
@settings(max_examples=10)
def test_an_elementwise_operation_in_parts_is_the_whole(
    operation: str, data: st.DataObject
) -> None:
    numbers = {"other": 0.3} if operation == "aten.rsub.Scalar" else {}
    layer = call_of(operation, SHAPE, *OPERATIONS[operation], **numbers)
    inputs = inputs_of(layer)
    given = [x[:, None] if x.dim() < 3 else x for x in inputs.values()]
    expected = operation_of(operation)(*given, *numbers.values())
    check(data, layer, expected, inputs)


@given(st.data())
@settings(max_examples=10)
def test_a_comparison_in_parts_is_ones_and_zeros(data: st.DataObject) -> None:
    x, y = random(2, *SHAPE).round(), random(2, 1, 6).round()
    layer = call_of("aten.le.Tensor", SHAPE, SHAPE, (1, 6))
    parts = {"call": data.draw(parts_of(layer))}
    found = values_of([layer], {"x": x, "y": y}, parts=parts)["call"]
    assert torch.equal(found, (x <= y).to(torch.int64))


def test_work_is_the_numbers_that_are_read_and_computed() -> None:
    part = Region(((0, 2), (1, 4)))
    compared = msgspec.structs.replace(
        call_of("aten.lt.Tensor", SHAPE, SHAPE, SHAPE), is_integer=True
    )
    wanted = Work(forward=6.0, backward=0.0, n_elements=18.0)
    assert operator_of(compared).work(compared, part) == wanted
    chosen = call_of("aten.where.self", SHAPE, SHAPE, SHAPE, SHAPE)
    wanted = Work(forward=6.0, backward=18.0, n_elements=24.0)
    assert operator_of(chosen).work(chosen, part) == wanted


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
    "a padded mask": lambda x: x * functional.pad(x > 0, (1, 0))[:, :, :6],
    "joined masks": lambda x: x * torch.cat([x > 0, x < -1], 1)[:, 2:6],
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
    compared = {layer.name for layer in graph.layers if layer.options.get("mask")}
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
