"""Layers and the graph they form: what a model computes, without the numbers.

    images [3, 32, 32] --> conv1 [16, 32, 32] --> relu1 --> pool1 ... --> loss []

A layer names its kind (`kind`), the layers it reads, and the tensors of the model that
it uses. All of it is data: two machines that capture the same model get the same graph,
and the same fingerprint.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import final

import msgspec

from distbelief.errors import JobError
from distbelief.graph.region import Region, Shape


Option = bool | int | float | str | None | tuple[int, ...]

INPUT = "input"
"""The kind of layers that nothing computes: they are read from the data."""


class GraphError(JobError):
    """A layer graph does not hang together, or a model cannot be made into one."""


@final
class TensorUse(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the model that a layer uses.

    Attributes:
        name: In the module's `state_dict`; two layers that share it have equal names.
        shape: All of it.
        trains: Whether it has a gradient.
    """

    name: str
    shape: Shape
    trains: bool = True


@final
class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer.

    Attributes:
        name: Unique in its graph.
        kind: Of which `LayerKind`.
        inputs: The layers it reads, in the kind's order.
        input_shapes: Shapes of their outputs, without the batch dimension.
        shape: Of its own output, likewise.
        options: What its kind needs to know: stride, padding, …
        tensors: The model's tensors it uses, by the kind's word for each: "weight", …
        is_integer: Whether its output is whole numbers: labels, word indices.
        whole: Why it is computed whole on one machine, if so.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    input_shapes: tuple[Shape, ...] = ()
    shape: Shape
    options: Mapping[str, Option] = msgspec.field(default_factory=dict)
    tensors: Mapping[str, TensorUse] = msgspec.field(default_factory=dict)
    is_integer: bool = False
    whole: str = ""

    @property
    def region(self) -> Region:
        """All of its output."""
        return Region.of(*self.shape)

    def integer(self, option: str) -> int:
        """Return an option that is a whole number."""
        value = self.options[option]
        assert isinstance(value, int), (self.name, option, value)
        return value

    def integers(self, option: str) -> tuple[int, ...]:
        """Return an option that is several whole numbers."""
        value = self.options[option]
        assert isinstance(value, tuple), (self.name, option, value)
        return value

    def number(self, option: str) -> float:
        """Return an option that is a number."""
        value = self.options[option]
        assert isinstance(value, int | float), (self.name, option, value)
        return float(value)

    def text(self, option: str) -> str:
        """Return an option that is a word."""
        value = self.options[option]
        assert isinstance(value, str), (self.name, option, value)
        return value


@final
@dataclass(frozen=True)
class LayerGraph:
    """Layers in topological order.

    Args:
        layers: Each after all that it reads.
        outputs: The layers whose outputs are the model's.

    Raises:
        GraphError: they do not hang together.
    """

    layers: tuple[Layer, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known: dict[str, Layer] = {}
        for layer in self.layers:
            if layer.name in known:
                raise GraphError(f"two layers are called {layer.name!r}")
            for name, shape in zip(layer.inputs, layer.input_shapes, strict=True):
                if name not in known:
                    raise GraphError(
                        f"layer {layer.name!r} reads {name!r}, which no layer before "
                        "it is called: it is missing, or the graph has a cycle"
                    )
                if known[name].shape != shape:
                    raise GraphError(
                        f"layer {layer.name!r} reads {name!r} as {list(shape)}, but "
                        f"its output is {list(known[name].shape)}"
                    )
            known[layer.name] = layer
        for name in self.outputs:
            if name not in known:
                raise GraphError(f"output {name!r} is no layer of the graph")
        _check_tensors(self.layers)

    def __getitem__(self, name: str) -> Layer:
        """Return the layer of this name."""
        return self.by_name[name]

    @cached_property
    def by_name(self) -> Mapping[str, Layer]:
        """All layers."""
        return MappingProxyType({layer.name: layer for layer in self.layers})

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Layer, ...]]:
        """Per layer, those that read it; one that reads it twice stands there once."""
        found: dict[str, list[Layer]] = {layer.name: [] for layer in self.layers}
        for layer in self.layers:
            for name in dict.fromkeys(layer.inputs):
                found[name].append(layer)
        return MappingProxyType({name: tuple(layers) for name, layers in found.items()})

    @cached_property
    def tensors(self) -> Mapping[str, TensorUse]:
        """Every tensor of the model that some layer uses, by name, sorted."""
        uses = {use.name: use for layer in self.layers for use in layer.tensors.values()}
        return MappingProxyType(dict(sorted(uses.items())))

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors that train; shared ones count once."""
        return sum(math.prod(u.shape) for u in self.tensors.values() if u.trains)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything, the same in every process."""
        encoded = msgspec.json.encode((self.layers, self.outputs), order="sorted")
        return hashlib.sha256(encoded).hexdigest()[:16]


def _check_tensors(layers: Iterable[Layer]) -> None:
    uses: dict[str, TensorUse] = {}
    for layer in layers:
        for use in layer.tensors.values():
            if uses.setdefault(use.name, use) != use:
                raise GraphError(
                    f"tensor {use.name!r} has shape {list(uses[use.name].shape)} in "
                    f"one layer and {list(use.shape)} in {layer.name!r}"
                )
