"""Lanes: one piece of work at a time in each, side by side, in virtual time.

A piece of work really runs, and at its virtual *end*: whatever others do to shared
memory while it is under way, it sees (and a buffer it reads after its lease has ended
is full of NaN by then).
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import final

import msgspec

from distbelief.roles.role import Computed, Event, Executor, Received, Seconds, TimerFired
from distbelief.simulation.event_queue import Call, EventQueue


# Processors: the roles of one host share its cores, and its way to memory.
#
# Each piece of work asks for some cores and, for a part of its time, for memory. While
# more cores are asked for than there are, all works go on slower by the same factor; so
# do the parts that move memory, if together they would move more than the host can:
#
#     speed = 1 / ((1 - m) * c + m * max(c, b))     m: its share of memory time
#                                                   c, b: by how much too many cores and
#                                                   bytes are asked for; 1 if not
#
# Whenever a piece begins or ends, the others are brought up to date. A thread that sleeps
# while all cores are taken does not begin at once: `wake_seconds`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """What the roles of one host compute with.

    Attributes:
        cores: As many threads go on at full speed side by side.
        bytes_per_second: To and from memory, for all of them together.
        wake_seconds: Until a thread that has slept gets a core, if all are taken.
    """

    cores: float
    bytes_per_second: float
    wake_seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        if not self.cores > 0 or not self.bytes_per_second > 0:
            raise ValueError(f"{self}: cores and bytes_per_second must be above 0")
        if not 0 <= self.wake_seconds < math.inf:
            raise ValueError(f"{self}: wake_seconds may not be below 0, nor endless")


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What one piece of work asks of its host.

    Attributes:
        seconds: How long it takes if it has all it asks for.
        threads: Cores that it keeps busy.
        memory_share: Part of the time for which it waits for memory.
        bytes_per_second: That it then moves.
    """

    seconds: Seconds
    threads: float = 1.0
    memory_share: float = 0.0
    bytes_per_second: float = 0.0


@final
class Job(msgspec.Struct, eq=False):
    """A piece of work under way."""

    demand: Demand
    end: Callable[[], None]
    left: Seconds
    speed: float = 0.0
    held: bool = False  # it stands still
    sleeps: bool = False  # it has no core yet

    @property
    def runs(self) -> bool:
        """Whether it is at work."""
        return not self.held and not self.sleeps


@final
@dataclass(slots=True, eq=False)
class ProcessorSharing:
    """The works under way on one host."""

    agenda: EventQueue
    processor: Processor
    _jobs: list[Job] = field(default_factory=list)
    _since: Seconds = 0.0
    _n_changes: int = 0

    def add(self, demand: Demand, end: Callable[[], None], *, wakes: bool = False) -> Job:
        """Begin a piece of work; `end` is called when it is done.

        Args:
            demand: What it asks for.
            end: Called then.
            wakes: Whether the thread that does it has slept.
        """
        self._catch_up()
        job = Job(demand, end, demand.seconds)
        wake_seconds = self.processor.wake_seconds
        if wakes and wake_seconds and self._is_crowded:
            job.sleeps = True
            self.agenda.at(self.agenda.now + wake_seconds, partial(self._wake, job))
        self._jobs.append(job)
        self._plan()
        return job

    def remove(self, job: Job) -> None:
        """Drop a piece of work that is not done."""
        if job in self._jobs:
            self._catch_up()
            self._jobs.remove(job)
            self._plan()

    def hold(self, job: Job, *, held: bool) -> None:
        """Let it stand still, or go on."""
        if job.held is not held:
            self._catch_up()
            job.held = held
            self._plan()

    @property
    def _is_crowded(self) -> bool:
        threads = sum(job.demand.threads for job in self._jobs if job.runs)
        return threads >= self.processor.cores

    def _wake(self, job: Job) -> None:
        if job in self._jobs:
            self._catch_up()
            job.sleeps = False
            self._plan()

    def _catch_up(self) -> None:
        seconds = self.agenda.now - self._since
        self._since = self.agenda.now
        if seconds > 0:
            for job in self._jobs:
                job.left -= seconds * job.speed

    def _plan(self) -> None:
        """Set all speeds, and ask for the next end."""
        processor, threads, moved = self.processor, 0.0, 0.0
        for job in self._jobs:
            if job.runs:
                demand = job.demand
                threads += demand.threads
                moved += demand.memory_share * demand.bytes_per_second
        crowd = max(1.0, threads / processor.cores)
        squeeze = max(crowd, moved / processor.bytes_per_second)
        first, soonest = None, math.inf
        for job in self._jobs:
            if not job.runs:
                job.speed = 0.0
                continue
            share = job.demand.memory_share
            job.speed = 1.0 / ((1.0 - share) * crowd + share * squeeze)
            seconds = max(0.0, job.left) / job.speed
            if first is None or seconds < soonest:
                first, soonest = job, seconds
        self._n_changes += 1
        if first is not None:
            ends = self.agenda.now + soonest
            self.agenda.at(ends, partial(self._end, first, self._n_changes))

    def _end(self, job: Job, n_changes: int) -> None:
        if n_changes != self._n_changes:
            return  # something began or ended meanwhile, and it was planned anew
        self._catch_up()
        self._jobs.remove(job)
        self._plan()
        job.end()


