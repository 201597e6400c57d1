"""Translations of what only moves elements: flatten, reshape, permute, cat, slices."""

import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.building import Builder
from distbelief.graph.kinds.joining import cat_layer, stack_layers
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import GraphError
from distbelief.graph.region import Shape
from distbelief.graph.translation import (
    Operand,
    Operation,
    Translated,
    translates,
    translates_function,
)


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
def reshape_module(
    builder: Builder, module: nn.Module, operation: Operation
) -> Translated:
    """Add a reshape."""
    del module
    return reshape(builder, operation)


@translates_function(torch.permute, "permute")
def permute(builder: Builder, operation: Operation) -> Translated:
    """Add a permutation that leaves the batch where it is."""
    given = operation.arguments[1:]
    if len(given) == 1 and isinstance(given[0], tuple):
        given = given[0]
    if not given:
        given = cast("tuple[object, ...]", operation.keywords["dims"])
    n_dims = len(operation.output) + 1
    dims = [_dim(dim, n_dims, operation) for dim in given]
    return _permuted(builder, operation, dims)


@translates_function(torch.transpose, "transpose", torch.swapaxes, "swapaxes")
def transpose(builder: Builder, operation: Operation) -> Translated:
    """Add a permutation of two dimensions."""
    n_dims = len(operation.output) + 1
    one = _dim(operation.argument(1, "dim0"), n_dims, operation)
    other = _dim(operation.argument(2, "dim1"), n_dims, operation)
    dims = list(range(n_dims))
    dims[one], dims[other] = other, one
    return _permuted(builder, operation, dims)


def _permuted(builder: Builder, operation: Operation, dims: list[int]) -> str:
    if dims[0] != 0:
        raise GraphError(
            f"{operation.name} moves the batch dimension: a layer must keep samples "
            "apart (use batch_first=True)"
        )
    return builder.add(
        operation.name,
        "permute",
        operation.inputs[:1],
        operation.output,
        options={"dims": tuple(dim - 1 for dim in dims[1:])},
    )


@translates_function(torch.cat, torch.concat)
def cat(builder: Builder, operation: Operation) -> Translated:
    """Add layers put side by side."""
    sources = [builder[operand.name] for operand in operation.operands]
    dim = _dim(operation.argument(1, "dim", 0), len(operation.output) + 1, operation)
    _keep_batch(dim, operation)
    name = builder.free_name(operation.name)
    return builder.add_layer(cat_layer(name, sources, dim=dim - 1))


@translates_function(torch.stack)
def stack(builder: Builder, operation: Operation) -> Translated:
    """Add layers put side by side in a new dimension."""
    sources = [builder[operand.name] for operand in operation.operands]
    dim = _dim(operation.argument(1, "dim", 0), len(operation.output) + 1, operation)
    _keep_batch(dim, operation)
    name = builder.free_name(operation.name)
    return builder.extend(stack_layers(name, sources, dim=dim - 1))


@translates_function(torch.chunk, "chunk", torch.split, "split")
def chunk(builder: Builder, operation: Operation) -> Translated:
    """Add a slice for each part."""
    source = operation.operands[0]
    dim = _dim(operation.argument(2, "dim", 0), len(source.shape) + 1, operation)
    _keep_batch(dim, operation)
    names, start = [], 0
    for shape in cast("tuple[Shape, ...]", operation.shape):
        starts = [0] * len(shape)
        starts[dim - 1] = start
        start += shape[dim - 1]
        names.append(_slice(builder, operation.name, source, starts, shape))
    return tuple(names)


@translates_function(operator.getitem)
def getitem(builder: Builder, operation: Operation) -> Translated:
    """Take one of several results, or slice a tensor by constants."""
    source, index = operation.arguments
    if isinstance(source, tuple) and isinstance(index, int):
        chosen = source[index]
        assert isinstance(chosen, Operand), operation
        return chosen.name
    if not isinstance(source, Operand):
        raise GraphError(f"{operation.name}: {source!r}[{index!r}]")
    starts, steps, kept = _places(index, source.shape, operation)
    if kept == source.shape and set(steps) == {1}:
        return source.name
    name = _slice(builder, operation.name, source, starts, kept, steps=steps)
    if kept == operation.output:
        return name
    return builder.add_layer(
        reshape_layer(
            builder.free_name(operation.name), builder[name], shape=operation.output
        )
    )


def _places(
    index: object, shape: Shape, operation: Operation
) -> tuple[list[int], list[int], Shape]:
    """Return start and step in each dimension, and the shape of what is taken."""
    places: list[object] = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in places:
        at = places.index(Ellipsis)
        n_missing = len(shape) + 1 - (len(places) - 1)
        places[at : at + 1] = [slice(None)] * n_missing
    places += [slice(None)] * (len(shape) + 1 - len(places))
    if places[0] != slice(None) or len(places) != len(shape) + 1:
        raise GraphError(
            f"{operation.name}: index {index!r}; only constant slices after the batch "
            "dimension can be split: put it into a module of its own"
        )
    ranges = [
        _range(place, extent, operation)
        for place, extent in zip(places[1:], shape, strict=True)
    ]
    starts, steps = [r.start for r in ranges], [r.step for r in ranges]
    return starts, steps, tuple(len(r) for r in ranges)


def _range(place: object, extent: int, operation: Operation) -> range:
    match place:
        case int():
            return range(place % extent, place % extent + 1)
        case slice():
            return range(*place.indices(extent))
        case _:
            raise GraphError(f"{operation.name}: index {place!r} is no constant")


def _slice(
    builder: Builder,
    name: str,
    source: Operand,
    starts: Sequence[int],
    shape: Shape,
    *,
    steps: Sequence[int] | None = None,
) -> str:
    return builder.add(
        name,
        "slice",
        [source.name],
        shape,
        options={
            "starts": tuple(starts),
            "steps": tuple(steps or [1] * len(shape)),
        },
    )


@translates_function(functional.pad)
def pad(builder: Builder, operation: Operation) -> Translated:
    """Add a border of a number."""
    mode = operation.argument(2, "mode", "constant")
    value = operation.argument(3, "value", 0.0) or 0.0
    widths = cast("tuple[int, ...]", operation.argument(1, "pad"))
    source = operation.operands[0]
    if mode != "constant" or min(widths) < 0 or len(widths) > 2 * len(source.shape):
        raise GraphError(
            f"{operation.name}: pad of {widths} with mode {mode!r}; only borders of a "
            "number can be split: put it into a module of its own"
        )
    assert isinstance(value, int | float)
    n_dims = len(source.shape)
    before, after = [0] * n_dims, [0] * n_dims
    for i in range(len(widths) // 2):  # torch: the last dimension comes first
        before[n_dims - 1 - i], after[n_dims - 1 - i] = widths[2 * i : 2 * i + 2]
    return builder.add(
        operation.name,
        "pad",
        [source.name],
        operation.output,
        options={
            "before": tuple(before),
            "after": tuple(after),
            "value": float(value),
        },
    )


def _dim(given: object, n_dims: int, operation: Operation) -> int:
    """Return a dimension, the batch counted, from 0."""
    if not isinstance(given, int) or not -n_dims <= given < n_dims:
        raise GraphError(f"{operation.name}: no dimension {given!r} of {n_dims}")
    return given % n_dims


def _keep_batch(dim: int, operation: Operation) -> None:
    if dim == 0:
        raise GraphError(
            f"{operation.name} joins or cuts the batch: a layer must keep samples apart"
        )
