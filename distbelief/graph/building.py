"""Layers collected one by one, while a model is translated."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self, final

import msgspec
from torch import nn

from distbelief.graph.layer import INPUT, GraphError, Layer, LayerGraph, Option, TensorUse
from distbelief.graph.region import Shape


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
