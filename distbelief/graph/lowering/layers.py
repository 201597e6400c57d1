"""Lowering rules for layers with weights, matrix products and attention."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from distbelief.graph.graph import GraphError, Layer, TensorUse, uses
from distbelief.graph.lowering.lower import (
    Held,
    Lowerer,
    NotSplitError,
    Operation,
    Results,
    Value,
    lowers,
    lowers_module,
)
from distbelief.graph.lowering.pointwise import pointwise
from distbelief.graph.lowering.views import expanded_layer, permuted, viewed
from distbelief.graph.module_calls import EXPERTS, LeafCall, is_experts
from distbelief.graph.ops.attention import attention_layer, multi_head_attention_layers
from distbelief.graph.ops.linear import product_layer
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.region import Shape


def _connected(
    op: Operation, value: Value, weight: Held, bias: TensorUse | None, *, turned: bool
) -> Value:
    # value @ weight^T, or value @ weight if `turned`.
    value.dim(-1)  # not the batch
    refuse_integers(op, value)
    n_outputs = weight.use.shape[1 if turned else 0]
    tensors = {"weight": weight.use} | ({} if bias is None else {"bias": bias})
    return op.add(
        "linear",
        [value],
        (*value.layer.shape[:-1], n_outputs),
        options={"transposed": True} if turned else {},
        tensors=tensors,
    )


def refuse_integers(op: Operation, value: Value) -> None:
    """Raise `GraphError` for integers where torch would raise in a real forward."""
    if value.layer.is_integer:
        raise GraphError(
            f"{op.name} cannot be run on {value.layer.name!r}. It gets integers: embed them "
            "first, or give the input as floats"
        )


@lowers("linear")
def linear(op: Operation) -> object:
    weight, bias = op["weight"], op["bias"]
    if isinstance(weight, Held) and (bias is None or isinstance(bias, Held)):
        return _connected(op, op.value("input"), weight, op.use("bias"), turned=weight.turned)
    weight = op.value("weight")
    found = _product(op, op.value("input"), permuted(op, weight, [1, 0]))
    return found if bias is None else pointwise(op, [found, op.value("bias")], "add")


@lowers("addmm", "baddbmm")
def product_and_sum(op: Operation) -> object:
    one, other = (("mat1", "mat2"), ("batch1", "batch2"))["batch1" in op.arguments]
    weight = op[other]
    plain = (op["beta"], op["alpha"]) == (1, 1)
    if plain and isinstance(weight, Held) and isinstance(op["self"], Held):
        return _connected(op, op.value(one), weight, op.use("self"), turned=not weight.turned)
    found = _product(op, op.value(one), op.value(other))
    terms = [found, op.value("self")]
    for index, word in enumerate(("alpha", "beta")):
        if op[word] != 1:
            terms[index] = pointwise(op, [terms[index]], "multiply_number", op.number(word))
    return pointwise(op, terms, "add")


@lowers("matmul", "mm", "bmm", "mv")
def product(op: Operation) -> object:
    left, right = op["self"], op.arguments.get("other", op.arguments.get("mat2"))
    one = op.value("self")
    if isinstance(right, Held) and len(right.use.shape) == 2 and one.batch is not None:
        return _connected(op, one, right, None, turned=not right.turned)
    return _product(op, op.lowerer.as_value(left), op.lowerer.as_value(right))


def _product(op: Operation, one: Value, other: Value) -> Value:
    one.dim(-1)  # not the batch
    if one.batch is not None and other.batch is None and other.n_dims == 2:
        shape = one.layer.shape
        rows = one.to(op.reshaped(one, (math.prod(shape[:-1]), shape[-1])))
        layer = product_layer(op.free_name, rows.layer, other.layer)
        found = one.to(op.builder[op.builder.add_layer(layer)])
        return one.to(op.reshaped(found, (*shape[:-1], other.layer.shape[-1])))
    one.dim(-2), other.dim(-1), other.dim(-2)
    like, rest = (one, other) if one.batch is not None else (other, one)
    if rest.batch is not None:
        alike = replace(one, layer=other.layer) == other and one.n_dims == other.n_dims
    else:  # its dimensions are after the batch
        alike = like.batch is None or rest.n_dims < like.n_dims - like.batch
    if not alike:
        raise NotSplitError("its tensors are arranged in different ways")
    lead = tuple(torch.broadcast_shapes(one.layer.shape[:-2], other.layer.shape[:-2]))
    layers = [expanded_layer(op, x, (*lead, *x.layer.shape[-2:])).layer for x in (one, other)]
    return like.to(op.builder[op.builder.add_layer(product_layer(op.free_name, *layers))])


# --- einsum: a product, and permutations before and after it ---
#
#     bqhd, bkhd -> bhqk      of both and of the result    h       before the last two
#                             of one and of the result     q, k    rows, columns
#                             of both, not of the result   d       summed

_EQUATION: Final = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


@lowers("einsum")
def einsum(op: Operation) -> object:
    match = _EQUATION.fullmatch(op["equation"].replace(" ", ""))
    if match is None:
        raise NotSplitError(f"{op['equation']!r} is no product of two tensors")
    one, other, result = match.groups()
    left, right = op["tensors"]
    if any(len(set(word)) < len(word) for word in (one, other, result)):
        raise NotSplitError("a letter stands twice")
    if isinstance(right, Held) and len(other) == 2:
        if one[:-1] != result[:-1] or set(other) != {one[-1], result[-1]}:
            raise NotSplitError("it sums over something else than the last dimension")
        value = op.lowerer.as_value(left)
        turned = (other[0] == one[-1]) != right.turned
        return _connected(op, value, right, None, turned=turned)
    values = [op.lowerer.as_value(given) for given in (left, right)]
    alone = set(one) ^ set(other)
    alike = one[0] == other[0] == result[0] and alone <= set(result)
    if not (alike and all(value.is_plain and value.batch == 0 for value in values)):
        raise NotSplitError("it is no product of two outputs of layers, each with the batch first")
    return _by_letters(op, values, one[1:], other[1:], result[1:])


def _by_letters(op: Operation, values: list[Value], one: str, other: str, result: str) -> Value:
    extents = dict(zip(one + other, (*values[0].layer.shape, *values[1].layer.shape), strict=True))

    def shape(letters: str) -> Shape:
        return tuple(extents[letter] for letter in letters)

    def ordered(value: Value, before: str, after: str) -> Value:
        return permuted(op, value, [0, *(before.index(letter) + 1 for letter in after)])

    lead = "".join(letter for letter in one if letter in other and letter in result)
    rows = "".join(letter for letter in one if letter not in other)
    columns = "".join(letter for letter in other if letter not in one)
    summed = "".join(letter for letter in one if letter in other and letter not in result)
    n_rows, n_columns, n_summed = (math.prod(shape(word)) for word in (rows, columns, summed))
    left = ordered(values[0], one, lead + rows + summed)
    left = left.to(op.reshaped(left, (*shape(lead), n_rows, n_summed)))
    right = ordered(values[1], other, lead + summed + columns)
    right = right.to(op.reshaped(right, (*shape(lead), n_summed, n_columns)))
    layer = product_layer(op.free_name, left.layer, right.layer)
    found = left.to(op.builder[op.builder.add_layer(layer)])
    found = found.to(op.reshaped(found, shape(lead + rows + columns)))
    return ordered(found, lead + rows + columns, result)


# --- embeddings ---


@lowers("embedding")
def embedding(op: Operation) -> object:
    use = op.use("weight")
    assert use is not None
    if op["scale_grad_by_freq"]:
        raise NotSplitError("it scales gradients by frequency")
    words = op["indices"]
    if isinstance(words, torch.Tensor) and (rows := _rows(op, use, words)) is not None:
        return rows
    value = op.value("indices")
    padding = op["padding_idx"]
    return op.add(
        "embedding",
        [value],
        (*value.layer.shape, use.shape[1]),
        options={"padding": None if padding < 0 else padding},
        tensors={"weight": use},
    )


def _rows(op: Operation, use: TensorUse, words: torch.Tensor) -> Value | None:
    # Rows of a table that follow each other and do not depend on the sample: arange(first, last).
    listed: list[int] = words.flatten().tolist()
    first = listed[0] if listed else 0
    if listed != list(range(first, first + len(listed))) or words.shape[:-1].numel() > 1:
        return None
    table = op.lowerer.as_value(Held(use))
    part = op.add(
        "slice",
        [table],
        (len(listed), use.shape[1]),
        options={"starts": (first, 0), "steps": (1, 1)},
    )
    return part.to(op.reshaped(part, (*words.shape, use.shape[1])))


@lowers("index")
def index(op: Operation) -> object:
    # Rows of a table: a relative position bias.
    table, words = op["self"], op["indices"]
    *before, last = words
    shape = list(op.result.shape)
    if (
        not any(before)
        and isinstance(last, torch.Tensor)
        and last.dtype == torch.int64
        # Words that are the same for every sample may stand for all of them.
        and not any(isinstance(n, torch.SymInt) for n in shape[len(before) :][: last.dim()])
    ):
        arguments = {"self": table, "dim": len(before), "index": last.flatten()}
        shape[len(before) : len(before) + last.dim()] = [last.numel()]
        chosen = replace(
            op,
            target=torch.ops.aten.index_select.default,
            arguments=arguments,
            result=op.result.view(shape),
        )
        return viewed(op, op.lowerer.as_value(op.lowerer.in_parts(chosen)), op.result.shape)
    if not (isinstance(table, Held) and len(table.use.shape) == 2 and len(words) == 1):
        raise NotSplitError("it is no choice of rows of a table")
    value = op.lowerer.as_value(words[0])
    return op.add(
        "embedding",
        [value],
        (*value.layer.shape, table.use.shape[1]),
        options={"padding": None},
        tensors={"weight": table.use},
    )


# --- attention ---


@lowers("scaled_dot_product_attention")
def attention(op: Operation) -> object:
    query, key, value = (op.value(word) for word in ("query", "key", "value"))
    if any(x.batch is not None and x.batch >= x.n_dims - 2 for x in (query, key, value)):
        raise GraphError(
            f"{op.name} mixes samples, because the batch is not before heads and positions: give "
            "attention batch_first=True"
        )
    if query.batch != 0 or any(query.to(x.layer) != x for x in (key, value)):
        raise NotSplitError("the batch is not the first dimension of all")
    if op.arguments.get("enable_gqa"):
        key, value = (_repeated_heads(op, x, query) for x in (key, value))
    causal, mask = masked(
        op.lowerer, op.name, op["attn_mask"], query.n_dims, true_hides=False, like=query
    )
    if any(x.layer.shape[:-2] != query.layer.shape[:-2] for x in (key, value)):
        raise NotSplitError("its heads differ")
    layer = attention_layer(
        op.free_name,
        [query.layer, key.layer, value.layer, *([] if mask is None else [mask])],
        causal=causal or bool(op["is_causal"]),
        scale=op["scale"],
        dropout=float(op["dropout_p"]),
    )
    return query.to(op.builder[op.builder.add_layer(layer)])


def _repeated_heads(op: Operation, value: Value, query: Value) -> Value:
    # Each key-value head serves a group of query heads.
    if not value.is_plain:
        raise NotSplitError("the batch is not its first dimension")
    heads, *rest = value.layer.shape
    group = query.layer.shape[0] // heads
    apart = value.to(op.reshaped(value, (heads, 1, *rest)))
    repeated = op.add("expand", [apart], (heads, group, *rest))
    return repeated.to(op.reshaped(repeated, (heads * group, *rest)))


def masked(
    lowerer: Lowerer,
    name: str,
    mask: object,
    n_dims: int,
    *,
    true_hides: bool,
    like: Value | None = None,
) -> tuple[bool, Layer | None]:
    """Return whether a mask is causal, or the layer that is added to the scores.

    Args:
        lowerer: What adds layers.
        name: Name of the attention.
        mask: None, a tensor that the forward makes, or a value.
        n_dims: torch's dimensions of the scores.
        true_hides: Whether True in a mask hides (torch's modules) or shows (its function).
        like: A value that the mask's batch must be arranged like; by default first and alone.
    """
    if mask is None:
        return False, None
    if isinstance(mask, torch.Tensor) and _is_causal(mask, true_hides=true_hides):
        return True, None
    if (
        isinstance(mask, torch.Tensor)
        and mask.dtype == torch.bool
        and bool((mask != true_hides).all())
    ):
        return False, None  # it hides nothing
    value = lowerer.as_value(mask)
    is_mask = lowerer.is_mask(value.layer)
    layer = value.layer
    if value.batch is None and value.n_dims == n_dims:
        if layer.shape[0] != 1:
            raise NotSplitError("its mask has as many samples as the batch")
        row = reshape_layer(lowerer.builder.free_name(f"{name}.mask"), layer, shape=layer.shape[1:])
        layer = lowerer.builder[lowerer.builder.add_layer(row)]
    elif (
        value.batch is not None
        and not value.is_plain
        and (like is None or like.to(value.layer) != value)
    ):
        raise NotSplitError("its mask has the batch elsewhere")
    if not is_mask and not layer.is_integer:
        return False, layer
    hidden = {"yes": -math.inf, "no": 0.0} if true_hides else {"yes": 0.0, "no": -math.inf}
    added = lowerer.builder.add(f"{name}.mask", "where", [layer.name], layer.shape, options=hidden)
    return False, lowerer.builder[added]


def _is_causal(mask: torch.Tensor, *, true_hides: bool) -> bool:
    # A mask made by the forward that hides all later keys and nothing else.
    if mask.dim() < 2 or mask.shape[:-2].numel() != 1:
        return False
    rows = mask.reshape(mask.shape[-2:])
    later = torch.ones(rows.shape, dtype=torch.bool).triu(1)
    if rows.dtype == torch.bool:
        return torch.equal(rows, later if true_hides else ~later)
    hidden = torch.zeros(rows.shape, dtype=rows.dtype).masked_fill(later, -math.inf)
    return torch.equal(rows, hidden)


@lowers_module(nn.MultiheadAttention)
def multi_head_attention(
    lowerer: Lowerer, module: nn.Module, call: LeafCall, inputs: Sequence[object]
) -> object:
    # The attention weights, the second result, are not kept.
    assert isinstance(module, nn.MultiheadAttention)
    arguments, keywords = call.arguments(inputs)
    words = (
        *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask"),
        *("average_attn_weights", "is_causal"),
    )
    given: dict[str, Any] = {**dict(zip(words, arguments, strict=False)), **keywords}
    sources = [lowerer.as_value(given[word]) for word in words[:3]]
    if not all(value.is_plain for value in sources):
        raise NotSplitError("the batch is not the first dimension of its inputs")
    hint = bool(given.get("is_causal"))
    causal, mask = masked(lowerer, call.path, given.get("attn_mask"), 4, true_hides=True)
    mask = _with_padding(lowerer, call.path, None if hint else mask, given.get("key_padding_mask"))
    layers = multi_head_attention_layers(
        lowerer.builder.free_name(call.path),
        (sources[0].layer, sources[1].layer, sources[2].layer),
        n_heads=module.num_heads,
        tensors=uses(module, call.path),
        causal=causal or hint,
        mask=mask,
        dropout=module.dropout if module.training else 0.0,
    )
    name = lowerer.builder.extend(layers)

    def make(index: int) -> Value:
        if index:
            raise NotSplitError("weights of attention are used, and have no split rule")
        return Value(lowerer.builder[name])

    return Results(make)


def _with_padding(lowerer: Lowerer, name: str, mask: Layer | None, padding: object) -> Layer | None:
    # What is added to the scores so that padding keys are hidden, and `mask`.
    if padding is None:
        return mask
    value = lowerer.as_value(padding)
    if not value.is_plain:
        raise NotSplitError("its padding mask does not depend on the sample")
    builder, added = lowerer.builder, value.layer
    if lowerer.is_mask(added):
        hidden = {"yes": -math.inf, "no": 0.0}
        added = builder[
            builder.add(f"{name}.padding", "where", [added.name], added.shape, options=hidden)
        ]
    keys = reshape_layer(builder.free_name(f"{name}.keys"), added, shape=(1, 1, *added.shape))
    builder.add_layer(keys)
    if mask is None:
        return keys
    both = builder.add(
        f"{name}.mask",
        "pointwise",
        [mask.name, keys.name],
        tuple(torch.broadcast_shapes(mask.shape, keys.shape)),
        options={"function": "add"},
    )
    return builder[both]


# --- mixtures of experts ---


@lowers_module(is_experts)
def experts(
    lowerer: Lowerer, module: nn.Module, call: LeafCall, inputs: Sequence[object]
) -> object:
    arguments, keywords = call.arguments(inputs)
    given = [*arguments, *keywords.values()]
    if list(keywords) not in ([], list(EXPERTS[len(arguments) :])):
        raise NotSplitError("its arguments are in another order")
    x, chosen, weights = (lowerer.as_value(value) for value in given)
    if any(x.to(value.layer) != value for value in (chosen, weights)):
        raise NotSplitError("its tensors are arranged in different ways")
    builder = lowerer.builder
    tensors = uses(module, call.path)
    n_experts = next(iter(tensors.values())).shape[0]
    shape = (*chosen.layer.shape[:-1], n_experts)
    names = [chosen.layer.name, weights.layer.name]
    routing = builder.add(f"{call.path}.routing", "routing", names, shape)
    name = builder.add(
        call.path,
        "experts",
        [routing, x.layer.name, chosen.layer.name],
        x.layer.shape,
        options={"module": call.path},
        tensors=tensors,
    )
    return [x.to(builder[name])]
