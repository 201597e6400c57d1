"""Opaque modules: one rank computes them by calling them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distbelief.graph.graph import GraphError, Option, TensorUse, uses
from distbelief.graph.lowering.lower import Lowerer, OpaqueError, Results, Value, batch_of
from distbelief.graph.module_calls import LeafCall
from distbelief.graph.unsupported import is_replaced


def whole_module(lowerer: Lowerer, call: LeafCall, inputs: Sequence[object]) -> object:
    """Add a layer for each used result of an opaque module.

    Raises:
        OpaqueError: Its caller must be opaque: it is called with anything but outputs of layers.
        GraphError: It keeps statistics, or its forward was replaced.
    """
    reason = lowerer.whole[call.path]
    caller, what = call.path.rpartition(".")[0], call.path or "the model"
    refuse_state(call.module, call.path, reason)
    arguments, keywords = call.arguments(inputs)
    values = []
    for given in [*arguments, *keywords.values()]:
        if not isinstance(given, Value) or given.batch not in {0, None} or given.after:
            shown = "a tensor" if isinstance(given, torch.Tensor) else repr(given)[:60]
            raise OpaqueError(
                caller,
                f"{what} ({type(call.module).__name__}) is opaque ({reason}) and is called "
                f"with {shown}: pass only outputs of layers, by position",
            )
        values.append(given)
    if keywords:
        raise OpaqueError(caller, f"{what} is opaque ({reason}) and is called by keywords")
    tensors: dict[str, TensorUse] = uses(call.module, call.path)
    places = call.places

    def make(index: int) -> object:
        place = places[index]
        if any(not isinstance(key, int) for key in place):
            raise GraphError(f"{what} is opaque and returns a dictionary: return tensors")
        options: dict[str, Option] = {"module": call.path}
        if place:
            options["output"] = tuple(int(str(key)) for key in place)
        shape = call.shapes_found[index]
        if batch_of(shape) != 0:
            raise GraphError(f"{what} is opaque ({reason}) and its result has no batch first")
        name = lowerer.builder.add(
            call.path or type(call.module).__name__.lower(),
            "whole",
            [value.layer.name for value in values],
            tuple(int(n) for n in shape[1:]),
            options=options,
            tensors=tensors,
            is_integer=not call.floats_found[index],
            whole=reason,
        )
        return Value(lowerer.builder[name])

    return Results(make)


def refuse_state(module: nn.Module, path: str, reason: str) -> None:
    """Raise `GraphError` for an opaque module that keeps statistics or has a replaced forward."""
    for inner, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase) and not part.batch_first:
            raise GraphError(
                f"{path or 'the model'} is opaque ({reason}) and takes the batch as its second "
                "dimension: give it batch_first=True"
            )
        if isinstance(part, _NormBase) and part.track_running_stats and part.training:
            raise GraphError(
                f"{path} is opaque ({reason}): the running statistics of its {inner or 'own'} "
                "would be lost: put it into eval mode, give it track_running_stats=False, or move "
                "it outside"
            )
        if path and is_replaced(part) and inner:
            raise GraphError(
                f"the forward of '{path}.{inner}' was replaced on the instance and cannot be "
                "split: define a class with this forward"
            )
