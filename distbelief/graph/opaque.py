"""Opaque layers: modules that cannot be split, so that one rank computes them by calling them."""

import inspect
from typing import final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.flop_counter import FlopCounterMode

from distbelief.graph.fake_tensor import run_without_memory
from distbelief.graph.graph import Builder, GraphError, Option, below, uses
from distbelief.graph.operation import Lowered, Operand, Operation, Several
from distbelief.graph.unsupported import is_replaced


@final
class CallError(GraphError):
    """A module is called with arguments that an opaque layer cannot be given."""


def opaque_module(
    builder: Builder, module: nn.Module, operation: Operation, *, reason: str
) -> Lowered:
    """Add an opaque layer, which calls the module itself.

    Raises:
        CallError: It takes anything but outputs of layers, or returns anything but tensors.
        GraphError: It keeps running statistics, which would be lost.
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

    def add(path: tuple[int, ...], result: torch.Tensor) -> str:
        if path in added:
            return added[path]
        suffix = "".join(f".{index}" for index in path)
        added[path] = builder.add(
            f"{operation.name}{suffix}",
            "whole",
            inputs,
            operation.shape_of(result),
            options=options | ({"output": path} if path else {}),
            tensors=uses(module, operation.target),
            is_integer=not result.is_floating_point(),
            whole=reason,
        )
        return added[path]

    if isinstance(operation.result, torch.Tensor):
        return add((), operation.result)
    if isinstance(operation.result, tuple | list):
        return Several(results=tuple(operation.result), add=add)
    raise CallError(
        f"{operation.name} ({type(module).__name__}) is opaque ({reason}) "
        f"and returns a {type(operation.result).__name__}: return tensors"
    )


def _refuse_masks(builder: Builder, operation: Operation, reason: str) -> None:
    for operand in operation.operands:
        if operand.is_integer and not builder[operand.name].is_integer:
            raise GraphError(
                f"{operation.name} is opaque ({reason}) and reads the mask {operand.name!r}, "
                "which is kept as floats: compare inside of the module"
            )


def _refuse_statistics(module: nn.Module, operation: Operation, reason: str) -> None:
    for path, part in module.named_modules():
        if isinstance(part, _NormBase) and part.track_running_stats and part.training:
            raise GraphError(
                f"{operation.name} is opaque ({reason}): the running statistics of its "
                f"{path or 'own'} would be lost: put it into eval mode, give it "
                "track_running_stats=False, or move it outside"
            )


def _refuse_replaced(module: nn.Module, operation: Operation) -> None:
    # A replaced forward may use any tensor; only for the model's root are all known.
    for path, part in module.named_modules():
        if is_replaced(part) and operation.target:
            raise GraphError(
                f"the forward of {below(operation.target, path).rstrip('.')!r} was replaced "
                "on the instance and cannot be split: define a class with this forward"
            )


def _positional(module: nn.Module, operation: Operation, reason: str) -> tuple[Operand, ...]:
    arguments: list[object] = list(operation.arguments)
    given = dict(operation.keywords)
    parameters = list(inspect.signature(module.forward).parameters)
    while len(arguments) < len(parameters) and parameters[len(arguments)] in given:
        arguments.append(given.pop(parameters[len(arguments)]))
    operands = tuple(item for item in arguments if isinstance(item, Operand))
    if given or len(operands) < len(arguments):
        others = [item for item in arguments if not isinstance(item, Operand)]
        argument = next(iter(given.values()), others[0] if others else None)
        shown = "a tensor" if isinstance(argument, torch.Tensor) else repr(argument)
        raise CallError(
            f"{operation.name} ({type(module).__name__}) is opaque ({reason}) and is called "
            f"with {shown}: pass only outputs of layers, by position"
        )
    return operands


def _operations(module: nn.Module, operation: Operation) -> int:
    # Floating point operations per sample as torch counts them; 0 if it cannot.
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
    except Exception:  # noqa: BLE001 -- a module may raise anything on tensors without values
        return 0
    return counter.get_total_flops() // operation.batch
