"""Lowering rules for views, slices, concatenation and padding."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from distbelief.graph.graph import Layer
from distbelief.graph.lowering.operation import Operation, lowers
from distbelief.graph.lowering.values import Held, NotSplitError, Value, batch_of, factor
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.region import Shape


def viewed(op: Operation, value: Value, shape: Sequence[Any]) -> Value:
    """Return a value in another shape of torch's, whose extents may count samples."""
    if value.batch is None:
        if batch_of(shape) is not None:
            raise NotSplitError("a tensor without samples gets some")
        return value.to(op.reshaped(value, tuple(int(n) for n in shape)))
    batch = batch_of(shape)
    if batch is None:
        raise NotSplitError("the batch gets lost")
    own = value.layer.shape
    outside = own[: value.batch + value.before]
    left, right = shape[:batch], shape[batch + 1 :]
    before, rest = divmod(math.prod(outside), max(1, math.prod(left)))
    after, more = divmod(factor(shape[batch]), max(1, before))
    inside = math.prod(own[len(outside) :])
    if rest or more or inside != after * math.prod(right):
        raise NotSplitError("it moves elements between samples")
    folded = (*([before] if before > 1 else []), *([after] if after > 1 else []))
    target = (*map(int, left), *folded, *map(int, right))
    layer = op.reshaped(value, target)
    return Value(layer, batch, before=int(before > 1), after=int(after > 1))


def permuted(op: Operation, value: Value, dims: Sequence[int]) -> Value:
    """Return a value with torch's dimensions in another order."""
    n = value.n_dims
    dims = [dim % n for dim in dims]
    order: list[int] = []
    for dim in dims:
        if dim == value.batch:
            order += range(dim, dim + value.before + value.after)
        else:
            order.append(value.dim(dim))
    layer = value.layer
    if order != sorted(order):
        shape = tuple(layer.shape[dim] for dim in order)
        layer = op.moved("permute", value, shape, dims=tuple(order)).layer
    batch = None if value.batch is None else dims.index(value.batch)
    return replace(value, layer=layer, batch=batch)


def swapped(op: Operation, value: Value) -> Value:
    """Return a value whose layer has its first two dimensions in the other order."""
    dims = (1, 0, *range(2, len(value.layer.shape)))
    shape = tuple(value.layer.shape[dim] for dim in dims)
    return op.moved("permute", value, shape, dims=dims)


