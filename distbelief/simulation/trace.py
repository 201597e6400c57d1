"""The trace of a simulation: one line per event, in a running SHA-256; and traffic counts.

Two runs with the same seed have equal digests, whatever PYTHONHASHSEED is: no text contains
an address or depends on the order of a set, and arrays are written as their CRC-32. A failed
run prints the last lines of each role in the order of events.
"""

import dataclasses
import hashlib
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, assert_never, final, get_args

import msgspec
import numpy as np

from distbelief.core.vectors import Vector
from distbelief.errors import DistBeliefError
from distbelief.protocol import Message
from distbelief.roles.role import (
    Address,
    Computed,
    Event,
    PeerJoined,
    PeerLost,
    Persisted,
    Received,
    Seconds,
    Started,
    TimerFired,
)


TEXT_MAX = 240  # characters of one event's content
ITEMS_MAX = 8
DEPTH_MAX = 3

# The types of most values; their subclasses, such as numpy's float64, take the slow path.
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})

_names: Final[dict[type, Sequence[str] | None]] = {}  # declared fields of each type, cached
_dtypes: Final[dict[object, str]] = {}  # name of each dtype: numpy builds it at each str()

_WITH_ARRAYS = {
    kind
    for kind in get_args(Message)
    if any(field.type == Vector for field in msgspec.structs.fields(kind))
}


def event_text(event: Event) -> str:
    """Return the kind of an event and its shortened content."""
    return f"{type(event).__name__} {_content(event)}".rstrip()


def message_text(message: Message) -> str:
    """Return the same as `stable_repr`, in less time."""
    kind = type(message)
    if kind not in _WITH_ARRAYS:
        text = repr(message)
        return text if len(text) <= TEXT_MAX else _cut(text)
    fields = []
    for name in kind.__struct_fields__:
        value = getattr(message, name)
        text = repr(value) if type(value) in _PLAIN else stable_repr(value, depth=1)
        fields.append(f"{name}={text if len(text) <= TEXT_MAX else _cut(text)}")
    text = f"{kind.__name__}({', '.join(fields)})"
    return text if len(text) <= TEXT_MAX else _cut(text)


def crc(array: Vector) -> int:
    """Return the CRC-32 of an array's bytes."""
    return zlib.crc32(array.tobytes())


def stable_repr(value: object, *, depth: int = 0) -> str:
    """Return a short text of `value` that depends only on its content."""
    if type(value) in _PLAIN:
        return _cut(repr(value))
    if type(value) is np.ndarray:  # a frequent case, without the match statement
        return _cut(_array_text(value))
    match value:
        case np.generic():  # first: numpy's float64 is also a float
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
            text = _composite_repr(value, depth + 1)
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
            text = f"{event.name} {stable_repr(outcome)}"
        case Persisted():
            text = f"{event.label} {event.error or ''}"
        case Started():
            text = stable_repr(event.restored)
        case PeerJoined():
            text = f"{event.peer}#{event.incarnation}"
        case PeerLost():
            text = f"{event.peer}#{event.incarnation} {event.reason}"
        case _:
            assert_never(event)
    return text


def _composite_repr(value: object, depth: int) -> str:
    kind = type(value)
    if isinstance(value, Mapping):
        items = [f"{key}: {stable_repr(item, depth=depth)}" for key, item in value.items()]
        return f"{{{', '.join(items[:ITEMS_MAX])}}}"
    if isinstance(value, (tuple, list)):
        texts = [stable_repr(item, depth=depth) for item in value[:ITEMS_MAX]]
        return f"{len(value)}[{', '.join(texts)}]"
    if kind not in _names:
        _names[kind] = _declared(kind)
    names = _names[kind]
    if names is None:
        return kind.__name__  # its repr may contain an address
    fields = [f"{name}={stable_repr(getattr(value, name), depth=depth)}" for name in names]
    return f"{kind.__name__}({', '.join(fields)})"


def _declared(kind: type) -> Sequence[str] | None:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return None


def _cut(text: str) -> str:
    if len(text) <= TEXT_MAX:
        return text
    return f"{text[: TEXT_MAX - 12]}…{zlib.crc32(text.encode()):08x}"


N_TOGETHER: Final = 256  # lines or events that enter the digest together
N_NEWEST: Final = 4096  # events kept in memory with `order_only`

_Happened = tuple[Seconds, Address, int, str, str]


class SimulationFailed(DistBeliefError):  # noqa: N818 - it states what happened
    """A simulated run broke an assertion, a limit or a check.

    Attributes:
        seed: The same seed fails in the same way.
        now: Virtual seconds.
        last: The last lines of each role.
    """

    def __init__(self, reason: str, *, seed: int, now: Seconds, trace: "Trace") -> None:
        self.seed = seed
        self.now = now
        self.last = trace.last()
        super().__init__(
            f"the simulation with seed {seed} failed at {now!r} s: {reason}\n"
            f"The last events of each role (to repeat the run: seed={seed}):\n"
            f"{trace.table()}"
        )


