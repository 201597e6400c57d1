"""Operators: what a layer must tell about itself so that it can be split over ranks.

For any region of a layer's output: which regions of its inputs and which parts of the model's
tensors it needs, what it costs, and how it is computed. Legal splits, halos, messages,
memory and cost follow from that alone. A new operator is a subclass of `Operator`
or `Sums` with a name.

An operator whose output is a sum (or maximum) over a dimension of its input may also compute
partial sums: each rank computes its part, one rank combines them. BatchNorm statistics, softmax
over split classes and Linear layers split by inputs work this way.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal, NamedTuple, final

import torch
from torch import nn
from typing_extensions import override

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.region import Region


Combine = Literal["sum", "max"]


class Cut(NamedTuple):
    """A dimension along which a region may be split, at multiples of `unit`."""

    dim: int
    unit: int = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The cost of one sample."""

    forward: float = 0.0  # floating point operations; a multiply-add counts as two
    backward: float = 0.0  # floating point operations of the backward pass
    n_elements: float = 0.0  # elements read and written in the forward pass, model tensors excluded

    def times(self, n: int) -> "Work":
        return Work(
            forward=n * self.forward, backward=n * self.backward, n_elements=n * self.n_elements
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The training step that a layer is computed in."""

    training: bool = False  # False for inference
    seed: int = 0  # seed of the step's randomness, equal on all ranks of a replica
    first_sample: int = 0  # index of the first sample among all samples of the step
    # Opaque modules by their path in the model, on any device: their own tensors are not used.
    modules: Mapping[str, nn.Module] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One computation of an operator, or of one of its partial sums."""

    layer: Layer
    region: Region  # of its output; of partial sums, of its first input
    # for each input the region that `reads` returns: (batch, *region.shape)
    inputs: Sequence[torch.Tensor]
    tensors: Mapping[str, torch.Tensor]  # for each tensor the part that `uses` returns
    step: Step  # seed and mode of the step

    @property
    def module(self) -> nn.Module:
        """The module of the model that the layer names; GraphError if it is not given."""
        path = self.layer.text("module")
        if path not in self.step.modules:
            raise GraphError(
                f"the module {path!r} of {self.layer.name!r} is not given: add it to Step.modules"
            )
        return self.step.modules[path]


class PartialSums(ABC):
    """How an output is combined from parts of the first input."""

    def combine(self, layer: Layer) -> Combine:
        """Return how partial outputs become one; "max" has no gradient."""
        del layer
        return "sum"

    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        """Return the dimensions of the first input along which it may be split."""
        return tuple(Cut(dim) for dim in range(len(layer.input_shapes[0])))

    def reads(self, layer: Layer, part: Region) -> tuple[Region, ...]:
        """Return the region of each input that belongs to `part` of the first one."""
        return tuple(part.broadcast(shape) for shape in layer.input_shapes)

    def uses(self, layer: Layer, part: Region) -> Mapping[str, Region]:
        """Return the part of each tensor that belongs to `part` of the first input."""
        del layer, part
        return {}

    def writes(self, layer: Layer, part: Region) -> Region:
        """Return the region of the output that `part` contributes to."""
        del part
        return layer.region

    @abstractmethod
    def compute(self, call: Call) -> torch.Tensor:
        """Return what `call.region` contributes to the region it `writes`: (batch, *shape)."""


OPERATORS: Final[dict[str, "Operator"]] = {}  # all, by name


class Operator(ABC):
    """What a layer computes, without state; a subclass with a name is registered."""

    name: ClassVar[str]  # the value of `Layer.kind`
    # Its partial sums, if its output is a sum over parts of its first input.
    partial: PartialSums | None = None
    # Cost per element of the output; None for that of an elementwise function of its inputs.
    per_element: ClassVar[Work | None] = None

    @override
    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            register(cls.name, cls())

    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        """Return the dimensions of the output along which it may be split."""
        return tuple(Cut(dim) for dim in range(len(layer.shape)))

    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        """Return the region of each input that `output` needs: by default the same, broadcast."""
        return tuple(output.broadcast(shape) for shape in layer.input_shapes)

    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        """Return the part of each of the model's tensors that `output` needs."""
        del output
        return {name: Region.of(*use.shape) for name, use in layer.tensors.items()}

    def joins_samples(self, layer: Layer) -> bool:
        """Return whether the output is one for the whole batch, (1, *shape), as statistics are."""
        del layer
        return False

    def work(self, layer: Layer, output: Region) -> Work:
        n = len(layer.inputs)
        work = self.per_element or Work(forward=1.0, backward=float(n), n_elements=1.0 + n)
        return work.times(output.n_elements)

    def product_work(self, layer: Layer, output: Region, operations: float) -> Work:
        """Return the cost of a product: as much again for each of two gradients."""
        read = sum(region.n_elements for region in self.reads(layer, output))
        return Work(
            forward=operations, backward=2 * operations, n_elements=float(output.n_elements + read)
        )

    @abstractmethod
    def compute(self, call: Call) -> torch.Tensor:
        """Return (batch, *call.region.shape), by operations that autograd knows."""


def register(name: str, operator: Operator) -> None:
    if name in OPERATORS:
        raise GraphError(f"there is an operator {name!r} already: use another name")
    OPERATORS[name] = operator


class Sums(PartialSums, ABC):
    """Partial sums that are all of a layer's work: its operator takes the input as one part."""

    name: ClassVar[str]  # of the operator
    per_element: ClassVar[Work] = Work(forward=1.0, backward=1.0, n_elements=1.0)  # of the input

    @override
    def __init_subclass__(cls) -> None:
        register(cls.name, _OnePart(cls()))

    def reduced(self, layer: Layer, output: Region) -> Region:
        """Return the region of the first input that `output` reduces; by default all of it."""
        del output
        return Region.of(*layer.input_shapes[0])

    def work(self, layer: Layer, part: Region) -> Work:
        del layer
        return self.per_element.times(part.n_elements)

    def cuts_of_output(self, layer: Layer) -> tuple[Cut, ...]:
        return tuple(Cut(dim) for dim in range(len(layer.shape)))

    def joins_samples(self, layer: Layer) -> bool:
        del layer
        return False


@final
class _OnePart(Operator):
    # The operator of sums.

    def __init__(self, sums: Sums) -> None:
        self.partial = self._sums = sums

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return self._sums.cuts_of_output(layer)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return self._sums.reads(layer, self._sums.reduced(layer, output))

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return self._sums.joins_samples(layer)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        return self._sums.work(layer, self._sums.reduced(layer, output))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return self._sums.compute(replace(call, region=self._sums.reduced(call.layer, call.region)))


def operator_of(layer: Layer) -> Operator:
    """Return the operator of a layer; GraphError if none of this name is registered."""
    try:
        return OPERATORS[layer.kind]
    except KeyError:
        raise GraphError(
            f"layer {layer.name!r} has unknown operator {layer.kind!r}: import the "
            f"module that registers it (known: {', '.join(sorted(OPERATORS))})"
        ) from None


def sums_of(layer: Layer) -> PartialSums:
    sums = operator_of(layer).partial
    assert sums is not None, layer.name
    return sums


def joined(graph: LayerGraph) -> frozenset[str]:
    """Return the layers with one output for the whole batch, and those that read only such."""
    found: set[str] = set()
    for layer in graph.layers:
        if layer.kind == INPUT:
            continue
        reads_only_joined = bool(layer.inputs) and found.issuperset(layer.inputs)
        if reads_only_joined or operator_of(layer).joins_samples(layer):
            found.add(layer.name)
    return frozenset(found)
