"""Normalization as layers: statistics, then their use.

    batch_norm_layers      over samples and space, with running statistics
    norm_layers            over some dimensions of each sample
    group_norm_layers      over groups of channels, and space, of each sample

Statistics are a mean, then a mean of squares around it: two sums that can be split, never the
difference of two large numbers. The last layer has the given name; `tensors` are by torch's
names (weight, bias, running_mean, running_var), each optional.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from typing_extensions import override

from distbelief.graph.graph import Layer, LayerGraph, TensorUse
from distbelief.graph.operator import Call, Operator, Work
from distbelief.graph.ops.reductions import reduction_layer
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.region import Region


@final
class Normalize(Operator):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias."""

    # inputs    (x, mean, variance), (x, mean square) or (x,); statistics broadcast
    # tensors   weight, bias, running_mean, running_var (trains=False); each optional
    # options   epsilon; dims: the dimensions of x that the tensors' dimensions are
    #           n_places: if above 0, the variance is the unbiased one of samples times so many
    #           elements, and x is divided by the biased one
    # With running tensors and statistics as inputs, training uses the inputs and inference the
    # running tensors; with x alone, both use the running tensors.
    name: ClassVar[str] = "normalise"
    per_element: ClassVar[Work | None] = Work(forward=4.0, backward=6.0, n_elements=2.0)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        own = Region(tuple(output.intervals[dim] for dim in layer.integers("dims")))
        return dict.fromkeys(layer.tensors, own)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        x, *statistics = call.inputs
        dims = layer.integers("dims")
        own = {name: _broadcastable(value, dims, x) for name, value in call.tensors.items()}
        if "running_var" in own and not (call.step.training and statistics):
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
class RunningAverage(Operator):
    """(1 - momentum) * running + momentum * statistic in training, else unchanged."""

    # inputs    statistic (batch of one); optionally the running average so far, where a module
    #           is called again
    # tensors   running (trains=False)
    # No layer reads it: `running_averages` tells which tensor it replaces.
    name: ClassVar[str] = "running_average"
    per_element: ClassVar[Work | None] = Work(n_elements=3.0)

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
    def compute(self, call: Call) -> torch.Tensor:
        statistic, *before = (value.detach() for value in call.inputs)
        running = before[0] if before else call.tensors["running"].unsqueeze(0)
        if not call.step.training:
            return running
        statistic = statistic.flatten(1)
        momentum = call.layer.number("momentum")
        return (1 - momentum) * running + momentum * statistic


def running_averages(graph: LayerGraph) -> dict[str, str]:
    """Return, for each tensor that a training step replaces, the layer that computes it.

    If a module is called several times, that is the last layer. Its output has a batch of one
    before the tensor's shape.
    """
    return {
        layer.tensors["running"].name: layer.name
        for layer in graph.layers
        if layer.kind == RunningAverage.name
    }


def _broadcastable(value: torch.Tensor, dims: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    shape = [1] * x.dim()
    for dim, extent in zip(dims, value.shape, strict=True):
        shape[dim + 1] = extent
    return value.view(shape)


Uses = Mapping[str, TensorUse]


def batch_norm_layers(
    name: str,
    source: Layer,
    *,
    tensors: Uses,
    epsilon: float,
    momentum: float,
    before: Mapping[str, Layer | None] | None = None,
    frozen: bool = False,
) -> list[Layer]:
    """Return the layers of a BatchNorm over (channels, *space).

    Without running tensors, the batch's statistics are used in inference too; if `frozen`, running
    ones in training too, unchanged. `before` has, by name, the layers that have replaced running
    statistics already in this forward, which calls the module several times.
    """
    if frozen:
        return [_normalize(name, [source], epsilon=epsilon, tensors=tensors, dims=[0])]
    space = range(1, len(source.shape))
    mean = reduction_layer(f"{name}.mean", [source], function="mean", dims=space, batch=True)
    variance = reduction_layer(
        f"{name}.variance", [source, mean], function="unbiased_variance", dims=space, batch=True
    )
    layers = [mean, variance]
    for statistic, key in ((mean, "running_mean"), (variance, "running_var")):
        if key not in tensors:
            continue
        former = (before or {}).get(key)
        reads = [statistic] if former is None else [statistic, former]
        layers.append(
            Layer.of(
                f"{name}.{key}",
                RunningAverage.name,
                reads,
                source.shape[:1],
                options={"momentum": momentum},
                tensors={"running": tensors[key]},
            )
        )
    norm = _normalize(
        name,
        [source, mean, variance],
        epsilon=epsilon,
        tensors=tensors,
        dims=[0],
        n_places=math.prod(source.shape[1:]),
    )
    return [*layers, norm]


def group_norm_layers(
    name: str, source: Layer, *, n_groups: int, tensors: Uses, epsilon: float
) -> list[Layer]:
    n_channels, *space = source.shape
    grouped = reshape_layer(
        f"{name}.groups", source, shape=(n_groups, n_channels // n_groups, *space)
    )
    dims = range(1, len(grouped.shape))
    inner = norm_layers(f"{name}.normal", grouped, over=dims, tensors={}, epsilon=epsilon)
    back = reshape_layer(f"{name}.channels", inner[-1], shape=source.shape)
    affine = _normalize(name, [back], epsilon=epsilon, tensors=tensors, dims=[0])
    return [grouped, *inner, back, affine]


def norm_layers(
    name: str,
    source: Layer,
    *,
    over: Sequence[int],
    tensors: Uses,
    epsilon: float,
    dims: Sequence[int] | None = None,
    centred: bool = True,
) -> list[Layer]:
    """Return the layers of a norm of each sample.

    Elements along `over` share a mean and a variance; `dims` are the dimensions of the tensors, by
    default the same. If it is not centred, no mean is subtracted, and a mean of squares is the
    variance.
    """
    statistics: list[Layer] = []
    function = "variance" if centred else "mean_square"
    if centred:
        statistics.append(reduction_layer(f"{name}.mean", [source], function="mean", dims=over))
    spread = reduction_layer(
        f"{name}.{function}", [source, *statistics], function=function, dims=over
    )
    statistics.append(spread)
    norm = _normalize(
        name, [source, *statistics], epsilon=epsilon, tensors=tensors, dims=dims or over
    )
    return [*statistics, norm]


def _normalize(
    name: str,
    sources: Sequence[Layer],
    *,
    epsilon: float,
    tensors: Uses,
    dims: Sequence[int],
    n_places: int = 0,
) -> Layer:
    return Layer.of(
        name,
        Normalize.name,
        sources,
        sources[0].shape,
        options={"epsilon": epsilon, "dims": tuple(dims), "n_places": n_places},
        tensors=tensors,
    )
