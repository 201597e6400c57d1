"""Operands without a batch, made to fit beside those with one."""

from collections.abc import Sequence

import msgspec

from distbelief.graph.building import Builder
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import Layer
from distbelief.graph.operation import Operand, Operation


def lined_up(
    builder: Builder, operation: Operation, operands: Sequence[Operand] | None = None
) -> list[str]:
    """Return operands' layers such that the last dimensions of all are lined up.

    Args:
        builder: Has them.
        operation: Whose operands they are.
        operands: All of them if absent.
    """
    operands = operation.operands if operands is None else operands
    n_dims = len(operation.output) + 1 if operation.batched else 0
    return [with_batch(builder, operand, n_dims).name for operand in operands]


def with_batch(builder: Builder, operand: Operand, n_dims: int) -> Layer:
    """Return the operand's layer, for an operation on tensors of so many dimensions.

    A tensor of the model with as many dimensions as those that have a batch has a
    batch of one itself, which its layer's shape does not count.
    """
    layer = builder[operand.name]
    if operand.batched or len(operand.shape) < n_dims or not n_dims:
        return layer
    assert operand.shape[0] == 1, operand
    name = builder.free_name(f"{operand.name}.row")
    if layer.kind == "parameter" and len(layer.tensors["value"].shape) == n_dims:
        layer = msgspec.structs.replace(layer, name=name, shape=layer.shape[1:])
    else:
        layer = reshape_layer(name, layer, shape=layer.shape[1:])
    return builder[builder.add_layer(layer)]
