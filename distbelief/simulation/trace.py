"""The trace of a simulation: a record of each event, in a running SHA-256; and traffic counts.

Two runs with the same seed have equal digests, whatever PYTHONHASHSEED is: no record contains
an address or depends on the order of a set, and arrays are recorded as their CRC-32. A failed
run prints the last records of each role in the order of events.
"""

import hashlib
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, final

import msgspec
import numpy as np

from distbelief.core.errors import DistBeliefError
from distbelief.core.vectors import Vector
from distbelief.protocol.role import Address, Computed, Event, Received, Seconds, TimerFired


TEXT_MAX: Final = 240  # characters of one event

_dtypes: Final[dict[object, str]] = {}  # name of each dtype: numpy builds it at each str()


def crc(array: Vector) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)


# An event is recorded as msgpack with the CRC-32 of its arrays: that takes less time than its
# `repr`, and a record that is kept holds no array.
def _stand_in(value: object) -> object:
    match value:
        case np.ndarray():
            dtype = value.dtype
            name = _dtypes.get(dtype)
            if name is None:
                name = _dtypes[dtype] = str(dtype)
            return f"{name}{list(value.shape)}:{crc(value):08x}"
        case np.generic():
            return value.item()
        case BaseException():
            return f"{type(value).__name__}({str(value)!r})"
        case _:
            return type(value).__name__  # its repr may contain an address


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_stand_in, order="deterministic").encode


def _encoded(value: object) -> bytes:
    try:
        return _encode(value)
    except TypeError:  # some keys are no text: their order is that of their text
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_stand_in, order="deterministic")
        return _encode(plain)


def _short(event: Event) -> str:
    named = f" {event.name}" if isinstance(event, (TimerFired, Computed)) else ""
    return f"{type(event).__name__}{named}"


def _text(encoded: bytes) -> str:
    decoded = msgspec.msgpack.decode(encoded)  # a message has its type among its fields
    kind, fields = (decoded.pop("type"), decoded) if isinstance(decoded, dict) else decoded
    text = f"{kind}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
    if len(text) <= TEXT_MAX:
        return text
    return f"{text[: TEXT_MAX - 12]}…{zlib.crc32(text.encode()):08x}"


N_TOGETHER: Final = 256  # records that enter the digest together
N_REMEMBERED: Final = 50_000  # records of all roles together, for the report of a failure
_N_SHORT: Final = 15  # items of a list whose header has one byte in msgpack; of a longer one, 3

# Time, role, its incarnation, and text or encoded message; of a message also its
# sender and the incarnation of the sender.
_Record = tuple[Seconds, Address, int, str | bytes, *tuple[object, ...]]


class SimulationFailed(DistBeliefError):  # noqa: N818 - it states what happened
    """A simulated run broke an assertion, a limit or a check."""

    def __init__(self, reason: str, *, seed: int, now: Seconds, trace: "Trace") -> None:
        self.seed = seed
        self.now = now
        self.last = trace.last()  # lines of each role
        super().__init__(
            f"the simulation with seed {seed} failed at {now!r} s: {reason}\n"
            f"The last events of each role (to repeat the run: seed={seed}):\n"
            f"{trace.table()}"
        )


class Trace:
    """The events of a run: all in the digest, the newest in memory.

    A failure shows the last `n_kept` of each role. With `order_only`, the content of events is
    left out.
    """

    def __init__(self, *, n_kept: int = 12, order_only: bool = False) -> None:
        self._hash = hashlib.sha256()
        self._order_only = order_only
        self._n_kept = n_kept
        self._pending: list[_Record] = []  # not in the digest yet
        self._newest = deque[_Record](maxlen=N_REMEMBERED)  # those in the digest

    @property
    def digest(self) -> str:
        """SHA-256 of all records so far, in hexadecimal."""
        self._flush()
        return self._hash.hexdigest()

    def event(self, now: Seconds, name: Address, incarnation: int, event: Event) -> None:
        """Record an event just before the role handles it."""
        pending = self._pending
        if type(event) is Received:
            message = event.message
            what = type(message).__name__ if self._order_only else _encoded(message)
            pending.append((now, name, incarnation, what, event.sender, event.incarnation))
        else:
            what = _short(event) if self._order_only else _encoded((type(event).__name__, event))
            pending.append((now, name, incarnation, what))
        if len(pending) >= N_TOGETHER:
            self._flush()

    def note(self, now: Seconds, name: Address, incarnation: int, text: str) -> None:
        """Record something that happened to a role and is not an event."""
        self._pending.append((now, name, incarnation, text))
        if len(self._pending) >= N_TOGETHER:
            self._flush()

    def _flush(self) -> None:
        # Without the header of the list: the digest must not depend on when it is asked for.
        n_header = 1 if len(self._pending) <= _N_SHORT else 3
        self._hash.update(_encode(self._pending)[n_header:])
        self._newest.extend(self._pending)
        self._pending.clear()

    def last(self) -> Mapping[Address, tuple[str, ...]]:
        lines: dict[Address, tuple[str, ...]] = {}
        for record in self._kept():
            name = record[1]
            lines[name] = (*lines.get(name, ()), "{!r} {} {}".format(*_cells(record)))
        return lines

    def _kept(self) -> list[_Record]:
        # The last records of each role, in the order of events.
        self._flush()
        kept: list[_Record] = []
        n_of = Counter[Address]()
        for record in reversed(self._newest):
            n_of[record[1]] += 1
            if n_of[record[1]] <= self._n_kept:
                kept.append(record)
        return kept[::-1]

    def table(self) -> str:
        """Return the last lines of all roles as a table, ordered by time."""
        rows = [(f"{now:.6f}", role, text) for now, role, text in map(_cells, self._kept())]
        cells = [("time", "role", "event"), *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(2)]
        return "\n".join(
            f"  {time:<{widths[0]}}  {role:<{widths[1]}}  {text}".rstrip()
            for time, role, text in cells
        )


def _cells(record: _Record) -> tuple[Seconds, str, str]:
    now, name, incarnation, what, *sender = record
    text = _text(what) if isinstance(what, bytes) else what
    if sender:
        text += f" from {sender[0]}#{sender[1]}"
    return now, f"{name}#{incarnation}", text


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

    def between(self, sender: str, receiver: str) -> float:
        """Return the bytes from roles to roles whose names begin with these prefixes."""
        return sum(
            n_bytes
            for ends, (_, n_bytes) in self._counts.items()
            if ends[0].startswith(sender) and ends[1].startswith(receiver)
        )
