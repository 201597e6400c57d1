import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, LayerGraph
from distbelief.graph.operator import Step, operator_of
from distbelief.graph.region import Region
from tests.distbelief.graph.ops.comparison import (
    assert_reads_are_tight,
    attention_layer,
    check,
    leaf,
    random,
    randomised,
    source,
    values_of,
)
from tests.distbelief.graph.zoo.catalogue import Applied


@given(
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
    st.tuples(*[st.integers(1, 4)] * 4),
    st.sampled_from([None, 0.4]),
    st.data(),
)
@settings(max_examples=40)
def test_attention_in_parts_is_the_whole(
    heads: tuple[int, ...],
    extents: tuple[int, int, int, int],
    scale: float | None,
    data: st.DataObject,
) -> None:
    causal = data.draw(st.booleans())
    n_queries, n_keys, size, size_out = extents
    inputs = {
        "q": leaf(random(2, *heads, n_queries, size)),
        "k": leaf(random(2, *heads, n_keys, size, seed=1)),
        "v": leaf(random(2, *heads, n_keys, size_out, seed=2)),
    }
    allowed = torch.zeros(n_queries, n_keys, dtype=torch.float64)
    if causal:
        later = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(1)
        allowed = allowed.masked_fill(later, -math.inf)
    if data.draw(st.booleans()):
        ones = tuple(data.draw(st.sampled_from([1, n])) for n in heads)
        shape = (*ones, n_queries, n_keys)[data.draw(st.integers(0, len(ones))) :]
        inputs["m"] = leaf(random(2, *shape, seed=3))
        allowed = allowed + inputs["m"].view(2, *(1,) * (len(heads) + 2 - len(shape)), *shape)
    expected = functional.scaled_dot_product_attention(
        inputs["q"], inputs["k"], inputs["v"], attn_mask=allowed, scale=scale
    )
    sources = [source(name, *value.shape[1:]) for name, value in inputs.items()]
    layer = attention_layer("a", sources, causal=causal, scale=scale)
    check(data, layer, expected, inputs)


def test_a_causal_part_reads_no_keys_after_its_last_query() -> None:
    layer = attention_layer("a", [source(name, 4, 8, 3) for name in "qkv"], causal=True)
    part = Region(((1, 3), (2, 5), (0, 3)))
    _, keys, values = operator_of(layer).reads(layer, part)
    assert keys == values == Region(((1, 3), (0, 5), (0, 3)))
    inputs = {name: random(1, 4, 8, 3, seed=ord(name)) for name in "qkv"}
    assert_reads_are_tight(layer, part, inputs)
    whole = operator_of(layer).work(layer, layer.region)
    assert operator_of(layer).work(layer, part).forward < whole.forward / 8


@given(st.data())
@settings(max_examples=30)
def test_weights_that_are_dropped_are_the_same_in_any_parts(data: st.DataObject) -> None:
    inputs = {name: leaf(random(2, 3, 4, 2, seed=ord(name))) for name in "qkv"}
    sources = [source(name, 3, 4, 2) for name in "qkv"]
    layer = attention_layer("a", sources, causal=data.draw(st.booleans()), dropout=0.4)
    step = Step(training=True, seed=5)
    whole = values_of([layer], inputs, step=step)["a"]
    check(data, layer, whole, inputs, step=step)
    assert not torch.allclose(whole, values_of([layer], inputs)["a"])


def test_dropped_weights_leave_the_mean_as_it_was() -> None:
    inputs = {name: random(1, 2, 3, 2, seed=ord(name)).expand(2000, -1, -1, -1) for name in "qkv"}
    layer = attention_layer("a", [source(name, 2, 3, 2) for name in "qkv"], dropout=0.3)
    dropped = values_of([layer], inputs, step=Step(training=True))["a"]
    undropped = values_of([layer], inputs)["a"]
    assert (dropped.mean(0) - undropped[0]).abs().max() < 0.1


class Attending(nn.Module):
    """Attention of any kind; `hides` is a mask, or "weights" for the second result."""

    def __init__(self, *, cross: bool, hides: str) -> None:
        super().__init__()
        sizes = {"kdim": 5, "vdim": 4} if cross else {}
        self.attend = nn.MultiheadAttention(6, 3, bias=not cross, batch_first=True, **sizes)
        self.cross, self.hides = cross, hides

    @override
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        given = (q, k, v) if self.cross else (q, q, q)
        later = torch.ones(3, 3).triu(1).bool()
        padding = (q[:, :, 0] > 0) & torch.tensor([False, True, True])
        match self.hides:
            case "later":
                return self.attend(*given, attn_mask=later, is_causal=True)[0]
            case "padding":
                return self.attend(*given, key_padding_mask=padding)[0]
            case "both":
                masks = {"key_padding_mask": padding, "attn_mask": later}
                return self.attend(*given, **masks, is_causal=True)[0]
            case "by head":
                mask = padding[:, None, None].expand(-1, 3, 3, 3).flatten(0, 1)
                return self.attend(*given, attn_mask=mask)[0]
            case "weights":
                attended, weights = self.attend(*given, attn_mask=later)
                return weights @ attended
            case _:
                return self.attend(*given)[0]


@cache
def attending(*, cross: bool, hides: str) -> tuple[nn.Module, LayerGraph]:
    model = randomised(Attending(cross=cross, hides=hides))
    specs = [InputSpec(shape=(3, size)) for size in (6, 5, 4)]
    return model, capture(model, specs)


@pytest.mark.each_value
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("hides", ["", "later", "padding", "both", "by head", "weights"])
@given(data=st.data())
@settings(max_examples=5)
def test_multi_head_attention_in_parts_is_the_module(
    data: st.DataObject, hides: str, *, cross: bool
) -> None:
    model, graph = attending(cross=cross, hides=hides)
    inputs = {w: leaf(random(2, 3, n, seed=n)) for w, n in {"q": 6, "k": 5, "v": 4}.items()}
    layers = [layer for layer in graph.layers if layer.kind != INPUT]
    assert not any(layer.whole for layer in layers)
    assert "attention" in {layer.kind for layer in layers}
    check(data, layers, model(**inputs), inputs, dict(model.named_parameters()))


def test_heads_are_whole_rows_of_the_projections() -> None:
    """Split by heads, linear, reshape and permute read only their own parts."""
    model = nn.MultiheadAttention(8, 4, batch_first=True)
    graph = capture(Applied(lambda x, f: f(x, x, x)[0], f=model), [InputSpec(shape=(5, 8))])
    (attention,) = [layer for layer in graph.layers if layer.kind == "attention"]
    first = graph[attention.inputs[1]]
    apart = graph[first.inputs[0]]
    projected = graph[apart.inputs[0]]
    part = Region(((1, 3), (0, 5), (0, 2)))
    (part,) = operator_of(first).reads(first, part)
    (part,) = operator_of(apart).reads(apart, part)
    assert part == Region(((0, 5), (2, 6)))
    uses = operator_of(projected).uses(projected, part)
    assert uses["weight"] == Region(((8 + 2, 8 + 6), (0, 8)))
    assert uses["bias"] == Region(((8 + 2, 8 + 6),))
