"""The CPU model: processor sharing on a host, the event loop and the executors of a process.

* `ProcessorSharing`: the roles of one host share its cores and memory bandwidth.
* `EventLoop`: the single thread of a process that handles events in sequence.
* `Executors`: one piece of work at a time in each executor of a process.

The work itself runs at its virtual *end*. So it sees what other roles did to shared memory in
the meantime; a buffer whose pin has been released is full of NaN by then.
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


# --- processor sharing ---
#
# Each piece of work demands some cores and, for a part of its time, memory bandwidth. If more
# cores are demanded than the host has, all work slows down by the same factor; the same holds
# for memory time and bandwidth:
#
#     speed = 1 / ((1 - m) * c + m * max(c, b))     m: the work's share of memory time
#                                                   c, b: demand over supply of cores and of
#                                                   bandwidth, at least 1
#
# Speeds are computed again whenever a piece of work begins or ends.


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """The cores and the memory bandwidth of one host."""

    cores: float
    bytes_per_second: float  # to and from memory, all cores together
    wake_seconds: Seconds = 0.0  # until a sleeping thread gets a core if all are busy

    def __post_init__(self) -> None:
        if not self.cores > 0 or not self.bytes_per_second > 0:
            raise ValueError(f"{self}: cores and bytes_per_second must be above 0")
        if not 0 <= self.wake_seconds < math.inf:
            raise ValueError(f"{self}: wake_seconds must be finite and at least 0")


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand of one piece of work on its host."""

    seconds: Seconds  # its duration on an idle host
    threads: float = 1.0  # cores that it keeps busy
    memory_share: float = 0.0  # fraction of the time spent on memory transfers
    bytes_per_second: float = 0.0  # bandwidth during that time


@final
class Job(msgspec.Struct, eq=False):
    """A piece of work in progress."""

    demand: Demand
    end: Callable[[], None]
    left: Seconds
    speed: float = 0.0
    held: bool = False  # its process is paused
    sleeps: bool = False  # its thread waits for a core

    @property
    def runs(self) -> bool:
        return not self.held and not self.sleeps


@final
@dataclass(slots=True, eq=False)
class ProcessorSharing:
    """The work in progress on one host."""

    event_queue: EventQueue
    processor: Processor
    _jobs: list[Job] = field(default_factory=list)
    _since: Seconds = 0.0
    _n_changes: int = 0

    def add(self, demand: Demand, end: Callable[[], None], *, wakes: bool = False) -> Job:
        """Begin a piece of work; `end` is called when it is done.

        `wakes` says that its thread was sleeping: it may have to wait for a core.
        """
        self._catch_up()
        job = Job(demand, end, demand.seconds)
        wake_seconds = self.processor.wake_seconds
        if wakes and wake_seconds and self._is_crowded:
            job.sleeps = True
            self.event_queue.at(self.event_queue.now + wake_seconds, partial(self._wake, job))
        self._jobs.append(job)
        self._plan()
        return job

    def remove(self, job: Job) -> None:
        if job in self._jobs:
            self._catch_up()
            self._jobs.remove(job)
            self._plan()

    def hold(self, job: Job, *, held: bool) -> None:
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
        seconds = self.event_queue.now - self._since
        self._since = self.event_queue.now
        if seconds > 0:
            for job in self._jobs:
                job.left -= seconds * job.speed

    def _plan(self) -> None:
        # Compute all speeds, and schedule the end of the job that finishes first.
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
            ends = self.event_queue.now + soonest
            self.event_queue.at(ends, partial(self._end, first, self._n_changes))

    def _end(self, job: Job, n_changes: int) -> None:
        if n_changes != self._n_changes:
            return  # another job began or ended since, and the end was scheduled again
        self._catch_up()
        self._jobs.remove(job)
        self._plan()
        job.end()


# --- event loop ---


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCost:
    """The time that a process takes to handle events."""

    seconds: Mapping[str, Seconds] = field(default_factory=dict)  # by `label_of` the event
    other: Seconds = 0.0  # events without an entry in `seconds`
    # Wake-up times, during which no core is busy: until a sleeping executor begins its work,
    # and until a sleeping process handles the result of an executor.
    begins: Seconds = 0.0
    answers: Seconds = 0.0

    def of(self, event: Event) -> Seconds:
        return self.seconds.get(label_of(event), self.other)


