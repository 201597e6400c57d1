"""Initial values without the whole model in one process: recorded, or from a file.

On the meta device tensors have shapes and no values, so a model of any size can be built. The
calls that would fill its tensors (`uniform_`, `zero_`, `torch.ones`) still pass by and are
recorded per storage; shards then draw the same distributions, element by element.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal, Protocol, cast, final

import msgspec
import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from distbelief.core.errors import JobError, StorageError
from distbelief.core.formatting import nearest
from distbelief.core.tensor_files import TensorFile
from distbelief.core.vectors import Vector
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout, TensorSpec


_FIX: Final = "Let its constructor use one function of torch.nn.init on the whole tensor"
_UNKNOWN: Final = f"filled in a way that shards cannot repeat. {_FIX}"
_EMPTY: Final = f"never given any values. {_FIX}"
_CAST: Final = (
    "cast to another type after it was drawn. Make its layer in that type (dtype={dtype}) rather "
    "than cast the module, as by double()"
)


class _Function(Protocol):
    def __call__(self, *args: object, **options: object) -> object: ...


# Functions that return a new tensor with one value everywhere.
_NEW: Final[Mapping[str, float]] = {"zeros": 0.0, "ones": 1.0}

# Functions that leave values as they are, or unset.
_SILENT: Final = frozenset({"empty", "empty_strided", "empty_like", "detach", "alias"})


def recorded_initials(
    build: Callable[[], nn.Module], names: Sequence[str]
) -> Mapping[str, Initial]:
    """Return how these tensors are drawn, or raise JobError; the model is built on meta."""
    recorder = _FillRecorder()
    with torch.device("meta"), _MetaQueryRecorder(recorder), recorder:
        module = build()
    tensors: dict[str, torch.Tensor] = {}
    tensors.update(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    found: dict[str, Initial] = {}
    for name in names:
        recorded = recorder.of(tensors[name])
        if isinstance(recorded, str):
            raise JobError(
                f"[model] initial = 'seed': tensor {name!r} is "
                f"{recorded.format(dtype=tensors[name].dtype)}, or use initial = 'module', or "
                "a .safetensors file"
            )
        found[name] = recorded
    return found


@final
class _FillRecorder(TorchDispatchMode):
    """Sees every operation and records those that fill a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._recorded: dict[int, Initial | str] = {}
        # Kept alive, so that no other storage can get the same address.
        self._kept: list[torch.UntypedStorage] = []

    def mark_unknown(self, tensor: torch.Tensor) -> None:
        self._store(tensor, _UNKNOWN)

    def of(self, tensor: torch.Tensor) -> Initial | str:
        return self._recorded.get(_key(tensor), _EMPTY)

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
            self._record(name, result, args, kwargs or {})
        return result

    def _record(
        self, name: str, result: torch.Tensor, args: Sequence[object], options: Mapping[str, object]
    ) -> None:
        if name in _SILENT:
            return
        if name in _NEW:
            self._store(result, _constant(_NEW[name]))
            return
        if name == "full":
            self._store(result, _constant(args[1]))
            return
        if not name.endswith("_") or name.endswith("__"):
            source = args[0] if args else None
            if not isinstance(source, torch.Tensor):
                self._store(result, _UNKNOWN)  # from a file, for example
            elif _key(source) != _key(result):
                is_cast = name == "_to_copy" and source.dtype != result.dtype
                known = isinstance(self.of(source), Initial)
                self._store(result, _CAST if is_cast and known else _UNKNOWN)
            return
        # A fill of a part cannot be repeated by shards.
        whole = result.numel() == _n_elements(result)
        distribution = _distribution(name, args, options)
        self._store(result, distribution if whole and distribution is not None else _UNKNOWN)

    def _store(self, tensor: torch.Tensor, recorded: Initial | str) -> None:
        key = _key(tensor)
        if key not in self._recorded:
            self._kept.append(tensor.untyped_storage())
        self._recorded[key] = recorded


