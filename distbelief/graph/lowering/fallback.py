"""Computes whole what has no split rule: a layer "call" for each operation.

An operation must keep samples apart. That is tried on noise: each of a few samples alone must
give what all of them give together.
"""

import json
import math
from typing import Any, Final

import torch

from distbelief.graph.graph import GraphError, Option, TensorUse
from distbelief.graph.lowering.lower import (
    Filled,
    Held,
    Lowerer,
    NotSplitError,
    Operation,
    Results,
    Value,
    batch_of,
    factor,
)
from distbelief.graph.ops.call import CONSTANT, evaluated


_N_VALUES_MAX: Final = 1 << 16  # of a constant that stands in the graph
_N_TRIED_MAX: Final = 1 << 24  # elements of an operation that is tried on noise


def call_whole(operation: Operation, reason: str) -> object:
    """Add layers "call" for the results of an operation.

    Raises:
        NotSplitError: It cannot be called so; its module can be opaque.
        GraphError: It mixes samples.
    """
    encoder = _Encoder(operation.lowerer)
    text = json.dumps(
        {
            "arguments": [],
            "keywords": {w: encoder.encoded(v) for w, v in operation.arguments.items()},
        }
    )
    result = operation.result
    several = not isinstance(result, torch.Tensor)
    if several and not isinstance(result, tuple | list):
        raise NotSplitError(f"it returns a {type(result).__name__}")
    batched = any(value.batch is not None for value in encoder.inputs)
    _check_samples(operation, encoder, text)

    def make(index: int | None) -> object:
        one = result if index is None else result[index]
        if not isinstance(one, torch.Tensor):
            raise NotSplitError("it returns something else than tensors")
        batch = batch_of(one.shape)
        is_number = operation.lowerer.joins and not one.shape
        if batch is None and batched and not is_number:
            raise GraphError(f"{operation.name} joins samples: a layer must keep them separate")
        shape = _layer_shape(one, batch)
        options: dict[str, Option] = {
            "operation": str(operation.target),
            "arguments": text,
            "batch": -1 if batch is None else batch,
        }
        if index is not None:
            options["output"] = index
        if one.dtype == torch.bool:
            options["mask"] = True
        sources = [value.layer.name for value in encoder.inputs]
        if batch is not None and not batched:  # noise, say: an input tells the number of samples
            sources.append(operation.lowerer.first)
        name = operation.builder.add(
            operation.name,
            "call",
            sources,
            shape,
            options=options,
            tensors=encoder.tensors,
            is_integer=not one.is_floating_point(),
            whole=reason,
        )
        inside = 0 if batch is None else int(factor(one.shape[batch]) > 1)
        return Value(operation.builder[name], batch, after=inside)

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


def constant_layer(lowerer: Lowerer, tensor: torch.Tensor) -> Value:
    """Return a layer for a tensor that the forward makes of numbers."""
    encoder = _Encoder(lowerer)
    text = json.dumps({"arguments": [encoder.encoded(tensor)], "keywords": {}})
    options: dict[str, Option] = {"operation": CONSTANT, "arguments": text, "batch": -1}
    if tensor.dtype == torch.bool:
        options["mask"] = True
    name = lowerer.builder.add(
        "constant",
        "call",
        [],
        tuple(tensor.shape),
        options=options,
        is_integer=not tensor.is_floating_point(),
    )
    return Value(lowerer.builder[name], batch=None)


def _layer_shape(result: torch.Tensor, batch: int | None) -> tuple[int, ...]:
    shape: list[int] = []
    for dim, extent in enumerate(result.shape):
        if dim != batch:
            shape.append(int(extent))
        elif factor(extent) > 1:
            shape.append(factor(extent))
    return tuple(shape)


class _Encoder:
    # Arguments as plain data, and what they name.

    def __init__(self, lowerer: Lowerer) -> None:
        self._lowerer = lowerer
        self.inputs: list[Value] = []
        self.tensors: dict[str, TensorUse] = {}

    def encoded(self, value: Any) -> Any:  # noqa: ANN401, PLR0911 -- of any type
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple():
                return [self.encoded(item) for item in value]
            case Held():
                word = f"p{len(self.tensors)}"
                self.tensors[word] = value.use
                return {"tensor": word, "turned": value.turned}
            case Value():
                self.inputs.append(value)
                place: dict[str, object] = {"input": len(self.inputs) - 1, "batch": value.batch}
                place |= {"before": value.before, "after": value.after}
                if self._lowerer.is_mask(value.layer):
                    place["dtype"] = "bool"
                return place
            case torch.Tensor():
                if value.numel() > _N_VALUES_MAX:
                    raise GraphError(
                        f"the forward makes a tensor of {value.numel()} numbers: register it as a "
                        "buffer of its module"
                    )
                dtype = str(value.dtype).removeprefix("torch.")
                return {
                    "constant": value.flatten().tolist(),
                    "dtype": dtype,
                    "shape": list(value.shape),
                }
            case Filled():
                dtype = str(value.dtype).removeprefix("torch.")
                shape = [self.encoded(extent) for extent in value.shape]
                return {"filled": value.number, "dtype": dtype, "shape": shape}
            case torch.SymInt():
                return {"samples": factor(value)} if factor(value) else int(value)
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.device() | torch.layout() | torch.memory_format():
                return None
            case _:
                raise NotSplitError(f"{type(value).__name__} cannot be sent")


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
