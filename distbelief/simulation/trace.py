"""The trace: every delivered event as one line, under a running SHA-256.

Two runs of one seed have equal digests, whatever PYTHONHASHSEED is: nothing here
depends on an address or on the order of a set, and arrays enter by their checksums.
A failed run prints the last lines of every role, in the order in which they happened.
"""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from distbelief.errors import DistBeliefError
from distbelief.roles import Address, Computed, Event, Received, Seconds, TimerFired
from distbelief.simulation.brief import event_text


N_TOGETHER: Final = 256  # lines or events, put into the digest at once
N_NEWEST: Final = 4096  # events that are kept if only their order is noted

_Happened = tuple[Seconds, Address, int, str, str]


class SimulationFailed(DistBeliefError):  # noqa: N818 - it states what happened
    """A simulated run broke an assertion, a bound or a checker.

    Attributes:
        seed: Of the run; the same seed fails in the same way.
        now: Virtual seconds.
        last: The last lines of every role.
    """

    def __init__(self, reason: str, *, seed: int, now: Seconds, trace: "Trace") -> None:
        self.seed = seed
        self.now = now
        self.last = trace.last()
        super().__init__(
            f"the simulation with seed {seed} failed at {now!r} s: {reason}\n"
            f"The last events of each role (run it again with seed={seed}):\n"
            f"{trace.table()}"
        )


class Trace:
    """Lines of what happened; all of them in the digest, the last ones in memory.

    Args:
        n_kept: Lines of each role that stay in memory.
        full: Keep all of them.
        order_only: Of an event only its time, its kind, and to whom it happened.
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
        """The SHA-256 of all lines and events so far, in hexadecimal."""
        self._flush()
        return self._hash.hexdigest()

    @property
    def n_lines(self) -> int:
        """How many lines there were."""
        return self._n_lines + len(self._happened)

    @property
    def lines(self) -> Sequence[str]:
        """All lines, if a full trace was asked for."""
        assert self._lines is not None, "ask for them: ClusterOptions(full_trace=True)"
        return self._lines

    def event(self, now: Seconds, name: Address, incarnation: int, event: Event) -> None:
        """Note an event just before the role handles it."""
        if self._order_only:
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
            return
        self.note(now, name, incarnation, event_text(event))

    def note(self, now: Seconds, name: Address, incarnation: int, text: str) -> None:
        """Note something else that happened to a role."""
        if self._order_only:
            self._note_order((now, name, incarnation, text, ""))
            return
        line = f"{now!r} {name}#{incarnation} {text}"
        self._n_lines += 1
        self._pending.append(line)
        if len(self._pending) >= N_TOGETHER:
            self._flush()
        kept = self._last.get(name)
        if kept is None:
            kept = self._last[name] = deque(maxlen=self._n_kept)
        kept.append((self._n_lines, line))
        if self._lines is not None:
            self._lines.append(line)

    def last(self) -> Mapping[Address, tuple[str, ...]]:
        """Return the last lines of every role."""
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

    def _note_order(self, happened: "_Happened") -> None:
        self._happened.append(happened)
        if len(self._happened) >= N_TOGETHER:
            self._flush()

    def table(self) -> str:
        """Return the last lines of all roles as a table, in order of time."""
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
