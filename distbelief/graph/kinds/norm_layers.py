"""BatchNorm and its kin as layers: statistics, then their use.

    batch_norm_layers      over samples and space; running statistics
    layer_norm_layers      over the last dimensions of each sample
    rms_norm_layers        the same, without a mean
    group_norm_layers      over groups of channels, and space, of each sample
    instance_norm_layers   over space of each sample and channel

Statistics are a mean, then a mean of squares around it: two sums over what may be
split, never the difference of two large numbers. The last layer has the name given;
`tensors` are by torch's words, and each may be absent: weight, bias, running_mean,
running_var. A module's num_batches_tracked is not counted on.
"""

import math
from collections.abc import Mapping, Sequence

from distbelief.graph.kinds.normalisation import Normalise, RunningAverage
from distbelief.graph.kinds.reduction import reduction_layer
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import GraphError, Layer, TensorUse


Uses = Mapping[str, TensorUse]


def batch_norm_layers(
    name: str,
    source: Layer,
    *,
    tensors: Uses,
    epsilon: float,
    momentum: float | None,
    before: Mapping[str, Layer | None] | None = None,
    frozen: bool = False,
) -> list[Layer]:
    """Return the layers of a BatchNorm over (channels, *space).

    Args:
        name: Of the last but its running averages, which come before it.
        source: What it reads.
        tensors: weight and bias; running_mean and running_var, unless they are not
            kept, and statistics are the batch's even when not training.
        epsilon: Added to the variance.
        momentum: Of the running statistics.
        before: By their words, the layers that have replaced them already in this
            forward, which calls the module several times.
        frozen: Whether to use the running statistics in training too, unchanged.

    Raises:
        GraphError: momentum is None, torch's plain average over all steps.
    """
    if frozen:
        return [_normalise(name, [source], epsilon=epsilon, tensors=tensors, dims=[0])]
    space = range(1, len(source.shape))
    mean = reduction_layer(f"{name}.mean", [source], function="mean", dims=space, batch=True)
    variance = reduction_layer(
        f"{name}.variance",
        [source, mean],
        function="variance",
        dims=space,
        batch=True,
        correction=1,
    )
    layers = [mean, variance]
    for statistic, word in ((mean, "running_mean"), (variance, "running_var")):
        if word not in tensors:
            continue
        if momentum is None:
            raise GraphError(
                f"{name!r} averages its statistics over all steps (momentum=None), "
                "which is not supported: use a number, 0.1 say"
            )
        former = (before or {}).get(word)
        reads = [statistic] if former is None else [statistic, former]
        layers.append(
            Layer(
                name=f"{name}.{word}",
                kind=RunningAverage.name,
                inputs=tuple(layer.name for layer in reads),
                input_shapes=tuple(layer.shape for layer in reads),
                shape=source.shape[:1],
                options={"momentum": momentum},
                tensors={"running": tensors[word]},
            )
        )
    norm = _normalise(
        name,
        [source, mean, variance],
        epsilon=epsilon,
        tensors=tensors,
        dims=[0],
        n_places=math.prod(source.shape[1:]),
    )
    return [*layers, norm]


def layer_norm_layers(
    name: str, source: Layer, *, n_dims: int, tensors: Uses, epsilon: float
) -> list[Layer]:
    """Return the layers of a LayerNorm over the last `n_dims` dimensions."""
    dims = range(len(source.shape) - n_dims, len(source.shape))
    return _per_sample(name, source, over=dims, tensors=tensors, epsilon=epsilon)


def rms_norm_layers(
    name: str, source: Layer, *, n_dims: int, tensors: Uses, epsilon: float
) -> list[Layer]:
    """Return the layers of an RMSNorm over the last `n_dims` dimensions."""
    dims = range(len(source.shape) - n_dims, len(source.shape))
    power = reduction_layer(f"{name}.mean_square", [source], function="mean_square", dims=dims)
    norm = _normalise(name, [source, power], epsilon=epsilon, tensors=tensors, dims=dims)
    return [power, norm]


def instance_norm_layers(name: str, source: Layer, *, tensors: Uses, epsilon: float) -> list[Layer]:
    """Return the layers of an InstanceNorm without running statistics."""
    space = range(1, len(source.shape))
    mean, variance, _ = _per_sample(name, source, over=space, tensors={}, epsilon=epsilon)
    sources = [source, mean, variance]
    norm = _normalise(name, sources, epsilon=epsilon, tensors=tensors, dims=[0])
    return [mean, variance, norm]


def group_norm_layers(
    name: str, source: Layer, *, n_groups: int, tensors: Uses, epsilon: float
) -> list[Layer]:
    """Return the layers of a GroupNorm over (channels, *space)."""
    n_channels, *space = source.shape
    grouped = reshape_layer(
        f"{name}.groups", source, shape=(n_groups, n_channels // n_groups, *space)
    )
    dims = range(1, len(grouped.shape))
    inner = _per_sample(f"{name}.normal", grouped, over=dims, tensors={}, epsilon=epsilon)
    back = reshape_layer(f"{name}.channels", inner[-1], shape=source.shape)
    affine = _normalise(name, [back], epsilon=epsilon, tensors=tensors, dims=[0])
    return [grouped, *inner, back, affine]


def _per_sample(
    name: str, source: Layer, *, over: Sequence[int], tensors: Uses, epsilon: float
) -> list[Layer]:
    mean = reduction_layer(f"{name}.mean", [source], function="mean", dims=over)
    variance = reduction_layer(f"{name}.variance", [source, mean], function="variance", dims=over)
    sources = [source, mean, variance]
    norm = _normalise(name, sources, epsilon=epsilon, tensors=tensors, dims=over)
    return [mean, variance, norm]


def _normalise(
    name: str,
    sources: Sequence[Layer],
    *,
    epsilon: float,
    tensors: Uses,
    dims: Sequence[int],
    n_places: int = 0,
) -> Layer:
    return Layer(
        name=name,
        kind=Normalise.name,
        inputs=tuple(source.name for source in sources),
        input_shapes=tuple(source.shape for source in sources),
        shape=sources[0].shape,
        options={"epsilon": epsilon, "dims": tuple(dims), "n_places": n_places},
        tensors=tensors,
    )
