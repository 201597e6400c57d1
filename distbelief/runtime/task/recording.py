"""A module made without memory, and how its constructor would have drawn its tensors.

On the meta device tensors have shapes and no values, so a net of any size can be made
in any process. What its constructor asks for (`uniform_`, `zero_`, `torch.ones`) passes
by all the same: it is noted, storage by storage, and from it the shards draw the same
distributions element by element. That is true for any layer, the user's own included,
and for initial values of one's own choice, such as Xavier's.

    with Recording() as recording:
        module = factory()
    initials = recording.initials(module)

What is drawn in a way that shards cannot repeat (in parts, or by arithmetic on what was
drawn) is refused by name. Some of torch.nn.init do nothing on the meta device, having
asked the tensor whether it is there: so whoever asks is taken to be one of them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Final, Protocol, Self, cast, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from distbelief.errors import JobError
from distbelief.parameter_server.layout.initial import Initial
from distbelief.runtime.task.task import ModelSpec, build_model


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
