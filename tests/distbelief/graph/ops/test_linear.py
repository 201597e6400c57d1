"""Products of two computed matrices, in parts."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import GraphError
from distbelief.graph.operator import operator_of
from distbelief.graph.ops.linear import product_layer
from distbelief.graph.region import Region
from tests.distbelief.graph.ops.comparison import assert_parts_equal, leaf, partitions, source
from tests.distbelief.graph.ops.test_norms import random
from tests.distbelief.graph.reference import evaluate


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
    parts = data.draw(partitions(layer.region, operator_of(layer).cuts(layer)))
    assert_parts_equal(layer, parts, x @ y, {"x": x, "y": y}, {})


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


class Attending(nn.Module):
    """Attention written with `@` and `bmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 6)
        self.key = nn.Linear(8, 6)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return torch.bmm(torch.softmax(scores / 6**0.5, -1), torch.matmul(scores, x))


def test_attention_by_hand_is_captured_in_layers_that_can_be_split() -> None:
    model = Attending()
    graph = capture(model, [InputSpec(shape=(5, 8))])
    assert [layer.kind for layer in graph.layers].count("product") == 3
    assert not any(layer.whole for layer in graph.layers)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    values = evaluate(graph, {"x": x}, dict(model.named_parameters()))
    torch.testing.assert_close(values[graph.outputs[0]], model(x))


class Outer(nn.Module):
    @override
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


def test_products_that_broadcast_are_refused_with_both_shapes() -> None:
    specs = [InputSpec(shape=(3, 4, 5)), InputSpec(shape=(1, 5, 2))]
    with pytest.raises(GraphError, match=r"\[3, 4, 5\] and \[1, 5, 2\], the batch"):
        capture(Outer(), specs)


class Summing(nn.Module):
    """An einsum of two linear layers' outputs."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation
        self.one = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    @override
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, self.one(x), self.other(y))


EQUATIONS = {
    "bqhd,bkhd->bhqk": ((5, 2, 4), (3, 2, 4)),
    "bhqk, bkhd -> bqhd": ((2, 5, 4), (4, 2, 4)),
    "bij,bkj->bik": ((5, 4), (3, 4)),
    "bij,bjk->bki": ((5, 4), (4, 4)),
    "bi,bj->bij": ((4,), (4,)),
    "bij,bij->bi": ((5, 4), (5, 4)),
    "nxij,nyij->nxy": ((2, 3, 4), (5, 3, 4)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_an_einsum_of_two_is_a_product(equation: str) -> None:
    model = Summing(equation)
    shapes = EQUATIONS[equation]
    graph = capture(model, [InputSpec(shape=shape) for shape in shapes])
    assert [layer.kind for layer in graph.layers].count("product") == 1
    assert not any(layer.whole for layer in graph.layers)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, *shape, generator=generator) for shape in shapes)
    values = evaluate(graph, {"x": x, "y": y}, dict(model.named_parameters()))
    torch.testing.assert_close(values[graph.outputs[0]], model(x, y))


@pytest.mark.parametrize("equation", ["bij,bkl->bil", "...i,...i->...", "bij,bkj", "bii,bij->bj"])
def test_an_einsum_that_is_no_product_is_refused(equation: str) -> None:
    model = Summing(equation)
    with pytest.raises(GraphError, match="is no product of two outputs of layers"):
        capture(model, [InputSpec(shape=(4, 4)), InputSpec(shape=(4, 4))])
