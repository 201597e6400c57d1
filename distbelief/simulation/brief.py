"""Short texts of events and values, the same in every process.

Nothing here depends on an address or on the order of a set; arrays are written as
their CRC-32.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Final, assert_never, get_args

import msgspec
import numpy as np

from distbelief.messages import Message
from distbelief.roles import (
    Computed,
    Event,
    PeerJoined,
    PeerLost,
    Persisted,
    Received,
    Started,
    TimerFired,
)
from distbelief.vectors import Vector


TEXT_MAX = 240  # characters of one event's content
ITEMS_MAX = 8
DEPTH_MAX = 3

_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
"""What most values are; subclasses, such as numpy's float64, are looked at closer."""

_names: Final[dict[type, Sequence[str] | None]] = {}
"""The fields that a type declares, looked up once."""

_dtypes: Final[dict[object, str]] = {}
"""What each type of numbers is called, which numpy makes up anew each time."""

_WITH_ARRAYS = {
    kind
    for kind in get_args(Message)
    if any(field.type == Vector for field in msgspec.structs.fields(kind))
}


def event_text(event: Event) -> str:
    """Return an event's kind and short content."""
    return f"{type(event).__name__} {_content(event)}".rstrip()


def message_text(message: Message) -> str:
    """Return a message as text: as `brief` would, in less time."""
    kind = type(message)
    if kind not in _WITH_ARRAYS:
        text = repr(message)
        return text if len(text) <= TEXT_MAX else _cut(text)
    fields = []
    for name in kind.__struct_fields__:
        value = getattr(message, name)
        text = repr(value) if type(value) in _PLAIN else brief(value, depth=1)
        fields.append(f"{name}={text if len(text) <= TEXT_MAX else _cut(text)}")
    text = f"{kind.__name__}({', '.join(fields)})"
    return text if len(text) <= TEXT_MAX else _cut(text)


def crc(array: Vector) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(array.tobytes())


def brief(value: object, *, depth: int = 0) -> str:
    """Return a short text of `value` that depends on its content alone."""
    if type(value) in _PLAIN:
        return _cut(repr(value))
    if type(value) is np.ndarray:  # as is frequent
        return _cut(_array_text(value))
    match value:
        case np.generic():  # first, for numpy's float64 is a float as well
            text = repr(value.item())
        case None | bool() | int() | float() | str() | bytes():
            text = repr(value)
        case np.ndarray():
            text = _array_text(value)
        case BaseException():
            text = f"{type(value).__name__}({str(value)!r})"
        case _ if depth >= DEPTH_MAX:
            text = type(value).__name__
        case _:
            text = _brief_composite(value, depth + 1)
    return _cut(text)


def _array_text(array: Vector) -> str:
    dtype = array.dtype
    name = _dtypes.get(dtype)
    if name is None:
        name = _dtypes[dtype] = str(dtype)
    return f"{name}{list(array.shape)}:{crc(array):08x}"


def _content(event: Event) -> str:
    match event:
        case Received():
            sender = f"{event.sender}#{event.incarnation}"
            text = f"{sender} {message_text(event.message)}"
        case TimerFired():
            text = event.name
        case Computed():
            outcome = event.result if event.error is None else event.error
            text = f"{event.name} {brief(outcome)}"
        case Persisted():
            text = f"{event.label} {event.error or ''}"
        case Started():
            text = brief(event.restored)
        case PeerJoined():
            text = f"{event.peer}#{event.incarnation}"
        case PeerLost():
            text = f"{event.peer}#{event.incarnation} {event.reason}"
        case _:
            assert_never(event)
    return text


def _brief_composite(value: object, depth: int) -> str:
    kind = type(value)
    if isinstance(value, Mapping):
        items = [f"{key}: {brief(item, depth=depth)}" for key, item in value.items()]
        return f"{{{', '.join(items[:ITEMS_MAX])}}}"
    if isinstance(value, (tuple, list)):
        texts = [brief(item, depth=depth) for item in value[:ITEMS_MAX]]
        return f"{len(value)}[{', '.join(texts)}]"
    if kind not in _names:
        _names[kind] = _declared(kind)
    names = _names[kind]
    if names is None:
        return kind.__name__  # its repr may hold an address
    fields = [f"{name}={brief(getattr(value, name), depth=depth)}" for name in names]
    return f"{kind.__name__}({', '.join(fields)})"


def _declared(kind: type) -> Sequence[str] | None:
    """Return the names of its fields, if it declares any."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return None


def _cut(text: str) -> str:
    if len(text) <= TEXT_MAX:
        return text
    return f"{text[: TEXT_MAX - 12]}…{zlib.crc32(text.encode()):08x}"
