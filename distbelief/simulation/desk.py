"""Desks: the one thread of a process that handles its events, one after the other.

An event waits for those before it, and then takes some time of a core of the host, like
any other work (`sharing`). Without a desk a role handles events in no time at all, and
only what it asks for takes any.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import final

from distbelief.roles import Computed, Event, Received, Seconds, TimerFired
from distbelief.simulation.sharing import Demand, Job, Sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """What events take of the process that handles them.

    Attributes:
        seconds: By `label_of` the event.
        other: Of any other.
        begins: Until a lane that sleeps begins what it is handed. Nobody computes.
        answers: Until a process that sleeps handles what a lane has done, likewise.
    """

    seconds: Mapping[str, Seconds] = field(default_factory=dict)
    other: Seconds = 0.0
    begins: Seconds = 0.0
    answers: Seconds = 0.0

    def of(self, event: Event) -> Seconds:
        """Return how long this one takes."""
        return self.seconds.get(label_of(event), self.other)


def label_of(event: Event) -> str:
    """Return what an event is called: "Push", "Computed apply", "PeerLost"."""
    match event:
        case Received():
            return type(event.message).__name__
        case Computed() | TimerFired():
            plain = "".join(letter for letter in event.name if not letter.isdigit())
            return f"{type(event).__name__} {plain}"
        case _:
            return type(event).__name__


@final
class Desk:
    """The events of one life of a role.

    Args:
        sharing: The works of its host.
        handling: What each event takes.
        handle: Called with each, when it has taken that.
        slowness: How many times as long everything takes at present.
    """

    def __init__(
        self,
        sharing: Sharing,
        handling: Handling,
        handle: Callable[[Event], None],
        *,
        slowness: Callable[[], float],
    ) -> None:
        self._sharing = sharing
        self._handling = handling
        self._handle = handle
        self._slowness = slowness
        self._queue: deque[Event] = deque()
        self._job: Job | None = None
        self._handles = False  # just now, in no time
        self._answers_at: Seconds = -math.inf  # when the last one that waits is told
        self._closed = False
        self._held = False

    def add(self, event: Event) -> None:
        """Handle an event after all that were added before."""
        self._queue.append(event)
        if self._job is None and not self._handles:
            self._begin(wakes=True)

    def answer(self, event: Event) -> None:
        """Handle what a lane has done; if the process sleeps, when it has woken up.

        No answer overtakes one before it, though other events may wake the process in
        between: what a lane has done is told in that order.
        """
        agenda = self._sharing.agenda
        sleeps = self._job is None and not self._handles and not self._queue
        awake_at = agenda.now + (self._handling.answers if sleeps else 0.0)
        if awake_at > agenda.now or self._answers_at >= agenda.now:
            self._answers_at = max(self._answers_at, awake_at)
            agenda.at(self._answers_at, partial(self.add, event))
        else:
            self.add(event)

    def hold(self, *, held: bool) -> None:
        """Stand still, or go on."""
        self._held = held
        if self._job is not None:
            self._sharing.hold(self._job, held=held)
        elif not held and self._queue:
            self._begin(wakes=True)

    def close(self) -> None:
        """Forget everything, for good."""
        self._closed = True
        self._queue.clear()
        if self._job is not None:
            self._sharing.remove(self._job)
            self._job = None

    def _begin(self, *, wakes: bool) -> None:
        if self._held or self._closed:
            return
        slowness = self._slowness()
        demand = Demand(
            seconds=slowness * self._handling.of(self._queue[0]), threads=1.0 / slowness
        )
        self._job = self._sharing.add(demand, self._end, wakes=wakes)

    def _end(self) -> None:
        self._job = None
        event = self._queue.popleft()
        self._handles = True  # what it brings about waits for its turn
        self._handle(event)
        self._handles = False
        if self._queue:
            self._begin(wakes=False)
