"""Normalisation by statistics: BatchNorm, LayerNorm, GroupNorm, InstanceNorm, RMSNorm.

    kind      "normalise": (x - mean) / sqrt(variance + epsilon) * weight + bias
    inputs    (x, mean, variance), (x, mean square), or (x,); statistics broadcast
    tensors   weight, bias, running_mean, running_var (trains=False); each may be absent
    options   epsilon
              dims: the dimensions of x that the tensors' dimensions are
              n_places: if above 0, the variance is one of samples times so many places,
              unbiased, and what is divided by is the biased one

    kind      "running_average": (1 - momentum) * running + momentum * statistic
    inputs    statistic (batch of one); then another "running_average" of the same
              tensor, or absent: what is running by then, where a module is called again
    tensors   running (trains=False)
    options   momentum

With running tensors and inputs, "normalise" uses the inputs in a training step and the
running tensors otherwise; with (x,) alone always the running tensors. New running
statistics leave the graph as layers of kind "running_average", which nobody reads:
`running_averages(graph)` says which tensor each replaces. The composites are in
`norm_layers`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.kinds.pointwise import broadcast
from distbelief.graph.layer import Layer, LayerGraph
from distbelief.graph.region import Region


@final
class Normalise(LayerKind):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias."""

    name: ClassVar[str] = "normalise"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return tuple(broadcast(output, shape) for shape in layer.input_shapes)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        own = Region(tuple(output.intervals[dim] for dim in layer.integers("dims")))
        return dict.fromkeys(layer.tensors, own)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements)
        return Work(forward=4 * n, backward=6 * n, n_elements=2 * n)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        x, *statistics = inputs
        dims = layer.integers("dims")
        own = {word: _spread(value, dims, x) for word, value in tensors.items()}
        if "running_var" in own and not (step.training and statistics):
            statistics = [own["running_mean"], own["running_var"]]
        elif layer.integer("n_places"):
            count = x.shape[0] * layer.integer("n_places")
            statistics = [statistics[0], statistics[1] * ((count - 1) / count)]
        scale = own.get("weight")
        if statistics:
            *mean, variance = statistics
            x = x - mean[0] if mean else x
            inverse = (variance + layer.number("epsilon")).rsqrt()
            scale = inverse if scale is None else inverse * scale
        result = x if scale is None else x * scale
        return result + own["bias"] if "bias" in own else result


@final
class RunningAverage(LayerKind):
    """The running statistic after this step: unchanged unless it is for training."""

    name: ClassVar[str] = "running_average"

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return True

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        ones = (1,) * (len(layer.input_shapes[0]) - 1)
        statistic = Region((*output.intervals, *((0, one) for one in ones)))
        return (statistic, output)[: len(layer.inputs)]

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        return {"running": output}

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        return Work(n_elements=3.0 * output.n_elements)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        statistic, *before = (value.detach() for value in inputs)
        running = before[0] if before else tensors["running"].unsqueeze(0)
        if not step.training:
            return running
        statistic = statistic.flatten(1)
        momentum = layer.number("momentum")
        return (1 - momentum) * running + momentum * statistic


def running_averages(graph: LayerGraph) -> dict[str, str]:
    """Return, by the tensor that a training step replaces, the layer that gives it.

    The last one, if a module is called several times. The layer's output has a batch of
    one before the tensor's shape.
    """
    return {
        layer.tensors["running"].name: layer.name
        for layer in graph.layers
        if layer.kind == RunningAverage.name
    }


def _spread(value: torch.Tensor, dims: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose dimensions are these of x as one that broadcasts."""
    shape = [1] * x.dim()
    for dim, extent in zip(dims, value.shape, strict=True):
        shape[dim + 1] = extent
    return value.view(shape)
