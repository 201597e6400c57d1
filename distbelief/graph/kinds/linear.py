"""Fully connected layers: split by outputs, or (as partial sums) by inputs.

tensors   weight (outputs, inputs), bias (outputs,), if there is one
input     (..., inputs): leading dimensions, of a sequence say, are kept
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import Cut, LayerKind, PartialSums, Step, Work
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


@final
class LinearSums(PartialSums):
    """Columns of W: each part of the inputs gives a summand of every output."""

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return (Cut(len(layer.shape) - 1),)

    @override
    def uses(self, layer: Layer, part: Region) -> Mapping[str, Region]:
        inputs = part.intervals[-1]
        uses = {"weight": Region(((0, layer.shape[-1]), inputs))}
        if "bias" in layer.tensors and inputs[0] == 0:  # added once
            uses["bias"] = Region.of(layer.shape[-1])
        return uses

    @override
    def compute(
        self,
        layer: Layer,
        part: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        return functional.linear(inputs[0], tensors["weight"], tensors.get("bias"))


@final
class Linear(LayerKind):
    """y = x W^T + b."""

    name: ClassVar[str] = "linear"
    partial: ClassVar[PartialSums | None] = LinearSums()

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        last = len(layer.shape) - 1
        return (output.replaced(last, (0, layer.input_shapes[0][-1])),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        units = output.intervals[-1]
        return {
            word: Region.of(*use.shape).replaced(0, units)
            for word, use in layer.tensors.items()
        }

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n_inputs = layer.input_shapes[0][-1]
        operations = 2.0 * output.n_elements * n_inputs
        n_read = math.prod(output.shape[:-1]) * n_inputs
        return Work(
            forward=operations,
            backward=2 * operations,  # for the input, and for the weight
            n_elements=float(output.n_elements + n_read),
        )

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        return functional.linear(inputs[0], tensors["weight"], tensors.get("bias"))
