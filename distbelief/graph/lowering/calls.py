"""Operations that torch itself computes in parts: layers "call", split where it treats all alike.

Elementwise operations are split by all dimensions, others by those that they do not work along.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from distbelief.graph.graph import Layer, Option
from distbelief.graph.lowering.operation import Context, Operation, by_name, lowers, plain_name
from distbelief.graph.lowering.values import (
    Held,
    Made,
    NotSplitError,
    Results,
    Value,
    factor,
    narrow,
    refuse_symbols,
    type_of,
)
from distbelief.graph.lowering.views import lined_up
from distbelief.graph.region import Shape


# The argument that names the dimensions that an operation works along, or their numbers; it
# treats all others alike. Elementwise operations work along none: torch marks most of them.
ALONG: Final[Mapping[str, str | Sequence[int]]] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), "dim"),
    **dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "diff"), "dim"),
    **dict.fromkeys(("amin", "amax", "min", "max", "argmin", "argmax", "median", "mode"), "dim"),
    **dict.fromkeys(("prod", "any", "all", "logsumexp", "nansum", "sum", "mean"), "dim"),
    **dict.fromkeys(("linalg_vector_norm", "norm", "count_nonzero"), "dim"),
    **dict.fromkeys(("std", "var", "var_mean"), "dim"),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), "dim"),
    **dict.fromkeys(("glu", "index_select", "index_fill", "repeat_interleave"), "dim"),
    **dict.fromkeys(("flip", "roll"), "dims"),
    **dict.fromkeys(("tril", "triu"), (-2, -1)),
    **dict.fromkeys(("fill", "zero", "where", "masked_fill", "__and__", "__or__", "rsub"), ()),
    **dict.fromkeys(("multiply", "subtract", "divide", "true_divide", "negative", "absolute"), ()),
    **dict.fromkeys(("hardswish", "log_sigmoid", "_prelu_kernel"), ()),
    **{
        f"{kind}{n}d": range(-n, 0)
        for n in (1, 2, 3)
        for kind in (
            *("upsample_nearest", "_upsample_nearest_exact"),
            *("adaptive_avg_pool", "adaptive_max_pool"),
        )
    },
    "upsample_linear1d": (-1,),
    "upsample_bilinear2d": (-2, -1),
    "upsample_bicubic2d": (-2, -1),
    "upsample_trilinear3d": (-3, -2, -1),
    "_upsample_bilinear2d_aa": (-2, -1),
    "_upsample_bicubic2d_aa": (-2, -1),
    "pad": "pad",
}


def call_in_parts(op: Operation) -> object:
    """Add layers "call", split by dimensions treated alike; NotSplitError if none is known."""
    packet = plain_name(op.target).partition(".")[0]
    if torch.Tag.nondeterministic_seeded in op.target.tags:
        raise NotSplitError
    is_alone = isinstance(op.result, torch.Tensor)  # not as of frexp
    if is_alone and (torch.Tag.pointwise in op.target.tags or ALONG.get(packet) == ()):
        found = _elementwise(op, op.target, op.arguments, op.result.dtype)
        _check_extents(found, op.result)
        return found
    if packet not in ALONG:
        raise NotSplitError
    return _along(op, ALONG[packet])


def elementwise(
    op: Operation,
    target: Any,  # noqa: ANN401 -- an operation
    *given: object,
    dtype: torch.dtype = torch.float32,
) -> Value:
    """Add a layer for an elementwise operation, by default with floats as its result."""
    return _elementwise(op, target, by_name(target, given, {}), dtype)


def _elementwise(
    op: Operation,
    target: Any,  # noqa: ANN401 -- an operation
    arguments: Mapping[str, Any],
    dtype: torch.dtype,
) -> Value:
    given = {word: _number(value) for word, value in arguments.items()}
    values = {
        word: op.context.as_value(x)
        for word, x in given.items()
        if isinstance(x, Value | Held) or (isinstance(x, torch.Tensor) and x.dim())
    }
    if not values:
        return op.context.constant(target(**given))
    layers, like = lined_up(op, list(values.values()))
    shape = tuple(torch.broadcast_shapes(*(layer.shape for layer in layers)))
    operands = dict(zip(values, layers, strict=True))
    return _added(op.context, op.name, target, {**given, **operands}, like, shape, dtype)


def _number(given: object) -> object:
    # Tensors of one number stay in the call, without dimensions.
    refuse_symbols([given])
    if isinstance(given, Made):
        return torch.tensor(given.number, dtype=given.result.dtype)
    return given.reshape(()) if isinstance(given, torch.Tensor) and given.numel() == 1 else given


def _along(op: Operation, word: str | Sequence[int]) -> object:
    arguments = dict(op.arguments)
    refuse_symbols(arguments.values())
    # Indices that the forward makes stay in the call.
    words = [w for w, given in arguments.items() if isinstance(given, Value | Held | Made)]
    values = [op.context.as_value(arguments[w]) for w in words]
    # Those that have a place for each number of another are cut with it.
    like = values[0]
    for place, given in op.arguments.items():
        if isinstance(given, torch.Tensor) and given.dim() == like.n_dims:
            words.append(place)
            values.append(_for_each_sample(op, given, like))
    like.refuse_others(*values)
    torchs = _dims(arguments, word, like.n_dims)
    own = tuple(like.dim(dim) for dim in torchs)
    shape = list(like.layer.shape)
    if all(extent == 1 for dim, extent in enumerate(shape) if dim not in own):
        raise NotSplitError("it works along all dimensions")
    if isinstance(word, str) and word != "pad":
        numbers = [dim + int(like.batch is not None) for dim in own]
        arguments[word] = numbers[0] if isinstance(arguments[word], int) else numbers
    drops = not arguments.get("keepdim", True)
    if "keepdim" in arguments:
        arguments["keepdim"] = True
    arguments |= {w: value.layer for w, value in zip(words, values, strict=True)}

    def make(index: int | None) -> Value:
        result = op.result if index is None else op.result[index]
        for dim, given in zip(own, torchs, strict=True):
            shape[dim] = 1 if "keepdim" in arguments else int(result.shape[given])
        more: dict[str, Option] = {"along": own} | ({} if index is None else {"output": index})
        found = _added(
            op.context, op.name, op.target, arguments, like, tuple(shape), result.dtype, **more
        )
        if drops:
            left = tuple(extent for dim, extent in enumerate(shape) if dim not in own)
            found = found.without(op.reshaped(found, left), torchs)
        _check_extents(found, result)
        return found

    return make(None) if isinstance(op.result, torch.Tensor) else Results(make)


def _for_each_sample(op: Operation, given: torch.Tensor, like: Value) -> Value:
    if like.batch is None:
        return op.context.as_value(given)
    if like.before or like.after or given.shape[like.batch] != 1:
        raise NotSplitError("its tensors are arranged in different ways")
    return like.to(op.context.constant(given.squeeze(like.batch)).layer)


def _dims(arguments: Mapping[str, Any], along: str | Sequence[int], n_dims: int) -> list[int]:
    given = arguments.get(along) if isinstance(along, str) else along
    if along == "pad":  # two numbers for each of the last dimensions
        given = range(-len(arguments["pad"]) // 2, 0)
    dims = [given] if isinstance(given, int) else list(given or ())
    if not dims:
        raise NotSplitError("it works along all dimensions")
    return sorted(dim % n_dims for dim in dims)


def detached(context: Context, value: Value, name: str = "detach") -> Value:
    if value.layer.is_integer:
        return value
    shape, target = value.layer.shape, torch.ops.aten.detach.default
    return _added(context, name, target, {"self": value.layer}, value, shape, torch.float32)


@lowers("detach")
def detach(op: Operation) -> object:
    return detached(op.context, op.value("self"), op.name)


@lowers("to", "_to_copy", "type_as", "float", "double", "half", "bfloat16")
def converted(op: Operation) -> object:
    """A graph is computed in one precision: only a cast to a narrow type rounds."""
    return typed(op, op.value("self"), op.result.dtype)


def typed(op: Operation, value: Value, dtype: torch.dtype) -> Value:
    """Return a value of this type of torch's: rounded, if it is narrow."""
    layer = value.layer
    same_kind = layer.is_integer != dtype.is_floating_point
    if same_kind and type_of(op.builder, layer) == narrow(dtype, op.context.dtype):
        return value
    return elementwise(op, torch.ops.aten.to.dtype, value, dtype, dtype=dtype)


def _added(
    context: Context,
    name: str,
    target: Any,  # noqa: ANN401 -- an operation
    arguments: Mapping[str, Any],
    like: Value,
    shape: Shape,
    dtype: torch.dtype,
    **more: Option,
) -> Value:
    # A layer whose inputs are the layers among its arguments.
    batch = None if like.batch is None else 0
    places = {w: Value(x, batch) if isinstance(x, Layer) else x for w, x in arguments.items()}
    encoder = context.encoder
    text = encoder.text([], places)
    options: dict[str, Option] = {"operation": str(target), "arguments": text, "along": (), **more}
    sources = [value.layer for value in encoder.inputs]
    return like.to(context.call(name, sources, shape, dtype, options, batch=batch))


def _check_extents(found: Value, result: torch.Tensor) -> None:
    extents = [factor(extent) or int(extent) for extent in result.shape]
    if math.prod(found.layer.shape) != math.prod(extents):
        raise NotSplitError("its tensors have different extents")