def sliced(op: Operation, value: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
    """Return a part of a value along a layer's dimension."""
    shape = list(value.layer.shape)
    shape[dim] = len(range(start, stop, step))
    if shape[dim] == value.layer.shape[dim] and step == 1:
        return value
    starts, steps = [0] * len(shape), [1] * len(shape)
    starts[dim], steps[dim] = start, step
    return op.moved("slice", value, tuple(shape), starts=tuple(starts), steps=tuple(steps))


def same(op: Operation) -> Value:
    """Return the value itself: the operation concerns memory only."""
    given: Value = op["self"]
    return given


lowers("contiguous", "alias", "lift_fresh_copy", "clone")(same)


@lowers(
    *("view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as"),
    *("unsqueeze", "squeeze"),
)
def view(op: Operation) -> object:
    return viewed(op, op.value("self"), op.result.shape)


@lowers("permute", "transpose", "swapaxes", "movedim", "t", "numpy_T", "mT", "adjoint")
def permute(op: Operation) -> object:
    # The order shows on a tensor whose dimensions have extents of their own.
    extents = range(2, op.result.dim() + 2)
    seen = op.target(**{**op.arguments, "self": torch.empty(*extents, device="meta")})
    dims = [extents.index(extent) for extent in seen.shape]
    given = op["self"]
    if isinstance(given, Held) and dims == [1, 0]:
        return replace(given, turned=not given.turned)
    return permuted(op, op.value("self"), dims)


@lowers("expand", "expand_as", "broadcast_to")
def expand(op: Operation) -> object:
    return expanded(op, op.value("self"), list(op.result.shape))


def expanded(op: Operation, value: Value, shape: Sequence[Any]) -> Value:
    """Return a value repeated to a shape of torch's."""
    batch = batch_of(shape)
    if value.batch is None:
        if batch is None:
            return expanded_layer(op, value, tuple(map(int, shape)))
        # A tensor without samples broadcasts over them.
        at = batch - (len(shape) - value.n_dims)
        own = value.layer.shape
        layer = value.layer
        if at >= 0:
            if own[at] != 1 or factor(shape[batch]) > 1:
                raise NotSplitError("it repeats samples")
            layer = op.reshaped(value, (*own[:at], *own[at + 1 :]))
        rest = tuple(int(n) for dim, n in enumerate(shape) if dim != batch)
        return expanded_layer(op, Value(layer, batch), rest)
    assert batch is not None
    folded = value.layer.shape[value.batch : value.batch + value.before + value.after]
    target = (*map(int, shape[:batch]), *folded, *map(int, shape[batch + 1 :]))
    if factor(shape[batch]) != value.n_folded:
        raise NotSplitError("it repeats samples")
    return expanded_layer(op, replace(value, batch=batch), target)


def expanded_layer(op: Operation, value: Value, shape: Shape) -> Value:
    """Return a value repeated to a shape of the layer's."""
    missing = len(shape) - len(value.layer.shape)
    if missing:
        value = value.to(op.reshaped(value, (*(1,) * missing, *value.layer.shape)))
    if value.layer.shape == shape:
        return value
    return op.moved("expand", value, shape)


@lowers("slice")
def slice_(op: Operation) -> object:
    value = op.value("self")
    dim = op["dim"] % value.n_dims
    if dim == value.batch:
        if factor(op.result.shape[dim]) != value.n_folded or op["step"] != 1:
            raise NotSplitError("it takes some of the samples")
        return value
    dim = value.dim(dim)
    extent = value.layer.shape[dim]
    start, stop, step = slice(op["start"], op["end"], op["step"]).indices(extent)
    return sliced(op, value, dim, start, stop, step)


@lowers("select")
def select(op: Operation) -> object:
    value = op.value("self")
    return _one(op, value, op["dim"] % value.n_dims, op["index"])


def _one(op: Operation, value: Value, dim: int, index: int) -> Value:
    own = value.dim(dim)
    index %= value.layer.shape[own]
    part = sliced(op, value, own, index, index + 1)
    shape = part.layer.shape
    return part.without(op.reshaped(part, (*shape[:own], *shape[own + 1 :])), [dim])


@lowers("narrow")
def narrow(op: Operation) -> object:
    value = op.value("self")
    dim = value.dim(op["dim"])
    start = op["start"] % value.layer.shape[dim]
    return sliced(op, value, dim, start, start + op["length"])


@lowers("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "tensor_split")
def split(op: Operation) -> object:
    value = op.value("self")
    torchs = op["dim"] % value.n_dims
    dim = value.dim(torchs)
    parts, start = [], 0
    for result in op.result:
        stop = start + int(result.shape[torchs])
        parts.append(sliced(op, value, dim, start, stop))
        start = stop
    return parts


@lowers("unbind")
def unbind(op: Operation) -> object:
    value = op.value("self")
    dim = op["dim"] % value.n_dims
    return [_one(op, value, dim, index) for index in range(len(op.result))]


@lowers("cat", "concat", "concatenate")
def cat(op: Operation) -> object:
    # torch joins empty tensors of any shape.
    parts = [one for one in op["tensors"] if not isinstance(one, torch.Tensor) or one.numel()]
    return _joined(op, [op.context.as_value(one) for one in parts], op["dim"])


def _joined(op: Operation, values: list[Value], dim: int) -> Value:
    values = [value for value in values if 0 not in value.layer.shape]
    first = next((value for value in values if value.batch is not None), values[0])
    own = first.dim(dim % op.result.dim())
    first.refuse_others(*values)
    layers = [value.layer for value in values]
    return first.to(joined(op, layers, own))


def joined(op: Operation, layers: Sequence[Layer], dim: int) -> Layer:
    """Return layers joined along a dimension of theirs."""
    kinds = {layer.is_integer for layer in layers}
    if len(kinds) > 1:
        raise NotSplitError("it joins integers and floats")
    shape = list(layers[0].shape)
    shape[dim] = sum(layer.shape[dim] for layer in layers)
    options, is_integer = {"dim": dim}, kinds.pop()
    return op.builder.add(
        op.name, "cat", layers, tuple(shape), options=options, is_integer=is_integer
    )


@lowers("stack")
def stack(op: Operation) -> object:
    n = op.result.dim()
    dim = op["dim"] % n
    shape = [1 if i == dim else extent for i, extent in enumerate(op.result.shape)]
    values = [viewed(op, op.context.as_value(one), shape) for one in op["tensors"]]
    return _joined(op, values, dim)


@lowers("roll")
def roll(op: Operation) -> object:
    value = op.value("self")
    if not op["dims"]:
        raise NotSplitError("it rolls all elements")
    for shift, dim in zip(op["shifts"], op["dims"], strict=True):
        own = value.dim(dim)
        extent = value.layer.shape[own]
        cut = -shift % extent
        if cut:
            tail = sliced(op, value, own, cut, extent)
            head = sliced(op, value, own, 0, cut)
            value = value.to(joined(op, [tail.layer, head.layer], own))
    return value


@lowers("copy")
def copied(op: Operation) -> object:
    return expanded(op, op.value("src"), op.result.shape)


@lowers("slice_scatter")
def slice_scatter(op: Operation) -> object:
    whole = expanded(op, op.value("self"), op.result.shape)
    dim = op["dim"] % op.result.dim()
    every = {"None", str(2**63 - 1), str(op.result.shape[dim])}
    if dim == whole.batch and not op["start"] and str(op["end"]) in every and op["step"] == 1:
        return op.value("src")
    own = whole.dim(dim)
    start, stop, step = slice(op["start"], op["end"], op["step"]).indices(whole.layer.shape[own])
    if step != 1:
        raise NotSplitError("its step is not 1")
    return _replaced(op, whole, op.value("src"), own, start, stop)


@lowers("select_scatter")
def select_scatter(op: Operation) -> object:
    whole = expanded(op, op.value("self"), op.result.shape)
    dim = op["dim"] % op.result.dim()
    own = whole.dim(dim)
    index = op["index"] % whole.layer.shape[own]
    shape = [1 if i == dim else extent for i, extent in enumerate(op.result.shape)]
    part = viewed(op, op.value("src"), shape)
    return _replaced(op, whole, part, own, index, index + 1)


def _replaced(op: Operation, whole: Value, part: Value, dim: int, start: int, stop: int) -> Value:
    # Another part of a value, from start to stop of a layer's dimension.
    whole.refuse_others(part)
    extent = whole.layer.shape[dim]
    pieces = [part.layer]
    if start:
        pieces.insert(0, sliced(op, whole, dim, 0, start).layer)
    if stop < extent:
        pieces.append(sliced(op, whole, dim, stop, extent).layer)
    return whole.to(joined(op, pieces, dim))


@lowers("pad", "constant_pad_nd")
def pad(op: Operation) -> object:
    value = op.value("self")
    if op.arguments.get("mode", "constant") != "constant":
        raise NotSplitError(f"its mode is {op['mode']!r}")
    n = len(value.layer.shape)
    before, after = [0] * n, [0] * n
    widths = [int(width) for width in op["pad"]]
    for i in range(len(widths) // 2):  # torch: the last dimension comes first
        low, high = widths[2 * i : 2 * i + 2]
        if low or high:
            dim = value.dim(value.n_dims - 1 - i)
            before[dim], after[dim] = low, high
    if min([0, *before, *after]) < 0:
        raise NotSplitError("it cuts")
    shape = tuple(b + e + a for b, e, a in zip(before, value.layer.shape, after, strict=True))
    number = float(op["value"] or 0.0)
    return op.moved("pad", value, shape, before=tuple(before), after=tuple(after), value=number)


@lowers("repeat")
def repeat(op: Operation) -> object:
    value = op.value("self")
    times = list(op["repeats"])
    if len(times) != value.n_dims or value.batch is None:
        raise NotSplitError("it repeats samples")
    if (n_samples := times[value.batch]) != 1:  # (n, after) -> (times, n, after)
        own, at = value.layer.shape, value.batch
        row = value.to(op.reshaped(value, (*own[:at], 1, *own[at:])))
        wide = expanded_layer(op, row, (*own[:at], n_samples, *own[at:]))
        if value.before:
            wide = value.to(op.reshaped(wide, (*own[:at], n_samples * own[at], *own[at + 1 :])))
        value = replace(value, layer=wide.layer, before=1)
    for dim, n in enumerate(times):
        if dim != value.batch and n != 1:
            own_dim = value.dim(dim)
            value = value.to(joined(op, [value.layer] * n, own_dim))
    return value


def lined_up(op: Operation, values: Sequence[Value]) -> tuple[list[Layer], Value]:
    """Return the layers of values that broadcast, and a value arranged like the result."""
    n = max(value.n_dims for value in values)
    first = next((value for value in values if value.batch is not None), None)
    if first is None:
        return [value.layer for value in values], max(values, key=lambda value: value.n_dims)
    assert first.batch is not None
    last = first.n_dims - first.batch  # the batch's dimension, from the end
    folded = first.before + first.after
    layers = []
    for value in values:
        if value.batch is not None:
            alike = value.n_dims - value.batch == last
            if not alike or (value.before, value.after) != (first.before, first.after):
                raise NotSplitError("its tensors are arranged in different ways")
            layers.append(value.layer)
        elif value.n_dims < last:
            layers.append(value.layer)
        else:  # it has a dimension of extent 1 where the others have the batch
            at, shape = value.n_dims - last, list(value.layer.shape)
            if shape[at] != 1:
                raise NotSplitError("a tensor without samples has as many as the batch")
            shape[at : at + 1] = [1] * folded if at else []
            name = op.builder.free_name(f"{value.layer.name}.row")
            row = reshape_layer(name, value.layer, shape=tuple(shape))
            use = value.layer.tensors.get("value")
            if use is not None and not at and use.shape == value.layer.shape:  # one layer, not two
                row = msgspec.structs.replace(value.layer, name=name, shape=tuple(shape))
            layers.append(op.builder.add_layer(row))
    return layers, replace(first, batch=n - last)
