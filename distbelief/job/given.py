"""What a program gives to `fit` as objects: model, data, loss and metrics.

The processes of the job are forked from the program, so they have these objects, whatever their
classes are and wherever these are defined: nothing is pickled, written or imported again. The job
names them by import paths without a module: [model] factory = ":model" (`task.imports`).
"""

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType
from typing import Final, TypeVar, cast

import torch
from torch import nn

from distbelief.core.errors import JobError
from distbelief.job.launch import forkserver
from distbelief.task.dry_run import shown
from distbelief.task.imports import INSTALLED, OBJECTS
from distbelief.task.task import check_memory, check_modes, check_saved, check_shapes


T = TypeVar("T")


def path_of(name: str) -> str:
    """Return the import path of an object that is given by this name."""
    return f":{name}"


@contextmanager
def given(objects: Mapping[str, object]) -> Iterator[None]:
    """Let the processes that are forked in a `with` block have these objects."""
    if OBJECTS:
        raise JobError("fit: another fit is running in this program: call one after the other")
    if forkserver.has_gpu():
        raise JobError(
            "fit: this program has used a GPU, which processes forked from it could not: call fit "
            "before, or train a job: distbelief.train"
        )
    OBJECTS.update(objects)
    try:
        yield
    finally:
        OBJECTS.clear()


def giving(thing: T) -> Callable[[], T]:
    """Return a factory of this thing."""
    return lambda: thing


def copying(module: nn.Module) -> Callable[[], nn.Module]:
    """Return a factory of copies of this module: a forward may change buffers and attributes."""
    return lambda: deepcopy(module)


def copy_of(model: object, *, user: str) -> nn.Module:
    """Return a copy of a module, in training mode; JobError if its copies would not be as it is."""
    if not isinstance(model, nn.Module):
        way = "call it" if callable(model) else "give the module itself"
        raise JobError(f"{user}: model is {shown(model)}, not an nn.Module: {way}")
    if hasattr(model, "_orig_mod"):
        raise JobError(f"{user}: model is compiled: give the module that torch.compile was given")
    check_shapes(model, user)
    check_memory(model, user)
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise JobError(
                f"{user}: {name or 'the model'!r} has an extra state (get_extra_state), of which a "
                "job saves nothing: make it a buffer"
            )
    check_saved(model, user)
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise JobError(f"{user}: {name!r} of the model is on the meta device: give it values")
    try:
        copy = deepcopy(model)
    except Exception as error:  # the user's code may raise anything
        raise JobError(
            f"{user}: the model cannot be copied: {type(error).__name__}: {error}: keep in it "
            "parameters, buffers and plain values only"
        ) from error
    check_modes(copy, user)
    copy.train()
    # A copy has lists, dictionaries and methods of its own parts. Functions are not copied.
    for place, one in copy.named_modules():
        for key, value in vars(one).items():
            if key not in {"_parameters", "_modules", "_buffers"}:
                what = f"attribute {key!r} of {place or 'the model'}"
                check_apart(value, model, what=what, user=user, copy=copy)
    return copy


def check_apart(
    value: object, model: nn.Module, *, what: str, user: str, copy: nn.Module | None = None
) -> None:
    """Raise JobError if a function refers to a model: processes train copies of it, not this.

    Parts of a `copy`, which may have the value, are not gone into.
    """
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    seen: set[object] = {id(part) for part in (() if copy is None else copy.modules())}
    if any(id(found) in parts for found in _referred(value, frozenset(), seen)):
        raise JobError(
            f"{user}: {what} refers to the model itself, of which each process trains a copy: "
            'let forward return what it needs, or the loss (loss="model")'
        )


_MANY: Final = 1000  # entries of a list: it is data


# What is called of an object that is a loss or a metric
_CALLED: Final = frozenset({"__call__", "forward", "update", "compute"})


def _referred(value: object, names: frozenset[str], seen: set[object]) -> Iterator[object]:
    """Yield what a value, and the functions in it, refer to, as far as that can be seen.

    Of an object these are the attributes of such `names`: those that a function reads that has it.
    """
    key = id(value), names
    if key in seen or id(value) in seen or isinstance(value, torch.Tensor):
        return
    seen.add(key)
    parts: Iterable[object] = ()
    match value:
        case FunctionType():
            parts = [one.cell_contents for one in value.__closure__ or () if one != CellType()]
            if not value.__code__.co_filename.startswith(INSTALLED):  # it may wrap the user's
                names = _names_in(value.__code__)
                parts += [value.__globals__.get(name) for name in _globals_in(value.__code__)]
                parts += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        case MethodType():
            function = value.__func__
            parts = (function, value.__self__)
            if isinstance(function, FunctionType):
                names = _names_in(function.__code__)
        case partial():
            wrapped = cast("partial[object]", value)
            parts = (wrapped.func, *wrapped.args, *wrapped.keywords.values())
        case Mapping():
            parts = islice(value.values(), _MANY)
        case list() | tuple():
            parts = islice(value, _MANY)
        case _:
            parts = [_attribute(value, name) for name in names | _CALLED]
    for part in parts:
        yield part
        yield from _referred(part, names, seen)


def _attribute(thing: object, name: str) -> object:
    """Return an attribute without running any code: a property is the method that it calls."""
    if isinstance(thing, nn.Module):
        for kept in (thing._parameters, thing._buffers, thing._modules):  # noqa: SLF001 -- getattr could run the user's code
            if name in kept:
                return kept[name]
    found: object = inspect.getattr_static(thing, name, None)
    found = found.fget if isinstance(found, property) else found
    if isinstance(found, FunctionType) and name not in getattr(thing, "__dict__", {}):
        return MethodType(found, thing)
    return found


def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that a function, and those in it, use."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _globals_in(code: CodeType) -> Iterator[str]:
    for each in dis.get_instructions(code):
        if each.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
            yield str(each.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_in(inner)
