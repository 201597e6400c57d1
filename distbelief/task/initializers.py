"""Initial values from a safetensors file, read by ranges: no process needs it whole."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import prod
from types import TracebackType
from typing import Final, Protocol, Self, cast, final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from distbelief.core.vectors import Vector
from distbelief.errors import JobError, StorageError
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout
from distbelief.task.task import ModelSpec, build_model


# How torch draws a layer's parameters, as distributions that shards can draw from.
#
# The same distributions as the layers' own `reset_parameters`; not the same numbers,
# since torch draws them one after another from one stream, and a shard must draw its part
# alone. A tensor whose elements are all equal in the module as built (a norm's weight, a
# zero bias, a counter) begins with that value, whatever its layer.


def initials_of(module: nn.Module, names: Sequence[str]) -> Mapping[str, Initial]:
    """Return a distribution for each of these tensors of `module`.

    Args:
        module: As its factory made it.
        names: Of parameters and buffers, as `named_parameters` has them.

    Raises:
        JobError: a tensor is not constant, and its layer's rule is not known.
    """
    return {name: _initial(module, name) for name in names}


def _initial(module: nn.Module, name: str) -> Initial:
    owner_name, _, own_name = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    tensor = getattr(owner, own_name)
    assert isinstance(tensor, torch.Tensor), name
    constant = _constant_value(tensor)
    if constant is not None:
        return Initial(distribution="constant", value=constant)
    bound = _bound(owner, own_name, tensor)
    if bound is not None:
        return Initial(distribution="uniform", low=-bound, high=bound)
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return Initial(distribution="normal", mean=0.0, std=1.0)
    raise JobError(
        f"[model] initial = 'seed' does not know how {type(owner).__name__} draws "
        f"{name!r}: use initial = 'module', or a .safetensors file"
    )


def _constant_value(tensor: torch.Tensor) -> float | None:
    """Return the value of all elements, if they have one and are more than one."""
    if tensor.numel() == 0:
        return 0.0
    low, high = float(tensor.detach().min()), float(tensor.detach().max())
    return low if low == high and _is_plain(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """One single drawn number looks constant, and must not be taken for it."""
    return tensor.numel() > 1 or float(tensor.detach().reshape(-1)[0]).is_integer()


def _bound(owner: nn.Module, name: str, tensor: torch.Tensor) -> float | None:
    """Return b where `owner` draws this tensor uniformly from [-b, b]."""
    match owner:
        case nn.Linear() | nn.Bilinear():
            return 1.0 / math.sqrt(owner.weight.shape[1])
        case nn.modules.conv._ConvNd():  # noqa: SLF001 -- the only name they share
            fan_in = owner.weight.shape[1] * math.prod(owner.kernel_size)
            return 1.0 / math.sqrt(fan_in)
        case nn.RNNBase() | nn.RNNCellBase():
            return 1.0 / math.sqrt(owner.hidden_size)
        case nn.MultiheadAttention() if tensor.ndim == 2 and name.endswith("_weight"):
            # Xavier's (Glorot & Bengio 2010), over what was stacked into one.
            return math.sqrt(6.0 / (tensor.shape[0] + tensor.shape[1]))
        case _:
            return None


# A module made without memory, and how its constructor would have drawn its tensors.
#
# On the meta device tensors have shapes and no values, so a net of any size can be made
# in any process. What its constructor asks for (`uniform_`, `zero_`, `torch.ones`) passes
# by all the same: it is noted, storage by storage, and from it the shards draw the same
# distributions element by element. That is true for any layer, the user's own included,
# and for initial values of one's own choice, such as Xavier's.
#
#     with Recording() as recording:
#         `module = factory()`, then `recording.initials(module)`
#
# What is drawn in a way that shards cannot repeat (in parts, or by arithmetic on what was
# drawn) is refused by name. Some of torch.nn.init do nothing on the meta device, having
# asked the tensor whether it is there: so whoever asks is taken to be one of them.

_UNKNOWN: Final = "filled in a way that shards cannot repeat"
_EMPTY: Final = "never given any values"
_CAST: Final = "cast to another type after it was drawn"

_Numbers = tuple[float, ...]
_Entered = AbstractContextManager[object]


class _Function(Protocol):
    def __call__(self, *args: object, **options: object) -> object: ...


_NEW: Final[Mapping[str, float]] = {"zeros": 0.0, "ones": 1.0}
"""Functions that return a new tensor with one value everywhere."""

_SILENT: Final = frozenset({"empty", "empty_strided", "empty_like", "detach", "alias"})
"""Functions that leave values as they are, or as nobody has set them."""


@final
class Recording:
    """Makes modules on the meta device, and remembers what fills their tensors.

    A context manager; afterwards `initials` tells.
    """

    def __init__(self) -> None:
        self._notes = _Notes()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        modes = (torch.device("meta"), _Questions(self._notes), self._notes)
        for mode in modes:
            self._stack.enter_context(cast("_Entered", mode))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def initials(self, module: nn.Module, names: Sequence[str]) -> Mapping[str, Initial]:
        """Return how each of these tensors of `module` is drawn.

        Args:
            module: Made within this recording.
            names: Of parameters and buffers.

        Raises:
            JobError: one is drawn in a way that shards cannot repeat.
        """
        tensors: dict[str, torch.Tensor] = {}
        tensors.update(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        found: dict[str, Initial] = {}
        for name in names:
            noted = self._notes.of(tensors[name])
            if isinstance(noted, str):
                raise JobError(
                    f"[model] initial = 'seed': tensor {name!r} is {noted}. "
                    f"{_mend(noted, tensors[name])}, or use initial = 'module', or a "
                    ".safetensors file"
                )
            found[name] = noted
        return found


def recorded_initials(spec: ModelSpec, names: Sequence[str]) -> Mapping[str, Initial]:
    """Return how each of these tensors of a job's model is drawn.

    Raises:
        JobError: the model cannot be built, or is drawn in a way that shards cannot
            repeat.
    """
    with Recording() as recording:
        module = build_model(spec)
    return recording.initials(module, names)


def _mend(noted: str, tensor: torch.Tensor) -> str:
    if noted != _CAST:
        return "Let its constructor use one function of torch.nn.init on the whole tensor"
    return (
        f"Make its layer in that type (dtype={tensor.dtype}) rather than cast the "
        "module, as by double()"
    )


@final
class _Notes(TorchDispatchMode):
    """Sees every operation; notes those that fill a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._noted: dict[int, Initial | str] = {}
        # While a storage is remembered here no other one can get its address.
        self._kept: list[torch.UntypedStorage] = []

    def doubt(self, tensor: torch.Tensor) -> None:
        """Something may have filled it, and nobody saw what."""
        self._set(tensor, _UNKNOWN)

    def of(self, tensor: torch.Tensor) -> Initial | str:
        """Return how it is drawn, or in words why nobody knows."""
        return self._noted.get(_key(tensor), _EMPTY)

    @override
    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        operation = cast("_Function", func)
        result = operation(*args, **(kwargs or {}))
        name = str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
        if isinstance(result, torch.Tensor) and result.is_meta:
            self._note(name, result, args, kwargs or {})
        return result

    def _note(
        self, name: str, result: torch.Tensor, args: Sequence[object], options: Mapping[str, object]
    ) -> None:
        if name in _SILENT:
            return
        if name in _NEW:
            self._set(result, _constant(_NEW[name]))
            return
        if name == "full":
            self._set(result, _constant(_number(args[1])))
            return
        if not name.endswith("_") or name.endswith("__"):
            source = args[0] if args else None
            if not isinstance(source, torch.Tensor):
                self._set(result, _UNKNOWN)  # of a file, say
            elif _key(source) != _key(result):
                is_cast = name == "_to_copy" and source.dtype != result.dtype
                known = isinstance(self.of(source), Initial)
                self._set(result, _CAST if is_cast and known else _UNKNOWN)
            return
        whole = result.numel() == _n_elements(result)
        drawn = _drawn(name, args, options)
        self._set(result, drawn if whole and drawn is not None else _UNKNOWN)

    def _set(self, tensor: torch.Tensor, noted: Initial | str) -> None:
        key = _key(tensor)
        if key not in self._noted:
            self._kept.append(tensor.untyped_storage())
        self._noted[key] = noted


