"""Lowering rules for views, concatenation, slices and padding."""

import operator
from collections.abc import Sequence
from typing import cast

import msgspec
import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.graph import Builder, GraphError, Layer
from distbelief.graph.lowering.registry import lowers, lowers_function
from distbelief.graph.operation import Lowered, Operand, Operation, Several
from distbelief.graph.ops.views import cat_layer, reshape_layer, stack_layers
from distbelief.graph.region import Shape


# --- operands without a batch ---


def lined_up(
    builder: Builder, operation: Operation, operands: Sequence[Operand] | None = None
) -> list[str]:
    """Return the layers of the operands (by default all), aligned at their last dimensions."""
    operands = operation.operands if operands is None else operands
    n_dims = len(operation.output) + 1 if operation.batched else 0
    return [with_batch(builder, operand, n_dims).name for operand in operands]


def with_batch(builder: Builder, operand: Operand, n_dims: int) -> Layer:
    """Return the operand's layer, for an operation on tensors of `n_dims` dimensions.

    A tensor of the model with as many dimensions as batched operands has a batch of one itself,
    which its layer's shape does not count.
    """
    layer = builder[operand.name]
    if operand.batched or len(operand.shape) < n_dims or not n_dims:
        return layer
    assert operand.shape[0] == 1, operand
    name = builder.free_name(f"{operand.name}.row")
    if layer.kind == "parameter" and len(layer.tensors["value"].shape) == n_dims:
        layer = msgspec.structs.replace(layer, name=name, shape=layer.shape[1:])
    else:
        layer = reshape_layer(name, layer, shape=layer.shape[1:])
    return builder[builder.add_layer(layer)]


# --- moves of elements ---


