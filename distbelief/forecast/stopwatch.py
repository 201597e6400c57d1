"""Times the work of roles, and how they handle events, piece by piece."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final, final

import msgspec

from distbelief.forecast.rates import Unit, amount, key_of, unit_of
from distbelief.roles import Action, Compute, Event, Lane, Seconds
from distbelief.simulation.desk import label_of


N_WARM: Final = 3
WARM_SHARE: Final = 0.25
"""Of the pieces of one kind, that are not counted: caches fill, memory is fetched."""

LAG: Final = 5.0
"""Times as long as usual: then it was no work that took the time."""

QUEUE: Final = Path("/proc/thread-self/schedstat")
"""Of Linux: nanoseconds that this thread ran, that it waited for a core; and more."""

WAITING_SHARE_MIN: Final = 0.2
"""Of the time that a kind of work takes: less is what two clocks differ by."""

Piece = tuple[Seconds, float]
"""How long a piece of work took, and how many units it was."""


def _never() -> Seconds:
    return 0.0


@final
class Stopwatch:
    """Times work and the handling of events.

    By processor time, where one thread computes: what others take of the processors is
    no property of the work. But a data set may wait for a disk, or for somebody else.

    Args:
        clock: By which work is timed.
        idle: For how long this thread has waited, of which that clock tells nothing.

    Attributes:
        work: Pieces by "KIND NAME by UNIT", and their unit.
        waits: Of the data lane, how long those pieces waited besides.
        handling: Seconds and number of events.
    """

    def __init__(
        self,
        clock: Callable[[], Seconds] = time.thread_time,
        *,
        idle: Callable[[], Seconds] = _never,
    ) -> None:
        self._clock = clock
        self._idle = idle
        self.work: dict[str, tuple[Unit, list[Piece]]] = {}
        self.waits: dict[str, list[Piece]] = {}
        self.handling: dict[str, tuple[Seconds, int]] = {}

    def adapt(self, kind: str, asked: Compute) -> Compute:
        """Return the same work, timed; unless it is in vain."""
        unit, reads = unit_of(asked.cost), asked.lane is Lane.DATA

        def work() -> object:
            part = 1.0 if asked.remaining is None else asked.remaining()
            idle = self._idle() if reads else 0.0
            begun = self._clock()
            result = asked.work()
            seconds = self._clock() - begun
            if part > 0:
                n = part * amount(asked.cost, unit)
                key = key_of(kind, asked.name, unit)
                _, pieces = self.work.setdefault(key, (unit, []))
                pieces.append((seconds, n))
                if reads:
                    self.waits.setdefault(key, []).append((self._idle() - idle, n))
            return result

        return msgspec.structs.replace(asked, work=work)

    def handled(
        self, kind: str, event: Event, handle: Callable[[], Sequence[Action]]
    ) -> Sequence[Action]:
        """Let a role handle an event, timed."""
        begun = self._clock()
        actions = handle()
        seconds = self._clock() - begun
        for key in (kind, f"{kind} {label_of(event)}"):
            total, n = self.handling.get(key, (0.0, 0))
            self.handling[key] = (total + seconds, n + 1)
        return actions


def warm(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces after the first ones, if there are any."""
    n_cold = max(N_WARM, round(WARM_SHARE * len(pieces)))
    return pieces[n_cold:] or pieces


def rate_of(pieces: Sequence[Piece]) -> Seconds:
    """Return the seconds of a unit: of all pieces together, save for a few that lag.

    Pieces of one kind may be of all sizes, and small ones take more for each unit.
    """
    usual = median(seconds / n for seconds, n in pieces)
    kept = [(s, n) for s, n in pieces if s / n <= LAG * usual] or pieces
    return sum(seconds for seconds, _ in kept) / sum(n for _, n in kept)


def waiting_of(pieces: Sequence[Piece], *, besides: Seconds) -> Seconds:
    """Return the seconds of a unit for which pieces have waited; 0 if that is nothing.

    Args:
        pieces: All of them: who waits now and then waits for a few only.
        besides: What a unit takes otherwise.
    """
    seconds = sum(seconds for seconds, _ in pieces) / sum(n for _, n in pieces)
    return seconds if seconds > WAITING_SHARE_MIN * (seconds + besides) else 0.0


def idle() -> Seconds:
    """Return for how long this thread has slept; only differences mean anything.

    That is the time in which it neither computed nor stood in a queue for a core. Where
    nobody tells of that queue no sleep is known of.
    """
    with suppress(OSError):
        _, queued, _ = QUEUE.read_text().split()
        return time.perf_counter() - time.thread_time() - 1e-9 * int(queued)
    return 0.0
