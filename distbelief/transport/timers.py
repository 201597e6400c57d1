"""Timers of one role, by name, soonest first; whoever asks says what time it is."""

import heapq
import math
from itertools import count

from distbelief.roles import Seconds


class Timers:
    """Named times. A name has one time: setting it again replaces it."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Seconds, int]] = {}
        self._heap: list[tuple[Seconds, int, str]] = []  # replaced entries included
        self._order = count()  # of two timers due at once, the one set first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next_at(self) -> Seconds:
        """When the next timer comes due; infinity if there is none."""
        while self._heap:
            at, order, name = self._heap[0]
            if self._entries.get(name) == (at, order):
                return at
            heapq.heappop(self._heap)
        return math.inf

    def set(self, name: str, at: Seconds) -> None:
        """Let `name` come due at `at`, and at no other time."""
        order = next(self._order)
        self._entries[name] = (at, order)
        heapq.heappush(self._heap, (at, order, name))
        # A watchdog is set at every message and hardly ever comes due.
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [(*entry, name) for name, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def cancel(self, name: str) -> None:
        """Forget the timer, if there is one."""
        self._entries.pop(name, None)

    def pop_due(self, now: Seconds) -> str | None:
        """Forget and return the first timer that is due; `None` if none is."""
        if self.next_at > now:
            return None
        name = heapq.heappop(self._heap)[-1]
        del self._entries[name]
        return name
