from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import operator_of
from distbelief.graph.ops.linear import product_layer
from distbelief.graph.region import Region, Shape
from tests.distbelief.graph.ops.comparison import (
    check,
    inputs_of,
    layer_of,
    leaf,
    random,
    source,
    tensors_of,
)
from tests.distbelief.graph.reference import evaluate


@st.composite
def linears(draw: st.DrawFn) -> Layer:
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    n_inputs, n_outputs = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    transposed = draw(st.booleans())
    matrix = (n_inputs, n_outputs) if transposed else (n_outputs, n_inputs)
    words = {"weight": matrix} | draw(st.sampled_from([{}, {"bias": (n_outputs,)}]))
    options: dict[str, Any] = {"transposed": True} if transposed else {}
    return layer_of("linear", (*leading, n_outputs), (*leading, n_inputs), words=words, **options)


@given(linears(), st.data())
def test_a_linear_layer_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    inputs, tensors = inputs_of(layer), tensors_of(layer)
    weight = tensors["weight"].t() if layer.options else tensors["weight"]
    expected = functional.linear(inputs["x"], weight, tensors.get("bias"))
    check(data, layer, expected, inputs, tensors)


extents = st.integers(1, 4)


@given(st.lists(extents, max_size=2), st.tuples(extents, extents, extents), st.data())
@settings(max_examples=40)
def test_a_product_in_parts_is_the_whole(
    lead: list[int], sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    rows, inner, columns = sizes
    x = leaf(random(2, *lead, rows, inner))
    y = leaf(random(2, *lead, inner, columns))
    layer = product_layer("p", source("x", *lead, rows, inner), source("y", *lead, inner, columns))
    check(data, layer, x @ y, {"x": x, "y": y})


def test_a_part_reads_its_rows_and_its_columns() -> None:
    layer = product_layer("p", source("x", 4, 6, 5), source("y", 4, 5, 7))
    part = Region(((1, 3), (2, 4), (0, 6)))
    assert operator_of(layer).reads(layer, part) == (
        Region(((1, 3), (2, 4), (0, 5))),
        Region(((1, 3), (0, 5), (0, 6))),
    )
    work = operator_of(layer).work(layer, part)
    assert (work.forward, work.backward) == (2 * 5 * 24, 4 * 5 * 24)
    assert work.n_elements == 2 * 2 * 5 + 2 * 5 * 6 + 24


class Calling(nn.Module):
    """A function of two linear layers' outputs."""

    def __init__(self, function: Callable[..., torch.Tensor], n_inputs: int, n: int) -> None:
        super().__init__()
        self.one = nn.Linear(n_inputs, n)
        self.other = nn.Linear(n_inputs, n)
        self.function = function

    @override
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(self.one(x), self.other(y), x)


def assert_products(model: nn.Module, *shapes: Shape, n_products: int, whole: bool = False) -> None:
    graph = capture(model, [InputSpec(shape=shape) for shape in shapes])
    assert [layer.kind for layer in graph.layers].count("product") == n_products
    assert any(layer.whole for layer in graph.layers) == whole
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, *shape, generator=generator) for shape in shapes)
    values = evaluate(graph, {"x": x, "y": y}, dict(model.named_parameters()))
    torch.testing.assert_close(values[graph.outputs[0]], model(x, y))


def test_attention_by_hand_is_captured_in_layers_that_can_be_split() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2)
        return torch.bmm(torch.softmax(scores / 6**0.5, -1), torch.matmul(scores, x))

    assert_products(Calling(attend, 8, 6), (5, 8), (5, 8), n_products=3)


def test_a_factor_is_repeated_where_the_other_has_more_matrices() -> None:
    model = Calling(lambda x, y, _: x @ y.transpose(-1, -2), 5, 5)
    assert_products(model, (3, 4, 5), (1, 2, 5), n_products=1)


def summing(equation: str) -> nn.Module:
    return Calling(lambda x, y, _: torch.einsum(equation, x, y), 4, 4)


EQUATIONS = {
    "bqhd,bkhd->bhqk": ((5, 2, 4), (3, 2, 4)),
    "bhqk, bkhd -> bqhd": ((2, 5, 4), (4, 2, 4)),
    "bij,bkj->bik": ((5, 4), (3, 4)),
    "bij,bjk->bki": ((5, 4), (4, 4)),
    "bi,bj->bij": ((4,), (4,)),
    "bij,bij->bi": ((5, 4), (5, 4)),
    "nxij,nyij->nxy": ((2, 3, 4), (5, 3, 4)),
    "bij,bkl->bil": ((5, 4), (2, 4)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_an_einsum_of_two_is_a_product(equation: str) -> None:
    assert_products(summing(equation), *EQUATIONS[equation], n_products=1)


@pytest.mark.parametrize("equation", ["...i,...i->...", "bii,bij->bj"])
def test_an_einsum_that_is_no_product_is_computed_whole(equation: str) -> None:
    assert_products(summing(equation), (4, 4), (4, 4), n_products=0, whole=True)


def test_an_einsum_that_joins_samples_is_refused() -> None:
    with pytest.raises(GraphError, match="einsum joins samples"):
        capture(summing("bij,bkj"), [InputSpec(shape=(4, 4))] * 2)
