"""Layers collected one by one, while a model is translated."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Self, final

import msgspec
from torch import nn

from distbelief.errors import JobError
from distbelief.graph.region import Region, Shape


# Layers and the graph they form: what a model computes, without the numbers.
#
#     images [3, 32, 32] --> conv1 [16, 32, 32] --> relu1 --> pool1 ... --> loss []
#
# A layer names its kind (`kind`), the layers it reads, and the tensors of the model that
# it uses. All of it is data: two machines that capture the same model get the same graph,
# and the same fingerprint.

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
        kind: Of which `Operator`.
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


@final
class Builder:
    """A layer graph in the making.

    Args:
        aliases: For tensors with several names, the one that stands for all.
    """

    def __init__(self, *, aliases: Mapping[str, str] | None = None) -> None:
        self._layers: dict[str, Layer] = {}
        self._aliases = aliases or {}

    @classmethod
    def of(cls, graph: LayerGraph) -> Self:
        """Return a builder that has the layers of a graph already."""
        builder = cls()
        for layer in graph.layers:
            builder.add_layer(layer)
        return builder

    def __getitem__(self, name: str) -> Layer:
        """Return the layer of this name, added before."""
        return self._layers[name]

    def free_name(self, wanted: str) -> str:
        """Return `wanted`, or that with a number if a layer has it already."""
        name, number = wanted, 1
        while name in self._layers:
            number += 1
            name = f"{wanted}.{number}"
        return name

    def input(self, name: str, shape: Shape, *, is_integer: bool = False) -> str:
        """Add an input."""
        layer = Layer(name=name, kind=INPUT, shape=shape, is_integer=is_integer)
        return self.add_layer(layer)

    def add(
        self,
        name: str,
        kind: str,
        inputs: Sequence[str],
        shape: Shape,
        *,
        options: Mapping[str, Option] | None = None,
        tensors: Mapping[str, TensorUse] | None = None,
        is_integer: bool = False,
        whole: str = "",
    ) -> str:
        """Add a layer that reads layers added before; return its name, made unique."""
        name = self.free_name(name)
        layer = Layer(
            name=name,
            kind=kind,
            inputs=tuple(inputs),
            input_shapes=tuple(self._layers[source].shape for source in inputs),
            shape=shape,
            options=dict(options or {}),
            tensors=dict(tensors or {}),
            is_integer=is_integer,
            whole=whole,
        )
        return self.add_layer(layer)

    def add_layer(self, layer: Layer) -> str:
        """Add a layer, its tensors under the names that stand for them."""
        if layer.name in self._layers:
            raise GraphError(f"two layers are called {layer.name!r}")
        tensors = {
            word: msgspec.structs.replace(use, name=self._aliases.get(use.name, use.name))
            for word, use in layer.tensors.items()
        }
        self._layers[layer.name] = msgspec.structs.replace(layer, tensors=tensors)
        return layer.name

    def replacing(self, tensor: str) -> Layer | None:
        """Return the layer, last of those added, that gives a tensor its new value."""
        name = self._aliases.get(tensor, tensor)
        for layer in reversed(self._layers.values()):
            if layer.kind == "running_average" and layer.tensors["running"].name == name:
                return layer
        return None

    def extend(self, layers: Iterable[Layer]) -> str:
        """Add the layers of a composite; return the name of the last one."""
        name = ""
        for layer in layers:
            name = self.add_layer(layer)
        return name

    def finish(self, outputs: Sequence[str]) -> LayerGraph:
        """Return the graph, without layers that no output depends on.

        What replaces running statistics stays: a training step is not without effect
        because nobody reads its output.
        """
        effects = {layer.name for layer in self._layers.values() if layer.kind == "running_average"}
        needed = {*outputs, *effects}
        for layer in reversed(self._layers.values()):
            if layer.name in needed:
                needed.update(layer.inputs)
        kept = tuple(
            layer for layer in self._layers.values() if layer.name in needed or layer.kind == INPUT
        )
        return LayerGraph(kept, tuple(outputs))


def uses(module: nn.Module, path: str, *words: str) -> dict[str, TensorUse]:
    """Return the module's own tensors as layers use them; all, or these."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        word: TensorUse(
            name=below(path, word), shape=tuple(tensor.shape), trains=tensor.requires_grad
        )
        for word, tensor in found.items()
        if not words or word in words
    }


def below(path: str, word: str) -> str:
    """Return the path of what a module calls `word`; the root's own path is empty."""
    return f"{path}.{word}" if path else word
