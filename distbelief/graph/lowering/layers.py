"""Lowering rules for layers with weights, matrix products and attention."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn

from distbelief.graph.graph import GraphError, Layer, Option, TensorUse, uses
from distbelief.graph.lowering.calls import call_in_parts, elementwise
from distbelief.graph.lowering.operation import Context, Operation, lowers, lowers_module
from distbelief.graph.lowering.values import Held, NotSplitError, Value, type_of
from distbelief.graph.lowering.views import expanded_layer, lined_up, permuted, sliced, viewed
from distbelief.graph.module_calls import EXPERTS, LeafCall, is_experts
from distbelief.graph.ops.linear import product_layer
from distbelief.graph.ops.reductions import reduction_layer


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
    word = next(word for word in ("other", "mat2", "vec") if word in op.arguments)
    one, right = op.value("self"), op[word]
    if isinstance(right, Held) and len(right.use.shape) == 2 and one.batch is not None:
        return _connected(op, one, _turned(right))
    other = op.value(word)
    # A vector is a row of the left matrix, or a column of the right one.
    rows, columns = ((-2,) * (one.n_dims == 1), (-1,) * (other.n_dims == 1))
    one.dim(-1), other.dim(-1)  # not the batch
    if rows:
        one = one.to(op.reshaped(one, (1, *one.layer.shape)))
    if columns:
        other = other.to(op.reshaped(other, (*other.layer.shape, 1)))
    found = _product(op, one, other)
    for dim in (*rows, *columns):
        shape = list(found.layer.shape)
        del shape[found.dim(dim)]
        found = found.without(op.reshaped(found, tuple(shape)), [dim % found.n_dims])
    return found


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
    if one.batch == one.n_dims - 2 and other.batch is None and other.n_dims == one.n_dims:
        # The rows are samples: what is folded into them are rows of a layer.
        groups, folded = one.layer.shape[: one.batch], one.layer.shape[one.batch : -1]
        left = op.reshaped(one, (*groups, math.prod(folded), one.layer.shape[-1]))
        found = one.to(_broadcast_product(op, left, other.layer))
        return one.to(op.reshaped(found, (*found.layer.shape[:-2], *folded, found.layer.shape[-1])))
    one.dim(-2), other.dim(-1), other.dim(-2)
    layers, like = lined_up(op, [one, other])
    return like.to(_broadcast_product(op, *layers))


def _broadcast_product(op: Operation, *pair: Layer) -> Layer:
    lead = tuple(torch.broadcast_shapes(*(layer.shape[:-2] for layer in pair)))
    one, other = (expanded_layer(op, Value(x), (*lead, *x.shape[-2:])).layer for x in pair)
    return op.builder.add_layer(product_layer(op.free_name, one, other))


# --- einsum: products, with permutations before and after ---
#
#     bqhd, bkhd -> bhqk      of both and of the result    h       before the last two
#                             of one and of the result     q, k    rows, columns
#                             of both, not of the result   d       summed

_EQUATION: Final = re.compile(r"[a-zA-Z]+(,[a-zA-Z]+)*->[a-zA-Z]*")
_Term = tuple[str, Any]  # a tensor of the product, its batch first, and its other letters


@lowers("einsum")
def einsum(op: Operation) -> object:
    equation = op["equation"].replace(" ", "")
    if _EQUATION.fullmatch(equation) is None:
        raise NotSplitError(f"{equation!r} is no product of letters")
    *words, result = re.split(",|->", equation)
    if any(len(set(word)) < len(word) for word in (*words, result)):
        raise NotSplitError("a letter stands twice")
    batch: set[str] = set()
    terms: list[_Term] = []
    for word, given in zip(words, op["tensors"], strict=True):
        rest, term = word, given if isinstance(given, Held) else op.context.as_value(given)
        if isinstance(term, Value) and term.batch is not None:
            if term.before or term.after:
                raise NotSplitError("the batch is not alone in its dimension")
            first = word[term.batch]
            batch.add(first)
            rest = word.replace(first, "")
            term = permuted(op, term, [word.index(letter) for letter in first + rest])
        terms.append((rest, term))
    if len(batch) > 1 or not batch <= set(result) or any(batch & set(word) for word, _ in terms):
        raise NotSplitError("it works along the batch")
    terms = [_summed(op, term, kept=equation) for term in terms]
    while len(terms) > 1:
        one, other, *later = terms
        kept = result + "".join(word for word, _ in later)
        terms = [_contracted(op, one, other, kept=kept), *later]
    word, found = terms[0]
    order = "".join(batch) + word
    return permuted(op, op.context.as_value(found), [order.index(letter) for letter in result])


def _summed(op: Operation, term: _Term, *, kept: str) -> _Term:
    # Sums over letters that stand nowhere else.
    word, given = term
    alone = [index for index, letter in enumerate(word) if kept.count(letter) == 1]
    if not alone:
        return term
    value = op.context.as_value(given)
    layer = reduction_layer(op.free_name, [value.layer], function="sum", dims=alone, keep=False)
    rest = "".join(letter for letter in word if kept.count(letter) > 1)
    return rest, value.to(op.builder.add_layer(layer))


def _contracted(op: Operation, *terms: _Term, kept: str) -> _Term:
    (one, left), (other, right) = terms[::-1] if isinstance(terms[0][1], Held) else terms
    lead = "".join(letter for letter in one if letter in other and letter in kept)
    rows = "".join(letter for letter in one if letter not in other)
    columns = "".join(letter for letter in other if letter not in one)
    summed = "".join(letter for letter in one if letter in other and letter not in kept)
    extents: dict[str, int] = {}

    def ordered(given: object, before: str, after: str) -> Value:
        value = op.context.as_value(given)
        if value.layer.is_integer:
            raise NotSplitError("its input is integers")
        extents.update(zip(before, value.layer.shape, strict=True))
        n = int(value.batch is not None)
        return permuted(op, value, [*range(n), *(before.index(letter) + n for letter in after)])

    def size(letters: str) -> int:
        return math.prod(extents[letter] for letter in letters)

    first = ordered(left, one, lead + rows + summed)
    word = lead + rows + columns
    is_linear = isinstance(right, Held) and first.batch is not None and not lead
    if is_linear and len(summed) == len(columns) == 1:
        weight = _turned(right) if other[0] == summed else _rows(op, right)
        assert weight is not None
        return word, _connected(op, first, weight)
    last = ordered(right, other, lead + summed + columns)
    before = tuple(extents[letter] for letter in lead)
    layers = [
        op.reshaped(first, (*before, size(rows), size(summed))),
        op.reshaped(last, (*before, size(summed), size(columns))),
    ]
    like = first if first.batch is not None else last
    found = like.to(op.builder.add_layer(product_layer(op.free_name, *layers)))
    return word, found.to(op.reshaped(found, tuple(extents[letter] for letter in word)))


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
    n = next(dim for dim, word in enumerate(words) if word is not None)
    are_lists = all(isinstance(word, torch.Tensor) for word in words[n:])
    if are_lists and all(word.dtype == torch.int64 for word in words[n:]):
        n_dims = max(word.dim() for word in words[n:])
        # Words that are the same for every sample may stand for all of them.
        if not any(isinstance(extent, torch.SymInt) for extent in op.result.shape[n:][:n_dims]):
            return _at_places(op, op.context.as_value(table), n, words[n:])
    has_rows = isinstance(table, Held) and len(table.use.shape) == 2 and not table.turned
    if not (has_rows and len(words) == 1):
        raise NotSplitError("it is no choice of rows of a table")
    return _looked_up(op, table.use, op.context.as_value(words[0]))


def _at_places(op: Operation, value: Value, dim: int, lists: Sequence[torch.Tensor]) -> Value:
    # What stands at places that the forward lists, the same for every sample.
    source, shape = op.node.args[0], list(op.result.shape)
    assert isinstance(source, fx.Node)
    own = [value.dim(dim + index) for index in range(len(lists))]
    extents = [value.layer.shape[each] for each in own]
    lists = torch.broadcast_tensors(*lists)
    places = lists[0] % extents[0]
    for extent, more in zip(extents[1:], lists[1:], strict=True):
        places = places * extent + more % extent
    if len(lists) > 1:  # their dimensions as one
        whole = list(source.meta["val"].shape)
        whole[dim : dim + len(lists)] = [math.prod(extents)]
        value = viewed(op, value, whole)
    n_dims = places.dim()
    shape[dim : dim + n_dims] = [places.numel()]
    chosen = replace(
        op,
        target=torch.ops.aten.index_select.default,
        arguments={"self": value, "dim": dim, "index": places.flatten()},
        result=op.result.view(shape),
    )
    return viewed(op, op.context.as_value(call_in_parts(chosen)), op.result.shape)


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
    lead = query.layer.shape[:-2]
    if any(len(x.layer.shape) != len(lead) + 2 for x in (key, value)):
        raise NotSplitError("its heads differ")
    # One head of keys and values may serve all queries.
    pair = [expanded_layer(op, x, (*lead, *x.layer.shape[-2:])).layer for x in (key, value)]
    layers = [query.layer, *pair, *mask]
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
    if type_of(op.builder, value.layer) == "bool":
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
    if not any(list(keywords) in ([], list(names[len(arguments) :])) for names in EXPERTS):
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
