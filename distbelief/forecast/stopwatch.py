"""Times the work of roles, and how they handle events, piece by piece."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, final

import msgspec

from distbelief.forecast.rates import Unit, amount, key_of, unit_of
from distbelief.roles import Action, Compute, Event, Seconds
from distbelief.simulation.desk import label_of


N_WARM: Final = 3
WARM_SHARE: Final = 0.25
"""Of the pieces of one kind, that are not counted: caches fill, memory is fetched."""

LAG: Final = 5.0
"""Times as long as usual: then it was no work that took the time."""

Piece = tuple[Seconds, float]
"""How long a piece of work took, and how many units it was."""


@final
class Stopwatch:
    """Times work and the handling of events.

    By processor time, where one thread computes: what others take of the processors is
    no property of the work.
    """

    def __init__(self, clock: Callable[[], Seconds] = time.thread_time) -> None:
        self._clock = clock
        self.work: dict[str, tuple[Unit, list[Piece]]] = {}
        self.handling: dict[str, tuple[Seconds, int]] = {}

    def adapt(self, kind: str, asked: Compute) -> Compute:
        """Return the same work, timed; unless it is in vain."""
        unit = unit_of(asked.cost)

        def work() -> object:
            part = 1.0 if asked.remaining is None else asked.remaining()
            begun = self._clock()
            result = asked.work()
            seconds = self._clock() - begun
            if part > 0:
                key = key_of(kind, asked.name, unit)
                _, pieces = self.work.setdefault(key, (unit, []))
                pieces.append((seconds, part * amount(asked.cost, unit)))
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
