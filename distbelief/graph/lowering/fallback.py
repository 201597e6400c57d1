"""Computes what has no split rule by calling torch: operations, and whole modules.

An operation must keep samples apart. That is tried on noise: each of a few samples alone must
give what all of them give together.

One rank computes all of it.
"""

import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from distbelief.graph.graph import GraphError, Layer, Option, TensorUse, uses
from distbelief.graph.lowering.operation import Context, Operation, plain_name
from distbelief.graph.lowering.values import (
    Encoder,
    Made,
    NotSplitError,
    Results,
    Value,
    batch_of,
    factor,
    refuse_symbols,
)
from distbelief.graph.module_calls import LeafCall, OpaqueError
from distbelief.graph.ops.call import MODES, evaluated
from distbelief.graph.unsupported import is_replaced


# An operation is tried on noise: elements and samples, and where floats lie around 0 or above.
_N_TRIED_MAX: Final = 1 << 22
_N_SAMPLES_MAX: Final = 64
_SCALES: Final = (0.8, 1000.0)
_BY_ROW: Final = frozenset({"index", "index_put", "embedding_bag", "_embedding_bag"})


# --- operations, whole ---


def call_whole(operation: Operation, reason: str) -> object:
    """Add layers "call" for the results of an operation.

    NotSplitError if it cannot be called so; its module can be opaque. GraphError if it mixes
    samples.
    """
    if torch.Tag.pointwise in operation.target.tags:
        refuse_symbols(operation.arguments.values())
    if "as_strided" in str(operation.target):
        raise GraphError(
            f"{operation.name} reads memory as it lies (as_strided), which ranks do not share: use "
            "slices, unfold or reshape"
        )
    _refuse_places(operation)
    encoder = operation.context.encoder
    # Random numbers that are drawn in training only are left to the step.
    is_random = torch.Tag.nondeterministic_seeded in operation.target.tags
    told = (word for word in MODES if is_random and operation.arguments.get(word) is True)
    mode = next(told, None)
    arguments = dict(operation.arguments) | ({mode: False} if mode else {})
    text = encoder.text([], arguments)
    result = operation.result
    several = not isinstance(result, torch.Tensor)
    if several and not isinstance(result, tuple | list):
        raise NotSplitError(f"it returns a {type(result).__name__}")
    is_known = _keeps_samples_apart(operation, encoder, text)

    def make(index: int | None) -> object:
        one = result if index is None else result[index]
        if not isinstance(one, torch.Tensor):
            raise NotSplitError("it returns something else than tensors")
        options: dict[str, Option] = {"operation": str(operation.target), "arguments": text}
        if mode is not None:
            options["mode"] = mode
        if index is not None:
            options["output"] = index
        if not is_known:
            options["unchecked"] = True
        tensors = encoder.tensors
        return _added(operation.context, operation.name, encoder, one, options, tensors, reason)

    return Results(make) if several else make(None)


def _refuse_places(operation: Operation) -> None:
    # Micro-batches begin with sample 0 each. As an index, its number only tells a sample's row.
    is_index = plain_name(operation.target).partition(".")[0] in _BY_ROW
    for given in pytree.tree_leaves(dict(operation.arguments)):
        if not isinstance(given, Made) or (is_index and given.numbers_samples):
            continue
        try:
            given.row()
        except NotSplitError:
            if batch_of(given.result.shape) is not None:
                raise _mixes(operation) from None
            raise GraphError(
                f"{operation.name} depends on the batch size, which micro-batches change: use a "
                "number, or one process per replica (partitions = 1)"
            ) from None


def per_sample(context: Context, mean: Value) -> Layer:
    """Add a layer that has a mean over the samples for each of them: a loss."""
    keywords = {"self": {"input": 0, "batch": None}, "size": [{"samples": 1}], "implicit": False}
    text = json.dumps({"arguments": [], "keywords": keywords})
    options = {"operation": "aten.expand.default", "arguments": text}
    sources = [mean.layer, context.first]
    return context.call("loss", sources, (), torch.float32, options, batch=0)


