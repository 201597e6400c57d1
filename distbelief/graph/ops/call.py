"""One operation of torch without a rule of its own, or a module that is not split.

Its arguments are plain data (JSON), so that a graph can be sent: inputs, tensors of the model and
the number of samples stand in them as small tables (`Encoder` in `lowering.fallback`). One rank
computes it for whole samples, or each rank a part along the dimensions that the operation treats
alike.
"""

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, reduce
from threading import RLock
from typing import Any, ClassVar, Final, final

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.region import Region


ALONE: Final = RLock()  # held by code that draws from the generators of the process, or may
CONSTANT: Final = "constant"  # the operation that returns its argument
MODES: Final = ("train", "training")  # arguments that say whether the model trains


@final
class TorchCall(Operator):
    """The result of one ATen (or custom) operation, or of a module that is not split."""

    # inputs    outputs of layers, in the order of their places in the arguments
    # tensors   of the model, by the words in the arguments; all of a module, by its own names: the
    #           module may lie on torch's meta device
    # options   operation: "aten.cumsum.default", or module: its path in the model, a key of
    #           `Step.modules`; arguments: JSON; output: index of one of several results; batch: the
    #           dimension of the result that is the batch, -1 for none; type: of its numbers, if
    #           fewer than those of other layers ("bool", "int8", "bfloat16"); mode: the argument
    #           that is true in training; along: the dimensions that an operation works along, it is
    #           split by all others; if absent, by none
    #           of a module, without arguments: they are the inputs, and the batch comes first
    #           statistics: buffers by name, separated by commas: the output is their new values
    #           operations: floating point operations of a module's forward pass per sample; if
    #           absent, two per element of its tensors
    name: ClassVar[str] = "call"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        if "along" not in layer.options:
            return ()
        return tuple(cut for cut in super().cuts(layer) if cut.dim not in layer.integers("along"))

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return layer.options.get("batch") == -1

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        if "along" not in layer.options:
            return tuple(Region.of(*shape) for shape in layer.input_shapes)
        reads = []
        for shape in layer.input_shapes:
            read, missing = output.broadcast(shape), len(layer.shape) - len(shape)
            for dim in layer.integers("along"):
                if dim >= missing:
                    read = read.replaced(dim - missing, (0, shape[dim - missing]))
            reads.append(read)
        return tuple(reads)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        if layer.options.get("along") == ():
            work = super().work(layer, output)
            return replace(work, backward=0.0) if layer.is_integer else work
        n_tensors = sum(math.prod(use.shape) for use in layer.tensors.values())
        if is_module(layer):
            counted = "operations" in layer.options
            operations = layer.number("operations") if counted else 2.0 * n_tensors
            return self.product_work(layer, output, operations)
        n_read = sum(region.n_elements for region in self.reads(layer, output))
        forward = float(output.n_elements + 2 * n_tensors)
        return Work(forward=forward, backward=2 * forward, n_elements=float(n_read) + forward)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer, inputs = call.layer, call.inputs
        if "along" in layer.options:
            inputs = _promoted([aligned(value, len(layer.shape)) for value in inputs])
        n_samples = max((value.shape[0] for value in inputs), default=1)
        if is_module(layer):
            result = _of_module(call, n_samples)
        else:
            name, text = layer.text("operation"), layer.text("arguments")
            tags = () if name == CONSTANT else operation_of(name).tags
            is_random = torch.Tag.nondeterministic_seeded in tags
            mode = {layer.text("mode"): call.step.training} if "mode" in layer.options else {}
            with step_numbers(call) if is_random else nullcontext():
                result = evaluated(
                    name, text, inputs=inputs, tensors=call.tensors, n_samples=n_samples, **mode
                )
        if "output" in layer.options:
            leaves = pytree.tree_leaves(result)
            tensors = [x for x in leaves if not is_module(layer) or isinstance(x, torch.Tensor)]
            result = tensors[layer.integer("output")]
        if not isinstance(result, torch.Tensor):
            raise GraphError(
                f"{layer.name!r} returns a {type(result).__name__}, not a tensor: select one of "
                "its outputs with the option `output`"
            )
        if layer.options.get("operation") == CONSTANT:
            result = result[call.region.slices]
        return from_torch(result, call, n_samples) if "batch" in layer.options else result


