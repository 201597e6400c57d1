"""Translations of products of two matrices that both are computed."""

import operator

import torch

from distbelief.graph.building import Builder
from distbelief.graph.kinds.product import product_layer
from distbelief.graph.layer import GraphError
from distbelief.graph.operation import Operation, Translated
from distbelief.graph.translation import translates_function


@translates_function(
    torch.matmul, "matmul", operator.matmul, torch.bmm, "bmm", "__matmul__"
)
def product(builder: Builder, operation: Operation) -> Translated:
    """Add a product over the last two dimensions."""
    operands = operation.operands
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
            "expand one of them, or use torch.nn.Linear for a matrix of the model's own"
        )
    one, other = (builder[operand.name] for operand in operands)
    name = builder.free_name(operation.name)
    return builder.add_layer(product_layer(name, one, other))
