"""Lowering rules for conversions and dropout; other elementwise operations are calls of torch."""

import torch

from distbelief.graph.graph import Option
from distbelief.graph.lowering.calls import elementwise
from distbelief.graph.lowering.operation import Operation, lowers
from distbelief.graph.lowering.values import NotSplitError, is_mask


@lowers("to", "_to_copy", "type_as", "float", "double", "half", "bfloat16")
def converted(op: Operation) -> object:
    """A value whose numbers are floats keeps its precision: a graph is computed in one."""
    value = op.value("self")
    layer, dtype = value.layer, op.result.dtype
    if not (layer.is_integer or op.is_integer):
        return value
    if layer.is_integer and op.is_integer and is_mask(op.builder, layer) == (dtype == torch.bool):
        return value
    return elementwise(op, torch.ops.aten.to.dtype, value, dtype, dtype=dtype)


lowers("_assert_tensor_metadata")(lambda _: None)


@lowers("detach")
def detach(op: Operation) -> object:
    value = op.value("self")
    return value if value.layer.is_integer else elementwise(op, op.target, value)


@lowers("dropout", "feature_dropout", "native_dropout")
def dropout(op: Operation) -> object:
    value = op.value("self" if "self" in op.arguments else "input")
    if op["train"] and op["p"]:
        channels = "feature" in str(op.target)
        if channels and not value.is_plain:
            raise NotSplitError("the batch is not its first dimension")
        n_shared = len(value.layer.shape) - 1 if channels else 0
        options: dict[str, Option] = {"probability": float(op["p"]), "n_shared": n_shared}
        value = op.add("dropout", [value], value.layer.shape, options=options)
    return [value, None] if isinstance(op.result, tuple | list) else value
