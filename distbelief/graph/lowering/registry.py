"""Registry of lowering rules: which layers a module or a function becomes.

A lowering rule gets a `Builder`, adds layers to it, and returns the name of the layer whose output
is the operation's (or several, for a tuple). Users may register their own. Tracing does not
look into modules that have a rule.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from distbelief.graph.graph import Builder, GraphError, Layer
from distbelief.graph.opaque import opaque_module
from distbelief.graph.operation import Lowered, Operand, Operation
from distbelief.graph.region import Shape
from distbelief.graph.unsupported import opaque_reason


ModuleLowering = Callable[[Builder, nn.Module, Operation], Lowered]
FunctionLowering = Callable[[Builder, Operation], Lowered]

M = TypeVar("M", bound=nn.Module)

_MODULES: dict[type[nn.Module], ModuleLowering] = {}
_FUNCTIONS: dict[object, FunctionLowering] = {}
_LIKE_THEIR_INPUT: set[type[nn.Module]] = set()


def lowers(
    *kinds: type[M], like_input: bool = False
) -> Callable[
    [Callable[[Builder, M, Operation], Lowered]], Callable[[Builder, M, Operation], Lowered]
]:
    """Register a lowering rule for modules of exactly these types.

    Args:
        kinds: The types.
        like_input: Whether the result has the shape of the first argument, so that the module need
            not be run to find it.
    """

    def register(
        rule: Callable[[Builder, M, Operation], Lowered],
    ) -> Callable[[Builder, M, Operation], Lowered]:
        for kind in kinds:
            _MODULES[kind] = cast("ModuleLowering", rule)
            if like_input:
                _LIKE_THEIR_INPUT.add(kind)
        return rule

    return register


def lowers_function(*targets: object) -> Callable[[FunctionLowering], FunctionLowering]:
    """Register a lowering rule for these functions, and for methods by name."""

    def register(rule: FunctionLowering) -> FunctionLowering:
        for target in targets:
            _FUNCTIONS[target] = rule
        return rule

    return register


def knows_module(module: nn.Module) -> bool:
    """Return whether there is a rule for exactly this type."""
    return type(module) in _MODULES


def knows_function(target: object) -> bool:
    """Return whether there is a rule for this function, or method by name."""
    return target in _FUNCTIONS


def is_like_input(module: nn.Module) -> bool:
    return type(module) in _LIKE_THEIR_INPUT


def lower_module(
    builder: Builder, module: nn.Module, operation: Operation, *, whole: str | None
) -> Lowered:
    """Add the layers of a module: an opaque layer with the reason if there is no rule."""
    rule = _MODULES.get(type(module))
    if whole is None and rule is None:
        whole = f"{type(module).__name__} has no split rule"
    if whole is None:
        whole = opaque_reason(module)
    if whole is None and rule is not None:
        return rule(builder, module, operation)
    return opaque_module(builder, module, operation, reason=whole or "")


def lower_child(
    builder: Builder, module: nn.Module, path: str, sources: Sequence[Layer], *, of: Operation
) -> Layer:
    """Add the layers of a module that another module calls.

    The result has the shape of the first source, but for the last dimension of a `nn.Linear`.
    """
    shape = sources[0].shape
    if isinstance(module, nn.Linear):
        shape = (*shape[:-1], module.out_features)
    operation = Operation(
        name=path,
        target=path,
        arguments=tuple(Operand(name=source.name, shape=source.shape) for source in sources),
        keywords={},
        result=torch.empty(of.batch, *shape, device="meta"),
        batch=of.batch,
        trains=of.trains and module.training,
    )
    name = lower_module(builder, module, operation, whole=None)
    assert isinstance(name, str), path
    return builder[name]


def lower_function(builder: Builder, target: object, operation: Operation) -> Lowered:
    """Add the layers of a function or method.

    Raises:
        GraphError: It has no rule.
    """
    rule = _FUNCTIONS.get(target)
    if rule is None:
        name = getattr(target, "__name__", str(target))
        raise GraphError(
            f"{name} ({operation.name}) has no split rule: put it into an nn.Module, or "
            "register a rule (distbelief.graph.lowering.registry)"
        )
    return rule(builder, operation)


def source_of(builder: Builder, operation: Operation) -> tuple[str, Layer, Shape]:
    """Return a free name for a composite, the layer it reads, and its output shape."""
    operand = operation.operands[0]
    return builder.free_name(operation.name), builder[operand.name], operation.output
