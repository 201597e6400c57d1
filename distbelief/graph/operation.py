"""Operation: one call of a model's forward, as lowering rules see it.

Most tensors have the batch as their first dimension, which no layer's shape counts. Tensors made
only of the model's own (position embeddings, scales) have none: their operand is not
`batched`, and their layer has one output for the whole batch, which broadcasts.
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
    """An argument that is the output of a layer."""

    name: str
    shape: Shape  # without the batch
    batched: bool = True  # whether the tensor has the batch before these dimensions
    is_integer: bool = False  # whether its elements are integers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    """The results of an opaque module; each becomes a layer when it is used."""

    results: tuple[object, ...]  # tensors, or tuples of them
    # Makes a layer of the tensor at an index path: (1, 0) is the first of the second.
    add: "Callable[[tuple[int, ...], torch.Tensor], str | Several]"
    place: tuple[int, ...] = ()  # index path of these results among all

    def take(self, index: int) -> "str | Several":
        """Return the layer of one result, or the results that it consists of.

        Raises:
            GraphError: It is not a tensor.
        """
        result, place = self.results[index], (*self.place, index % len(self.results))
        if isinstance(result, torch.Tensor):
            return self.add(place, result)
        if isinstance(result, tuple | list):
            return Several(results=tuple(result), add=self.add, place=place)
        raise GraphError(f"result {place} is a {type(result).__name__}, not a tensor")


Lowered = str | tuple[str, ...] | Several


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call."""

    name: str  # name for its layer
    target: str  # path of the module, or name of the function
    arguments: tuple[object, ...]  # operands, numbers, constant tensors, tuples of these
    keywords: Mapping[str, object]  # keyword arguments of the same types
    result: object  # its result without memory: a tensor, or a tuple of results
    batch: int  # extent of the batch in `result`
    trains: bool = True  # False for modules in evaluation mode while the model trains

    @property
    def operands(self) -> tuple[Operand, ...]:
        flat: list[object] = []
        for argument in (*self.arguments, *self.keywords.values()):
            flat += argument if isinstance(argument, tuple) else [argument]
        return tuple(item for item in flat if isinstance(item, Operand))

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands)

    @property
    def batched(self) -> bool:
        return any(operand.batched for operand in self.operands)

    @property
    def output(self) -> Shape:
        return self.shape_of(self.result)

    @property
    def outputs(self) -> tuple[Shape, ...]:
        assert isinstance(self.result, tuple | list), self.target
        return tuple(self.shape_of(result) for result in self.result)

    @property
    def is_integer(self) -> bool:
        return isinstance(self.result, torch.Tensor) and is_integer(self.result)

    def shape_of(self, result: object) -> Shape:
        """Return the shape of a result, without the batch.

        Raises:
            GraphError: It has lost the batch, or is not a tensor.
        """
        if not isinstance(result, torch.Tensor):
            raise GraphError(f"{self.name} returns a {type(result).__name__}, not a tensor")
        if not self.batched:
            return tuple(result.shape)
        if not result.dim() or result.shape[0] != self.batch:
            shape = ["batch" if n == self.batch else n for n in result.shape]
            raise GraphError(
                f"{self.name} gives [{', '.join(map(str, shape))}]: its first dimension must "
                "be the batch (use batch_first=True, or reshape with the batch in front)"
            )
        return tuple(result.shape[1:])

    def argument(self, position: int, word: str, default: object = None) -> object:
        if position < len(self.arguments):
            return self.arguments[position]
        return self.keywords.get(word, default)

    def operand(self, position: int, word: str) -> Operand:
        """Return an argument that must be a layer.

        Raises:
            GraphError: It is something else.
        """
        found = self.argument(position, word)
        if not isinstance(found, Operand):
            raise GraphError(
                f"{self.name}: {word} is {_described(found)}, not the output of a "
                "layer: register tensors as parameters or buffers of their module"
            )
        return found

    def dim(self, given: object, shape: Shape) -> int:
        """Return the dimension of a layer's shape for a dimension of torch's.

        Args:
            given: Counts the batch, if operands have it; may be negative.
            shape: Shape without the batch.

        Raises:
            GraphError: It is the batch dimension, or out of range.
        """
        n_dims = len(shape) + self.batched
        if not isinstance(given, int) or not -n_dims <= given < n_dims:
            raise GraphError(f"{self.name}: no dimension {given!r} of {n_dims}")
        dim = given % n_dims - self.batched
        if dim < 0:
            raise GraphError(
                f"{self.name} uses the batch dimension: a layer must keep samples separate"
            )
        return dim

    def only(self, *words: str) -> None:
        """Raise `GraphError` if other keywords are given, unless as None or False."""
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
                "out, or put the call into its own module"
            )


def is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} that the forward made"
    return repr(value)
