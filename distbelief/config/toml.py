"""Writes plain values as TOML, to store a job in its run directory (`tomllib` only reads).

Nested tables get a header of their own, tables inside lists are written inline. None is left out:
TOML cannot express it, and no key of a job file needs it.
"""

import json
import math
import re
from collections.abc import Mapping

from distbelief.core.errors import JobFileError


Table = Mapping[str, object]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def write(table: Table) -> str:
    """Return `table` as a TOML document that reads back as an equal one."""
    return "\n".join(_lines(table, ())).strip("\n") + "\n"


def inline(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return repr(value)
        case str():
            return _text(value)
        case list() | tuple():
            return f"[{', '.join(inline(item) for item in value)}]"
        case Mapping():
            pairs = (f"{_key(str(k))} = {inline(v)}" for k, v in value.items())
            return f"{{ {', '.join(pairs)} }}" if value else "{}"
        case _:
            shown = " ".join(str(value).split())[:60]
            raise JobFileError(
                f"{shown} ({type(value).__name__}) cannot be in a job file; use text, finite "
                "numbers, true or false, lists and tables"
            )


def excerpt(value: object, *, n_max: int = 60) -> str:
    """Return one value as a user would write it, cut if long."""
    try:
        text = inline(value)
    except JobFileError:
        text = str(value)
    return text if len(text) <= n_max else text[: n_max - 3] + "..."


def _lines(table: Table, path: tuple[str, ...]) -> list[str]:
    present = {key: value for key, value in table.items() if value is not None}
    nested = {k: v for k, v in present.items() if isinstance(v, Mapping)}
    plain = {k: v for k, v in present.items() if k not in nested}
    lines = [_line(key, value) for key, value in plain.items()]
    if path and (lines or not nested):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for key, value in nested.items():
        lines += _lines(value, (*path, key))
    return lines


def _line(key: str, value: object) -> str:
    try:
        return f"{_key(key)} = {inline(value)}"
    except JobFileError as error:
        raise JobFileError(f"{key}: {error}") from None


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # JSON escapes everything that TOML needs escaped, except the control character DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
