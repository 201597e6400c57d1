"""The CPU model: the work in progress on a host, and the threads of a process.

* `Host`: the pieces of work of its roles share its cores and memory bandwidth.
* `SimulatedThread`: one piece of work at a time, in each executor of a process.
* `EventLoop`: the thread of a process that handles events in sequence.

The work itself runs at its virtual *end*. So it sees what other roles did to shared memory in
the meantime; a buffer whose pin has been released is full of NaN by then.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import msgspec

from distbelief.protocol.role import Event, Seconds
from distbelief.simulation.event_queue import Call, EventQueue


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


UNLIMITED = Processor(cores=math.inf, bytes_per_second=math.inf)


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
    end: Call
    left: Seconds  # at the time `since`, at full speed
    since: Seconds
    speed: float = 0.0
    n_plans: int = 0  # how often its end was planned: only the last plan holds
    held: bool = False  # its process is paused


@final
@dataclass(slots=True, eq=False)
class Host:
    event_queue: EventQueue
    processor: Processor = UNLIMITED
    _jobs: list[Job] = field(default_factory=list)

    def add(self, demand: Demand, end: Call) -> Job:
        """Begin a piece of work; `end` is called when it is done."""
        job = Job(demand, end, demand.seconds, self.event_queue.now)
        self._jobs.append(job)
        self._plan()
        return job

    def remove(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            job.n_plans += 1
            self._plan()

    def hold(self, job: Job, *, held: bool) -> None:
        if job.held is not held:
            job.held = held
            self._plan()

    def _plan(self) -> None:
        # Compute all speeds, and plan the end of each piece whose speed has changed.
        crowd = squeeze = 1.0
        if self.processor is not UNLIMITED:
            threads = moved = 0.0
            for job in self._jobs:
                if not job.held:
                    threads += job.demand.threads
                    moved += job.demand.memory_share * job.demand.bytes_per_second
            crowd = max(1.0, threads / self.processor.cores)
            squeeze = max(crowd, moved / self.processor.bytes_per_second)
        now = self.event_queue.now
        for job in self._jobs:
            share = job.demand.memory_share
            speed = 0.0 if job.held else 1.0 / ((1.0 - share) * crowd + share * squeeze)
            if speed == job.speed:
                continue
            job.left = max(0.0, job.left - (now - job.since) * job.speed)
            job.since, job.speed = now, speed
            job.n_plans += 1
            if speed:
                ends = now + job.left / speed
                self.event_queue.at(ends, self._end, job, job.n_plans)

    def _end(self, job: Job, n_plans: int) -> None:
        if n_plans == job.n_plans:
            self._jobs.remove(job)
            self._plan()
            job.end()


def _nothing() -> None:
    pass


class Work(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    demand: Callable[[], Demand]  # called when it begins
    end: Callable[[Seconds], None]  # does the work; gets the time that it took
    begin: Call = _nothing
    cut_short: Call = _nothing  # called if the process is killed before the end


@final
class SimulatedThread:
    """A thread of a simulated process, such as an executor: one piece of work at a time."""

    def __init__(self, host: Host, *, wake_seconds: Seconds = 0.0) -> None:
        self._host = host
        self._wake_seconds = wake_seconds  # until it begins, if it sleeps
        self._queue: deque[Work] = deque()  # with the work in progress
        self._job: Job | None = None
        self._began: Seconds = 0.0
        self._wakes = False
        self._held = False
        self._closed = False

    @property
    def sleeps(self) -> bool:
        return not self._queue

    def add(self, work: Work) -> None:
        """Do `work` after all earlier work."""
        self._queue.append(work)
        if len(self._queue) > 1:
            return
        if self._wake_seconds:
            self._wakes = True
            event_queue = self._host.event_queue
            event_queue.at(event_queue.now + self._wake_seconds, self._wake)
        else:
            self._begin()

    def hold(self, *, held: bool) -> None:
        """Pause, or continue: work in progress ends that much later."""
        self._held = held
        if self._job is not None:
            self._host.hold(self._job, held=held)
        elif not held and self._queue and not self._wakes:
            self._begin()

    def close(self) -> Work | None:
        """Drop all work; return the piece in progress."""
        self._closed = True
        work = None
        if self._job is not None:
            self._host.remove(self._job)
            self._job, work = None, self._queue[0]
        self._queue.clear()
        return work

    def _wake(self) -> None:
        self._wakes = False
        self._begin()

    def _begin(self) -> None:
        if self._held or self._closed:
            return
        work = self._queue[0]
        work.begin()
        self._began = self._host.event_queue.now
        self._job = self._host.add(work.demand(), self._end)

    def _end(self) -> None:
        self._job = None
        # It stays in the queue, so that work added by `end` waits.
        self._queue[0].end(self._host.event_queue.now - self._began)
        if not self._closed:
            self._queue.popleft()
            if self._queue:
                self._begin()


@final
class EventLoop:
    """The thread of a simulated process that handles its events in sequence.

    An event waits for those before it, then uses a core of the host for a while, like any
    other work. A process without an event loop handles events in no time.
    """

    def __init__(
        self,
        host: Host,
        *,
        event_seconds: Seconds,  # core time of an event
        wake_seconds: Seconds,  # until a sleeping process continues
        handle: Callable[[Event], None],  # called at the end of that time
        slowness: Callable[[], float],  # factor by which faults slow down the process now
    ) -> None:
        self.thread = SimulatedThread(host)
        self._event_queue = host.event_queue
        self._event_seconds = event_seconds
        self._wake_seconds = wake_seconds
        self._handle = handle
        self._slowness = slowness
        self._results_at: Seconds = -math.inf  # when the last waiting result is delivered

    def add(self, event: Event) -> None:
        """Handle an event after all earlier ones."""
        self.thread.add(Work(demand=self._demand, end=lambda _: self._handle(event)))

    def deliver_result(self, event: Event) -> None:
        """Handle the result of an executor; a sleeping process wakes up first."""
        # Results are delivered in order, although another event may wake the process earlier.
        now = self._event_queue.now
        awake_at = now + (self._wake_seconds if self.thread.sleeps else 0.0)
        if awake_at > now or self._results_at >= now:
            self._results_at = max(self._results_at, awake_at)
            self._event_queue.at(self._results_at, self.add, event)
        else:
            self.add(event)

    def _demand(self) -> Demand:
        slowness = self._slowness()
        return Demand(seconds=slowness * self._event_seconds, threads=1.0 / slowness)
