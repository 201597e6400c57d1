"""Which layers a module or a function becomes: two tables, open to a user's own.

A translation gets a `Builder`, adds layers to it, and returns the name of the one whose
output is the operation's (or several, for a tuple). `translates` registers one for a
type of modules; what is registered is kept whole by tracing, and never looked into.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast, final

from torch import nn

from distbelief.graph.building import Builder
from distbelief.graph.layer import GraphError, TensorUse
from distbelief.graph.region import Shape


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An argument that is the output of a layer."""

    name: str
    shape: Shape


Translated = str | tuple[str, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of a traced module.

    Attributes:
        name: What to call its layer.
        target: Path of the module, or name of the function.
        arguments: Operands, numbers, tuples of either.
        keywords: Likewise.
        shape: Of the result without the batch, or of each if it is a tuple.
    """

    name: str
    target: str
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]
    shape: Shape | tuple[Shape, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All arguments that are layers, in order."""
        flat: list[object] = []
        for argument in (*self.arguments, *self.keywords.values()):
            flat += argument if isinstance(argument, tuple) else [argument]
        return tuple(item for item in flat if isinstance(item, Operand))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(operand.name for operand in self.operands)

    @property
    def output(self) -> Shape:
        """The shape of the one result."""
        return cast("Shape", self.shape)

    def argument(self, position: int, word: str, default: object = None) -> object:
        """Return an argument given by position or by keyword."""
        if position < len(self.arguments):
            return self.arguments[position]
        return self.keywords.get(word, default)


ModuleTranslation = Callable[[Builder, nn.Module, Operation], Translated]
FunctionTranslation = Callable[[Builder, Operation], Translated]

M = TypeVar("M", bound=nn.Module)

_MODULES: dict[type[nn.Module], ModuleTranslation] = {}
_FUNCTIONS: dict[object, FunctionTranslation] = {}


def translates(
    *kinds: type[M],
) -> Callable[
    [Callable[[Builder, M, Operation], Translated]],
    Callable[[Builder, M, Operation], Translated],
]:
    """Register a translation for modules of exactly these types."""

    def register(
        translation: Callable[[Builder, M, Operation], Translated],
    ) -> Callable[[Builder, M, Operation], Translated]:
        for kind in kinds:
            _MODULES[kind] = cast("ModuleTranslation", translation)
        return translation

    return register


def translates_function(
    *targets: object,
) -> Callable[[FunctionTranslation], FunctionTranslation]:
    """Register a translation for these functions, and methods by their names."""

    def register(translation: FunctionTranslation) -> FunctionTranslation:
        for target in targets:
            _FUNCTIONS[target] = translation
        return translation

    return register


def knows_module(module: nn.Module) -> bool:
    """Return whether there is a translation for modules of this very type."""
    return type(module) in _MODULES


def translate_module(
    builder: Builder, module: nn.Module, operation: Operation, *, whole: str | None
) -> Translated:
    """Add the layers of a module; a `whole` layer with the reason if there is none."""
    translation = _MODULES.get(type(module))
    if whole is None and translation is not None:
        return translation(builder, module, operation)
    reason = whole or f"{type(module).__name__} has no split rule"
    return whole_module(builder, module, operation, reason=reason)


def translate_function(
    builder: Builder, target: object, operation: Operation
) -> Translated:
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
            "distbelief.graph.translation.translates_function"
        )
    return translation(builder, operation)


def whole_module(
    builder: Builder, module: nn.Module, operation: Operation, *, reason: str
) -> Translated:
    """Add a layer that one machine computes, by the module itself."""
    tensors = uses(module, operation.target)
    shapes = operation.shape
    if shapes and isinstance(shapes[0], tuple):
        raise GraphError(
            f"{operation.target} ({type(module).__name__}) returns several tensors and "
            f"is computed whole ({reason}): wrap it so that it returns one"
        )
    return builder.add(
        operation.name,
        "whole",
        operation.inputs,
        operation.output,
        options={"module": operation.target},
        tensors=tensors,
        whole=reason,
    )


def uses(module: nn.Module, path: str, *words: str) -> dict[str, TensorUse]:
    """Return the module's own tensors as layers use them; all, or these."""
    found = {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
    }
    return {
        word: TensorUse(
            name=f"{path}.{word}" if path else word,
            shape=tuple(tensor.shape),
            trains=tensor.requires_grad,
        )
        for word, tensor in found.items()
        if not words or word in words
    }