@final
class _MetaQueryRecorder(TorchFunctionMode):
    def __init__(self, recorder: _FillRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def __torch_function__(
        self,
        func: object,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # Some functions of torch.nn.init ask whether a tensor is on the meta device and then do
        # nothing, so the fill would go unseen.
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            self._recorder.mark_unknown(cast("torch.Tensor", args[0]))
        return cast("_Function", func)(*args, **(kwargs or {}))


def _distribution(
    name: str, args: Sequence[object], options: Mapping[str, object]
) -> Initial | str | None:
    def number(place: int, key: str, usual: float) -> float:
        value = args[place] if place < len(args) else options.get(key, usual)
        return float(cast("float", value))

    match name:
        case "uniform_":
            low, high = number(1, "from", 0.0), number(2, "to", 1.0)
            return Initial(distribution="uniform", low=low, high=high)
        case "normal_":
            mean, std = number(1, "mean", 0.0), number(2, "std", 1.0)
            return Initial(distribution="normal", mean=mean, std=std)
        case "zero_":
            return _constant(0.0)
        case "fill_" if not isinstance(args[1], torch.Tensor):
            return _constant(args[1])
        case _:
            return None


def _constant(value: object) -> Initial | str:
    number = float(cast("float", value))
    return Initial(distribution="constant", value=number) if math.isfinite(number) else _UNKNOWN


def _key(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 -- has no other name
    return identity


def _n_elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // max(1, tensor.element_size())


# By the word of safetensors
_TYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def lost(before: torch.Tensor, after: torch.Tensor) -> str:
    """Return the first number that a cast has made infinite, and its place.

    Of integers, or to them: that it has made another. "" if all are there.
    """
    if before.dtype == after.dtype:  # of 8 bits, some know no infinity
        return ""
    is_lost = after.isinf() & before.isfinite()
    if not (before.is_floating_point() and after.is_floating_point()):
        is_lost = after.to(before.dtype) != before
    return "".join(f"{before[tuple(at)].item()!r} at {at}" for at in is_lost.nonzero()[:1].tolist())


# read(name, start, stop) -> elements [start, stop) of that tensor, row-major
Read = Callable[[str, int, int], Vector]


def reader(file: TensorFile, layout: Layout) -> Read:
    """Return a function that reads ranges of tensors from a safetensors file, and nothing else.

    The layout has the expected names and shapes, and the dtype of the result. StorageError if the
    file cannot be read, lacks a tensor, or has another shape.
    """
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    dtype = torch.float64 if layout.dtype.itemsize == 8 else torch.float32
    try:
        found = file.entries
    except (OSError, StorageError) as error:
        raise StorageError(f"cannot read initial values from {file.place}: {error}") from None
    for name in shapes:
        if name not in found:
            raise StorageError(
                f"{file.place} has no tensor {name!r} (it has {_few(sorted(found))}): use a file "
                "of this model"
            )

    def read(name: str, start: int, stop: int) -> Vector:
        entry = found[name]
        if entry.shape != shapes[name]:
            raise StorageError(
                f"{file.place}: tensor {name!r} has shape {entry.shape}, the model's has "
                f"{shapes[name]}: use a file of this model"
            )
        if entry.dtype not in _TYPES:
            raise StorageError(
                f"{file.place}: tensor {name!r} has type {entry.dtype}: use {', '.join(_TYPES)}"
            )
        stored = _TYPES[entry.dtype]
        try:
            raw = file.raw(name, start, stop)
        except (OSError, StorageError) as error:
            raise StorageError(f"cannot read initial values from {file.place}: {error}") from None
        if raw.nbytes != (stop - start) * stored.itemsize:
            raise StorageError(f"{file.place}: its header is wrong about {name!r}")
        if not raw.nbytes:  # torch gives an empty array a stride with which it has no views
            return np.empty(0, layout.dtype)
        given = torch.from_numpy(raw).view(stored)
        made = given.to(dtype)
        if stored != dtype and stored.itemsize >= dtype.itemsize and (what := lost(given, made)):
            place = f"{file.place}: tensor {name!r}, elements {start} to {stop - 1}"
            raise StorageError(f"{place}: {what}, which {dtype} has not")
        return np.asarray(made.numpy())

    return read


class InitialFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Value of [model] initial: a file that has some of the model's tensors."""

    file: str  # path of a safetensors file with whole tensors by name
    # Of the model's tensors that the file has not: an error, or as the factory leaves them
    missing: Literal["refuse", "draw"] = "refuse"
    # Patterns of names: as the factory leaves them, whatever the file has by such a name
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.file.endswith(".safetensors"):
            raise ValueError(f"file is {self.file!r}; use the path of a .safetensors file")


def partial_values(
    spec: InitialFile,
    values: Mapping[str, torch.Tensor],  # of the model, as its factory leaves them
    *,
    aliases: Mapping[str, str],  # further names of tied tensors, and the names that they have here
) -> dict[str, torch.Tensor]:
    """Return what the file of a table `initial` has for this model.

    JobError that names them if tensors are missing, in excess, or of another shape.
    """
    file = TensorFile.at(Path(spec.file))
    try:
        found = {n: entry for n, entry in file.entries.items() if not _fits(n, spec.skip)}
    except (OSError, StorageError) as error:
        raise JobError(f"[model] initial: cannot read {spec.file}: {error}") from None
    where = f"[model] initial: {spec.file}"
    for pattern in spec.skip:
        if not any(fnmatchcase(name, pattern) for name in (*values, *file.entries)):
            raise JobError(
                f"{where}: skip has {pattern!r}, and no tensor's name is like that, in the model "
                "or the file: use a name, or a pattern such as 'head.*'. "
                f"{nearest(pattern, values)}"
            )
    wanted = [name for name in values if not _fits(name, spec.skip)]
    own = {name: next((a for a in _names(name, aliases) if a in found), "") for name in wanted}
    missing = [name for name, there in own.items() if not there]
    extra = sorted(found.keys() - {*own.values(), *aliases})
    misshapen = [
        f"{name!r} {list(found[there].shape)}, in the model {list(values[name].shape)}"
        for name, there in own.items()
        if there and found[there].shape != tuple(values[name].shape)
    ]
    if extra:  # also where missing ones are drawn: names with another prefix would all be drawn
        raise JobError(
            f"{where} has tensors that the model has not: {_few(extra)}: add them to skip, or use "
            f"a file of this model (which has {_few([*values], 3)})"
        )
    if misshapen:
        raise JobError(f"{where}: other shapes: {_few(misshapen)}: add them to skip")
    if missing and spec.missing == "refuse":
        raise JobError(f'{where} lacks {_few(missing)}: give missing = "draw", or add them to skip')
    if not any(own.values()):
        raise JobError(f"{where}: nothing is taken from it: leave initial out")
    specs = [TensorSpec(name=there, shape=found[there].shape) for there in own.values() if there]
    is_double = any(values[name].dtype == torch.float64 for name in own)
    layout = Layout.of(specs, n_shards=1, dtype="float64" if is_double else "float32")
    try:
        read = reader(file, layout)
        return {
            name: torch.from_numpy(read(there, 0, values[name].numel())).view(values[name].shape)
            for name, there in own.items()
            if there
        }
    except StorageError as error:
        raise JobError(f"[model] initial: {error}") from None


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _names(name: str, aliases: Mapping[str, str]) -> Iterator[str]:
    yield name
    yield from (other for other, of in aliases.items() if of == name)


def _few(names: Sequence[str], n_max: int = 5) -> str:
    return ", ".join(names[:n_max]) + ", ..." * (len(names) > n_max)