class Trace:
    """The lines of a run: all in the digest, the last `n_kept` of each role in memory.

    With `full`, all lines are kept; with `order_only`, the content of events is left out.
    """

    def __init__(self, *, n_kept: int = 12, full: bool = False, order_only: bool = False) -> None:
        self._hash = hashlib.sha256()
        self._order_only = order_only
        self._happened: list[_Happened] = []
        self._newest: deque[_Happened] = deque(maxlen=N_NEWEST)
        self._pending: list[str] = []
        self._n_kept = n_kept
        self._last: dict[Address, deque[tuple[int, str]]] = {}
        self._lines: list[str] | None = [] if full else None
        self._n_lines = 0

    @property
    def digest(self) -> str:
        """SHA-256 of all lines and events so far, in hexadecimal."""
        self._flush()
        return self._hash.hexdigest()

    @property
    def n_lines(self) -> int:
        return self._n_lines + len(self._happened)

    @property
    def lines(self) -> Sequence[str]:
        """All lines; needs `full`."""
        assert self._lines is not None, "use ClusterOptions(full_trace=True)"
        return self._lines

    def event(self, now: Seconds, name: Address, incarnation: int, event: Event) -> None:
        """Record an event just before the role handles it."""
        if not self._order_only:
            self.note(now, name, incarnation, event_text(event))
            return
        who = ""
        if type(event) is Received:
            kind, who = type(event.message).__name__, event.sender
        else:
            kind = type(event).__name__
            if isinstance(event, (TimerFired, Computed)):
                who = event.name
        self._happened.append((now, name, incarnation, kind, who))
        if len(self._happened) >= N_TOGETHER:
            self._flush()

    def note(self, now: Seconds, name: Address, incarnation: int, text: str) -> None:
        """Record something that happened to a role and is not an event."""
        if self._order_only:
            self._happened.append((now, name, incarnation, text, ""))
        else:
            line = f"{now!r} {name}#{incarnation} {text}"
            self._n_lines += 1
            self._pending.append(line)
            kept = self._last.get(name)
            if kept is None:
                kept = self._last[name] = deque(maxlen=self._n_kept)
            kept.append((self._n_lines, line))
            if self._lines is not None:
                self._lines.append(line)
        if len(self._happened) + len(self._pending) >= N_TOGETHER:
            self._flush()

    def last(self) -> Mapping[Address, tuple[str, ...]]:
        return {name: tuple(line for _, line in rows) for name, rows in self._kept().items()}

    def _kept(self) -> Mapping[Address, deque[tuple[int, str]]]:
        if not self._order_only:
            return self._last
        self._flush()
        kept: dict[Address, deque[tuple[int, str]]] = {}
        for index, (now, name, incarnation, what, who) in enumerate(self._newest):
            rows = kept.setdefault(name, deque(maxlen=self._n_kept))
            rows.append((index, f"{now!r} {name}#{incarnation} {what} {who}".rstrip()))
        return kept

    def table(self) -> str:
        """Return the last lines of all roles as a table, ordered by time."""
        rows = sorted(row for kept in self._kept().values() for row in kept)
        cells = [("time", "role", "event"), *(_cells(line) for _, line in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(2)]
        return "\n".join(
            f"  {time:<{widths[0]}}  {role:<{widths[1]}}  {text}".rstrip()
            for time, role, text in cells
        )

    def _flush(self) -> None:
        if self._happened:
            self._hash.update(msgspec.msgpack.encode(self._happened))
            self._newest.extend(self._happened)
            self._n_lines += len(self._happened)
            self._happened.clear()
        if self._pending:
            self._hash.update(("\n".join(self._pending) + "\n").encode())
            self._pending.clear()


def _cells(line: str) -> tuple[str, str, str]:
    time, role, text = line.split(" ", 2)
    return f"{float(time):.6f}", role, text


@final
class Traffic:
    """Messages and bytes sent so far, by sender and receiver.

    Bytes are those of the large task if there are cost scales. Transfers through shared
    memory are not counted.
    """

    def __init__(self, traffic: Mapping[tuple[Address, Address], Sequence[float]]) -> None:
        self._counts = {ends: (int(n), b) for ends, (n, b) in traffic.items()}

    @property
    def messages(self) -> int:
        return sum(n for n, _ in self._counts.values())

    @property
    def n_bytes(self) -> float:
        return sum(n_bytes for _, n_bytes in self._counts.values())

    @property
    def sent(self) -> Mapping[Address, float]:
        """Bytes sent by each role."""
        return self._by_end(0)

    @property
    def received(self) -> Mapping[Address, float]:
        """Bytes sent to each role."""
        return self._by_end(1)

    def between(self, sender: str, receiver: str) -> float:
        """Return the bytes from roles to roles whose names begin with these prefixes."""
        return sum(
            n_bytes
            for ends, (_, n_bytes) in self._counts.items()
            if ends[0].startswith(sender) and ends[1].startswith(receiver)
        )

    def _by_end(self, end: int) -> Mapping[Address, float]:
        totals: dict[Address, float] = {}
        for ends, (_, n_bytes) in self._counts.items():
            totals[ends[end]] = totals.get(ends[end], 0.0) + n_bytes
        return totals
