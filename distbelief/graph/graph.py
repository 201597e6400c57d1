"""Layer graphs: what a model computes, without its values.

    images [3, 32, 32] --> conv1 [16, 32, 32] --> relu1 --> pool1 ... --> loss []

A layer names its operator (`kind`), the layers it reads and the model's tensors it uses. All of it
is plain data: two hosts that capture the same model get the same graph and fingerprint.
Shapes leave out the batch dimension.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Self, TypedDict, Unpack, final

import msgspec
import torch
from torch import nn

from distbelief.core.errors import JobError
from distbelief.graph.region import Region, Shape


Option = bool | int | float | str | None | tuple[int, ...]

# The `kind` of layers that are read from the data.
INPUT = "input"


class GraphError(JobError):
    """A layer graph is inconsistent, or a model cannot be captured as one."""


@final
class TensorUse(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # key in the module's `state_dict`; layers that share a tensor use the same name
    shape: Shape
    trains: bool = True  # whether it has a gradient


class _More(TypedDict, total=False):
    # Fields of a layer that have a default.

    options: Mapping[str, Option]
    tensors: Mapping[str, TensorUse]
    is_integer: bool
    whole: str


@final
class Layer(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    name: str  # unique in its graph
    kind: str  # name of its `Operator`
    inputs: tuple[str, ...] = ()  # names of the layers it reads, in the operator's order
    input_shapes: tuple[Shape, ...] = ()  # output shapes of these layers, without the batch
    shape: Shape  # of its output, without the batch
    # Options of the operator: stride, padding, and so on.
    options: Mapping[str, Option] = msgspec.field(default_factory=dict)
    # Tensors of the model by the operator's name for each: "weight", "bias".
    tensors: Mapping[str, TensorUse] = msgspec.field(default_factory=dict)
    is_integer: bool = False  # whether its output is integers: labels, word indices
    whole: str = ""  # why it is opaque (computed by one rank); "" if it can be split

    @classmethod
    def of(
        cls, name: str, kind: str, sources: Sequence["Layer"], shape: Shape, **more: Unpack[_More]
    ) -> "Layer":
        return cls(
            name=name,
            kind=kind,
            inputs=tuple(source.name for source in sources),
            input_shapes=tuple(source.shape for source in sources),
            shape=shape,
            **more,
        )

    @property
    def region(self) -> Region:
        """All of its output."""
        return Region.of(*self.shape)

    @cached_property
    def signature(self) -> bytes:
        # Everything that its costs depend on: all but names, and which of several steps it is.
        tensors = {argument: (use.shape, use.trains) for argument, use in self.tensors.items()}
        options = {
            name: value for name, value in self.options.items() if name not in {"module", "step"}
        }
        inputs = [self.inputs.index(name) for name in self.inputs]
        return msgspec.json.encode(
            (self.kind, self.shape, self.input_shapes, inputs, options, tensors, bool(self.whole)),
            order="sorted",
        )

    def integer(self, option: str) -> int:
        value = self.options[option]
        assert isinstance(value, int), (self.name, option, value)
        return value

    def integers(self, option: str) -> tuple[int, ...]:
        value = self.options[option]
        assert isinstance(value, tuple), (self.name, option, value)
        return value

    def number(self, option: str) -> float:
        value = self.options[option]
        assert isinstance(value, int | float), (self.name, option, value)
        return float(value)

    def text(self, option: str) -> str:
        value = self.options[option]
        assert isinstance(value, str), (self.name, option, value)
        return value


@final
@dataclass(frozen=True)
class LayerGraph:
    """Layers in topological order; raises GraphError if they are inconsistent."""

    layers: tuple[Layer, ...]
    outputs: tuple[str, ...]  # layers
    # Where each output, without a loss, stands in what the forward returns; () if not known.
    fields: tuple[tuple[str | int, ...], ...] = ()

    def __post_init__(self) -> None:
        known: dict[str, Layer] = {}
        for layer in self.layers:
            if layer.name in known:
                raise GraphError(f"two layers have the name {layer.name!r}")
            for name, shape in zip(layer.inputs, layer.input_shapes, strict=True):
                if name not in known:
                    raise GraphError(
                        f"layer {layer.name!r} reads {name!r}, but no layer before it has "
                        "this name: it is missing, or the graph has a cycle"
                    )
                if known[name].shape != shape:
                    raise GraphError(
                        f"layer {layer.name!r} reads {name!r} as {list(shape)}, but "
                        f"its output is {list(known[name].shape)}"
                    )
            known[layer.name] = layer
        for name in self.outputs:
            if name not in known:
                raise GraphError(f"output {name!r} is not a layer of the graph")
        _check_tensors(self.layers)

    def __getitem__(self, name: str) -> Layer:
        return self.by_name[name]

    @cached_property
    def by_name(self) -> Mapping[str, Layer]:
        return MappingProxyType({layer.name: layer for layer in self.layers})

    @cached_property
    def computed(self) -> tuple[Layer, ...]:
        """All layers except inputs."""
        return tuple(layer for layer in self.layers if layer.kind != INPUT)

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Layer, ...]]:
        """For each layer, the layers that read it, each once."""
        found: dict[str, list[Layer]] = {layer.name: [] for layer in self.layers}
        for layer in self.layers:
            for name in dict.fromkeys(layer.inputs):
                found[name].append(layer)
        return MappingProxyType({name: tuple(layers) for name, layers in found.items()})

    @cached_property
    def tensors(self) -> Mapping[str, TensorUse]:
        """Every tensor of the model that a layer uses, by name, sorted."""
        uses = {use.name: use for layer in self.layers for use in layer.tensors.values()}
        return MappingProxyType(dict(sorted(uses.items())))

    def only(self, outputs: Sequence[str]) -> "LayerGraph":
        """Return the graph of these outputs, with nothing that they do not depend on."""
        needed = _needed(self.layers, outputs)
        kept = tuple(layer for layer in self.layers if layer.name in needed)
        return LayerGraph(kept, tuple(outputs))

    @property
    def n_parameters(self) -> int:
        """Number of elements of all trained tensors; shared ones count once."""
        return sum(math.prod(u.shape) for u in self.tensors.values() if u.trains)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the whole graph, the same in every process."""
        encoded = msgspec.json.encode((self.layers, self.outputs), order="sorted")
        return hashlib.sha256(encoded).hexdigest()[:16]


