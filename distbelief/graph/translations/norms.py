"""Translations of normalisation: BatchNorm, LayerNorm, GroupNorm and their kin."""

from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from distbelief.graph.building import Builder, uses
from distbelief.graph.kinds.norm_layers import (
    batch_norm_layers,
    group_norm_layers,
    instance_norm_layers,
    layer_norm_layers,
    rms_norm_layers,
)
from distbelief.graph.layer import GraphError, Option
from distbelief.graph.operation import Operation, Translated
from distbelief.graph.translation import source_of, translates, translates_function
from distbelief.graph.translations.layers import owned
from distbelief.graph.wholes import whole_module


# On tensors without memory torch takes milliseconds for one of these.
@translates(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, like_input=True)
def batch_norm(builder: Builder, module: _BatchNorm, operation: Operation) -> Translated:
    """Add statistics of the batch, their running averages, and their use.

    A frozen one, in evaluation mode while the model trains, has its running
    statistics only.
    """
    name, source, _ = source_of(builder, operation)
    if source.shape[0] != module.num_features:
        raise GraphError(
            f"{operation.name} is for {module.num_features} features, but "
            f"{source.name!r} has {source.shape[0]}"
        )
    tensors = uses(module, operation.target)
    tensors.pop("num_batches_tracked", None)
    layers = batch_norm_layers(
        name,
        source,
        tensors=tensors,
        epsilon=module.eps,
        momentum=module.momentum,
        before={word: builder.replacing(use.name) for word, use in tensors.items()},
        frozen="running_mean" in tensors and not operation.trains,
    )
    return builder.extend(layers)


@translates(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(builder: Builder, module: _InstanceNorm, operation: Operation) -> Translated:
    """Add statistics of each channel of each sample, and their use."""
    if module.track_running_stats:
        reason = "InstanceNorm with running statistics has no split rule"
        return whole_module(builder, module, operation, reason=reason)
    name, source, _ = source_of(builder, operation)
    tensors = uses(module, operation.target)
    layers = instance_norm_layers(name, source, tensors=tensors, epsilon=module.eps)
    return builder.extend(layers)


@translates(nn.GroupNorm)
def group_norm(builder: Builder, module: nn.GroupNorm, operation: Operation) -> Translated:
    """Add statistics of groups of channels, and their use."""
    name, source, _ = source_of(builder, operation)
    layers = group_norm_layers(
        name,
        source,
        n_groups=module.num_groups,
        tensors=uses(module, operation.target),
        epsilon=module.eps,
    )
    return builder.extend(layers)


@translates(nn.LayerNorm)
def layer_norm(builder: Builder, module: nn.LayerNorm, operation: Operation) -> Translated:
    """Add statistics of the last dimensions, and their use."""
    name, source, _ = source_of(builder, operation)
    layers = layer_norm_layers(
        name,
        source,
        n_dims=len(module.normalized_shape),
        tensors=uses(module, operation.target),
        epsilon=module.eps,
    )
    return builder.extend(layers)


@translates_function(functional.layer_norm)
def layer_norm_function(builder: Builder, operation: Operation) -> Translated:
    """Add statistics of the last dimensions, and their use, with the model's own."""
    name, source, _ = source_of(builder, operation)
    shape = operation.argument(1, "normalized_shape")
    assert isinstance(shape, tuple), shape
    tensors = {
        word: owned(builder, operation, operation.operand(position, word))
        for position, word in ((2, "weight"), (3, "bias"))
        if operation.argument(position, word) is not None
    }
    epsilon = operation.argument(4, "eps", 1e-5)
    assert isinstance(epsilon, float), epsilon
    layers = layer_norm_layers(name, source, n_dims=len(shape), tensors=tensors, epsilon=epsilon)
    return builder.extend(layers)


@translates(nn.RMSNorm)
def rms_norm(builder: Builder, module: nn.RMSNorm, operation: Operation) -> Translated:
    """Add the mean square of the last dimensions, and its use."""
    name, source, _ = source_of(builder, operation)
    epsilon = module.eps
    if epsilon is None:  # torch: what its numbers are precise to
        weight = cast("torch.Tensor | None", module.weight)
        dtype = torch.get_default_dtype() if weight is None else weight.dtype
        epsilon = torch.finfo(dtype).eps
    layers = rms_norm_layers(
        name,
        source,
        n_dims=len(module.normalized_shape),
        tensors=uses(module, operation.target),
        epsilon=epsilon,
    )
    return builder.extend(layers)


@translates(nn.LocalResponseNorm)
def local_response(
    builder: Builder, module: nn.LocalResponseNorm, operation: Operation
) -> Translated:
    """Add x / (k + alpha * mean of squares over neighbouring channels) ^ beta."""
    return _local_response(
        builder,
        operation,
        size=module.size,
        alpha=float(module.alpha),
        beta=float(module.beta),
        k=float(module.k),
    )


@translates_function(functional.local_response_norm)
def local_response_function(builder: Builder, operation: Operation) -> Translated:
    """Add x / (k + alpha * mean of squares over neighbouring channels) ^ beta."""
    words = {"alpha": 1e-4, "beta": 0.75, "k": 1.0}
    numbers = {}
    for position, (word, usual) in enumerate(words.items(), start=2):
        value = operation.argument(position, word, usual)
        assert isinstance(value, int | float), (word, value)
        numbers[word] = float(value)
    size = operation.argument(1, "size")
    assert isinstance(size, int), size
    return _local_response(builder, operation, size=size, **numbers)


def _local_response(builder: Builder, operation: Operation, **options: Option) -> str:
    return builder.add(
        operation.name, "local_response", operation.inputs[:1], operation.output, options=options
    )
