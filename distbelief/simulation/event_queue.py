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

import msgspec
import numpy as np

from distbelief.errors import LocalProtocolError
from distbelief.roles.role import Seconds


Call = Callable[[], None]
Arguments = TypeVarTuple("Arguments")

_NEVER = math.inf  # a module's name is found faster than an attribute


class EventQueue:
    """A virtual clock and the calls due on it."""

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self.n_at_once = 0  # calls made since the clock last moved
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

    def steps(self, n_max: int, *, until: Seconds) -> int:
        """Make at most `n_max` of the calls due by `until`; return how many were made."""
        heap, first = self._heap, self._first  # local names: this loop is hot
        now, n, since = self.now, 0, -self.n_at_once
        try:
            while n < n_max:
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


class _Timer(msgspec.Struct, eq=False):
    at: Seconds
    entry: Seconds  # time of its newest entry in the event queue


class Timers:
    """The timers of one simulated process, by name; calls `fire(name)` when one is due."""

    # A watchdog is set again at every message and rarely fires. So a timer that moves to a
    # later time keeps its entry in the event queue, and is scheduled again when that entry
    # comes up. The queue then holds a few entries per name, however often a timer is set.

    def __init__(self, event_queue: EventQueue, fire: Callable[[str], None]) -> None:
        self._event_queue = event_queue
        self._fire = fire
        self._timers: dict[str, _Timer] = {}

    def set(self, name: str, at: Seconds) -> None:
        """Set the timer `name` to `at`; it replaces an earlier setting."""
        timer = self._timers.get(name)
        if timer is not None and timer.entry <= at:
            timer.at = at
            return
        self._schedule(name, at)

    def cancel(self, name: str) -> None:
        self._timers.pop(name, None)

    def close(self) -> None:
        self._timers.clear()

    def _schedule(self, name: str, at: Seconds) -> None:
        timer = _Timer(at=at, entry=at)
        self._timers[name] = timer
        self._event_queue.at(at, self._come_up, name, timer)

    def _come_up(self, name: str, timer: _Timer) -> None:
        if self._timers.get(name) is not timer:
            return  # cancelled, or moved to an earlier time
        if timer.at > self._event_queue.now:
            self._schedule(name, timer.at)
            return
        del self._timers[name]
        self._fire(name)


def check_numbers(options: object, *, positive: str = "", finite: str = "") -> None:
    """Raise ValueError unless these fields are above 0 (or None), or finite and at least 0."""
    kind = type(options).__name__
    for name in positive.split():
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"{kind}.{name} is {value}; it must be above 0")
    for name in finite.split():
        if not 0 <= (value := getattr(options, name)) < math.inf:
            raise ValueError(f"{kind}.{name} is {value}; it must be finite and at least 0")


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
