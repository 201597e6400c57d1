"""Computes what has no split rule by calling torch: operations, and whole modules.

An operation must keep samples apart. That is tried on noise: each of a few samples alone must
give what all of them give together.

Operations that treat some dimensions alike are split by them (`call_in_parts`); of all others one
rank computes all (`call_whole`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distbelief.graph.graph import GraphError, Option, TensorUse, uses
from distbelief.graph.lowering.lower import (
    Filled,
    Held,
    Lowerer,
    Made,
    NotSplitError,
    Operation,
    Results,
    Value,
    batch_of,
    factor,
    linear,
    plain_name,
)
from distbelief.graph.lowering.views import lined_up
from distbelief.graph.module_calls import LeafCall, OpaqueError
from distbelief.graph.ops.call import CONSTANT, evaluated, packed
from distbelief.graph.unsupported import is_replaced


_N_CHARACTERS_MAX: Final = 1 << 20  # of a constant that stands in the graph
_N_TRIED_MAX: Final = 1 << 24  # elements of an operation that is tried on noise


# --- operations, whole ---


def call_whole(operation: Operation, reason: str) -> object:
    """Add layers "call" for the results of an operation.

    Raises:
        NotSplitError: It cannot be called so; its module can be opaque.
        GraphError: It mixes samples.
    """
    encoder = _Encoder(operation.lowerer)
    text = encoder.text([], operation.arguments)
    result = operation.result
    several = not isinstance(result, torch.Tensor)
    if several and not isinstance(result, tuple | list):
        raise NotSplitError(f"it returns a {type(result).__name__}")
    _check_samples(operation, encoder, text)

    def make(index: int | None) -> object:
        one = result if index is None else result[index]
        if not isinstance(one, torch.Tensor):
            raise NotSplitError("it returns something else than tensors")
        options: dict[str, Option] = {"operation": str(operation.target), "arguments": text}
        if index is not None:
            options["output"] = index
        return _added(operation.name, "call", encoder, one, options, encoder.tensors, reason)

    return Results(make) if several else make(None)


def per_sample(lowerer: Lowerer, mean: Value) -> str:
    """Add a layer that has a mean over the samples for each of them: a loss."""
    place = {"input": 0, "batch": None, "before": 0, "after": 0}
    keywords = {"self": place, "size": [{"samples": 1}], "implicit": False}
    options: dict[str, Option] = {
        "operation": "aten.expand.default",
        "arguments": json.dumps({"arguments": [], "keywords": keywords}),
        "batch": 0,
    }
    sources = [mean.layer.name, lowerer.first]
    return lowerer.builder.add("loss", "call", sources, (), options=options)


def _added(
    name: str,
    kind: str,
    encoder: "_Encoder",
    result: torch.Tensor,
    options: dict[str, Option],
    tensors: Mapping[str, TensorUse],
    reason: str,
) -> Value:
    # A layer whose result is arranged as torch's.
    lowerer = encoder.lowerer
    batch = batch_of(result.shape)
    batched = any(value.batch is not None for value in encoder.inputs)
    is_loss = lowerer.joins and not result.shape
    if batch is None and batched and not is_loss:
        why = f" ({reason})" if kind == "whole" else ""
        raise GraphError(f"{name} joins samples{why}: a layer must keep them separate")
    if result.dtype == torch.bool:
        options["mask"] = True
    sources = [value.layer.name for value in encoder.inputs]
    if batch is not None and not batched:  # noise, say: an input tells the number of samples
        sources.append(lowerer.first)
    shape: list[int] = []
    for dim, extent in enumerate(result.shape):
        if dim != batch:
            shape.append(int(extent))
        elif factor(extent) > 1:
            shape.append(factor(extent))
    added = lowerer.builder.add(
        name,
        kind,
        sources,
        tuple(shape),
        options=options | {"batch": -1 if batch is None else batch},
        tensors=tensors,
        is_integer=not result.is_floating_point(),
        whole=reason,
    )
    inside = 0 if batch is None else int(factor(result.shape[batch]) > 1)
    return Value(lowerer.builder[added], batch, after=inside)


def constant_layer(lowerer: Lowerer, tensor: torch.Tensor, name: str = "constant") -> Value:
    """Return a layer for a tensor that the forward makes of numbers."""
    encoder = _Encoder(lowerer)
    options: dict[str, Option] = {
        "operation": CONSTANT,
        "arguments": encoder.text([tensor], {}),
        "along": (),
    }
    return _added(name, "call", encoder, tensor, options, {}, "")


# --- operations, in parts ---

# The argument that names the dimensions that an operation works along, or their numbers; it
# treats all others alike. Elementwise operations work along none.
ALONG: Final[Mapping[str, str | Sequence[int]]] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), "dim"),
    **dict.fromkeys(("sort", "argsort", "topk", "kthvalue", "diff"), "dim"),
    **dict.fromkeys(("amin", "amax", "min", "max", "argmin", "argmax", "median", "mode"), "dim"),
    **dict.fromkeys(("prod", "any", "all", "logsumexp", "nansum", "sum", "mean"), "dim"),
    **dict.fromkeys(("linalg_vector_norm", "norm", "count_nonzero", "std", "var"), "dim"),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), "dim"),
    **dict.fromkeys(("glu", "index_select", "index_fill", "repeat_interleave"), "dim"),
    **dict.fromkeys(("flip", "roll"), "dims"),
    **dict.fromkeys(("tril", "triu"), (-2, -1)),
    **dict.fromkeys(("_to_copy", "to", "fill", "zero", "where", "__and__", "__or__"), ()),
    **{
        f"{kind}{n}d": range(-n, 0)
        for n in (1, 2, 3)
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
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
    """Add layers "call" that are split by the dimensions that an operation treats alike.

    Raises:
        NotSplitError: It is not known to treat any alike.
    """
    packet = plain_name(op.target).partition(".")[0]
    elementwise = torch.Tag.pointwise in op.target.tags or ALONG.get(packet) == ()
    if not (elementwise or packet in ALONG) or torch.Tag.nondeterministic_seeded in op.target.tags:
        raise NotSplitError
    arguments = dict(op.arguments)
    if any(isinstance(given, torch.SymInt | torch.SymFloat) for given in arguments.values()):
        raise NotSplitError("it depends on the batch size")
    words = [
        word
        for word, given in arguments.items()
        if isinstance(given, Value | Held | Filled)
        or (elementwise and isinstance(given, torch.Tensor))  # indices stay in the call
    ]
    values = [op.lowerer.as_value(arguments[word]) for word in words]
    torchs: list[int] = []
    if elementwise:
        layers, like = lined_up(op, values)
        shape = list(torch.broadcast_shapes(*(layer.shape for layer in layers)))
    else:
        like, layers = values[0], [value.layer for value in values]
        if any(like.to(value.layer) != value for value in values):
            raise NotSplitError("its tensors are arranged in different ways")
        shape = list(like.layer.shape)
        torchs = _dims(arguments, ALONG[packet], like.n_dims)
    own = [like.dim(dim) for dim in torchs]
    if own and all(extent == 1 for dim, extent in enumerate(shape) if dim not in own):
        raise NotSplitError("it works along all dimensions")
    n_batch = int(like.batch is not None)
    if isinstance(word := ALONG.get(packet), str) and word != "pad":
        numbers = [dim + n_batch for dim in own]
        arguments[word] = numbers[0] if isinstance(arguments[word], int) else numbers
    drops = not arguments.get("keepdim", True)
    if "keepdim" in arguments:
        arguments["keepdim"] = True
    encoder = _Encoder(op.lowerer)
    for word, layer in zip(words, layers, strict=True):
        arguments[word] = Value(layer, 0 if n_batch else None)
    options: dict[str, Option] = {
        "operation": str(op.target),
        "arguments": encoder.text([], arguments),
        "batch": n_batch - 1,
        "along": tuple(own),
    }

    def make(index: int | None) -> Value:
        result = op.result if index is None else op.result[index]
        for dim, given in zip(own, torchs, strict=True):
            shape[dim] = 1 if "keepdim" in arguments else int(result.shape[given])
        if math.prod(shape) != math.prod(factor(n) or int(n) for n in result.shape):
            raise NotSplitError("its tensors have different extents")
        more: dict[str, Option] = {} if index is None else {"output": index}
        more |= {"mask": True} if result.dtype == torch.bool else {}
        name = op.builder.add(
            op.name,
            "call",
            [layer.name for layer in layers],
            tuple(shape),
            options=options | more,
            is_integer=not result.is_floating_point(),
        )
        found = like.to(op.builder[name])
        return _without(op, found, torchs) if drops else found

    return make(None) if isinstance(op.result, torch.Tensor) else Results(make)


def _without(op: Operation, value: Value, torchs: list[int]) -> Value:
    # Without some of torch's dimensions, each of extent 1.
    own = [value.dim(dim) for dim in torchs]
    left = tuple(extent for dim, extent in enumerate(value.layer.shape) if dim not in own)
    batch = value.batch and value.batch - sum(dim < value.batch for dim in torchs)
    return replace(value, layer=op.reshaped(value, left), batch=batch)


def _dims(arguments: Mapping[str, Any], along: str | Sequence[int], n_dims: int) -> list[int]:
    given = arguments.get(along) if isinstance(along, str) else along
    if along == "pad":  # two numbers for each of the last dimensions
        given = range(-len(arguments["pad"]) // 2, 0)
    dims = [given] if isinstance(given, int) else list(given or ())
    if not dims:
        raise NotSplitError("it works along all dimensions")
    return sorted(dim % n_dims for dim in dims)


# --- modules ---


def whole_module(lowerer: Lowerer, call: LeafCall, inputs: Sequence[object], result: Any) -> object:  # noqa: ANN401
    """Add a layer for each used result of an opaque module.

    Raises:
        OpaqueError: Its caller must be opaque: it is called with something that cannot be sent.
        GraphError: It keeps statistics, or its forward was replaced.
    """
    reason = lowerer.whole[call.path]
    what = call.path or "the model"
    refuse_state(call.module, call.path, reason)
    encoder = _Encoder(lowerer)
    try:
        text = encoder.text(*call.arguments(inputs))
    except NotSplitError as error:
        raise OpaqueError(
            call.path.rpartition(".")[0],
            f"{what} ({type(call.module).__name__}) is opaque ({reason}) and gets {error}",
        ) from error
    tensors = {**uses(call.module, call.path), **encoder.tensors}
    name = call.path or type(call.module).__name__.lower()

    def make(index: int) -> object:
        options: dict[str, Option] = {"module": call.path, "arguments": text, "output": index}
        if call.operations:
            options["operations"] = call.operations
        return _added(name, "whole", encoder, result[index], options, tensors, reason)

    return Results(make)


def refuse_state(module: nn.Module, path: str, reason: str) -> None:
    """Raise `GraphError` for an opaque module that keeps statistics or has a replaced forward."""
    for inner, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase) and not part.batch_first:
            raise GraphError(
                f"{path or 'the model'} is opaque ({reason}) and takes the batch as its second "
                "dimension: give it batch_first=True"
            )
        if isinstance(part, _NormBase) and part.track_running_stats and part.training:
            raise GraphError(
                f"{path or 'the model'} is opaque ({reason}): the running statistics of its "
                f"{inner or 'own'} would be lost: put it into eval mode, give it "
                "track_running_stats=False, or move it outside"
            )
        if path and is_replaced(part) and inner:
            raise GraphError(
                f"the forward of '{path}.{inner}' was replaced on the instance and cannot be "
                "split: define a class with this forward"
            )


# --- arguments ---


class _Encoder:
    # Arguments as plain data, and what they name.

    def __init__(self, lowerer: Lowerer) -> None:
        self.lowerer = lowerer
        self.inputs: list[Value] = []
        self.tensors: dict[str, TensorUse] = {}

    def text(self, arguments: Sequence[object], keywords: Mapping[str, object]) -> str:
        return json.dumps(
            {
                "arguments": self.encoded(list(arguments)),
                "keywords": {word: self.encoded(value) for word, value in keywords.items()},
            }
        )

    def encoded(self, value: Any) -> Any:  # noqa: ANN401, C901, PLR0911, PLR0912 -- of any type
        place: dict[str, object]
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list():
                return [self.encoded(item) for item in value]
            case tuple() if type(value) is tuple:
                return {"tuple": [self.encoded(item) for item in value]}
            case dict():
                return {"words": {str(word): self.encoded(item) for word, item in value.items()}}
            case Held():
                word = f"p{len(self.tensors)}"
                self.tensors[word] = value.use
                place = {"tensor": word, "turned": value.turned}
                return place if value.dtype.is_floating_point else place | self.encoded(value.dtype)
            case Value():
                self.inputs.append(value)
                place = {"input": len(self.inputs) - 1, "batch": value.batch}
                place |= {"before": value.before, "after": value.after}
                if self.lowerer.is_mask(value.layer):
                    place["dtype"] = "bool"
                return place
            case torch.Tensor():
                text = packed(value)
                if len(text) > _N_CHARACTERS_MAX:
                    raise GraphError(
                        f"the forward makes a tensor of {value.numel()} numbers: register it as a "
                        "buffer of its module"
                    )
                return {"constant": text, "shape": list(value.shape)} | self.encoded(value.dtype)
            case Filled():
                shape = [self.encoded(extent) for extent in value.shape]
                return {"filled": value.number, "shape": shape} | self.encoded(value.dtype)
            case Made():
                keywords = {word: self.encoded(item) for word, item in value.keywords.items()}
                given = {"arguments": self.encoded(value.args), "keywords": keywords}
                return {"made": str(value.target), **given}
            case torch.SymInt():
                samples, plus = linear(value)
                return {"samples": samples, "plus": plus} if samples else plus
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.device():
                return {"device": "own"}  # that of the rank
            case torch.layout() | torch.memory_format():
                return None
            case _:
                raise NotSplitError(f"{_shown(value)}, which cannot be sent")


def _shown(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def _check_samples(operation: Operation, encoder: _Encoder, text: str) -> None:
    # Each sample of noise alone must give what it gives among others.
    target = operation.target
    inputs = encoder.inputs
    batched = [value.batch is not None for value in inputs]
    if not any(batched) or torch.Tag.nondeterministic_seeded in target.tags:
        return
    sizes = [math.prod(value.layer.shape) for value in inputs]
    sizes += [math.prod(use.shape) for use in encoder.tensors.values()]
    if sum(sizes) * 2 > _N_TRIED_MAX:
        return
    generator = torch.Generator().manual_seed(0)

    def noise(shape: tuple[int, ...], *, is_integer: bool) -> torch.Tensor:
        if is_integer:
            return torch.randint(0, 2, shape, generator=generator)
        return torch.rand(shape, generator=generator) + 0.1

    values = [
        noise((2 if b else 1, *v.layer.shape), is_integer=v.layer.is_integer)
        for v, b in zip(inputs, batched, strict=True)
    ]
    tensors = {word: noise(use.shape, is_integer=False) for word, use in encoder.tensors.items()}

    def run(some: list[torch.Tensor], n: int) -> list[torch.Tensor]:
        with torch.no_grad():
            found = evaluated(str(target), text, inputs=some, tensors=tensors, n_samples=n)
        several = found if isinstance(found, tuple | list) else [found]
        return [one for one in several if isinstance(one, torch.Tensor)]

    try:
        together = run(values, 2)
        alone = [
            run([v[i : i + 1] if b else v for v, b in zip(values, batched, strict=True)], 1)
            for i in range(2)
        ]
    except Exception:  # noqa: BLE001 -- noise may be no valid input
        return
    results = operation.result if isinstance(operation.result, tuple | list) else [operation.result]
    results = [one for one in results if isinstance(one, torch.Tensor)]
    for index, result in enumerate(results):
        batch = batch_of(result.shape)
        if batch is None:
            continue
        joined = torch.cat([one[index] for one in alone], dim=batch)
        if not torch.allclose(
            together[index].double(), joined.double(), rtol=1e-3, atol=1e-4, equal_nan=True
        ):
            raise GraphError(
                f"{operation.name} mixes samples: a layer must keep them separate; give attention "
                "and recurrent layers batch_first=True, and normalise with torch.nn.BatchNorm"
            )
