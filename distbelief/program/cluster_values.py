"""Values of a cluster file, checked; a mistake names the key and what to write."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from distbelief.errors import JobFileError
from distbelief.graph.layer import GraphError
from distbelief.spelling import nearest
from distbelief.units import Dimension, parse


Table = Mapping[str, object]

ENDS: Final = re.compile(r"(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})")
"""Two machines, or the first and the last of a group: "0-15"."""


def quantity(
    table: Table, key: str, dimension: Dimension, where: str, *, default: float | None = None
) -> float:
    """Return a quantity of this dimension; the default if the key is missing.

    Raises:
        GraphError: naming the key and the mend.
    """
    if key not in table:
        if default is not None:
            return default
        raise GraphError(f"{where} lacks the key '{key}'")
    try:
        return parse(table[key], dimension)
    except JobFileError as error:
        raise GraphError(f"{where} {key} = {error}".lstrip()) from None


def text_of(table: Table, key: str, *, default: str) -> str:
    """Return a text; the default if the key is missing.

    Raises:
        GraphError: naming the key and the mend.
    """
    value = table.get(key, default)
    if not isinstance(value, str):
        raise GraphError(f'{key} = {excerpt(value)}: wants text in quotes: "..."')
    return value


def count_of(table: Table, key: str, where: str) -> int:
    """Return a whole number above 0; 1 if the key is missing.

    Raises:
        GraphError: naming the key and the mend.
    """
    value = table.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GraphError(f"{where} {key} = {excerpt(value)}: wants a whole number, at least 1")
    return value


def table_of(value: object, keys: Iterable[str], where: str) -> Table:
    """Return a value that is a table with these keys only.

    Raises:
        GraphError: naming the key and the mend.
    """
    if not isinstance(value, dict):
        raise GraphError(f"{where} = {excerpt(value)}: wants a table of keys")
    check_keys(value, keys, where)
    return value


def check_keys(table: Table, known: Iterable[str], where: str) -> None:
    """Refuse keys that are not known, and name the nearest.

    Raises:
        GraphError: naming the key and the mend.
    """
    for key in table:
        if key not in known:
            raise GraphError(f"{where} has no key '{key}'. {nearest(key, known)}")


def excerpt(value: object, *, n_max: int = 60) -> str:
    """Return a value as text, not too long."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= n_max else text[: n_max - 3] + "..."
