"""Processors: the roles of one host share its cores, and its way to memory.

Each piece of work asks for some cores and, for a part of its time, for memory. While
more cores are asked for than there are, all works go on slower by the same factor; so
do the parts that move memory, if together they would move more than the host can:

    speed = 1 / ((1 - m) * c + m * max(c, b))     m: its share of memory time
                                                  c, b: by how much too many cores and
                                                  bytes are asked for; 1 if not

Whenever a piece begins or ends, the others are brought up to date. A thread that sleeps
while all cores are taken does not begin at once: `wake_seconds`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import final

import msgspec

from distbelief.roles import Seconds
from distbelief.simulation.agenda import Agenda


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
class Sharing:
    """The works under way on one host."""

    agenda: Agenda
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
