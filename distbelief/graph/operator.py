"""What a kind of layer has to tell of itself, so that it can be split over machines.

For any region of a layer's output: which regions of its inputs it needs, which parts of
the model's tensors, what it costs, and how it is computed. From that alone follow legal
splits, halos, messages, memory and price. A new kind is one small file: a subclass of
`Operator`, and `register(...)`.

A kind whose output is a sum (or a maximum) over a dimension of its input may tell how
to compute a part of it from a part of that dimension: *partial*. The parts are then
combined on one machine and used from there; statistics of BatchNorm, softmax over split
classes and row-split Linear layers are this and nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import nn

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.region import Region


Combine = Literal["sum", "max"]


class Cut(NamedTuple):
    """A dimension along which a region may be cut, at multiples of `unit`."""

    dim: int
    unit: int = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one sample costs.

    Attributes:
        forward: Floating point operations, a multiply-add counted as two.
        backward: Likewise.
        n_elements: Numbers read and written in the forward pass, tensors apart.
    """

    forward: float = 0.0
    backward: float = 0.0
    n_elements: float = 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a layer may know of the step it is computed in.

    Attributes:
        training: Or inference.
        seed: Of the step's randomness; equal on all machines of a replica.
        first_sample: Index of the first sample, of all that the step is about.
        modules: Modules that are computed whole, by their paths in the model; on which
            device does not matter, for their tensors are not used.
    """

    training: bool = False
    seed: int = 0
    first_sample: int = 0
    modules: Mapping[str, nn.Module] = field(default_factory=dict)


class PartialSums(ABC):
    """How a kind's output is put together from parts of its first input.

    Attributes:
        combine: How partial outputs become one. A "max" has no gradient.
    """

    combine: ClassVar[Combine] = "sum"

    @abstractmethod
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        """Return along which dimensions of its first input it may be cut."""

    def reads(self, layer: Layer, part: Region) -> tuple[Region, ...]:
        """Return the region of each input that goes with `part` of the first one."""
        return (part,) * len(layer.inputs)

    def uses(self, layer: Layer, part: Region) -> Mapping[str, Region]:
        """Return the part of each tensor that goes with `part` of the first input."""
        del layer, part
        return {}

    def writes(self, layer: Layer, part: Region) -> Region:
        """Return the region of the output that `part` contributes to."""
        del part
        return layer.region

    @abstractmethod
    def compute(
        self,
        layer: Layer,
        part: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        """Return what `part` contributes to what it `writes`: (batch, *shape)."""


class Operator(ABC):
    """One kind of layer; has no state.

    Attributes:
        name: As in `Layer.kind`.
        partial: How its output is a sum over parts of its first input, if it is.
    """

    name: ClassVar[str]
    partial: ClassVar[PartialSums | None] = None

    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        """Return along which dimensions of the output it may be cut."""
        return tuple(Cut(dim) for dim in range(len(layer.shape)))

    @abstractmethod
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        """Return the region of each input that `output` needs."""

    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        """Return the part of each of the model's tensors that `output` needs."""
        del output
        return {word: Region.of(*use.shape) for word, use in layer.tensors.items()}

    def joins_samples(self, layer: Layer) -> bool:
        """Return whether its output is one for the batch, (1, *shape): statistics."""
        del layer
        return False

    @abstractmethod
    def work(self, layer: Layer, output: Region) -> Work:
        """Return what `output` costs."""

    @abstractmethod
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        """Return `output`, (batch, *output.shape), by operations autograd knows.

        Args:
            layer: Which layer.
            output: Which part of it.
            inputs: Of each input what `reads` names: (batch, *region.shape).
            tensors: Of each tensor what `uses` names.
            step: For randomness, and whether to train.
        """


_KINDS: dict[str, Operator] = {}


def register(kind: Operator) -> None:
    """Make a kind known by its name.

    Raises:
        GraphError: another one has that name.
    """
    known = _KINDS.setdefault(kind.name, kind)
    if type(known) is not type(kind):
        raise GraphError(
            f"layer kind {kind.name!r} is {type(known).__qualname__} already: give "
            f"{type(kind).__qualname__} another name"
        )


def operator_of(layer: Layer) -> Operator:
    """Return the kind of this layer.

    Raises:
        GraphError: nobody has registered it.
    """
    try:
        return _KINDS[layer.kind]
    except KeyError:
        raise GraphError(
            f"layer {layer.name!r} is of kind {layer.kind!r}, which is not known here: "
            f"import the module that registers it (known: {', '.join(sorted(_KINDS))})"
        ) from None


def joined(graph: LayerGraph) -> frozenset[str]:
    """Return the layers whose output is one for the whole batch: (1, *shape).

    They do, or read nothing but such layers.
    """
    found: set[str] = set()
    for layer in graph.layers:
        if layer.kind == INPUT:
            continue
        follows = bool(layer.inputs) and found.issuperset(layer.inputs)
        if follows or operator_of(layer).joins_samples(layer):
            found.add(layer.name)
    return frozenset(found)
