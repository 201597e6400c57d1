"""A tensor of the model as a layer: position embeddings, class tokens, scales.

    kind      "parameter"
    inputs    none
    tensors   value: of the layer's shape, or with a dimension of extent 1 before it,
              which is then the batch (position embeddings are often kept so)
    options   none

Its output does not depend on the sample, so its batch has one sample, (1, *shape),
which broadcasts against the batches of others.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


@final
class Parameter(LayerKind):
    """output = the tensor."""

    name: ClassVar[str] = "parameter"

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return True

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return ()

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        batch = ((0, 1),) if _has_batch(layer) else ()
        return {"value": Region((*batch, *output.intervals))}

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        return Work(n_elements=float(output.n_elements))

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        value = tensors["value"]
        return value if _has_batch(layer) else value.unsqueeze(0)


def _has_batch(layer: Layer) -> bool:
    return len(layer.tensors["value"].shape) > len(layer.shape)