def label_of(event: Event) -> str:
    """Return the kind of an event: "Push", "Computed apply", "PeerLost"."""
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
    """The event loop of one simulated process: handles its events in sequence.

    An event waits for those before it, then uses a core of the host for a while, like any
    other work. A process without an event loop handles events in no time.

    Args:
        sharing: The work in progress on its host.
        handling: The cost of each event.
        handle: Called with each event at the end of that time.
        slowness: The factor by which faults slow down the process now.
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
        self._handles = False  # inside `handle`
        self._results_at: Seconds = -math.inf  # when the last waiting result is delivered
        self._closed = False
        self._held = False

    def add(self, event: Event) -> None:
        """Handle an event after all earlier ones."""
        self._queue.append(event)
        if self._job is None and not self._handles:
            self._begin(wakes=True)

    def deliver_result(self, event: Event) -> None:
        """Handle the result of an executor; a sleeping process wakes up first."""
        # Results are delivered in order, although another event may wake the process earlier.
        event_queue = self._sharing.event_queue
        sleeps = self._job is None and not self._handles and not self._queue
        awake_at = event_queue.now + (self._handling.answers if sleeps else 0.0)
        if awake_at > event_queue.now or self._results_at >= event_queue.now:
            self._results_at = max(self._results_at, awake_at)
            event_queue.at(self._results_at, partial(self.add, event))
        else:
            self.add(event)

    def hold(self, *, held: bool) -> None:
        """Pause, or continue."""
        self._held = held
        if self._job is not None:
            self._sharing.hold(self._job, held=held)
        elif not held and self._queue:
            self._begin(wakes=True)

    def close(self) -> None:
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
        self._handles = True  # events that it causes wait in the queue
        self._handle(event)
        self._handles = False
        if self._queue:
            self._begin(wakes=False)


# --- executors ---


def _nothing() -> None:
    pass


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work for an executor."""

    seconds: Callable[[], Seconds]  # its duration; called when it begins
    end: Callable[[Seconds], None]  # does the work; gets the time that it took
    demand: Callable[[Seconds], Demand] | None = None  # on a shared host; None: one core
    begin: Call = _nothing
    cut_short: Call = _nothing  # called if the process is killed before the end


class Executors:
    """The executors of one simulated process: compute, data and so on.

    `sharing` is None if the process has its own speed; `begins` is the wake-up time of a
    sleeping executor.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        sharing: ProcessorSharing | None = None,
        *,
        begins: Seconds = 0.0,
    ) -> None:
        self._event_queue = event_queue
        self._sharing = sharing
        self._begins = begins
        self._jobs: dict[Executor, Job] = {}  # of a shared host
        self._held_until: Seconds = 0.0
        self._queues: dict[Executor, deque[Work]] = {executor: deque() for executor in Executor}
        self._began: dict[Executor, Seconds] = {}
        self._ends: dict[Executor, Seconds] = {}  # of the first in each busy queue

    def add(self, executor: Executor, work: Work) -> None:
        """Do `work` after all earlier work of this executor."""
        queue = self._queues[executor]
        queue.append(work)
        if len(queue) > 1:
            return
        if self._begins:
            at = self._event_queue.now + self._begins
            self._event_queue.at(at, partial(self._wake, executor, work))
        else:
            self._begin(executor, wakes=True)

    def delay(self, seconds: Seconds) -> None:
        """Pause for `seconds`: work in progress ends that much later."""
        for executor in self._ends:
            self._ends[executor] += seconds
        if self._sharing is not None:
            self._hold(seconds)

    def close(self, *, cut_short: bool) -> None:
        """Drop all work; with `cut_short`, call `Work.cut_short` of work in progress."""
        running = [self._queues[executor][0] for executor in self._ends or self._jobs]
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

    def _wake(self, executor: Executor, work: Work) -> None:
        queue = self._queues[executor]
        if not queue or queue[0] is not work:
            return  # closed since
        if self._event_queue.now < self._held_until:
            self._event_queue.at(self._held_until, partial(self._wake, executor, work))
        else:
            self._begin(executor, wakes=True)

    def _begin(self, executor: Executor, *, wakes: bool) -> None:
        work = self._queues[executor][0]
        work.begin()
        self._began[executor] = self._event_queue.now
        if self._sharing is not None:
            seconds = work.seconds()
            demand = work.demand(seconds) if work.demand else Demand(seconds=seconds)
            end = partial(self._end_shared, executor)
            job = self._sharing.add(demand, end, wakes=wakes)
            self._jobs[executor] = job
            return
        self._ends[executor] = self._event_queue.now + work.seconds()
        self._event_queue.at(self._ends[executor], partial(self._end, executor))

    def _end(self, executor: Executor) -> None:
        ends = self._ends.get(executor)
        if ends is None:
            return  # closed since
        if ends > self._event_queue.now:  # delayed since
            self._event_queue.at(ends, partial(self._end, executor))
            return
        del self._ends[executor]
        self._finish(executor)

    def _end_shared(self, executor: Executor) -> None:
        del self._jobs[executor]
        self._finish(executor)

    def _hold(self, seconds: Seconds) -> None:
        assert self._sharing is not None
        self._held_until = max(self._held_until, self._event_queue.now) + seconds
        for job in self._jobs.values():
            self._sharing.hold(job, held=True)
        self._event_queue.at(self._held_until, self._go_on)

    def _go_on(self) -> None:
        if self._event_queue.now >= self._held_until and self._sharing is not None:
            for job in self._jobs.values():
                self._sharing.hold(job, held=False)

    def _finish(self, executor: Executor) -> None:
        queue = self._queues[executor]
        work = queue[0]  # it stays in the queue, so that work added by `end` waits
        work.end(self._event_queue.now - self._began[executor])
        if queue and queue[0] is work:  # `end` has not closed the executors
            queue.popleft()
            if queue:
                self._begin(executor, wakes=False)
