"""Which layers a module or a function becomes: two tables, open to a user's own.

A translation gets a `Builder`, adds layers to it, and returns the name of the one whose
output is the operation's (or several, for a tuple). `translates` registers one for a
type of modules; what is registered is kept whole by tracing, and never looked into.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from distbelief.graph.graph import Builder, GraphError, Layer
from distbelief.graph.opaque import whole_module
from distbelief.graph.operation import Operand, Operation, Translated
from distbelief.graph.region import Shape
from distbelief.graph.unsupported import why_whole


ModuleTranslation = Callable[[Builder, nn.Module, Operation], Translated]
FunctionTranslation = Callable[[Builder, Operation], Translated]

M = TypeVar("M", bound=nn.Module)

_MODULES: dict[type[nn.Module], ModuleTranslation] = {}
_FUNCTIONS: dict[object, FunctionTranslation] = {}
_LIKE_THEIR_INPUT: set[type[nn.Module]] = set()


def translates(
    *kinds: type[M], like_input: bool = False
) -> Callable[
    [Callable[[Builder, M, Operation], Translated]], Callable[[Builder, M, Operation], Translated]
]:
    """Register a translation for modules of exactly these types.

    Args:
        kinds: The types.
        like_input: Whether the result has the shape of the first argument, so that
            the module need not be run to know it.
    """

    def register(
        translation: Callable[[Builder, M, Operation], Translated],
    ) -> Callable[[Builder, M, Operation], Translated]:
        for kind in kinds:
            _MODULES[kind] = cast("ModuleTranslation", translation)
            if like_input:
                _LIKE_THEIR_INPUT.add(kind)
        return translation

    return register


def translates_function(*targets: object) -> Callable[[FunctionTranslation], FunctionTranslation]:
    """Register a translation for these functions, and methods by their names."""

    def register(translation: FunctionTranslation) -> FunctionTranslation:
        for target in targets:
            _FUNCTIONS[target] = translation
        return translation

    return register


def knows_module(module: nn.Module) -> bool:
    """Return whether there is a translation for modules of this very type."""
    return type(module) in _MODULES


def knows_function(target: object) -> bool:
    """Return whether there is a translation for this function, or method by name."""
    return target in _FUNCTIONS


def is_like_input(module: nn.Module) -> bool:
    """Return whether the module's result has the shape of its first argument."""
    return type(module) in _LIKE_THEIR_INPUT


def translate_module(
    builder: Builder, module: nn.Module, operation: Operation, *, whole: str | None
) -> Translated:
    """Add the layers of a module; a `whole` layer with the reason if there is none."""
    translation = _MODULES.get(type(module))
    if whole is None and translation is None:
        whole = f"{type(module).__name__} has no split rule"
    if whole is None:
        whole = why_whole(module)
    if whole is None and translation is not None:
        return translation(builder, module, operation)
    return whole_module(builder, module, operation, reason=whole or "")


def translate_child(
    builder: Builder, module: nn.Module, path: str, sources: Sequence[Layer], *, of: Operation
) -> Layer:
    """Add the layers of a module that another one calls on its own.

    The result has the shape of the first source but for its last dimension, which a
    `nn.Linear` changes.
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
    name = translate_module(builder, module, operation, whole=None)
    assert isinstance(name, str), path
    return builder[name]


def translate_function(builder: Builder, target: object, operation: Operation) -> Translated:
    """Add the layers of a function or method.

    Raises:
        GraphError: it has no translation.
    """
    translation = _FUNCTIONS.get(target)
    if translation is None:
        name = getattr(target, "__name__", str(target))
        raise GraphError(
            f"{name} ({operation.name}) has no split rule: put it into an nn.Module of "
            "its own, which is then computed whole, or register a translation with "
            "distbelief.graph.lowering.registry.translates_function"
        )
    return translation(builder, operation)


def source_of(builder: Builder, operation: Operation) -> tuple[str, Layer, Shape]:
    """Return a free name for a composite, the layer it reads, and the shape it has."""
    operand = operation.operands[0]
    return builder.free_name(operation.name), builder[operand.name], operation.output
