"""The event queue of a simulation: a virtual clock, the calls due on it, timers, random numbers.

Calls are ordered by (time, sequence): two calls due at the same time run in the order in
which they were added. A run therefore depends only on what was added, and when.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVarTuple

import numpy as np

from distbelief.core.errors import LocalProtocolError
from distbelief.protocol.role import Seconds


Call = Callable[[], None]
Arguments = TypeVarTuple("Arguments")

Due = tuple[Seconds, int]  # time and sequence of a call
NEVER: Due = (math.inf, 0)

_NEVER = math.inf  # a module's name is found faster than an attribute


class EventQueue:
    """A virtual clock and the calls due on it."""

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self.n_at_once = 0  # calls made since the clock last moved
        self._stops = False  # `steps` returns after the present call
        # Time, sequence, call and its arguments.
        self._heap: list[tuple[Seconds, int, Callable[..., None], tuple[object, ...]]] = []  # type: ignore[explicit-any]  # of any kind
        self._first: deque[Call] = deque()
        self._n_added = 0

    def at(self, time: Seconds, call: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Schedule a call at `time`: now if that is in the past, never if it is infinite."""
        if not self.now <= time < _NEVER:
            if math.isnan(time):
                raise LocalProtocolError("a call is scheduled at time NaN")
            if time == _NEVER:
                return
            time = self.now
        self._n_added += 1
        heappush(self._heap, (time, self._n_added, call, arguments))

    def reserve(self, time: Seconds) -> Due:
        """Return the place in the order of calls that `at` would give a call at `time`."""
        if math.isnan(time):
            raise LocalProtocolError("a call is scheduled at time NaN")
        self._n_added += 1
        return max(time, self.now), self._n_added

    def at_reserved(self, due: Due, call: Callable[[Due], None]) -> None:
        """Schedule a call at a reserved place; it gets that place."""
        if due[0] < _NEVER:
            heappush(self._heap, (*due, call, (due,)))

    def before_all(self, calls: Iterable[Call]) -> None:
        """Make these calls now, in this order, before any other call."""
        # Events that a pause or a cut link has held back must not be overtaken by events
        # that arrive at the very time of their release.
        self._first.extend(calls)

    @property
    def next_time(self) -> Seconds:
        """Time of the next call; infinity if there is none."""
        if self._first:
            return self.now
        return self._heap[0][0] if self._heap else math.inf

    def stop(self) -> None:
        """Let `steps` return after the present call, so that its caller looks what has changed."""
        self._stops = True

    def steps(self, n_max: int, *, until: Seconds) -> int:
        """Make at most `n_max` of the calls due by `until`; return how many were made."""
        self._stops = False
        heap, first = self._heap, self._first  # local names: this loop is hot
        now, n, since = self.now, 0, -self.n_at_once
        try:
            while n < n_max and not self._stops:
                if first:
                    n += 1
                    first.popleft()()
                elif heap and heap[0][0] <= until:
                    time, _, call, arguments = heappop(heap)
                    if time != now:
                        self.now = now = time
                        since = n
                    n += 1
                    call(*arguments)
                else:
                    break
        finally:
            self.n_at_once = n - since
        return n

    def advance(self, time: Seconds) -> None:
        """Move the clock to `time`; no call may be due before."""
        assert self.now <= time <= self.next_time, (self.now, time, self.next_time)
        self.now = time


class Timers:
    """The timers of one simulated process, by name; calls `fire(name)` when one is due."""

    # A watchdog is set again at every message and rarely fires, and a client has one for each
    # shard. So the event queue holds one entry for all of them, at or before the earliest: when
    # it comes up too early, it is scheduled again.

    def __init__(self, event_queue: EventQueue, fire: Callable[[str], None]) -> None:
        self._event_queue = event_queue
        self._fire = fire
        self._due: dict[str, Due] = {}
        self._entry: Due = NEVER  # the newest entry in the event queue

    def set(self, name: str, at: Seconds) -> None:
        """Set the timer `name` to `at`; it replaces an earlier setting."""
        due = self._due[name] = self._event_queue.reserve(at)
        if due < self._entry:
            self._schedule(due)

    def cancel(self, name: str) -> None:
        self._due.pop(name, None)

    def close(self) -> None:
        self._due.clear()

    def _schedule(self, due: Due) -> None:
        self._entry = due
        self._event_queue.at_reserved(due, self._come_up)

    def _come_up(self, entry: Due) -> None:
        if entry is not self._entry:
            return  # an earlier entry has replaced this one
        due, self._entry = self._due, NEVER
        if not due:
            return
        name = min(due, key=due.__getitem__)
        if due[name] > entry:
            self._schedule(due[name])
            return
        del due[name]
        if due:
            self._schedule(min(due.values()))
        self._fire(name)


_N_DRAWN = 256


def draws(stream: np.random.Generator) -> Iterator[float]:
    """Yield what `stream.random()` would return, call by call; no one else may use `stream`."""
    # A single draw costs twenty times as much as one of a block.
    while True:
        yield from stream.random(_N_DRAWN).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStreams:
    """Random number generators: one per concern, all from one seed."""

    # With a single stream, one extra message would change every later fault, and runs of two
    # almost equal systems could not be compared.
    schedule: np.random.Generator  # how long work takes
    network: np.random.Generator  # how long messages travel
    disk: np.random.Generator  # how long writing a checkpoint takes
    faults: np.random.Generator  # which message a fault affects

    @staticmethod
    def of(seed: int) -> "RandomStreams":
        names = ("schedule", "network", "disk", "faults")
        children = np.random.SeedSequence(seed).spawn(len(names))
        drawn = map(np.random.default_rng, children)
        return RandomStreams(**dict(zip(names, drawn, strict=True)))
