"""Lanes: one piece of work at a time in each, side by side, in virtual time.

A piece of work really runs, and at its virtual *end*: whatever others do to shared
memory while it is under way, it sees (and a buffer it reads after its lease has ended
is full of NaN by then).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from distbelief.roles import Lane, Seconds
from distbelief.simulation.agenda import Agenda, Call


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One piece of work, as a lane sees it."""

    seconds: Callable[[], Seconds]  # asked when it begins
    end: Callable[[Seconds], None]  # does the work; given how long it took
    begin: Call = _nothing
    cut_short: Call = _nothing  # the process was killed meanwhile


class Lanes:
    """The lanes of one life of one role."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._queues: dict[Lane, deque[Work]] = {lane: deque() for lane in Lane}
        self._began: dict[Lane, Seconds] = {}
        self._ends: dict[Lane, Seconds] = {}  # of the first in each busy queue

    def add(self, lane: Lane, work: Work) -> None:
        """Do `work` after all that was added to this lane before."""
        queue = self._queues[lane]
        queue.append(work)
        if len(queue) == 1:
            self._begin(lane)

    def delay(self, seconds: Seconds) -> None:
        """Stand still for so long: what is under way ends that much later."""
        for lane in self._ends:
            self._ends[lane] += seconds

    def close(self, *, cut_short: bool) -> None:
        """Drop everything; tell what is under way if it was cut short by force."""
        running = [self._queues[lane][0] for lane in self._ends]
        self._ends.clear()
        for queue in self._queues.values():
            queue.clear()
        if cut_short:
            for work in running:
                work.cut_short()

    def _begin(self, lane: Lane) -> None:
        work = self._queues[lane][0]
        work.begin()
        self._began[lane] = self._agenda.now
        self._ends[lane] = self._agenda.now + work.seconds()
        self._agenda.at(self._ends[lane], partial(self._end, lane))

    def _end(self, lane: Lane) -> None:
        ends = self._ends.get(lane)
        if ends is None:
            return  # closed meanwhile
        if ends > self._agenda.now:  # delayed meanwhile
            self._agenda.at(ends, partial(self._end, lane))
            return
        del self._ends[lane]
        queue = self._queues[lane]
        work = queue[0]  # stays there, so that what it calls for waits its turn
        work.end(self._agenda.now - self._began[lane])
        if queue and queue[0] is work:  # not closed in reply
            queue.popleft()
            if queue:
                self._begin(lane)
