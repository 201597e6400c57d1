"""Timers of one life, by name.

A watchdog is set anew at every message and hardly ever fires, so a timer that moves
later keeps its entry in the agenda: when that comes up early, it goes back. The agenda
thus holds a few entries per name, however often the timer is set.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush

import msgspec

from distbelief.errors import LocalProtocolError
from distbelief.roles.role import Seconds


# What happens next: calls on a virtual clock, ordered by (time, sequence).
#
# Two calls due at one time run in the order in which they were added, so a run depends on
# nothing but what was added when.

Call = Callable[[], None]


class EventQueue:
    """A virtual clock and the calls due on it.

    Attributes:
        now: The time.
        n_at_once: Calls made since it was last another one.
    """

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self.n_at_once = 0
        self._heap: list[tuple[Seconds, int, Call]] = []
        self._first: deque[Call] = deque()
        self._n_added = 0

    def at(self, time: Seconds, call: Call) -> None:
        """Make `call` at `time`; now, if that has passed; never, if it is infinite.

        Raises:
            LocalProtocolError: `time` is not a number.
        """
        if not self.now <= time < math.inf:
            if math.isnan(time):
                raise LocalProtocolError("nothing can be due at time NaN")
            if time == math.inf:
                return
            time = self.now
        self._n_added += 1
        heappush(self._heap, (time, self._n_added, call))

    def before_all(self, calls: Iterable[Call]) -> None:
        """Make these calls now, in this order, before anything else that is due.

        What was held back (by a pause, by a cut-off link) must not be overtaken by
        what arrives at the very moment of its release.
        """
        self._first.extend(calls)

    @property
    def next_time(self) -> Seconds:
        """When the next call is due; infinity if there is none."""
        if self._first:
            return self.now
        return self._heap[0][0] if self._heap else math.inf

    def step(self) -> None:
        """Move the clock to the next call, and make it."""
        self.steps(1, until=math.inf)

    def steps(self, n_max: int, *, until: Seconds) -> int:
        """Make the calls that are due by `until`, `n_max` at most; return how many."""
        heap, first = self._heap, self._first  # they stay the same objects
        for n in range(n_max):
            if first:
                call = first.popleft()
            elif heap and heap[0][0] <= until:
                time, _, call = heappop(heap)
                if time != self.now:
                    self.now = time
                    self.n_at_once = 0
            else:
                return n
            self.n_at_once += 1
            call()
        return n_max

    def advance(self, time: Seconds) -> None:
        """Let time pass during which nothing is due."""
        assert self.now <= time <= self.next_time, (self.now, time, self.next_time)
        self.now = time


class _Timer(msgspec.Struct, eq=False):
    at: Seconds
    entry: Seconds  # when its newest entry in the agenda comes up


class Timers:
    """Calls `fire(name)` when a timer comes due."""

    def __init__(self, agenda: EventQueue, fire: Callable[[str], None]) -> None:
        self._agenda = agenda
        self._fire = fire
        self._timers: dict[str, _Timer] = {}

    def set(self, name: str, at: Seconds) -> None:
        """Let `name` come due at `at`, and at no other time."""
        timer = self._timers.get(name)
        if timer is not None and timer.entry <= at:
            timer.at = at
            return
        self._schedule(name, at)

    def cancel(self, name: str) -> None:
        """Forget the timer, if there is one."""
        self._timers.pop(name, None)

    def close(self) -> None:
        """Forget all of them."""
        self._timers.clear()

    def _schedule(self, name: str, at: Seconds) -> None:
        timer = _Timer(at=at, entry=at)
        self._timers[name] = timer
        self._agenda.at(at, partial(self._come_up, name, timer))

    def _come_up(self, name: str, timer: _Timer) -> None:
        if self._timers.get(name) is not timer:
            return  # cancelled, or moved to an earlier time, meanwhile
        if timer.at > self._agenda.now:
            self._schedule(name, timer.at)
            return
        del self._timers[name]
        self._fire(name)