@lowers_function(
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
def reshape(builder: Builder, operation: Operation) -> Lowered:
    # The shapes are known, so they are all that is needed.
    source = builder[operation.operands[0].name]
    if source.shape == operation.output:
        return source.name
    name = builder.free_name(operation.name)
    return builder.add_layer(reshape_layer(name, source, shape=operation.output))


@lowers(nn.Flatten, nn.Unflatten)
def reshape_module(builder: Builder, module: nn.Module, operation: Operation) -> Lowered:
    del module
    return reshape(builder, operation)


@lowers_function("view_as", "reshape_as", "expand_as")
def like_another(builder: Builder, operation: Operation) -> Lowered:
    if operation.target == "expand_as":
        return expand(builder, operation)
    return reshape(builder, operation)


@lowers_function("expand", torch.broadcast_to, "broadcast_to")
def expand(builder: Builder, operation: Operation) -> Lowered:
    # A batch of one needs no expansion: it broadcasts.
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
    name = builder.free_name(operation.name)
    return builder[builder.add_layer(reshape_layer(name, source, shape=shape))]


@lowers_function(torch.permute, "permute")
def permute(builder: Builder, operation: Operation) -> Lowered:
    # The batch must stay first.
    given = operation.arguments[1:]
    if len(given) == 1 and isinstance(given[0], tuple):
        given = given[0]
    if not given:
        given = cast("tuple[object, ...]", operation.keywords["dims"])
    if operation.batched and given[0] == 0:
        given = given[1:]
    shape = operation.operands[0].shape
    return _permuted(builder, operation, [operation.dim(dim, shape) for dim in given])


@lowers_function(torch.transpose, "transpose", torch.swapaxes, "swapaxes")
def transpose(builder: Builder, operation: Operation) -> Lowered:
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


@lowers_function(torch.cat, torch.concat)
def cat(builder: Builder, operation: Operation) -> Lowered:
    dim = operation.dim(operation.argument(1, "dim", 0), operation.output)
    sources = _all_operands(builder, operation)
    name = builder.free_name(operation.name)
    return builder.add_layer(cat_layer(name, sources, dim=dim))


@lowers_function(torch.stack)
def stack(builder: Builder, operation: Operation) -> Lowered:
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


@lowers_function(torch.chunk, "chunk", torch.split, "split")
def chunk(builder: Builder, operation: Operation) -> Lowered:
    source = operation.operands[0]
    dim = operation.dim(operation.argument(2, "dim", 0), source.shape)
    names, start = [], 0
    for shape in operation.outputs:
        starts = [0] * len(shape)
        starts[dim] = start
        start += shape[dim]
        names.append(_slice(builder, operation.name, source, starts, shape))
    return tuple(names)


@lowers_function(torch.unbind, "unbind")
def unbind(builder: Builder, operation: Operation) -> Lowered:
    source = operation.operands[0]
    dim = operation.dim(operation.argument(1, "dim", 0), source.shape)
    return tuple(_one(builder, operation, source, dim, index) for index in range(source.shape[dim]))


@lowers_function(torch.select, "select")
def select(builder: Builder, operation: Operation) -> Lowered:
    source = operation.operands[0]
    dim = operation.dim(operation.argument(1, "dim"), source.shape)
    index = operation.argument(2, "index")
    assert isinstance(index, int), operation
    return _one(builder, operation, source, dim, index % source.shape[dim])


@lowers_function(torch.narrow, "narrow")
def narrow(builder: Builder, operation: Operation) -> Lowered:
    source = operation.operands[0]
    dim = operation.dim(operation.argument(1, "dim"), source.shape)
    start = operation.argument(2, "start")
    assert isinstance(start, int), operation
    starts = [0] * len(source.shape)
    starts[dim] = start % source.shape[dim]
    return _slice(builder, operation.name, source, starts, operation.output)


def _one(builder: Builder, operation: Operation, source: Operand, dim: int, index: int) -> str:
    starts = [0] * len(source.shape)
    starts[dim] = index
    thin = (*source.shape[:dim], 1, *source.shape[dim + 1 :])
    layer = builder[_slice(builder, operation.name, source, starts, thin)]
    return shaped(builder, operation, layer, (*source.shape[:dim], *source.shape[dim + 1 :])).name


@lowers_function(operator.getitem)
def getitem(builder: Builder, operation: Operation) -> Lowered:
    # Takes one of several results, or slices a tensor by constants.
    source, index = operation.arguments
    if isinstance(source, Several) and isinstance(index, int):
        return source.take(index)
    if isinstance(source, tuple) and isinstance(index, slice):
        return tuple(one.name for one in source[index] if isinstance(one, Operand))
    if isinstance(source, tuple) and isinstance(index, int):
        if not -len(source) <= index < len(source):
            raise GraphError(
                f"result {index} is used, and has no split rule (weights of attention, "
                "say): put what needs it into a module of its own"
            )
        chosen = source[index]
        assert isinstance(chosen, Operand), operation
        return chosen.name
    if not isinstance(source, Operand):
        raise GraphError(f"{operation.name}: {source!r}[{index!r}]")
    starts, steps, kept = _places(index, source, operation)
    if kept == source.shape and set(steps) <= {1}:
        name = source.name
    else:
        name = _slice(builder, operation.name, source, starts, kept, steps=steps)
    if kept == operation.output:
        return name
    return shaped(builder, operation, builder[name], operation.output).name


def _places(
    index: object, source: Operand, operation: Operation
) -> tuple[list[int], list[int], Shape]:
    # Start and step in each dimension, and the resulting shape.
    places: list[object] = list(index) if isinstance(index, tuple) else [index]
    n_dims = len(source.shape) + source.batched
    n_new = sum(place is None for place in places)
    if any(place is Ellipsis for place in places):
        at = next(i for i, place in enumerate(places) if place is Ellipsis)
        places[at : at + 1] = [slice(None)] * (n_dims - (len(places) - 1 - n_new))
    places += [slice(None)] * (n_dims - (len(places) - n_new))
    if source.batched and (not _is_all(places[0]) or len(places) != n_dims + n_new):
        raise GraphError(
            f"index {index!r}: only constant slices after the batch dimension can be "
            "split: put it into a module of its own"
        )
    ranges = [
        _range(place, extent, operation)
        for place, extent in zip(
            [place for place in places if place is not None][source.batched :],
            source.shape,
            strict=True,
        )
    ]
    starts, steps = [r.start for r in ranges], [r.step for r in ranges]
    return starts, steps, tuple(len(r) for r in ranges)


def _is_all(place: object) -> bool:
    return isinstance(place, slice) and place == slice(None)


def _range(place: object, extent: int, operation: Operation) -> range:
    match place:
        case int() if not isinstance(place, bool):
            return range(place % extent, place % extent + 1)
        case slice():
            return range(*place.indices(extent))
        case _:
            raise GraphError(
                f"{operation.name}: index {place!r} is no constant slice: put it "
                "into a module of its own"
            )


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
        options={"starts": tuple(starts), "steps": tuple(steps or [1] * len(shape))},
        is_integer=source.is_integer,
    )


@lowers_function(functional.pad)
def pad(builder: Builder, operation: Operation) -> Lowered:
    mode = operation.argument(2, "mode", "constant")
    value = operation.argument(3, "value", 0.0) or 0.0
    widths = cast("tuple[int, ...]", operation.argument(1, "pad"))
    source = operation.operands[0]
    if mode != "constant" or min(widths) < 0 or len(widths) > 2 * len(source.shape):
        raise GraphError(
            f"{operation.name}: pad of {widths} with mode {mode!r}; only borders of "
            "a number can be split: put it into a module of its own"
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
        options={"before": tuple(before), "after": tuple(after), "value": float(value)},
    )
