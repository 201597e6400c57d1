"""Translations of products of two matrices: both computed, or one the model's own.

`x @ w` and `x @ w.T` are fully connected layers if w is a parameter or a buffer. An
`einsum` of two is such a product once dimensions are put in order:

    bqhd, bkhd -> bhqk      of both and of the result    h       before the last two
                            of one and of the result     q, k    rows, columns
                            of both, not of the result   d       summed
"""

import math
import operator
import re
from typing import Final

import torch

from distbelief.graph.building import Builder
from distbelief.graph.kinds.product import product_layer
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import GraphError, Layer, TensorUse
from distbelief.graph.operation import Operation, Translated
from distbelief.graph.region import Shape
from distbelief.graph.translation import translates_function


_EQUATION: Final = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


@translates_function(torch.matmul, "matmul", operator.matmul, torch.bmm, "bmm", "__matmul__")
def product(builder: Builder, operation: Operation) -> Translated:
    """Add a product over the last two dimensions."""
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
            f"{operation.name} multiplies {shapes}, the batch not counted: both have "
            "to have the batch, and the same dimensions between it and the last two; "
            "expand one of them, or let a matrix of the model's own be the second"
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
    """Add a fully connected layer with this weight."""
    return builder.add(
        operation.name,
        "linear",
        operation.inputs[:1],
        operation.output,
        options={"transposed": True} if transposed else {},
        tensors={"weight": use},
    )


def _own_matrix(builder: Builder, operation: Operation) -> tuple[TensorUse, bool] | None:
    """Return the model's own matrix that is the second factor, if one is.

    Returns:
        It, and whether it is (inputs, outputs): torch.nn.Linear has it the other way.
    """
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


@translates_function(torch.einsum)
def einsum(builder: Builder, operation: Operation) -> Translated:
    """Add a product, and whatever puts dimensions in order before and after it."""
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
    """Return whether an equation has the inputs of the model's own matrix first.

    Raises:
        GraphError: it does not replace the last dimension of the first operand.
    """
    equation = str(operation.argument(0, "equation")).replace(" ", "")
    match = _EQUATION.fullmatch(equation)
    one, other, result = match.groups() if match else ("", "", "")
    distinct = all(len(set(word)) == len(word) for word in (one, other, result))
    pairs = {one[-1:] + result[-1:]: True, result[-1:] + one[-1:]: False}
    if one[:-1] != result[:-1] or other not in pairs or not distinct:
        raise _no_product(operation, equation)
    return pairs[other]


def _letters(operation: Operation) -> tuple[str, str, str]:
    """Return what an equation calls the dimensions after the batch.

    Raises:
        GraphError: it is no product of two that both have the batch.
    """
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
