"""What happens next: calls on a virtual clock, ordered by (time, sequence).

Two calls due at one time run in the order in which they were added, so a run depends on
nothing but what was added when.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from distbelief.errors import LocalProtocolError
from distbelief.roles import Seconds


Call = Callable[[], None]


class Agenda:
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
