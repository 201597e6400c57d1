"""Kinds whose output is one part of itself: the part that is taken over everything.

What such a kind computes stands once, in its `partial`; the kind adds which region of
the first input a region of the output is taken over, and what it costs.
"""

from abc import ABC
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


class SumOfParts(LayerKind, ABC):
    """A kind that computes an output as its `partial` does the largest part."""

    def taken_over(self, layer: Layer, output: Region) -> Region:
        """Return the region of the first input: all of it, unless a kind knows less."""
        del output
        return Region.of(*layer.input_shapes[0])

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        assert self.partial is not None
        return self.partial.reads(layer, self.taken_over(layer, output))

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        assert self.partial is not None
        part = self.taken_over(layer, output)
        return self.partial.compute(layer, part, inputs, tensors, step)
