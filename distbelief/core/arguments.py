"""Calls with wrong arguments: refused as JobError, with the way out.

Python's own TypeError names the argument, but not what to give instead. Tables called `ELSEWHERE`
say what an option of another library is here.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import ClassVar, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import msgspec
from typing_extensions import override

from distbelief.core.errors import JobError, SettingError
from distbelief.core.formatting import nearest


_P = ParamSpec("_P")
_R = TypeVar("_R")


def check_call(
    user: str,
    signature: inspect.Signature,
    arguments: tuple[object, ...],
    options: Mapping[str, object],
    elsewhere: Mapping[str, str],
) -> None:
    """Raise JobError if these are no arguments of `user`; `elsewhere`: options of other libraries.

    The way out of such an option is a sentence.
    """
    parameters = signature.parameters
    named = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    placed = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in options:
        if name not in parameters and (name in elsewhere or not takes_any):
            hint = elsewhere.get(name) or nearest(name, [*placed, *named])
            raise JobError(f"{user} has no option {name!r}: {hint[:1].lower()}{hint[1:]}")
    if len(arguments) > len(placed):
        value = " ".join(repr(arguments[len(placed)]).split())[:60]
        raise JobError(f"{user}: {value} needs a name: {', '.join(f'{name}=' for name in named)}")
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise JobError(f"{user}: {error}") from None


_WORDS: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "PathLike": "a path",
    "Path": "a path",
    "Mapping": "a table",
    "Sequence": "a list",
    "Iterable": "a list",
    "Callable": "a function",
    "NoneType": "None",
}
# Numpy's numbers, too, and all that names a file.
_WIDER: Mapping[type, type] = {int: Integral, float: Real, Path: os.PathLike}


def misfits(
    signature: inspect.Signature, arguments: tuple[object, ...], options: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Yield what is plainly not of its annotation: its name, and what to give.

    Annotations that say more than the kind of a value are left to those who know them.
    """
    for name, value in signature.bind(*arguments, **options).arguments.items():
        kinds = _kinds_of(signature.parameters[name].annotation)
        if not any(_is_of(value, kind) for kind in kinds):
            words = [_WORDS.get(kind.__name__, kind.__name__) for kind in kinds]
            yield name, " or ".join(dict.fromkeys(words))


def _kinds_of(annotation: object) -> list[type]:
    """Return the types of which a value may be; [object] if that is not known."""
    origin = get_origin(annotation)
    if origin in {Union, UnionType}:
        return [kind for one in get_args(annotation) for kind in _kinds_of(one)]
    kind = origin or annotation
    if annotation is None:
        return [NoneType]
    is_plain = isinstance(kind, type) and not getattr(kind, "_is_protocol", False)
    return [cast("type", kind)] if is_plain and kind is not bool else [object]


def _is_of(value: object, kind: type) -> bool:
    if kind is Sequence and isinstance(value, str):
        return False
    if isinstance(value, bool):
        return kind in {bool, object}
    return isinstance(value, _WIDER.get(kind, kind))


def checked(
    user: str, elsewhere: Mapping[str, str]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function, or `__init__`, of this name refuse wrong arguments as `check_call` does.

    Python's own errors, of a value that does not fit its annotation, are refusals of it.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        parameters = [one for name, one in signature.parameters.items() if name != "self"]
        shown = signature.replace(parameters=parameters)
        n_own = len(signature.parameters) - len(parameters)

        @wraps(function)
        def call(*arguments: _P.args, **options: _P.kwargs) -> _R:
            own = arguments[n_own:]
            check_call(user, shown, own, options, elsewhere)
            try:
                return function(*arguments, **options)
            except (TypeError, ValueError, AttributeError) as error:
                for name, use in misfits(shown, own, options):
                    value = " ".join(repr(shown.bind(*own, **options).arguments[name]).split())
                    raise JobError(f"{user}: {name} is {value[:60]}; use {use}") from error
                raise

        return call

    return decorate


class CheckedArguments(msgspec.StructMeta):
    """Makes structs whose wrong arguments are refused as `check_call` does."""

    elsewhere: ClassVar[Mapping[str, str]] = {}  # what options of other libraries are here

    @override
    def __call__(self, *arguments: object, **options: object) -> object:
        check_call(self.__name__, inspect.signature(self), arguments, options, self.elsewhere)
        return super().__call__(*arguments, **options)


class NamedTable(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    metaclass=CheckedArguments,
):
    """Base of the structs of which a table of a job file chooses one by its key "name"."""


_T = TypeVar("_T", bound=msgspec.Struct)


def documented(means: Mapping[str, str]) -> Callable[[type[_T]], type[_T]]:
    """Add a section "Args" to the docstring of a struct: what its fields mean, by their names."""

    def add(struct: type[_T]) -> type[_T]:
        lines = [f"    {field}: {means[field]}" for field in struct.__struct_fields__]
        struct.__doc__ = "\n".join([inspect.getdoc(struct) or "", "", "Args:", *lines])
        return struct

    return add


def require(
    struct: msgspec.Struct, user: str, fields: str, fits: Callable[[float], bool], use: str
) -> None:
    """Raise SettingError if one of these fields, of those that the struct has, does not fit."""
    for field in fields.split():
        value = getattr(struct, field, None)
        is_number = isinstance(value, int | float)
        if value is not None and not (is_number and fits(value)):
            raise SettingError(f"{user}: {key_of(struct, field)} is {value!r}; use {use}")


def key_of(struct: msgspec.Struct, field: str) -> str:
    """Return what a table calls this field."""
    return struct.__struct_encode_fields__[struct.__struct_fields__.index(field)]
