"""Lowering rules for convolution, pooling and this library's locally connected modules."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from distbelief.graph.graph import Option, uses
from distbelief.graph.lowering.calls import elementwise
from distbelief.graph.lowering.operation import (
    Context,
    Operation,
    lowers,
    lowers_module,
    plain_name,
)
from distbelief.graph.lowering.values import Held, NotSplitError, Value
from distbelief.graph.lowering.views import swapped
from distbelief.graph.module_calls import LeafCall
from distbelief.graph.ops.local_norms import LocalContrastNorm2d
from distbelief.graph.ops.locally_connected import LocallyConnected2d
from distbelief.graph.ops.reductions import reduction_layer
from distbelief.graph.ops.windows import L2Pool2d
from distbelief.graph.region import Shape


_N_DIMS_MAX: Final = 5  # of a weight


def _shape(op: Operation) -> Shape:
    return tuple(int(extent) for extent in op.result.shape[1:])


def _several(sizes: Any, n: int) -> Shape:  # noqa: ANN401 -- as torch takes them
    if isinstance(sizes, int):
        return (sizes,) * n
    found = tuple(int(size) for size in sizes)
    return found if len(found) == n else found * n


@lowers("convolution", *(f"conv{word}{n}d" for word in ("", "_transpose") for n in (1, 2, 3)))
def convolution(op: Operation) -> object:
    value, weight = op.value("input"), op["weight"]
    n_dims = len(weight.use.shape) if isinstance(weight, Held) else op.value("weight").n_dims
    if value.batch is None and value.n_dims == n_dims and value.layer.shape[0] == 1:
        # Positions, the same for all samples.
        found = _convolved(op, Value(op.reshaped(value, value.layer.shape[1:])))
        return Value(op.reshaped(found, (1, *found.layer.shape)), batch=None)
    if value.batch == 0 and value.before + value.after == 1 and n_dims < _N_DIMS_MAX:
        # Samples with frames: (frames, channels, ...) as (channels, frames, ...), window 1.
        found = _convolved(op, Value(swapped(op, value).layer), frames=value.layer.shape[:1])
        return value.to(swapped(op, found).layer)
    return _convolved(op, value.plain())


def _convolved(op: Operation, value: Value, *, frames: Shape = ()) -> Value:
    transposed = "transpose" in str(op.target) or bool(op.arguments.get("transposed"))
    words = [word for word in ("weight", "bias") if not _is_held(op[word])]
    words = ["weight", *words] if frames and "weight" not in words else words
    computed = {word: op.value(word) for word in words}
    if any(source.batch is not None for source in computed.values()):
        raise NotSplitError("its weight depends on the sample")
    tensors = op.uses(*(word for word in ("weight", "bias") if word not in computed))
    sources = [value]
    if "weight" in computed:
        weight = computed["weight"]
        if frames:
            weight = weight.to(
                op.reshaped(weight, (*weight.layer.shape[:2], 1, *weight.layer.shape[2:]))
            )
        sources.append(weight)
    sizes = (sources[1].layer.shape if "weight" in computed else tensors["weight"].shape)[2:]
    ones = (1,) * len(frames)
    n = len(sizes) - len(frames)
    dilation = _several(op["dilation"], n)
    around, extra = (0,) * n, (0,) * n
    if op["padding"] == "same":
        totals = [(size - 1) * d for size, d in zip(sizes[len(frames) :], dilation, strict=True)]
        around = tuple(total // 2 for total in totals)
        extra = tuple(total % 2 for total in totals)
    elif op["padding"] != "valid":
        around = _several(op["padding"], n)
    none = (0,) * len(frames)
    options: dict[str, Option] = {
        "stride": (*ones, *_several(op["stride"], n)),
        "padding": (*none, *around),
        "dilation": (*ones, *dilation),
        "groups": op["groups"],
    }
    options |= {} if transposed else {"extra": (*none, *extra)}
    options |= {"size": sizes} if transposed or len(sources) > 1 else {}
    kind = "transposed_convolution" if transposed else "convolution"
    n_channels, *space = _shape(op)
    shape = (n_channels, *frames, *space)
    found = op.add(kind, sources, shape, options=options, tensors=tensors)
    if "bias" not in computed:
        return found
    bias = computed["bias"]
    row = bias.to(op.reshaped(bias, (n_channels, *(1,) * (len(shape) - 1))))
    return elementwise(op, torch.ops.aten.add.Tensor, found, row)


def _is_held(given: object) -> bool:
    return given is None or (isinstance(given, Held) and not given.turned)


@lowers(*(f"{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)))
def pool(op: Operation) -> object:
    n = _n_spatial(op)
    size = _several(op["kernel_size"], n)
    options: dict[str, Option] = {
        "size": size,
        "stride": _several(op["stride"], n) if op["stride"] else size,
        "padding": _several(op["padding"], n),
        "ceil": bool(op["ceil_mode"]),
    }
    if "max" in str(op.target):
        options |= {"function": "max", "dilation": _several(op["dilation"], n)}
    else:
        options |= {"function": "average", "count_include_pad": bool(op["count_include_pad"])}
        options["divisor"] = op.arguments.get("divisor_override")
    value = _with_channels(op, n)
    shape = (value.layer.shape[0], *(int(extent) for extent in op.result.shape[-n:]))
    found = op.add("pool", [value], shape, options=options)
    return found.to(op.reshaped(found, _shape(op)))


def _n_spatial(op: Operation) -> int:
    # The dimensions of space, by the operation's name: "avg_pool2d" has two.
    return int(plain_name(op.target).partition(".")[0][-2])


def _with_channels(op: Operation, n_spatial: int) -> Value:
    # Without a channel dimension torch takes the samples for channels.
    value = op.plain("self")
    shape = value.layer.shape
    return value if len(shape) > n_spatial else value.to(op.reshaped(value, (1, *shape)))


@lowers(*(f"adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)))
def adaptive_pool(op: Operation) -> object:
    several = isinstance(op.result, tuple | list)
    n, result = _n_spatial(op), op.result[0] if several else op.result
    value, sizes = op.plain("self"), tuple(int(extent) for extent in result.shape[-n:])
    extents = value.layer.shape[-n:]
    if set(sizes) == {1} and "avg" in str(op.target):  # a mean over all has partial sums
        space = [dim % len(value.layer.shape) for dim in range(-n, 0)]
        layer = reduction_layer(op.free_name, [value.layer], function="mean", dims=space)
        return value.to(op.builder.add_layer(layer))
    if any(extent % size for extent, size in zip(extents, sizes, strict=True)):
        raise NotSplitError("its windows differ in size")
    window = [extent // size for extent, size in zip(extents, sizes, strict=True)]
    plain = {"self": op["self"], "kernel_size": window, "stride": window, "padding": 0}
    plain |= {"dilation": 1, "ceil_mode": False, "count_include_pad": True}
    found = pool(replace(op, arguments=plain, result=result))
    return [found, None] if several else found


@lowers(
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
)
def resized(op: Operation) -> object:
    value = op.plain("self" if "self" in op.arguments else "input")
    # The factors, if any, stand in a list or each alone.
    words = ("scales", "scales_d", "scales_h", "scales_w")
    alone = [op.arguments[word] for word in words if op.arguments.get(word) is not None]
    factors = op.arguments.get("scale_factors") or alone
    if len(factors) not in {0, op.result.dim() - 2}:
        raise NotSplitError("a dimension has a factor, another has none")
    options: dict[str, Option] = {
        "operation": plain_name(op.target).partition(".")[0],
        "align": op.arguments.get("align_corners"),
        "scales": ",".join(map(repr, factors)),
    }
    return op.add("resize", [value], _shape(op), options=options)


# --- modules ---

_MODULES: Final[Mapping[type[nn.Module], tuple[str, Mapping[str, str]]]] = {
    # Its operator; the operator's options and the module's attributes.
    LocallyConnected2d: (
        "locally_connected",
        {"size": "kernel_size", "stride": "stride", "padding": "padding"},
    ),
    L2Pool2d: (
        "pool",
        {"size": "kernel_size", **{word: word for word in ("stride", "padding", "epsilon")}},
    ),
    LocalContrastNorm2d: ("local_contrast", {"size": "size", "epsilon": "epsilon"}),
}


@lowers_module(*_MODULES)
def of_module(
    context: Context, module: nn.Module, call: LeafCall, inputs: Sequence[object]
) -> object:
    value = context.as_value(inputs[0]).plain()
    kind, attributes = _MODULES[type(module)]
    options: dict[str, Option] = {word: getattr(module, name) for word, name in attributes.items()}
    if isinstance(module, L2Pool2d):
        options["function"] = "l2"
    shape = tuple(int(str(extent)) for extent in call.shapes_found[0][1:])
    layer = context.builder.add(
        call.path, kind, [value.layer], shape, options=options, tensors=uses(module, call.path)
    )
    return [Value(layer)]