def _added(
    context: Context,
    name: str,
    encoder: Encoder,
    result: torch.Tensor,
    options: dict[str, Option],
    tensors: Mapping[str, TensorUse],
    reason: str,
) -> Value:
    # A layer whose result is arranged as torch's.
    why = f" ({reason})" if "module" in options else ""
    try:
        batch = batch_of(result.shape)
    except NotSplitError as error:
        if not why:
            raise  # its module can be opaque
        raise GraphError(f"{name} mixes samples{why}: a layer must keep them separate") from error
    batched = any(value.batch is not None for value in encoder.inputs)
    is_loss = context.joins and not result.shape
    if batch is None and batched and not is_loss:
        raise GraphError(f"{name} joins samples{why}: a layer must keep them separate")
    sources = [value.layer for value in encoder.inputs]
    if batch is not None and not batched:  # noise, say: an input tells the number of samples
        sources.append(context.first)
    # Dimensions of the layer: all but that of the samples, unless that has further elements.
    shape = tuple(factor(n) or int(n) for n in result.shape if factor(n) != 1)
    more = {"tensors": tensors, "whole": reason}
    added = context.call(name, sources, shape, result.dtype, options, batch=batch, **more)
    return Value(added, batch, after=int(any(factor(n) > 1 for n in result.shape)))


# --- modules ---


def whole_module(
    context: Context,
    call: LeafCall,
    inputs: Sequence[object],
    result: Any,  # noqa: ANN401 -- fake tensors
    reason: str,
) -> object:
    """Add a layer for each used result of an opaque module.

    OpaqueError if its caller must be opaque: it is called with something that cannot be sent.
    GraphError if its statistics would be lost, or the forward of a part was replaced.
    """
    what = call.path or "the model"
    refuse_state(call.module, call.path, reason)
    encoder = context.encoder
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
        return _added(context, name, encoder, result[index], options, tensors, reason)

    _add_statistics(context, call, name, text, [value.layer for value in encoder.inputs], reason)
    return Results(make)


def _add_statistics(
    context: Context, call: LeafCall, name: str, text: str, sources: Sequence[Layer], reason: str
) -> None:
    # One more call, without a gradient, that returns the running statistics one after the other.
    tensors = uses(call.module, call.path)
    words = [
        f"{path}.{word}".lstrip(".")
        for path, part in call.module.named_modules()
        if isinstance(part, _NormBase) and part.track_running_stats and part.training
        for word in ("running_mean", "running_var")
    ]
    if not words:
        return
    if any(context.builder.replacing(tensors[word].name) is not None for word in words):
        raise GraphError(
            f"{call.path} is opaque ({reason}) and called twice: the running statistics of the "
            "first call would be lost: put its norms into eval mode, or move them outside"
        )
    options: dict[str, Option] = {"module": call.path, "arguments": text}
    options["statistics"] = ",".join(words)
    sizes = [math.prod(tensors[word].shape) for word in words]
    shape, more = (sum(sizes),), {"tensors": tensors, "whole": reason}
    every = context.call(
        f"{name}.statistics", sources, shape, torch.float32, options, batch=None, **more
    )
    for index, (word, size) in enumerate(zip(words, sizes, strict=True)):
        options = {"starts": (sum(sizes[:index]),), "steps": (1,)}
        part = context.builder.add(f"{name}.{word}.new", "slice", [every], (size,), options=options)
        context.builder.add(
            f"{name}.{word}",
            "running_average",
            [part],
            tensors[word].shape,
            options={"momentum": 1.0},
            tensors={"running": tensors[word]},
        )


def refuse_state(module: nn.Module, path: str, reason: str) -> None:
    """Raise `GraphError` for an opaque module that mixes samples or has a replaced forward."""
    for inner, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase) and not part.batch_first:
            raise GraphError(
                f"{path or 'the model'} is opaque ({reason}) and takes the batch as its second "
                "dimension: give it batch_first=True"
            )
        if path and is_replaced(part) and inner:
            raise GraphError(
                f"the forward of '{path}.{inner}' was replaced on the instance and cannot be "
                "split: define a class with this forward"
            )


