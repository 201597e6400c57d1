"""What the arguments of torch's operations are while they become layers.

A value is the output of a layer. Layers count no batch; a forward may have it anywhere:

    x                    (s, 4, 16)      batch 0
    x.transpose(0, 1)    (4, s, 16)      batch 1
    x.view(-1, 16)       (4 s, 16)       batch 0, with one more layer dimension inside (`after`)

So a view that only moves the batch is no layer.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import torch
from torch.utils import _pytree as pytree

from distbelief.graph.graph import Builder, GraphError, Layer, TensorUse
from distbelief.graph.module_calls import n_samples_in
from distbelief.graph.ops.call import packed


_N_NUMBERS_TRIED: Final = 1 << 16  # of a tensor that depends on the number of samples
_N_CHARACTERS_MAX: Final = 1 << 20  # of a constant that stands in the graph


class NotSplitError(Exception):
    """An operation has no split rule for these arguments."""


def refuse_symbols(given: Iterable[object]) -> None:
    """Raise `NotSplitError` if there is a number that depends on the batch size, or on data."""
    for number in given:
        if isinstance(number, torch.SymInt | torch.SymFloat):
            names = number.node.expr.free_symbols
            of_data = any(str(name).startswith(("u", "zuf")) for name in names)
            what = "the values of its data (`.item()`)" if of_data else "the batch size"
            raise NotSplitError(f"it depends on {what}")


@final
@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: the output of a layer, with the batch at torch's dimension `batch`."""

    layer: Layer
    batch: int | None = 0  # None: one for all samples
    before: int = 0  # layer dimensions in torch's dimension `batch`, outside of the samples
    after: int = 0  # the same, inside of the samples

    @property
    def n_dims(self) -> int:
        """Number of torch's dimensions."""
        return len(self.layer.shape) - self.before - self.after + (self.batch is not None)

    @property
    def n_folded(self) -> int:
        """Number of elements of each sample in the batch's dimension."""
        first = self.batch or 0
        return math.prod(self.layer.shape[first : first + self.before + self.after])

    @property
    def is_plain(self) -> bool:
        """Whether the batch is first, and alone in its dimension."""
        return self.batch == 0 and not self.before and not self.after

    def plain(self) -> "Value":
        """Return it if it is plain, else raise `NotSplitError`."""
        if not self.is_plain:
            raise NotSplitError("the batch is not its first dimension")
        return self

    def dim(self, given: int) -> int:
        """Return the layer's dimension for one of torch's; NotSplitError if it is the batch."""
        dim = given % max(1, self.n_dims)
        if dim == self.batch:
            raise NotSplitError("it works along the batch")
        if self.batch is None or dim < self.batch:
            return dim
        return dim - 1 + self.before + self.after

    def to(self, layer: Layer) -> "Value":
        """Return another layer in the same arrangement."""
        return replace(self, layer=layer)

    def refuse_others(self, *values: "Value") -> None:
        """Raise `NotSplitError` if any of these values is arranged in another way."""
        if any(self.to(value.layer) != value for value in values):
            raise NotSplitError("its tensors are arranged in different ways")

    def without(self, layer: Layer, torchs: Sequence[int]) -> "Value":
        """Return a layer that lacks some of torch's dimensions."""
        batch = self.batch and self.batch - sum(dim < self.batch for dim in torchs)
        return replace(self, layer=layer, batch=batch)


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the model, before a layer reads it."""

    use: TensorUse
    dtype: torch.dtype = torch.float32  # of the model; ranks have floats
    turned: bool = False  # transposed; of two dimensions


@final
@dataclass(frozen=True, slots=True)
class Complex:
    """A complex tensor: two tensors of its shape."""

    real: Any
    imaginary: Any


@final
@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that depends on the number of samples and on nothing else."""

    target: Any
    args: list[Any]
    keywords: dict[str, Any]
    result: Any  # a fake tensor
    number: float | None = None  # that of all its elements
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def at(self, n: int) -> torch.Tensor:
        """Return it for n samples."""
        if n not in self.known:
            args, said = _for(self.args, n), _for(self.keywords, n)
            self.known[n] = self.target(*args, **said)
        return self.known[n]

    @property
    def n_folded(self) -> int:
        """Number of elements of each sample in the batch's dimension; 0 without one."""
        return max((factor(extent) for extent in self.result.shape), default=0)

    @property
    def is_folded(self) -> bool:
        """Whether it has several elements for each sample in the batch's dimension."""
        return self.n_folded > 1

    def row(self) -> torch.Tensor:
        """Return it for any number of samples; without them, but for what each has of its own.

        NotSplitError if samples get different numbers.
        """
        batch = batch_of(self.result.shape)
        many = _N_NUMBERS_TRIED // max(1, self.at(2).numel())
        found = [self.at(n) for n in (2, 3, *([] if many < 4 else [many]))]
        if batch is not None:
            found = [x.unflatten(batch, (x.shape[batch] // self.n_folded, -1)) for x in found]
        row = found[0] if batch is None else found[0].narrow(batch, 0, 1)
        if not all(torch.equal(row.expand_as(x), x) for x in found):
            raise NotSplitError("it depends on the batch size")
        return row if batch is None else row.squeeze(batch).contiguous()

    @property
    def numbers_samples(self) -> bool:
        """Whether it is 0, 1, 2 ... for the samples, or a multiple of that: of their rows."""
        step = int(self.at(2).flatten()[-1])
        return all(torch.equal(self.at(n).flatten(), torch.arange(n) * step) for n in (2, 3))


def _for(given: Any, n: int) -> Any:  # noqa: ANN401 -- arguments
    # For n samples.
    def one(value: object) -> object:
        if isinstance(value, Made):
            return value.at(n).clone()
        if isinstance(value, torch.Tensor):
            return value.clone()
        return n_samples_in(value, n) if isinstance(value, torch.SymInt) else value

    return pytree.tree_map(one, given)


@final
@dataclass(slots=True)
class Results:
    """Several results, each of which becomes a layer when it is used."""

    make: Callable[[int], object]
    made: dict[int, object] = field(default_factory=dict)

    def __getitem__(self, index: int) -> object:
        if index not in self.made:
            self.made[index] = self.make(index)
        return self.made[index]


# --- extents ---


def linear(extent: Any) -> tuple[int, int]:  # noqa: ANN401 -- an int or a symbol
    """Return a and b of an extent of a * n + b for n samples.

    NotSplitError if it is something else, such as half the batch size.
    """
    if isinstance(extent, int):
        return 0, extent
    found = [n_samples_in(extent, n) for n in (0, 1, 2, 7)]
    a, b = found[1] - found[0], found[0]
    if found != [a * n + b for n in (0, 1, 2, 7)]:
        raise NotSplitError(f"an extent is {extent}, no multiple of the batch size")
    return a, b


def factor(extent: object) -> int:
    """Return n of an extent of n samples; 0 if it does not depend on the batch.

    NotSplitError if it is something else, such as the batch size plus one.
    """
    a, b = linear(extent)
    if a and b:
        raise NotSplitError(f"an extent is {extent}, no multiple of the batch size")
    return a


def batch_of(shape: Sequence[object]) -> int | None:
    """Return the dimension that is the batch, or holds it."""
    found = [dim for dim, extent in enumerate(shape) if factor(extent)]
    if len(found) > 1:
        raise NotSplitError("its result has the batch twice")
    return found[0] if found else None


# --- as plain data ---


MOVES: Final = frozenset({"permute", "reshape", "slice", "expand", "cat", "pad"})
_N_BITS: Final = 32  # a graph is computed in float32 or float64


def narrow(dtype: torch.dtype, own: torch.dtype) -> str:
    """Return the name of a type that has fewer numbers than those of layers; "" if it has not.

    Layers have floats of one type, whatever type `own` the model's are of, and int64.
    """
    if dtype.is_floating_point:
        is_narrow = torch.finfo(dtype).bits < min(_N_BITS, torch.finfo(own).bits)
    else:
        is_narrow = dtype != torch.int64
    return str(dtype).removeprefix("torch.") if is_narrow else ""


def type_of(builder: Builder, layer: Layer) -> str:
    """Return the narrow type of a layer's numbers, "bool" for a mask; "" if it has none."""
    if layer.kind in MOVES:
        first, *others = {type_of(builder, builder[name]) for name in layer.inputs}
        return "" if others else first
    return str(layer.options.get("type", ""))


@final
class Encoder:
    """Arguments of a call as plain data (JSON, read by `ops.call.decoded`), and what they name."""

    def __init__(self, builder: Builder, dtype: torch.dtype) -> None:
        self._builder = builder
        self._dtype = dtype  # of the model's floats
        self.inputs: list[Value] = []
        self.tensors: dict[str, TensorUse] = {}

    def text(self, arguments: Sequence[object], keywords: Mapping[str, object]) -> str:
        return json.dumps(
            {
                "arguments": self.encoded(list(arguments)),
                "keywords": {word: self.encoded(value) for word, value in keywords.items()},
            }
        )

    def encoded(self, value: Any) -> Any:  # noqa: ANN401, C901, PLR0911, PLR0912 -- of any type
        place: dict[str, object]
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list():
                return [self.encoded(item) for item in value]
            case tuple() if type(value) is tuple:
                return {"tuple": [self.encoded(item) for item in value]}
            case dict():
                return {"words": {str(word): self.encoded(item) for word, item in value.items()}}
            case Held():
                word = f"p{len(self.tensors)}"
                self.tensors[word] = value.use
                place = {"tensor": word, "turned": value.turned}
                is_own = value.dtype.is_floating_point and not narrow(value.dtype, self._dtype)
                return place if is_own else place | self.encoded(value.dtype)
            case Value():
                self.inputs.append(value)
                place = {"input": len(self.inputs) - 1, "batch": value.batch}
                if value.before or value.after:
                    place |= {"before": value.before, "after": value.after}
                if dtype := type_of(self._builder, value.layer):
                    place["dtype"] = dtype
                return place
            case torch.Tensor():
                text = packed(value)
                if len(text) > _N_CHARACTERS_MAX:
                    raise GraphError(
                        f"the forward makes a tensor of {value.numel()} numbers: register it as a "
                        "buffer of its module"
                    )
                place = {"constant": text, "shape": list(value.shape)} | self._narrow(value.dtype)
                return place | self.encoded(value.dtype)
            case Made():
                keywords = {word: self.encoded(item) for word, item in value.keywords.items()}
                given = {"arguments": self.encoded(value.args), "keywords": keywords}
                return {"made": str(value.target), **given, **self._narrow(value.result.dtype)}
            case torch.SymInt():
                samples, plus = linear(value)
                return {"samples": samples, "plus": plus} if samples else plus
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.device():
                return {"device": "own"}  # that of the rank
            case torch.layout() | torch.memory_format():
                return None
            case _:
                raise NotSplitError(
                    f"an object of type {type(value).__name__}, which cannot be sent"
                )

    def _narrow(self, dtype: torch.dtype) -> dict[str, object]:
        # Other floats get the type of what they meet.
        name = dtype.is_floating_point and narrow(dtype, self._dtype)
        return {"narrow": True} if name else {}