def _needed(layers: Sequence[Layer], outputs: Iterable[str]) -> set[str]:
    # The layers that these depend on, themselves included.
    needed = set(outputs)
    for layer in reversed(layers):
        if layer.name in needed:
            needed.update(layer.inputs)
    return needed


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
    """Builds a layer graph; `aliases` maps further names of a tensor to that in the graph."""

    def __init__(self, *, aliases: Mapping[str, str] | None = None) -> None:
        self._layers: dict[str, Layer] = {}
        self._aliases = aliases or {}

    @classmethod
    def of(cls, graph: LayerGraph) -> Self:
        """Return a builder with all layers of a graph."""
        builder = cls()
        for layer in graph.layers:
            builder.add_layer(layer)
        return builder

    def __getitem__(self, name: str) -> Layer:
        return self._layers[name]

    def __len__(self) -> int:
        return len(self._layers)

    def since(self, n: int) -> list[Layer]:
        """Return all layers but the first n."""
        return list(islice(self._layers.values(), n, None))

    def free_name(self, name: str) -> str:
        """Return `name`, with a number if a layer has it already."""
        free, number = name, 1
        while free in self._layers:
            number += 1
            free = f"{name}.{number}"
        return free

    def input(
        self, name: str, shape: Shape, *, is_integer: bool = False, is_mask: bool = False
    ) -> Layer:
        options: dict[str, Option] = {"type": "bool"} if is_mask else {}
        return self.add_layer(
            Layer(name=name, kind=INPUT, shape=shape, is_integer=is_integer, options=options)
        )

    def add(
        self, name: str, kind: str, sources: Sequence[Layer], shape: Shape, **more: Unpack[_More]
    ) -> Layer:
        """Add a layer that reads layers added before; its name is made unique."""
        return self.add_layer(Layer.of(self.free_name(name), kind, sources, shape, **more))

    def add_layer(self, layer: Layer) -> Layer:
        """Add a layer, with its tensors under their names in the graph."""
        if layer.name in self._layers:
            raise GraphError(f"two layers have the name {layer.name!r}")
        tensors = {
            key: msgspec.structs.replace(use, name=self._aliases.get(use.name, use.name))
            for key, use in layer.tensors.items()
        }
        self._layers[layer.name] = msgspec.structs.replace(layer, tensors=tensors)
        return self._layers[layer.name]

    def replacing(self, tensor: str) -> Layer | None:
        """Return the last layer that gives a tensor its new value (a running average)."""
        name = self._aliases.get(tensor, tensor)
        for layer in reversed(self._layers.values()):
            if layer.kind == "running_average" and layer.tensors["running"].name == name:
                return layer
        return None

    def extend(self, layers: Sequence[Layer]) -> Layer:
        """Add layers in order; return the last one."""
        return [self.add_layer(layer) for layer in layers][-1]

    def finish(self, outputs: Sequence[str]) -> LayerGraph:
        """Return the graph, without layers that no output depends on."""
        layers = tuple(self._layers.values())
        # Running statistics are kept: a training step needs them though nothing reads them.
        effects = [layer.name for layer in layers if layer.kind == "running_average"]
        needed = _needed(layers, [*outputs, *effects])
        kept = tuple(layer for layer in layers if layer.name in needed or layer.kind == INPUT)
        return LayerGraph(kept, tuple(outputs))


def uses(module: nn.Module, path: str, *names: str) -> dict[str, TensorUse]:
    """Return the module's own tensors for `Layer.tensors`: all, or those with these names."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: TensorUse(
            name=below(path, name), shape=tuple(as_real(tensor).shape), trains=tensor.requires_grad
        )
        for name, tensor in found.items()
        if not names or name in names
    }


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as shards and graphs have it: complex numbers as (..., 2)."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def below(path: str, name: str) -> str:
    """Return the path of what the module at `path` calls `name`; the root's path is empty."""
    return f"{path}.{name}" if path else name
