"""Calls with wrong arguments: refused as JobError, with the way out.

Python's own TypeError names the argument, but not what to give instead. Tables called `ELSEWHERE`
say what an option of another library is here.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ClassVar, ParamSpec, TypeVar

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


def checked(
    user: str, elsewhere: Mapping[str, str]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function, or `__init__`, of this name refuse wrong arguments as `check_call` does."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        parameters = [one for name, one in signature.parameters.items() if name != "self"]
        shown = signature.replace(parameters=parameters)
        n_own = len(signature.parameters) - len(parameters)

        @wraps(function)
        def call(*arguments: _P.args, **options: _P.kwargs) -> _R:
            check_call(user, shown, arguments[n_own:], options, elsewhere)
            return function(*arguments, **options)

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
