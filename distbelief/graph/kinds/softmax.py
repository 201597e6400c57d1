"""Softmax and its logarithm, over a dimension that may be split.

kind      "softmax": exp(x - maximum) / sum, or its logarithm
inputs    x, maximum, sum of exp(x - maximum); these two broadcast against x
options   log: whether the logarithm is wanted

softmax_layers(name, source, *, dim, log=False)    maximum, sum_exp, softmax
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.kinds.pointwise import broadcast
from distbelief.graph.kinds.reduction import reduction_layer
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


@final
class Softmax(LayerKind):
    """exp(x - maximum) / sum of the same, or its logarithm."""

    name: ClassVar[str] = "softmax"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return tuple(broadcast(output, shape) for shape in layer.input_shapes)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements)
        return Work(forward=3 * n, backward=3 * n, n_elements=2 * n)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        x, maximum, total = inputs
        if layer.options["log"]:
            return x - maximum - total.log()
        return (x - maximum).exp() / total


def softmax_layers(name: str, source: Layer, *, dim: int, log: bool = False) -> list[Layer]:
    """Return the layers of a softmax over dimension `dim`, the batch not counted."""
    maximum = reduction_layer(f"{name}.maximum", [source], function="maximum", dims=[dim])
    total = reduction_layer(f"{name}.sum_exp", [source, maximum], function="sum_exp", dims=[dim])
    sources = (source, maximum, total)
    softmax = Layer(
        name=name,
        kind=Softmax.name,
        inputs=tuple(layer.name for layer in sources),
        input_shapes=tuple(layer.shape for layer in sources),
        shape=source.shape,
        options={"log": log},
    )
    return [maximum, total, softmax]
