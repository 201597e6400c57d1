"""Translations of what only moves elements: flatten, expand, permute, cat."""

from typing import cast

import torch
from torch import nn

from distbelief.graph.building import Builder
from distbelief.graph.kinds.joining import cat_layer, stack_layers
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import GraphError, Layer
from distbelief.graph.operation import Operation, Translated
from distbelief.graph.region import Shape
from distbelief.graph.translation import translates, translates_function
from distbelief.graph.translations.broadcasting import lined_up


@translates_function(
    torch.flatten,
    "flatten",
    "view",
    "reshape",
    torch.reshape,
    "unflatten",
    torch.unflatten,
    "unsqueeze",
    torch.unsqueeze,
    "squeeze",
    torch.squeeze,
)
def reshape(builder: Builder, operation: Operation) -> Translated:
    """Add a reshape: the shapes, which are known, say it all."""
    source = builder[operation.operands[0].name]
    if source.shape == operation.output:
        return source.name
    name = builder.free_name(operation.name)
    return builder.add_layer(reshape_layer(name, source, shape=operation.output))


@translates(nn.Flatten, nn.Unflatten)
def reshape_module(builder: Builder, module: nn.Module, operation: Operation) -> Translated:
    """Add a reshape."""
    del module
    return reshape(builder, operation)


@translates_function("view_as", "reshape_as", "expand_as")
def like_another(builder: Builder, operation: Operation) -> Translated:
    """Add a reshape or an expansion to the shape of another tensor."""
    if operation.target == "expand_as":
        return expand(builder, operation)
    return reshape(builder, operation)


@translates_function("expand", torch.broadcast_to, "broadcast_to")
def expand(builder: Builder, operation: Operation) -> Translated:
    """Add elements repeated; a batch of one needs none, for it broadcasts."""
    source = builder[operation.operands[0].name]
    assert isinstance(operation.result, torch.Tensor), operation
    shape = tuple(operation.result.shape)
    if operation.batched or shape[0] == operation.batch:
        shape = shape[1:]
        if not operation.operands[0].batched and len(source.shape) > len(shape):
            source = shaped(builder, operation, source, source.shape[1:])
    if len(source.shape) < len(shape):
        ones = (1,) * (len(shape) - len(source.shape))
        source = shaped(builder, operation, source, (*ones, *source.shape))
    if source.shape == shape:
        return source.name
    return builder.add(operation.name, "expand", [source.name], shape, is_integer=source.is_integer)


def shaped(builder: Builder, operation: Operation, source: Layer, shape: Shape) -> Layer:
    """Add a reshape to this shape, named after the operation."""
    name = builder.free_name(operation.name)
    return builder[builder.add_layer(reshape_layer(name, source, shape=shape))]


@translates_function(torch.permute, "permute")
def permute(builder: Builder, operation: Operation) -> Translated:
    """Add a permutation that leaves the batch where it is."""
    given = operation.arguments[1:]
    if len(given) == 1 and isinstance(given[0], tuple):
        given = given[0]
    if not given:
        given = cast("tuple[object, ...]", operation.keywords["dims"])
    if operation.batched and given[0] == 0:
        given = given[1:]
    shape = operation.operands[0].shape
    return _permuted(builder, operation, [operation.dim(dim, shape) for dim in given])


@translates_function(torch.transpose, "transpose", torch.swapaxes, "swapaxes")
def transpose(builder: Builder, operation: Operation) -> Translated:
    """Add a permutation of two dimensions."""
    shape = operation.operands[0].shape
    one = operation.dim(operation.argument(1, "dim0"), shape)
    other = operation.dim(operation.argument(2, "dim1"), shape)
    dims = list(range(len(shape)))
    dims[one], dims[other] = other, one
    return _permuted(builder, operation, dims)


def _permuted(builder: Builder, operation: Operation, dims: list[int]) -> str:
    return builder.add(
        operation.name,
        "permute",
        operation.inputs[:1],
        operation.output,
        options={"dims": tuple(dims)},
        is_integer=builder[operation.inputs[0]].is_integer,
    )


@translates_function(torch.cat, torch.concat)
def cat(builder: Builder, operation: Operation) -> Translated:
    """Add layers put side by side."""
    dim = operation.dim(operation.argument(1, "dim", 0), operation.output)
    sources = _all_operands(builder, operation)
    name = builder.free_name(operation.name)
    return builder.add_layer(cat_layer(name, sources, dim=dim))


@translates_function(torch.stack)
def stack(builder: Builder, operation: Operation) -> Translated:
    """Add layers put side by side in a new dimension."""
    dim = operation.dim(operation.argument(1, "dim", 0), operation.output)
    sources = _all_operands(builder, operation)
    name = builder.free_name(operation.name)
    return builder.extend(stack_layers(name, sources, dim=dim))


def _all_operands(builder: Builder, operation: Operation) -> list[Layer]:
    given = cast("tuple[object, ...]", operation.argument(0, "tensors"))
    if len(operation.operands) != len(given):
        raise GraphError(
            f"{operation.name} with a tensor that the forward made: register it as a "
            "buffer of its module"
        )
    return [builder[name] for name in lined_up(builder, operation)]
