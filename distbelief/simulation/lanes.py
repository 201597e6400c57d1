"""Lanes: one piece of work at a time in each, side by side, in virtual time.

A piece of work really runs, and at its virtual *end*: whatever others do to shared
memory while it is under way, it sees (and a buffer it reads after its lease has ended
is full of NaN by then).
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from distbelief.roles import Lane, Seconds
from distbelief.simulation.agenda import Agenda, Call
from distbelief.simulation.sharing import Demand, Job, Sharing


def _nothing() -> None:
    pass


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work, as a lane sees it."""

    seconds: Callable[[], Seconds]  # asked when it begins
    end: Callable[[Seconds], None]  # does the work; given how long it took
    demand: Callable[[Seconds], Demand] | None = None  # of a shared host; None: a core
    begin: Call = _nothing
    cut_short: Call = _nothing  # the process was killed meanwhile


class Lanes:
    """The lanes of one life of one role.

    Args:
        agenda: When things end.
        sharing: What else runs on its host; None if it has its speed for itself.
        begins: Until one that sleeps begins what it is handed.
    """

    def __init__(
        self, agenda: Agenda, sharing: Sharing | None = None, *, begins: Seconds = 0.0
    ) -> None:
        self._agenda = agenda
        self._sharing = sharing
        self._begins = begins
        self._jobs: dict[Lane, Job] = {}  # of a shared host
        self._held_until: Seconds = 0.0
        self._queues: dict[Lane, deque[Work]] = {lane: deque() for lane in Lane}
        self._began: dict[Lane, Seconds] = {}
        self._ends: dict[Lane, Seconds] = {}  # of the first in each busy queue

    def add(self, lane: Lane, work: Work) -> None:
        """Do `work` after all that was added to this lane before."""
        queue = self._queues[lane]
        queue.append(work)
        if len(queue) > 1:
            return
        if self._begins:
            at = self._agenda.now + self._begins
            self._agenda.at(at, partial(self._wake, lane, work))
        else:
            self._begin(lane, wakes=True)

    def delay(self, seconds: Seconds) -> None:
        """Stand still for so long: what is under way ends that much later."""
        for lane in self._ends:
            self._ends[lane] += seconds
        if self._sharing is not None:
            self._hold(seconds)

    def close(self, *, cut_short: bool) -> None:
        """Drop everything; tell what is under way if it was cut short by force."""
        running = [self._queues[lane][0] for lane in self._ends or self._jobs]
        self._ends.clear()
        for job in self._jobs.values():
            assert self._sharing is not None
            self._sharing.remove(job)
        self._jobs.clear()
        for queue in self._queues.values():
            queue.clear()
        if cut_short:
            for work in running:
                work.cut_short()

    def _wake(self, lane: Lane, work: Work) -> None:
        """Begin what a lane was handed when it slept."""
        queue = self._queues[lane]
        if not queue or queue[0] is not work:
            return  # closed meanwhile
        if self._agenda.now < self._held_until:
            self._agenda.at(self._held_until, partial(self._wake, lane, work))
        else:
            self._begin(lane, wakes=True)

    def _begin(self, lane: Lane, *, wakes: bool) -> None:
        work = self._queues[lane][0]
        work.begin()
        self._began[lane] = self._agenda.now
        if self._sharing is not None:
            seconds = work.seconds()
            demand = work.demand(seconds) if work.demand else Demand(seconds=seconds)
            end = partial(self._end_shared, lane)
            job = self._sharing.add(demand, end, wakes=wakes)
            self._jobs[lane] = job
            return
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
        self._finish(lane)

    def _end_shared(self, lane: Lane) -> None:
        del self._jobs[lane]
        self._finish(lane)

    def _hold(self, seconds: Seconds) -> None:
        """Let what runs on a shared host stand still for so much longer."""
        assert self._sharing is not None
        self._held_until = max(self._held_until, self._agenda.now) + seconds
        for job in self._jobs.values():
            self._sharing.hold(job, held=True)
        self._agenda.at(self._held_until, self._go_on)

    def _go_on(self) -> None:
        if self._agenda.now >= self._held_until and self._sharing is not None:
            for job in self._jobs.values():
                self._sharing.hold(job, held=False)

    def _finish(self, lane: Lane) -> None:
        queue = self._queues[lane]
        work = queue[0]  # stays there, so that what it calls for waits its turn
        work.end(self._agenda.now - self._began[lane])
        if queue and queue[0] is work:  # not closed in reply
            queue.popleft()
            if queue:
                self._begin(lane, wakes=False)
