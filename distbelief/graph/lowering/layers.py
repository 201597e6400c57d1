"""Lowering rules for layers with weights, matrix products and attention."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import nn

from distbelief.graph.graph import GraphError, Layer, Option, TensorUse, uses
from distbelief.graph.lowering.calls import call_in_parts, elementwise
from distbelief.graph.lowering.operation import Context, Operation, lowers, lowers_module
from distbelief.graph.lowering.values import Held, NotSplitError, Value, is_mask
from distbelief.graph.lowering.views import expanded_layer, lined_up, permuted, sliced, viewed
from distbelief.graph.module_calls import EXPERTS, LeafCall, is_experts
from distbelief.graph.ops.linear import product_layer
from distbelief.graph.region import Shape


_ADD: Final = torch.ops.aten.add.Tensor
_MULTIPLY: Final = torch.ops.aten.mul.Tensor


class Rows(NamedTuple):
    """Rows of a tensor of the model that follow each other."""

    use: TensorUse
    first: int
    n: int
    turned: bool = False  # columns


def _rows(op: Operation, given: object) -> Rows | None:
    # What an argument is: all rows of a tensor, or a slice of them (attention keeps queries, keys
    # and values in one tensor).
    if isinstance(given, Held):
        return Rows(given.use, 0, given.use.shape[int(given.turned)], given.turned)
    if not isinstance(given, Value) or given.layer.kind != "slice":
        return None
    layer, source = given.layer, op.builder[given.layer.inputs[0]]
    all_columns = source.shape[1:] == layer.shape[1:] and set(layer.integers("steps")) == {1}
    if source.kind != "parameter" or not all_columns:
        return None
    return Rows(source.tensors["value"], layer.integers("starts")[0], layer.shape[0])


def _connected(op: Operation, value: Value, weight: Rows, bias: Rows | None = None) -> Value:
    # value @ weight^T + bias
    value.dim(-1)  # not the batch
    refuse_integers(op, value)
    tensors = {"weight": weight.use} | ({} if bias is None else {"bias": bias.use})
    options: dict[str, Option] = {"transposed": True} if weight.turned else {}
    if weight.first:
        options["first_row"] = weight.first
    if bias is not None and bias.first:
        options["first_row_of_bias"] = bias.first
    shape = (*value.layer.shape[:-1], weight.n)
    return op.add("linear", [value], shape, options=options, tensors=tensors)


def refuse_integers(op: Operation, value: Value) -> None:
    """Raise `GraphError` for integers where torch would raise in a real forward."""
    if value.layer.is_integer:
        raise GraphError(
            f"{op.name} cannot be run on {value.layer.name!r}. It gets integers: embed them "
            "first, or give the input as floats"
        )


@lowers("linear")
def linear(op: Operation) -> object:
    weight, bias = _rows(op, op["weight"]), _rows(op, op["bias"])
    if weight is not None and (bias is not None or op["bias"] is None):
        return _connected(op, op.value("input"), weight, bias)
    found = _product(op, op.value("input"), permuted(op, op.value("weight"), [1, 0]))
    return found if op["bias"] is None else elementwise(op, _ADD, found, op.value("bias"))


@lowers("addmm", "baddbmm")
def product_and_sum(op: Operation) -> object:
    one, other = (("mat1", "mat2"), ("batch1", "batch2"))["batch1" in op.arguments]
    weight, bias = op[other], op["self"]
    plain = (op["beta"], op["alpha"]) == (1, 1)
    if plain and isinstance(weight, Held) and isinstance(bias, Held):
        return _connected(op, op.value(one), _turned(weight), _rows(op, bias))
    terms = [_product(op, op.value(one), op.value(other)), op.value("self")]
    for index, word in enumerate(("alpha", "beta")):
        if op[word] != 1:
            terms[index] = elementwise(op, _MULTIPLY, terms[index], op[word])
    return elementwise(op, _ADD, *terms)


@lowers("matmul", "mm", "bmm", "mv")
def product(op: Operation) -> object:
    left, right = op["self"], op.arguments.get("other", op.arguments.get("mat2"))
    one = op.value("self")
    if isinstance(right, Held) and len(right.use.shape) == 2 and one.batch is not None:
        return _connected(op, one, _turned(right))
    return _product(op, op.context.as_value(left), op.context.as_value(right))


def _turned(held: Held) -> Rows:
    return Rows(held.use, 0, held.use.shape[int(not held.turned)], not held.turned)


def _product(op: Operation, one: Value, other: Value) -> Value:
    one.dim(-1)  # not the batch
    if one.batch is not None and other.batch is None and other.n_dims == 2:
        shape = one.layer.shape
        rows = one.to(op.reshaped(one, (math.prod(shape[:-1]), shape[-1])))
        layer = product_layer(op.free_name, rows.layer, other.layer)
        found = one.to(op.builder.add_layer(layer))
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
    return like.to(op.builder.add_layer(product_layer(op.free_name, *layers)))


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
        value = op.context.as_value(left)
        rows = _turned(right) if other[0] == one[-1] else _rows(op, right)
        assert rows is not None
        return _connected(op, value, rows)
    values = [op.context.as_value(given) for given in (left, right)]
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
    found = left.to(op.builder.add_layer(layer))
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
    if isinstance(words, torch.Tensor) and (rows := _rows_of_table(op, use, words)) is not None:
        return rows
    padding = op["padding_idx"]
    return _looked_up(op, use, op.value("indices"), padding=None if padding < 0 else padding)


def _looked_up(op: Operation, use: TensorUse, words: Value, *, padding: int | None = None) -> Value:
    shape, options = (*words.layer.shape, use.shape[1]), {"padding": padding}
    return op.add("embedding", [words], shape, options=options, tensors={"weight": use})


def _rows_of_table(op: Operation, use: TensorUse, words: torch.Tensor) -> Value | None:
    # Rows of a table that follow each other and do not depend on the sample: arange(first, last).
    listed: list[int] = words.flatten().tolist()
    first = listed[0] if listed else 0
    if listed != list(range(first, first + len(listed))) or words.shape[:-1].numel() > 1:
        return None
    table = op.context.as_value(Held(use))
    part = sliced(op, table, 0, first, first + len(listed))
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
        return viewed(op, op.context.as_value(call_in_parts(chosen)), op.result.shape)
    if not (isinstance(table, Held) and len(table.use.shape) == 2 and len(words) == 1):
        raise NotSplitError("it is no choice of rows of a table")
    return _looked_up(op, table.use, op.context.as_value(words[0]))


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
    causal, mask = _masked(op, query)
    if any(x.layer.shape[:-2] != query.layer.shape[:-2] for x in (key, value)):
        raise NotSplitError("its heads differ")
    layers = [query.layer, key.layer, value.layer, *mask]
    options: dict[str, Option] = {"causal": causal or bool(op["is_causal"])}
    options |= {"scale": op["scale"], "dropout": float(op["dropout_p"])}
    shape = (*query.layer.shape[:-1], value.layer.shape[-1])
    return query.to(op.builder.add(op.name, "attention", layers, shape, options=options))


def _repeated_heads(op: Operation, value: Value, query: Value) -> Value:
    # Each key-value head serves a group of query heads.
    heads, *rest = value.plain().layer.shape
    group = query.layer.shape[0] // heads
    apart = value.to(op.reshaped(value, (heads, 1, *rest)))
    repeated = op.moved("expand", apart, (heads, group, *rest))
    return repeated.to(op.reshaped(repeated, (heads * group, *rest)))


def _masked(op: Operation, query: Value) -> tuple[bool, list[Layer]]:
    # Whether the mask is causal; the layer that is added to the scores.
    mask = op["attn_mask"]
    if isinstance(mask, torch.Tensor):
        if _is_causal(mask):
            return True, []
        if bool((mask if mask.dtype == torch.bool else mask == 0).all()):
            mask = None  # it hides nothing
    if mask is None:
        return False, []
    value = op.context.as_value(mask)
    if is_mask(op.builder, value.layer):
        value = elementwise(op, torch.ops.aten.where.Scalar, value, 0.0, -math.inf)
    (_, layer), _ = lined_up(op, [query, value])
    return False, [layer]


def _is_causal(mask: torch.Tensor) -> bool:
    # A mask made by the forward that hides all later keys and nothing else.
    if mask.dim() < 2 or mask.shape[:-2].numel() != 1:
        return False
    rows = mask.reshape(mask.shape[-2:])
    later = torch.ones(rows.shape, dtype=torch.bool).triu(1)
    if rows.dtype == torch.bool:
        return torch.equal(rows, ~later)
    hidden = torch.zeros(rows.shape, dtype=rows.dtype).masked_fill(later, -math.inf)
    return torch.equal(rows, hidden)


# --- mixtures of experts ---


@lowers_module(is_experts)
def experts(
    context: Context, module: nn.Module, call: LeafCall, inputs: Sequence[object]
) -> object:
    arguments, keywords = call.arguments(inputs)
    given = [*arguments, *keywords.values()]
    if list(keywords) not in ([], list(EXPERTS[len(arguments) :])):
        raise NotSplitError("its arguments are in another order")
    x, chosen, weights = (context.as_value(value) for value in given)
    x.refuse_others(chosen, weights)
    tensors = uses(module, call.path)
    shape = (*chosen.layer.shape[:-1], next(iter(tensors.values())).shape[0])
    read = [chosen.layer, weights.layer]
    routing = context.builder.add(f"{call.path}.routing", "routing", read, shape)
    read, options = [routing, x.layer, chosen.layer], {"module": call.path}
    shape = x.layer.shape
    layer = context.builder.add(call.path, "experts", read, shape, options=options, tensors=tensors)
    return [x.to(layer)]
