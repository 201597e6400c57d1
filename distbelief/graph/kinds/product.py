"""Products of two matrices that both are computed: scores of queries and keys, say.

    one (*lead, rows, inner)    other (*lead, inner, columns)    output (*lead, rows,
                                                                         columns)

A part of the output reads rows of the one, columns of the other, and of the dimensions
before these what it is itself.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


@final
class Product(LayerKind):
    """output = one @ other, over the last two dimensions."""

    name: ClassVar[str] = "product"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        *lead, rows, columns = output.intervals
        inner = (0, layer.input_shapes[0][-1])
        return Region((*lead, rows, inner)), Region((*lead, inner, columns))

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n_inner = layer.input_shapes[0][-1]
        forward = 2.0 * n_inner * output.n_elements
        read = sum(region.n_elements for region in self.reads(layer, output))
        return Work(forward=forward, backward=2 * forward, n_elements=read + output.n_elements)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        return inputs[0] @ inputs[1]


def product_layer(name: str, one: Layer, other: Layer) -> Layer:
    """Return the layer of a product.

    Args:
        name: Of the layer.
        one: (*lead, rows, inner)
        other: (*lead, inner, columns)
    """
    return Layer(
        name=name,
        kind="product",
        inputs=(one.name, other.name),
        input_shapes=(one.shape, other.shape),
        shape=(*one.shape[:-1], other.shape[-1]),
    )