# Desks: the one thread of a process that handles its events, one after the other.
#
# An event waits for those before it, and then takes some time of a core of the host, like
# any other work (`sharing`). Without a desk a role handles events in no time at all, and
# only what it asks for takes any.


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCost:
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
class EventLoop:
    """The events of one life of a role.

    Args:
        sharing: The works of its host.
        handling: What each event takes.
        handle: Called with each, when it has taken that.
        slowness: How many times as long everything takes at present.
    """

    def __init__(
        self,
        sharing: ProcessorSharing,
        handling: EventCost,
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


def _nothing() -> None:
    pass


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work, as a lane sees it."""

    seconds: Callable[[], Seconds]  # asked when it begins
    end: Callable[[Seconds], None]  # does the work; given how long it took
    demand: Callable[[Seconds], Demand] | None = None  # of a shared host; None: a core
    begin: Call = _nothing
    cut_short: Call = _nothing  # the process was killed meanwhile


class Executors:
    """The lanes of one life of one role.

    Args:
        agenda: When things end.
        sharing: What else runs on its host; None if it has its speed for itself.
        begins: Until one that sleeps begins what it is handed.
    """

    def __init__(
        self, agenda: EventQueue, sharing: ProcessorSharing | None = None, *, begins: Seconds = 0.0
    ) -> None:
        self._agenda = agenda
        self._sharing = sharing
        self._begins = begins
        self._jobs: dict[Executor, Job] = {}  # of a shared host
        self._held_until: Seconds = 0.0
        self._queues: dict[Executor, deque[Work]] = {lane: deque() for lane in Executor}
        self._began: dict[Executor, Seconds] = {}
        self._ends: dict[Executor, Seconds] = {}  # of the first in each busy queue

    def add(self, lane: Executor, work: Work) -> None:
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

    def _wake(self, lane: Executor, work: Work) -> None:
        """Begin what a lane was handed when it slept."""
        queue = self._queues[lane]
        if not queue or queue[0] is not work:
            return  # closed meanwhile
        if self._agenda.now < self._held_until:
            self._agenda.at(self._held_until, partial(self._wake, lane, work))
        else:
            self._begin(lane, wakes=True)

    def _begin(self, lane: Executor, *, wakes: bool) -> None:
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

    def _end(self, lane: Executor) -> None:
        ends = self._ends.get(lane)
        if ends is None:
            return  # closed meanwhile
        if ends > self._agenda.now:  # delayed meanwhile
            self._agenda.at(ends, partial(self._end, lane))
            return
        del self._ends[lane]
        self._finish(lane)

    def _end_shared(self, lane: Executor) -> None:
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

    def _finish(self, lane: Executor) -> None:
        queue = self._queues[lane]
        work = queue[0]  # stays there, so that what it calls for waits its turn
        work.end(self._agenda.now - self._began[lane])
        if queue and queue[0] is work:  # not closed in reply
            queue.popleft()
            if queue:
                self._begin(lane, wakes=False)
