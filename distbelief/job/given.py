"""What a program gives to `fit` as objects: model, data, loss and metrics.

The processes of the job are forked from the program, so they have these objects, whatever their
classes are and wherever these are defined: nothing is pickled, written or imported again. The job
names them by import paths without a module: [model] factory = ":model" (`task.imports`).
"""

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType
from typing import Final, TypeVar, cast

from torch import nn

from distbelief.core.errors import JobError
from distbelief.job.launch import forkserver
from distbelief.task.dry_run import shown
from distbelief.task.imports import OBJECTS
from distbelief.task.task import check_shapes


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


def copy_of(model: object, *, user: str) -> nn.Module:
    """Return a copy of a module, in training mode; JobError if its copies would not be as it is."""
    if not isinstance(model, nn.Module):
        way = "call it" if callable(model) else "give the module itself"
        raise JobError(f"{user}: model is {shown(model)}, not an nn.Module: {way}")
    if hasattr(model, "_orig_mod"):
        raise JobError(f"{user}: model is compiled: give the module that torch.compile was given")
    check_shapes(model, user)
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise JobError(f"{user}: {name!r} of the model is on the meta device: give it values")
    evaluates = [name for name, one in model.named_modules() if not one.training]
    if evaluates and len(evaluates) < len([*model.modules()]):
        raise JobError(
            f"{user}: {evaluates[0] or 'the model'!r} is in evaluation mode and other parts are "
            "not, and a job trains all: call model.train(), and leave out or freeze (by "
            "requires_grad_) what is not meant to train"
        )
    for place, one in model.named_modules():
        for key, value in vars(one).items():
            if key not in {"_parameters", "_modules", "_buffers"}:
                what = f"attribute {key!r} of {place or 'the model'}"
                check_apart(value, model, what=what, user=user)
    try:
        return deepcopy(model).train()
    except Exception as error:  # the user's code may raise anything
        raise JobError(
            f"{user}: the model cannot be copied: {type(error).__name__}: {error}: keep in it "
            "parameters, buffers and plain values only"
        ) from error


def check_apart(value: object, model: nn.Module, *, what: str, user: str) -> None:
    """Raise JobError if a function refers to a model: processes train copies of it, not this."""
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    if any(id(found) in parts for found in _referred(value, set())):
        raise JobError(
            f"{user}: {what} refers to the model itself, of which each process trains a copy: make "
            "it a method of the module, or let forward return what it needs"
        )


_MANY: Final = 1000  # entries of a list: it is data


def _referred(value: object, seen: set[int]) -> Iterator[object]:
    """Yield what a value, and the functions in it, refer to, as far as that can be seen."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[object] = ()
    match value:
        case FunctionType():
            cells = [one.cell_contents for one in value.__closure__ or () if one != CellType()]
            found = [value.__globals__.get(name) for name in _globals_in(value.__code__)]
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            parts = [*cells, *found, *defaults]
        case MethodType():  # a copy of a module has a method of that copy
            parts = (value.__func__,)
        case partial():
            wrapped = cast("partial[object]", value)
            parts = (wrapped.func, *wrapped.args, *wrapped.keywords.values())
        case Mapping():
            parts = islice(value.values(), _MANY)
        case list() | tuple():
            parts = islice(value, _MANY)
        case _:
            return
    for part in parts:
        yield part
        yield from _referred(part, seen)


def _globals_in(code: CodeType) -> Iterator[str]:
    for each in dis.get_instructions(code):
        if each.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
            yield str(each.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_in(inner)
