"""Lowering rules for layers with weights, matrix products and recurrent networks.

Recurrent networks are opaque. The last hidden state of the last layer, `h[-1]`, is the last output;
other hidden states have the batch as their second dimension and no rule.
"""

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from distbelief.graph.graph import Builder, GraphError, Layer, TensorUse, uses
from distbelief.graph.lowering.registry import lowers, lowers_function
from distbelief.graph.opaque import opaque_module
from distbelief.graph.operation import Lowered, Operand, Operation, Several
from distbelief.graph.ops.linear import product_layer
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.region import Shape


@lowers(nn.Linear)
def linear(builder: Builder, module: nn.Linear, operation: Operation) -> Lowered:
    return builder.add(
        operation.name,
        "linear",
        operation.inputs,
        operation.output,
        tensors=uses(module, operation.target),
    )


@lowers_function(functional.linear)
def linear_function(builder: Builder, operation: Operation) -> Lowered:
    return builder.add(
        operation.name,
        "linear",
        operation.inputs[:1],
        operation.output,
        tensors=_weights(builder, operation),
    )


@lowers(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(builder: Builder, module: _ConvNd, operation: Operation) -> Lowered:
    # A convolution that pads with anything but zeros is opaque.
    if module.padding_mode != "zeros":
        reason = f"padding_mode {module.padding_mode!r} has no split rule"
        return opaque_module(builder, module, operation, reason=reason)
    return _convolution(
        builder,
        operation,
        uses(module, operation.target),
        stride=tuple(module.stride),
        padding=module.padding,
        dilation=tuple(module.dilation),
        groups=module.groups,
    )


@lowers_function(functional.conv1d, functional.conv2d, functional.conv3d)
def convolution_function(builder: Builder, operation: Operation) -> Lowered:
    argument = operation.argument
    tensors = _weights(builder, operation)
    n_dims = len(operation.output) - 1

    def several(position: int, word: str, default: int) -> Shape:
        sizes = argument(position, word, default)
        if isinstance(sizes, int):
            return (sizes,) * n_dims
        return tuple(cast("Shape", sizes))

    padding = argument(4, "padding", 0)
    return _convolution(
        builder,
        operation,
        tensors,
        stride=several(3, "stride", 1),
        padding=padding if isinstance(padding, str) else several(4, "padding", 0),
        dilation=several(5, "dilation", 1),
        groups=cast("int", argument(6, "groups", 1)),
    )


def _convolution(
    builder: Builder,
    operation: Operation,
    tensors: Mapping[str, TensorUse],
    *,
    stride: Shape,
    padding: str | Shape,
    dilation: Shape,
    groups: int,
) -> str:
    sizes = tensors["weight"].shape[2:]
    around, extra = (0,) * len(sizes), (0,) * len(sizes)
    if padding == "same":
        totals = [(n - 1) * d for n, d in zip(sizes, dilation, strict=True)]
        around = tuple(total // 2 for total in totals)
        extra = tuple(total % 2 for total in totals)
    elif not isinstance(padding, str):
        around = tuple(int(size) for size in padding)
    return builder.add(
        operation.name,
        "convolution",
        operation.inputs[:1],
        operation.output,
        options={
            "stride": stride,
            "padding": around,
            "extra": extra,
            "dilation": dilation,
            "groups": groups,
        },
        tensors=tensors,
    )


@lowers(nn.Embedding)
def embedding(builder: Builder, module: nn.Embedding, operation: Operation) -> Lowered:
    # Words that the forward counts itself (arange) are a part of the table.
    if module.scale_grad_by_freq:
        reason = "an embedding with scale_grad_by_freq has no split rule"
        return opaque_module(builder, module, operation, reason=reason)
    use = uses(module, operation.target)["weight"]
    return _embedded(builder, operation, use, 0, padding=module.padding_idx)


@lowers_function(functional.embedding)
def embedding_function(builder: Builder, operation: Operation) -> Lowered:
    operation.only("input", "weight", "padding_idx", "norm_type")
    use = owned(builder, operation, operation.operand(1, "weight"))
    padding = cast("int | None", operation.argument(2, "padding_idx"))
    return _embedded(builder, operation, use, 0, padding=padding)


def _embedded(
    builder: Builder, operation: Operation, use: TensorUse, position: int, *, padding: int | None
) -> str:
    words = operation.argument(position, "input")
    if isinstance(words, torch.Tensor):
        return _rows(builder, operation, use, words)
    source = operation.operand(position, "input")
    return builder.add(
        operation.name,
        "embedding",
        [source.name],
        operation.output,
        options={"padding": padding},
        tensors={"weight": use},
    )


def _rows(builder: Builder, operation: Operation, use: TensorUse, words: torch.Tensor) -> str:
    # Rows of a table that do not depend on the sample: arange(first, last).
    listed: list[int] = words.flatten().tolist()
    first = listed[0] if listed else 0
    if listed != list(range(first, first + len(listed))) or words.shape[:-1].numel() > 1:
        raise GraphError(
            f"{operation.name}: words that the forward makes must be consecutive, "
            "as of torch.arange; give others as an input"
        )
    table = builder.add(
        f"{operation.name}.table", "parameter", [], use.shape, tensors={"value": use}
    )
    shape = (*words.shape, use.shape[1])
    part = builder.add(
        f"{operation.name}.rows" if words.dim() > 1 else operation.name,
        "slice",
        [table],
        shape[-2:],
        options={"starts": (first, 0), "steps": (1, 1)},
    )
    if words.dim() == 1:
        return part
    return builder.add(operation.name, "reshape", [part], shape)


_WORDS: Final = ("weight", "bias")


def _weights(builder: Builder, operation: Operation) -> dict[str, TensorUse]:
    # Functions take weight and bias after their input.
    if not isinstance(operation.argument(0, "input"), Operand):
        operation.operand(0, "input")
    return {
        word: owned(builder, operation, operation.operand(position, word))
        for position, word in enumerate(_WORDS, start=1)
        if operation.argument(position, word) is not None
    }


def owned(builder: Builder, operation: Operation, operand: Operand) -> TensorUse:
    layer: Layer = builder[operand.name]
    use = layer.tensors.get("value")
    if layer.kind != "parameter" or use is None or use.shape != operand.shape:
        raise GraphError(
            f"{operation.name} with a weight that is computed ({operand.name!r}) has "
            "no split rule: put it into a module of its own"
        )
    return use


# --- products of two matrices ---
#
# `x @ w` and `x @ w.T` are linear layers if w is a parameter or a buffer. An `einsum` of two
# operands is a product after a permutation:
#
#     bqhd, bkhd -> bhqk      of both and of the result    h       before the last two
#                             of one and of the result     q, k    rows, columns
#                             of both, not of the result   d       summed

_EQUATION: Final = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


@lowers_function(torch.matmul, "matmul", operator.matmul, torch.bmm, "bmm", "__matmul__")
def product(builder: Builder, operation: Operation) -> Lowered:
    operands = operation.operands
    own = _own_matrix(builder, operation)
    if own is not None:
        return _connected(builder, operation, *own)
    alike = (
        len(operands) == 2
        and all(operand.batched and len(operand.shape) >= 2 for operand in operands)
        and operands[0].shape[:-2] == operands[1].shape[:-2]
    )
    if not alike:
        shapes = " and ".join(str(list(operand.shape)) for operand in operands)
        raise GraphError(
            f"{operation.name} multiplies {shapes}, the batch not counted: expand one, "
            "so that all but the last two dimensions are equal, or use the model's own matrix"
        )
    one, other = (builder[operand.name] for operand in operands)
    name = builder.free_name(operation.name)
    return builder.add_layer(product_layer(name, one, other))


def _connected(
    builder: Builder,
    operation: Operation,
    use: TensorUse,
    transposed: bool,  # noqa: FBT001 -- whether it is (inputs, outputs)
) -> str:
    return builder.add(
        operation.name,
        "linear",
        operation.inputs[:1],
        operation.output,
        options={"transposed": True} if transposed else {},
        tensors={"weight": use},
    )


def _own_matrix(builder: Builder, operation: Operation) -> tuple[TensorUse, bool] | None:
    # The second factor, if it is a tensor of the model, and whether it is (inputs, outputs).
    if [operand.batched for operand in operation.operands] != [True, False]:
        return None
    layer = builder[operation.operands[1].name]
    turned = layer.kind == "permute" and layer.options["dims"] == (1, 0)
    if turned:
        layer = builder[layer.inputs[0]]
    use = layer.tensors.get("value")
    if layer.kind != "parameter" or use is None or len(use.shape) != 2:
        return None
    return use, not turned


@lowers_function(torch.einsum)
def einsum(builder: Builder, operation: Operation) -> Lowered:
    # A product, and permutations before and after it.
    own = _own_matrix(builder, operation)
    if own is not None:
        return _connected(builder, operation, own[0], own[1] == _is_plain(operation))
    one, other, result = _letters(operation)
    layers = [builder[operand.name] for operand in operation.operands]
    extents = dict(zip(one + other, (*layers[0].shape, *layers[1].shape), strict=True))

    def shape(letters: str) -> Shape:
        return tuple(extents[letter] for letter in letters)

    lead = "".join(letter for letter in one if letter in other and letter in result)
    rows = "".join(letter for letter in one if letter not in other)
    columns = "".join(letter for letter in other if letter not in one)
    summed = "".join(letter for letter in one if letter in other and letter not in result)
    n_rows, n_columns, n_summed = (math.prod(shape(letters)) for letters in (rows, columns, summed))
    left = _permuted(builder, operation, layers[0], one, lead + rows + summed)
    left = _shaped(builder, operation, left, (*shape(lead), n_rows, n_summed))
    right = _permuted(builder, operation, layers[1], other, lead + summed + columns)
    right = _shaped(builder, operation, right, (*shape(lead), n_summed, n_columns))
    name = builder.free_name(operation.name)
    found = builder[builder.add_layer(product_layer(name, left, right))]
    found = _shaped(builder, operation, found, shape(lead + rows + columns))
    return _permuted(builder, operation, found, lead + rows + columns, result).name


def _is_plain(operation: Operation) -> bool:
    # Whether the model's own matrix has the inputs first in the equation.
    equation = str(operation.argument(0, "equation")).replace(" ", "")
    match = _EQUATION.fullmatch(equation)
    one, other, result = match.groups() if match else ("", "", "")
    distinct = all(len(set(word)) == len(word) for word in (one, other, result))
    pairs = {one[-1:] + result[-1:]: True, result[-1:] + one[-1:]: False}
    if one[:-1] != result[:-1] or other not in pairs or not distinct:
        raise _no_product(operation, equation)
    return pairs[other]


def _letters(operation: Operation) -> tuple[str, str, str]:
    # The equation's letters for the dimensions after the batch.
    equation = str(operation.argument(0, "equation")).replace(" ", "")
    match = _EQUATION.fullmatch(equation)
    batched = [operand.batched for operand in operation.operands] == [True, True]
    if match is None or not batched:
        raise _no_product(operation, equation)
    one, other, result = match.groups()
    alike = one[0] == other[0] == result[0]
    distinct = all(len(set(word)) == len(word) for word in (one, other, result))
    alone = set(one) ^ set(other)
    if not (alike and distinct and alone <= set(result)):
        raise _no_product(operation, equation)
    return one[1:], other[1:], result[1:]


def _no_product(operation: Operation, equation: str) -> GraphError:
    return GraphError(
        f"{operation.name} of {equation!r} is no product of two outputs of layers, "
        "each with the batch first, that sums over dimensions of both: use "
        "torch.nn.Linear for a matrix of the model's own, or `sum` for other sums"
    )


def _permuted(
    builder: Builder, operation: Operation, source: Layer, before: str, after: str
) -> Layer:
    if before == after:
        return source
    dims = tuple(before.index(letter) for letter in after)
    shape = tuple(source.shape[dim] for dim in dims)
    name = f"{operation.name}.order"
    options = {"dims": dims}
    return builder[builder.add(name, "permute", [source.name], shape, options=options)]


def _shaped(builder: Builder, operation: Operation, source: Layer, shape: Shape) -> Layer:
    if source.shape == shape:
        return source
    name = builder.free_name(f"{operation.name}.shape")
    return builder[builder.add_layer(reshape_layer(name, source, shape=shape))]


@lowers(nn.RNN, nn.LSTM, nn.GRU)
def recurrent(builder: Builder, module: nn.RNNBase, operation: Operation) -> Lowered:
    # An opaque layer for the outputs, and the part of it that is the last state.
    if not module.batch_first:
        raise GraphError(
            f"{operation.name} takes the batch as its second dimension: give it batch_first=True"
        )
    reason = f"{type(module).__name__} has no split rule: a step needs the one before"
    whole = opaque_module(builder, module, operation, reason=reason)
    assert isinstance(whole, Several), operation
    outputs = whole
    last = module.num_layers - 1
    of_hidden = (1, 0) if isinstance(module, nn.LSTM) else (1,)

    def add(place: tuple[int, ...], result: torch.Tensor) -> str | Several:
        if place == of_hidden:
            states = tuple(result.unbind(0))
            return Several(results=states, add=add, place=place)
        if place[:-1] == of_hidden and place[-1] == last and not module.bidirectional:
            name = outputs.take(0)
            assert isinstance(name, str), operation
            return _last(builder, name, f"{operation.name}.last")
        if place == (0,):
            return outputs.take(0)
        raise GraphError(
            f"{operation.name}: state {place} has the batch as its second dimension; "
            "only outputs, and h[-1] of a network in one direction, can be used"
        )

    return replace(whole, add=add)


def _last(builder: Builder, source: str, name: str) -> str:
    # The last position of (positions, features).
    n_positions, n_features = builder[source].shape
    part = builder.add(
        f"{name}.slice",
        "slice",
        [source],
        (1, n_features),
        options={"starts": (n_positions - 1, 0), "steps": (1, 1)},
    )
    layer = reshape_layer(builder.free_name(name), builder[part], shape=(n_features,))
    return builder.add_layer(layer)
