"""Layers put side by side.

kind      "cat"
inputs    any number; their extents differ in dimension `dim` only
options   dim: without the batch, from 0

stack_layers(name, sources, *, dim)     reshapes, then cat
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


@final
class Cat(LayerKind):
    """One input after the other."""

    name: ClassVar[str] = "cat"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        dim = layer.integer("dim")
        start, stop = output.intervals[dim]
        reads, offset = [], 0
        for shape in layer.input_shapes:
            extent = shape[dim]
            low = min(max(start - offset, 0), extent)
            high = max(min(stop - offset, extent), low)
            reads.append(output.replaced(dim, (low, high)))
            offset += extent
        return tuple(reads)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        return Work(n_elements=2.0 * output.n_elements)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        n_samples = max(value.shape[0] for value in inputs)
        alike = [value.expand(n_samples, *value.shape[1:]) for value in inputs]
        return torch.cat(alike, dim=layer.integer("dim") + 1)


def cat_layer(name: str, sources: Sequence[Layer], *, dim: int) -> Layer:
    """Return the layer that joins these along a dimension, the batch not counted."""
    shapes = tuple(source.shape for source in sources)
    extent = sum(shape[dim] for shape in shapes)
    return Layer(
        name=name,
        kind=Cat.name,
        inputs=tuple(source.name for source in sources),
        input_shapes=shapes,
        shape=(*shapes[0][:dim], extent, *shapes[0][dim + 1 :]),
        options={"dim": dim},
    )


def stack_layers(name: str, sources: Sequence[Layer], *, dim: int) -> list[Layer]:
    """Return the layers that join equal shapes along a new dimension `dim`."""
    shape = sources[0].shape
    raised = [
        reshape_layer(f"{name}.{i}", source, shape=(*shape[:dim], 1, *shape[dim:]))
        for i, source in enumerate(sources)
    ]
    return [*raised, cat_layer(name, raised, dim=dim)]
