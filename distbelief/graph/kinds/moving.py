"""Elements at other places: permuted, sliced, repeated, padded.

kind      "permute"
options   dims: of x without the batch, as in torch.permute

kind      "slice": x[start : : step] in each dimension, as long as the shape says
options   starts, steps: a number per dimension, steps >= 1
          (select, narrow, chunk, split: a slice, and a reshape to drop a dimension)

kind      "expand": extents of 1 repeated
options   none: the shapes say it all (equal number of dimensions)

kind      "pad": a number around
options   before, after: a number >= 0 per dimension; value
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.kinds.pointwise import broadcast
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


@final
class Permute(LayerKind):
    """Dimensions in another order."""

    name: ClassVar[str] = "permute"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        intervals = dict(zip(layer.integers("dims"), output, strict=True))
        return (Region(tuple(intervals[dim] for dim in sorted(intervals))),)

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
        return inputs[0].permute(0, *(dim + 1 for dim in layer.integers("dims")))


@final
class Slice(LayerKind):
    """Every step-th element from some start."""

    name: ClassVar[str] = "slice"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        intervals = []
        for start, step, (first, stop) in zip(
            layer.integers("starts"), layer.integers("steps"), output, strict=True
        ):
            low = start + first * step
            intervals.append((low, low + max(0, (stop - first - 1) * step + 1)))
        return (Region(tuple(intervals)),)

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
        steps = layer.integers("steps")
        return inputs[0][(slice(None), *(slice(None, None, step) for step in steps))]


@final
class Expand(LayerKind):
    """One element in many places."""

    name: ClassVar[str] = "expand"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (broadcast(output, layer.input_shapes[0]),)

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
        return inputs[0].expand(-1, *output.shape)


@final
class Pad(LayerKind):
    """The input with a number around it."""

    name: ClassVar[str] = "pad"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        intervals = []
        for before, extent, (start, stop) in zip(
            layer.integers("before"), layer.input_shapes[0], output, strict=True
        ):
            low = min(max(start - before, 0), extent)
            intervals.append((low, max(low, min(stop - before, extent))))
        return (Region(tuple(intervals)),)

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
        (read,) = self.reads(layer, output)
        pads: list[int] = []
        for before, interval, (low, high) in zip(
            layer.integers("before"), output, read, strict=True
        ):
            start, stop = interval[0] - before, interval[1] - before
            missing = min(max(low - start, 0), stop - start)
            pads = [missing, stop - start - missing - (high - low), *pads]
        return functional.pad(inputs[0], pads, value=layer.number("value"))
