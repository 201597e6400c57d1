"""Translations of what takes a part of a tensor, or pads it."""

import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch.nn import functional

from distbelief.graph.building import Builder
from distbelief.graph.layer import GraphError
from distbelief.graph.operation import Operand, Operation, Several, Translated
from distbelief.graph.region import Shape
from distbelief.graph.translation import translates_function
from distbelief.graph.translations.shapes import shaped


@translates_function(torch.chunk, "chunk", torch.split, "split")
def chunk(builder: Builder, operation: Operation) -> Translated:
    """Add a slice for each part."""
    source = operation.operands[0]
    dim = operation.dim(operation.argument(2, "dim", 0), source.shape)
    names, start = [], 0
    for shape in operation.outputs:
        starts = [0] * len(shape)
        starts[dim] = start
        start += shape[dim]
        names.append(_slice(builder, operation.name, source, starts, shape))
    return tuple(names)


@translates_function(torch.unbind, "unbind")
def unbind(builder: Builder, operation: Operation) -> Translated:
    """Add a slice for each index of a dimension."""
    source = operation.operands[0]
    dim = operation.dim(operation.argument(1, "dim", 0), source.shape)
    return tuple(_one(builder, operation, source, dim, index) for index in range(source.shape[dim]))


@translates_function(torch.select, "select")
def select(builder: Builder, operation: Operation) -> Translated:
    """Add one index of a dimension."""
    source = operation.operands[0]
    dim = operation.dim(operation.argument(1, "dim"), source.shape)
    index = operation.argument(2, "index")
    assert isinstance(index, int), operation
    return _one(builder, operation, source, dim, index % source.shape[dim])


@translates_function(torch.narrow, "narrow")
def narrow(builder: Builder, operation: Operation) -> Translated:
    """Add a range of a dimension."""
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


@translates_function(operator.getitem)
def getitem(builder: Builder, operation: Operation) -> Translated:
    """Take one of several results, or slice a tensor by constants."""
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
    """Return start and step in each dimension, and the shape of what is taken."""
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


@translates_function(functional.pad)
def pad(builder: Builder, operation: Operation) -> Translated:
    """Add a border of a number."""
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