def is_module(layer: Layer) -> bool:
    return layer.kind == TorchCall.name and "module" in layer.options


def _of_module(call: Call, n_samples: int) -> object:
    # Buffers may change meanwhile; random numbers are the step's.
    layer, module = call.layer, call.module
    if module.training != call.step.training:
        module.train(call.step.training)
    buffers = dict(module.named_buffers())
    state = dict(call.tensors)
    for word in buffers.keys() & state.keys():
        # Ranks have floats, also of whole numbers.
        own, value = buffers[word].dtype, state[word]
        is_exact = own.is_floating_point or own.is_complex
        state[word] = value.clone() if is_exact else value.to(own, copy=True)
    for word, tensor in (*module.named_parameters(), *module.named_buffers()):
        if word in state and tensor.is_complex():
            state[word] = torch.view_as_complex(state[word].contiguous())
    arguments: list[Any] = [value.expand(n_samples, *value.shape[1:]) for value in call.inputs]
    words: dict[str, Any] = {}
    if "arguments" in layer.options:
        text = layer.text("arguments")
        arguments, words = decoded(
            text, inputs=call.inputs, tensors=call.tensors, n_samples=n_samples
        )
    # All layers of one call draw the same numbers.
    chance = step_numbers(call, f"{layer.text('module')}:{','.join(layer.inputs)}")
    with chance, default_dtype([*call.inputs, *state.values()]):
        result: object = functional_call(module, state, tuple(arguments), words)
    if "statistics" in layer.options:
        kept = [state[word].flatten() for word in layer.text("statistics").split(",")]
        return torch.cat(kept).detach()
    return result


def aligned(value: torch.Tensor, n_dims: int) -> torch.Tensor:
    """Return (batch, *shape) with dimensions of extent 1 inserted after the batch.

    Without them torch would align the batch with a dimension of a longer shape.
    """
    missing = n_dims + 1 - value.dim()
    return value.view(value.shape[0], *(1,) * missing, *value.shape[1:]) if missing else value


