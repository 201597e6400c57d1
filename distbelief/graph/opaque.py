"""Modules that one machine computes: what there is no way to split."""

import inspect
from typing import final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.flop_counter import FlopCounterMode

from distbelief.graph.fake_tensor import run_without_memory
from distbelief.graph.graph import Builder, GraphError, Option, below, uses
from distbelief.graph.operation import Operand, Operation, Several, Translated
from distbelief.graph.unsupported import is_replaced


@final
class CallError(GraphError):
    """A module is called in a way in which no single machine can compute it alone."""


def whole_module(
    builder: Builder, module: nn.Module, operation: Operation, *, reason: str
) -> Translated:
    """Add a layer that one machine computes, by the module itself.

    Raises:
        CallError: it takes what such a layer cannot give it, or returns no tensors.
        GraphError: it keeps statistics, which would be lost.
    """
    _refuse_statistics(module, operation, reason)
    _refuse_replaced(module, operation)
    inputs = [operand.name for operand in _positional(module, operation, reason)]
    _refuse_masks(builder, operation, reason)
    options: dict[str, Option] = {"module": operation.target}
    operations = _operations(module, operation)
    if operations:
        options["operations"] = operations

    added: dict[tuple[int, ...], str] = {}

    def add(place: tuple[int, ...], result: torch.Tensor) -> str:
        if place in added:
            return added[place]
        dotted = "".join(f".{index}" for index in place)
        added[place] = builder.add(
            f"{operation.name}{dotted}",
            "whole",
            inputs,
            operation.shape_of(result),
            options=options | ({"output": place} if place else {}),
            tensors=uses(module, operation.target),
            is_integer=not result.is_floating_point(),
            whole=reason,
        )
        return added[place]

    if isinstance(operation.result, torch.Tensor):
        return add((), operation.result)
    if isinstance(operation.result, tuple | list):
        return Several(results=tuple(operation.result), add=add)
    raise CallError(
        f"{operation.name} ({type(module).__name__}) is computed whole ({reason}) "
        f"and returns a {type(operation.result).__name__}: return tensors"
    )


def _refuse_masks(builder: Builder, operation: Operation, reason: str) -> None:
    for operand in operation.operands:
        if operand.is_integer and not builder[operand.name].is_integer:
            raise GraphError(
                f"{operation.name} is computed whole ({reason}), and is given the mask "
                f"{operand.name!r}, which is kept as numbers: compare inside of it"
            )


def _refuse_statistics(module: nn.Module, operation: Operation, reason: str) -> None:
    for path, part in module.named_modules():
        if isinstance(part, _NormBase) and part.track_running_stats and part.training:
            raise GraphError(
                f"{operation.name} is computed whole ({reason}), but the running "
                f"statistics of its {path or 'own'} would be lost: put that into eval "
                "mode, give it track_running_stats=False, or move it outside"
            )


def _refuse_replaced(module: nn.Module, operation: Operation) -> None:
    """Check that it computes with no tensors but its own, as far as can be seen.

    The model's own forward may be another than its type's: all tensors are its.
    """
    for path, part in module.named_modules():
        if is_replaced(part) and operation.target:
            raise GraphError(
                f"the forward of {below(operation.target, path).rstrip('.')!r} was put "
                "in the place of its type's, and cannot be split: make a type of it"
            )


def _positional(module: nn.Module, operation: Operation, reason: str) -> tuple[Operand, ...]:
    """Return the arguments of a whole module: layers, by position."""
    arguments: list[object] = list(operation.arguments)
    given = dict(operation.keywords)
    words = list(inspect.signature(module.forward).parameters)
    while len(arguments) < len(words) and words[len(arguments)] in given:
        arguments.append(given.pop(words[len(arguments)]))
    operands = tuple(item for item in arguments if isinstance(item, Operand))
    if given or len(operands) < len(arguments):
        others = [item for item in arguments if not isinstance(item, Operand)]
        culprit = next(iter(given.values()), others[0] if others else None)
        shown = "a tensor" if isinstance(culprit, torch.Tensor) else repr(culprit)
        raise CallError(
            f"{operation.name} ({type(module).__name__}) is computed whole "
            f"({reason}), and is called with {shown}: it may take outputs of layers "
            "only, by position; keep other arguments in the module"
        )
    return operands


def _operations(module: nn.Module, operation: Operation) -> int:
    """Return how many floating point operations torch counts for a sample, or 0."""
    inputs = [
        torch.empty(
            *((operation.batch,) if operand.batched else ()),
            *operand.shape,
            dtype=torch.int64 if operand.is_integer else torch.float32,
            device="meta",
        )
        for operand in operation.operands
    ]
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
            torch.manual_seed(0)
            run_without_memory(module, tuple(inputs), {})
    except Exception:  # noqa: BLE001 -- what it does with tensors without values
        return 0
    return counter.get_total_flops() // operation.batch
