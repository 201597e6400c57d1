import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional

from distbelief.graph.graph import GraphError
from distbelief.graph.operator import Step, operator_of
from distbelief.graph.ops.attention import attention_layer, multi_head_attention_layers
from distbelief.graph.region import Region
from tests.distbelief.graph.ops.comparison import (
    assert_reads_are_tight,
    check,
    leaf,
    random,
    randomised,
    source,
    uses_of,
    values_of,
)


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


@given(st.data())
@settings(max_examples=20)
def test_multi_head_attention_in_parts_is_the_module(data: st.DataObject) -> None:
    bias, cross, masked = (data.draw(st.booleans()) for _ in range(3))
    n_features, n_heads = 6, data.draw(st.sampled_from([1, 2, 3]))
    sizes = {"kdim": 5, "vdim": 4} if cross else {}
    module = nn.MultiheadAttention(n_features, n_heads, bias=bias, batch_first=True, **sizes)
    randomised(module)
    inputs = {"q": leaf(random(2, 3, n_features))}
    allowed = None
    if masked:
        allowed = torch.zeros(3, 3, dtype=torch.float64)
        allowed = allowed.masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    if cross:
        inputs["k"] = leaf(random(2, 3, 5, seed=1))
        inputs["v"] = leaf(random(2, 3, 4, seed=2))
    operands = [inputs.get(name, inputs["q"]) for name in "qkv"]
    expected, _ = module(*operands, attn_mask=allowed, need_weights=False)
    q, k, v = (
        source(name if name in inputs else "q", *value.shape[1:])
        for name, value in zip("qkv", operands, strict=True)
    )
    layers = multi_head_attention_layers(
        "attention", (q, k, v), n_heads=n_heads, tensors=uses_of(module), causal=masked
    )
    check(data, layers, expected, inputs, dict(module.named_parameters()))


def test_heads_are_whole_rows_of_the_projections() -> None:
    """Split by heads, linear, reshape and permute read only their own parts."""
    module = nn.MultiheadAttention(8, 4, batch_first=True)
    x = source("x", 5, 8)
    layers = multi_head_attention_layers("a", (x, x, x), n_heads=4, tensors=uses_of(module))
    named = {layer.name: layer for layer in layers}
    first, apart, projected = (named[n] for n in ("a.k.first", "a.k.heads", "a.k"))
    part = Region(((1, 3), (0, 5), (0, 2)))
    (part,) = operator_of(first).reads(first, part)
    (part,) = operator_of(apart).reads(apart, part)
    assert part == Region(((0, 5), (2, 6)))
    uses = operator_of(projected).uses(projected, part)
    assert uses["weight"] == Region(((8 + 2, 8 + 6), (0, 8)))
    assert uses["bias"] == Region(((8 + 2, 8 + 6),))


def test_biases_added_to_keys_are_refused() -> None:
    x = source("x", 5, 8)
    tensors = uses_of(nn.MultiheadAttention(8, 4, add_bias_kv=True))
    with pytest.raises(GraphError, match="add_bias_kv"):
        multi_head_attention_layers("a", (x, x, x), n_heads=4, tensors=tensors)