def _promoted(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Numbers that the forward makes get the precision of what they meet.
    floats = [value.dtype for value in values if value.is_floating_point()]
    if len(set(floats)) < 2:
        return list(values)
    dtype = reduce(torch.promote_types, floats)
    return [value.to(dtype) if value.is_floating_point() else value for value in values]


def from_torch(result: torch.Tensor, call: Call, n_samples: int) -> torch.Tensor:
    """Return a result of torch as (batch, *shape of the region)."""
    floats = [x.dtype for x in (*call.inputs, *call.tensors.values()) if x.is_floating_point()]
    if not result.is_floating_point():  # masks travel as numbers
        result = result.to(torch.int64)
    elif floats and result.dtype.itemsize < floats[0].itemsize:
        result = result.to(floats[0])
    batch = call.layer.integer("batch")
    if batch < 0:
        return result.unsqueeze(0)
    if batch == 0 and result.shape == (n_samples, *call.region.shape):
        return result
    shape = (*result.shape[:batch], n_samples, -1, *result.shape[batch + 1 :])
    return result.reshape(shape).movedim(batch, 0).reshape(n_samples, *call.region.shape)


@contextmanager
def default_dtype(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give what a forward makes, as by `torch.zeros`, the precision of these tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(next((t.dtype for t in tensors if t.is_floating_point()), before))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def step_numbers(call: Call, name: str = "") -> Iterator[None]:
    """Draw torch's random numbers from the seed of the step and a name, the layer's by default."""
    step = call.step
    name = f"{step.seed}:{step.first_sample}:{name or call.layer.name}"
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
    devices = {value.device for value in call.inputs if value.is_cuda}
    with ALONE, torch.random.fork_rng(devices=sorted(devices, key=str)):
        if torch.cuda.is_initialized():
            torch.manual_seed(seed)
        else:  # the same for the CPU, but for 0.3 ms in which torch keeps the stack for CUDA
            torch.default_generator.manual_seed(seed)
        yield


def evaluated(
    name: str,
    arguments: str,
    *,
    inputs: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    n_samples: int,
    **more: bool,
) -> object:
    """Return the result of an operation for these tensors, with more arguments."""
    given, keywords = decoded(arguments, inputs=inputs, tensors=tensors, n_samples=n_samples)
    return given[0] if name == CONSTANT else operation_of(name)(*given, **keywords | more)


def decoded(  # noqa: C901 -- a case for each kind of argument
    arguments: str,
    *,
    inputs: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    n_samples: int,
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments that stand in JSON, with these tensors."""
    device = next((t.device for t in (*inputs, *tensors.values())), torch.device("cpu"))
    floats = [t.dtype for t in (*inputs, *tensors.values()) if t.is_floating_point()]

    def one(value: Any) -> Any:  # noqa: ANN401, C901, PLR0911, PLR0912 -- whatever JSON holds
        if isinstance(value, list):
            return [one(item) for item in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"input": int(index)}:
                return _arranged(inputs[index], value, n_samples)
            case {"tensor": str(word)}:
                tensor = tensors[word]
                if "dtype" in value:
                    tensor = tensor.to(getattr(torch, value["dtype"]))
                return tensor.t() if value.get("turned") else tensor
            case {"samples": int(factor)}:
                return factor * n_samples + int(value.get("plus", 0))
            case {"constant": str(packed), "dtype": str(dtype), "shape": shape}:
                numbers = _unpacked(packed, dtype).reshape(shape)
                return numbers.to(device=device, dtype=_typed(numbers.dtype, floats, value))
            case {"made": str(name), "arguments": given, "keywords": keywords}:
                made = operation_of(name)(*one(given), **{w: one(v) for w, v in keywords.items()})
                return made.to(device=device, dtype=_typed(made.dtype, floats, value))
            case {"device": _}:
                return device
            case {"dtype": str(dtype)}:
                return getattr(torch, dtype)
            case {"tuple": items}:
                return tuple(one(items))
            case {"words": words}:
                return {word: one(item) for word, item in words.items()}
            case _:
                raise GraphError(f"a call has an unknown argument {value!r}")

    given = _parsed(arguments)
    keywords = {word: one(v) for word, v in given["keywords"].items()}
    if "device" in keywords:
        keywords["device"] = device  # some operations need one
    return one(given["arguments"]), keywords


def packed(numbers: torch.Tensor) -> str:
    """Return the numbers of a tensor as text."""
    flat = numbers.detach().cpu().contiguous().reshape(-1)
    # An empty tensor of numpy's has a stride with which torch makes no views.
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return base64.b64encode(zlib.compress(content)).decode()


@lru_cache(maxsize=4096)  # each layer's are read in each step, and not changed
def _parsed(arguments: str) -> Any:  # noqa: ANN401 -- whatever JSON holds
    return json.loads(arguments)


@lru_cache(maxsize=256)  # a graph's constants are read in each step
def _unpacked(text: str, dtype: str) -> torch.Tensor:
    content = bytearray(zlib.decompress(base64.b64decode(text)))
    kind = getattr(torch, dtype)
    return torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)


def _typed(
    dtype: torch.dtype, floats: Sequence[torch.dtype], place: Mapping[str, Any]
) -> torch.dtype:
    # Numbers that the forward makes have the precision of what they meet.
    meets = dtype.is_floating_point and floats and not place.get("narrow")
    return floats[0] if meets else dtype


def _arranged(value: torch.Tensor, place: dict[str, Any], n_samples: int) -> torch.Tensor:
    # (batch, *shape of the layer) as the operation takes it.
    if "dtype" in place:
        value = value.to(getattr(torch, place["dtype"]))
    if place["batch"] is None:
        return value[0]
    batch, before, after = place["batch"], place.get("before", 0), place.get("after", 0)
    value = value.expand(n_samples, *value.shape[1:]).movedim(0, batch + before)
    return value.flatten(batch, batch + before + after)


def operation_of(name: str) -> Any:  # noqa: ANN401 -- an operation of torch
    """Return an operation by its name; GraphError if torch has none of this name here."""
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise GraphError(
            f"torch has no operation {name} here: import the module that registers it where the "
            "model's factory stands"
        ) from None