def _keeps_samples_apart(operation: Operation, encoder: Encoder, text: str) -> bool:
    """Check that samples of noise alone give what they give among others.

    Return False if that could not be tried. GraphError if it mixes samples.
    """
    target = operation.target
    batched = [value.batch is not None for value in encoder.inputs]
    if not any(batched):
        return True
    if torch.Tag.nondeterministic_seeded in target.tags:
        return bool(target.namespace == "aten")
    sizes = [math.prod(value.layer.shape) for value in encoder.inputs]
    sizes += [math.prod(use.shape) for use in encoder.tensors.values()]
    n_tried = min(_N_TRIED_MAX // max(1, sum(sizes)), _N_SAMPLES_MAX)
    if n_tried < 2:
        return False
    found = [_alone_as_among(operation, encoder, text, n_tried, scale) for scale in _SCALES]
    if False in found:
        raise _mixes(operation)
    return True in found


def _alone_as_among(
    operation: Operation, encoder: Encoder, text: str, n: int, scale: float
) -> bool | None:
    # Whether some of n samples of noise alone give what they give among all; None if it is no valid
    # input.
    generator = torch.Generator().manual_seed(0)

    def noise(shape: tuple[int, ...], *, is_integer: bool) -> torch.Tensor:
        if is_integer:
            return torch.randint(0, 2, shape, generator=generator)
        return (torch.rand(shape, generator=generator) - 0.5) * scale + max(0.0, 1 - scale)

    batched = [value.batch is not None for value in encoder.inputs]
    values = [
        noise((n if b else 1, *v.layer.shape), is_integer=v.layer.is_integer)
        for v, b in zip(encoder.inputs, batched, strict=True)
    ]
    tensors = {word: noise(use.shape, is_integer=False) for word, use in encoder.tensors.items()}

    def run(some: list[torch.Tensor], n: int) -> list[torch.Tensor]:
        name = str(operation.target)
        with torch.no_grad():
            return _tensors(evaluated(name, text, inputs=some, tensors=tensors, n_samples=n))

    try:
        together = run(values, n)
    except Exception:  # noqa: BLE001 -- noise may be no valid input
        return None
    # Of several results only those that are used: others may number the samples.
    parts = [node for node in operation.node.users if node.target is operator.getitem]
    results = _tensors(operation.result)
    used = {node.args[1] for node in parts if node.users} or range(len(results))
    for sample in sorted({0, 1, n - 1}):
        pairs = zip(values, batched, strict=True)
        own = [v[sample : sample + 1].clone() if b else v for v, b in pairs]
        try:
            alone = run(own, 1)
        except Exception:  # noqa: BLE001 -- it needs other samples
            return False
        for index, result in enumerate(results):
            batch = batch_of(result.shape)
            if batch is None or index not in used:
                continue
            if alone[index].dim() != together[index].dim():
                return False
            size = alone[index].shape[batch]
            among = together[index].narrow(batch, sample * size, size).double()
            if not torch.allclose(
                among, alone[index].double(), rtol=1e-3, atol=1e-4 * max(1.0, scale), equal_nan=True
            ):
                return False
    return True


def _mixes(operation: Operation) -> GraphError:
    given = pytree.tree_leaves(dict(operation.arguments))
    numbered = any(isinstance(one, Made) and one.number is None for one in given)
    if numbered or "index" in str(operation.target):
        return GraphError(
            f"{operation.name} mixes samples, as message passing does that numbers the nodes of "
            "all graphs of a batch: keep a dimension for the samples (torch.gather, torch.bmm), "
            "or use one process per replica (partitions = 1)"
        )
    return GraphError(
        f"{operation.name} mixes samples: a layer must keep them separate; give attention "
        "and recurrent layers batch_first=True, and normalise with torch.nn.BatchNorm"
    )


def _tensors(result: object) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
