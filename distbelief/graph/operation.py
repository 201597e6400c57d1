"""One call that a model's forward makes, as translations see it.

Tensors are told apart by where they come from. Most have the batch as their first
dimension, which no layer's shape counts. What is made of the model's own tensors alone
(position embeddings, scales) has none: its operand is not `batched`, all its dimensions
count, and its layer's output is one for the whole batch, which broadcasts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from distbelief.graph.graph import GraphError
from distbelief.graph.region import Shape


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An argument that is the output of a layer.

    Attributes:
        name: Of the layer.
        shape: Of the layer's output, without the batch.
        batched: Whether the tensor has the batch before these dimensions.
        is_integer: Whether it is whole numbers.
    """

    name: str
    shape: Shape
    batched: bool = True
    is_integer: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """The results of a module that is computed whole: layers once they are used.

    Attributes:
        results: Tensors, or tuples of them.
        add: Makes a layer of the tensor at a place: (1, 0) is the first of the second.
        place: Of these results among all.
    """

    results: tuple[object, ...]
    add: "Callable[[tuple[int, ...], torch.Tensor], str | Several]"
    place: tuple[int, ...] = ()

    def take(self, index: int) -> "str | Several":
        """Return the layer of one result, or results that it consists of.

        Raises:
            GraphError: it is no tensor.
        """
        result, place = self.results[index], (*self.place, index % len(self.results))
        if isinstance(result, torch.Tensor):
            return self.add(place, result)
        if isinstance(result, tuple | list):
            return Several(results=tuple(result), add=self.add, place=place)
        raise GraphError(f"result {place} is a {type(result).__name__}, not a tensor")


Translated = str | tuple[str, ...] | Several


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call.

    Attributes:
        name: What to call its layer.
        target: Path of the module, or name of the function.
        arguments: Operands, numbers, tensors of constants, tuples of these.
        keywords: Likewise.
        result: What it returns, without memory: a tensor, or a tuple of results.
        batch: The extent of the batch in `result`.
        trains: Whether it may be used in training: not for modules that are in
            evaluation mode while the model is not.
    """

    name: str
    target: str
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]
    result: object
    batch: int
    trains: bool = True

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
    def batched(self) -> bool:
        """Whether any operand has the batch."""
        return any(operand.batched for operand in self.operands)

    @property
    def output(self) -> Shape:
        """The shape of the one result, without the batch."""
        return self.shape_of(self.result)

    @property
    def outputs(self) -> tuple[Shape, ...]:
        """The shapes of several results."""
        assert isinstance(self.result, tuple | list), self.target
        return tuple(self.shape_of(result) for result in self.result)

    @property
    def is_integer(self) -> bool:
        """Whether the one result is whole numbers."""
        return isinstance(self.result, torch.Tensor) and is_integer(self.result)

    def shape_of(self, result: object) -> Shape:
        """Return the shape of a result, without the batch.

        Raises:
            GraphError: it has lost the batch, or is no tensor.
        """
        if not isinstance(result, torch.Tensor):
            raise GraphError(f"{self.name} returns a {type(result).__name__}, not a tensor")
        if not self.batched:
            return tuple(result.shape)
        if not result.dim() or result.shape[0] != self.batch:
            shape = ["batch" if n == self.batch else n for n in result.shape]
            raise GraphError(
                f"{self.name} gives [{', '.join(map(str, shape))}]: its first "
                "dimension is not the batch, but a layer must keep samples apart "
                "(batch_first=True, or reshape with the batch in front)"
            )
        return tuple(result.shape[1:])

    def argument(self, position: int, word: str, default: object = None) -> object:
        """Return an argument given by position or by keyword."""
        if position < len(self.arguments):
            return self.arguments[position]
        return self.keywords.get(word, default)

    def operand(self, position: int, word: str) -> Operand:
        """Return an argument that has to be a layer.

        Raises:
            GraphError: it is something else.
        """
        found = self.argument(position, word)
        if not isinstance(found, Operand):
            raise GraphError(
                f"{self.name}: {word} is {_described(found)}, not the output of a "
                "layer; register tensors as parameters or buffers of their module"
            )
        return found

    def dim(self, given: object, shape: Shape) -> int:
        """Return which dimension of a layer's shape is meant by one of torch's.

        Args:
            given: Counts the batch, if operands have it; may be negative.
            shape: Without the batch.

        Raises:
            GraphError: it is the batch, or none.
        """
        n_dims = len(shape) + self.batched
        if not isinstance(given, int) or not -n_dims <= given < n_dims:
            raise GraphError(f"{self.name}: no dimension {given!r} of {n_dims}")
        dim = given % n_dims - self.batched
        if dim < 0:
            raise GraphError(
                f"{self.name} is about the batch dimension: a layer must keep samples apart"
            )
        return dim

    def only(self, *words: str) -> None:
        """Check that no keywords but these are given, unless as None or False.

        Raises:
            GraphError: there are others.
        """
        given = {
            word
            for word, value in self.keywords.items()
            if value is not None and value is not False
        }
        others = sorted(given - set(words))
        if others:
            raise GraphError(
                f"{self.name}: argument {others[0]}="
                f"{_described(self.keywords[others[0]])} has no split rule: leave it "
                "out, or put the call into a module of its own"
            )


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether its elements are whole numbers."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} that the forward made"
    return repr(value)
