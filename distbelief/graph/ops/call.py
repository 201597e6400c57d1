"""One operation of torch without a split rule: one rank computes it for whole samples.

Its arguments are plain data (JSON), so that a graph can be sent: inputs, tensors of the model and
the number of samples stand in them as small tables (`encoded` in `lowering.fallback`).
"""

import json
import math
from typing import Any, ClassVar, Final, final

import torch
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.ops.opaque import seed_of
from distbelief.graph.region import Region


CONSTANT: Final = "constant"  # the operation that returns its argument


@final
class TorchCall(Operator):
    """The result of one ATen (or custom) operation."""

    # inputs    outputs of layers, in the order of their places in the arguments
    # tensors   of the model, by the words in the arguments
    # options   operation: "aten.cumsum.default"; arguments: JSON; output: index of one of several
    #           results; batch: the dimension of the result that is the batch, -1 for none;
    #           mask: whether its numbers stand for True and False
    name: ClassVar[str] = "call"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return ()

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return layer.integer("batch") < 0

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return tuple(Region.of(*shape) for shape in layer.input_shapes)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n_read = sum(math.prod(shape) for shape in layer.input_shapes)
        n_tensors = sum(math.prod(use.shape) for use in layer.tensors.values())
        forward = float(output.n_elements + 2 * n_tensors)
        return Work(forward=forward, backward=2 * forward, n_elements=float(n_read) + forward)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        n_samples = max((value.shape[0] for value in call.inputs), default=1)
        devices = {value.device for value in call.inputs if value.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            torch.manual_seed(seed_of(layer, call.step))
            result = evaluated(
                layer.text("operation"),
                layer.text("arguments"),
                inputs=call.inputs,
                tensors=call.tensors,
                n_samples=n_samples,
            )
        if "output" in layer.options:
            result = result[layer.integer("output")]  # type: ignore[index] # several results
        assert isinstance(result, torch.Tensor), layer.name
        if result.dtype == torch.bool:  # masks travel as numbers
            result = result.to(torch.int64)
        batch = layer.integer("batch")
        if batch < 0:
            return result.unsqueeze(0)
        shape = (*result.shape[:batch], n_samples, -1, *result.shape[batch + 1 :])
        return result.reshape(shape).movedim(batch, 0).reshape(n_samples, *layer.shape)


def evaluated(
    name: str,
    arguments: str,
    *,
    inputs: Any,  # noqa: ANN401 -- tensors by index
    tensors: Any,  # noqa: ANN401 -- tensors by word
    n_samples: int,
) -> object:
    """Return the result of an operation for these tensors."""
    device = next((t.device for t in (*inputs, *tensors.values())), torch.device("cpu"))

    floats = [t.dtype for t in (*inputs, *tensors.values()) if t.is_floating_point()]

    def typed(name: str) -> torch.dtype:
        # Numbers that the forward makes have the precision of what they meet.
        dtype: torch.dtype = getattr(torch, name)
        return floats[0] if dtype.is_floating_point and floats else dtype

    def decoded(value: Any) -> Any:  # noqa: ANN401, PLR0911 -- whatever JSON holds
        if isinstance(value, list):
            return [decoded(item) for item in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"input": int(index)}:
                return _arranged(inputs[index], value, n_samples)
            case {"tensor": str(word)}:
                tensor = tensors[word]
                return tensor.t() if value.get("turned") else tensor
            case {"samples": int(factor)}:
                return factor * n_samples
            case {"constant": numbers, "dtype": str(dtype), "shape": shape}:
                numbers = torch.tensor(numbers, dtype=typed(dtype), device=device)
                return numbers.reshape(shape)
            case {"filled": number, "dtype": str(dtype), "shape": shape}:
                return torch.full(decoded(shape), number, dtype=typed(dtype), device=device)
            case {"dtype": str(dtype)}:
                return getattr(torch, dtype)
            case _:
                raise GraphError(f"{name} has an unknown argument {value!r}")

    given = json.loads(arguments)
    if name == CONSTANT:
        return decoded(given["arguments"][0])
    operation = operation_of(name)
    keywords = {word: decoded(value) for word, value in given["keywords"].items()}
    return operation(*(decoded(value) for value in given["arguments"]), **keywords)


def _arranged(value: torch.Tensor, place: dict[str, Any], n_samples: int) -> torch.Tensor:
    # (batch, *shape of the layer) as the operation takes it.
    if "dtype" in place:
        value = value.to(getattr(torch, place["dtype"]))
    if place["batch"] is None:
        return value[0]
    batch, before, after = place["batch"], place["before"], place["after"]
    value = value.expand(n_samples, *value.shape[1:]).movedim(0, batch + before)
    return value.flatten(batch, batch + before + after)


def operation_of(name: str) -> Any:  # noqa: ANN401 -- an operation of torch
    """Return an operation by its name.

    Raises:
        GraphError: torch has none of this name here.
    """
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise GraphError(
            f"torch has no operation {name} here: import the module that registers it where the "
            "model's factory stands"
        ) from None