@final
class _Questions(TorchFunctionMode):
    """Hears who asks a tensor whether it is on the meta device.

    Args:
        notes: Where that is noted.
    """

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    @override
    def __torch_function__(
        self,
        func: object,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            self._notes.doubt(cast("torch.Tensor", args[0]))
        return cast("_Function", func)(*args, **(kwargs or {}))


def _drawn(
    name: str, args: Sequence[object], options: Mapping[str, object]
) -> Initial | str | None:
    """Return what an operation in place fills a tensor with, if shards can do so."""
    match name:
        case "uniform_":
            low, high = _arguments(args, options, ("from", 0.0), ("to", 1.0))
            return Initial(distribution="uniform", low=low, high=high)
        case "normal_":
            mean, std = _arguments(args, options, ("mean", 0.0), ("std", 1.0))
            return Initial(distribution="normal", mean=mean, std=std)
        case "zero_":
            return _constant(0.0)
        case "fill_":
            value = args[1]
            if isinstance(value, torch.Tensor):
                return None
            return _constant(_number(value))
        case _:
            return None


def _arguments(
    args: Sequence[object], options: Mapping[str, object], *wanted: tuple[str, float]
) -> _Numbers:
    """Return the arguments after the tensor, by place or by name."""
    return tuple(
        _number(args[place] if place < len(args) else options.get(name, usual))
        for place, (name, usual) in enumerate(wanted, 1)
    )


def _number(value: object) -> float:
    return float(cast("float", value))


def _constant(value: float) -> Initial | str:
    if not math.isfinite(value):
        return _UNKNOWN
    return Initial(distribution="constant", value=value)


def _key(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 -- has no other name
    return identity


def _n_elements(tensor: torch.Tensor) -> int:
    """Return the elements of the whole storage, of which this may be a view."""
    return tensor.untyped_storage().nbytes() // max(1, tensor.element_size())


Read = Callable[[str, int, int], Vector]
"""read(name, start, stop) -> elements [start, stop) of that tensor, row-major."""


def reader(path: str, layout: Layout) -> Read:
    """Return a function that reads ranges of the layout's tensors from this file.

    Args:
        path: A .safetensors file with whole tensors by name.
        layout: Names and shapes that it must have; its dtype is what is returned.

    Raises:
        StorageError: the file cannot be read, lacks a tensor, or has another shape.
    """
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    dtype = torch.float64 if layout.dtype.itemsize == 8 else torch.float32
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read initial values from {path}: {error}") from None
    for name in shapes:
        if name not in found:
            few = ", ".join(sorted(found)[:5])
            raise StorageError(
                f"{path} has no tensor {name!r} (it has {few}"
                f"{', ...' if len(found) > 5 else ''}): use a file of this model"
            )

    def read(name: str, start: int, stop: int) -> Vector:
        with safe_open(path, framework="pt") as file:
            tensor = file.get_slice(name)
            shape = tuple(tensor.get_shape())
            if shape != shapes[name]:
                raise StorageError(
                    f"{path}: tensor {name!r} has shape {shape}, the model's has "
                    f"{shapes[name]}: use a file of this model"
                )
            if not shape:
                part = file.get_tensor(name).reshape(1)
                first = 0
            else:
                row = max(prod(shape[1:]), 1)
                first = start // row * row
                part = tensor[start // row : -(-stop // row)]
            flat: torch.Tensor = part.reshape(-1)[start - first : stop - first]
            return np.asarray(flat.to(dtype).numpy())

    return read
