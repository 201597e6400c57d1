"""The replicas, as the coordinator knows them: what each was told, and how fast it is.

    Account of somebody new       a member; an Assignment when there is work
    Assignment                    repeated until an Account knows of it
    silence                       no member any more; one again when it speaks, and
                              versions of what it is told go on

All words are of the whole state, so one that is lost, late or doubled does no harm: the
next says it all again, and versions tell which is newer.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.protocol import Assignment, ChunkResult, ChunkTask, ShardVersion, WorkReport
from distbelief.roles.role import Action, Address, Received, Seconds, Send
from sandblaster.chunks import BatchRange
from sandblaster.coordinator.config import CoordinatorConfig


_NEWEST_WEIGHT: Final = 0.3
"""Weight of the newest measurement in an average."""


@final
@dataclass(slots=True, kw_only=True, eq=False)
class ChunkCopy:
    """One replica's try at one set."""

    set_index: int
    attempt: int
    n_examples: int
    assigned_at: Seconds
    result: ChunkResult | None = None
    grant: int = 0
    token_issued_at: Seconds = 0.0
    is_doubled: bool = False  # has another replica one of the same set?


@final
@dataclass(slots=True)
class TimeSpent:
    """What one replica has spent its time with, in one evaluation.

    Attributes:
        computing: Sets.
        fetching: Before the first of them: parameters had to come.
        staging: Before the others: a sum had to be pushed, or a set to be dealt.
    """

    computing: Seconds = 0.0
    fetching: Seconds = 0.0
    staging: Seconds = 0.0

    @property
    def total(self) -> Seconds:
        """All that; whatever else there was, it waited."""
        return self.computing + self.fetching + self.staging


@final
@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    """One replica.

    Attributes:
        name: Who it is.
        number: Counts all that have ever come.
        incarnation: Of its process, or of its leader's.
        life: Of a replica of several machines, in that.
        version: Of what it was told last.
        known: Of what it is known to know.
        sent_at: When it was told, for the first or another time.
        asked_at: Since when it owes an answer, if it does.
        joined_at: When it came.
        heard_at: When it spoke last.
        progress_at: When it began what it is computing, as far as one can tell.
        copies: Its tries, by attempt, in the order in which it computes them.
        n_computed: Examples, for the present evaluation.
        n_sets: Computed in the present evaluation.
        seconds_per_example: Of computing; None before it has computed any.
        lag: By which the first set of an evaluation is later than its computing takes:
            parameters have to come first. None before the first.
        turnaround: From an assignment to word of it; None before the first.
        spent: Its time, in the present evaluation.
    """

    name: Address
    incarnation: int
    version: int
    known: int
    heard_at: Seconds
    joined_at: Seconds
    life: int = 0
    number: int = 0
    sent_at: Seconds = 0.0
    asked_at: Seconds = 0.0
    delay: Seconds = 0.0
    progress_at: Seconds = 0.0
    copies: dict[int, ChunkCopy] = field(default_factory=dict)
    n_computed: int = 0
    n_sets: int = 0
    seconds_per_example: float | None = None
    lag: float | None = None
    turnaround: float | None = None
    spent: TimeSpent = field(default_factory=TimeSpent)

    @property
    def outstanding(self) -> list[ChunkCopy]:
        """What it has to compute, in order."""
        return [copy for copy in self.copies.values() if copy.result is None]

    def record(self, result: ChunkResult, *, elapsed: Seconds) -> None:
        """It has computed a set, so long after it could begin to."""
        pace = result.seconds / max(result.n_examples, 1)
        if 0.0 < pace < math.inf:
            self.seconds_per_example = _average(self.seconds_per_example, pace)
            before = max(0.0, elapsed - result.seconds)
            self.spent.computing += result.seconds
            if self.n_sets:
                self.spent.staging += before
            else:
                self.spent.fetching += before
                self.lag = _average(self.lag, before)
        self.n_sets += 1


@final
class WorkerPool:
    """All replicas that are there.

    Attributes:
        n_changes: How often somebody has come or gone.
        n_wasted_lost: Examples of members that left, in this evaluation.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._workers: dict[Address, WorkerState] = {}
        # The newest life known to be over: incarnation, and life within.
        self._gone: dict[Address, tuple[int, int]] = {}
        # What those who left were told last: it may yet reach them.
        self._last_versions: dict[Address, int] = {}
        self._epoch = 0
        self._evaluation = 0
        self._versions: tuple[ShardVersion, ...] = ()
        self._batch = BatchRange(first=0, n_examples=0)
        self._n_joined = 0
        self.n_changes = 0
        self.n_wasted_lost = 0

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def n_computed(self) -> int:
        """Examples computed for this evaluation, as far as is known."""
        return self.n_wasted_lost + sum(worker.n_computed for worker in self)

    def get(self, name: Address) -> WorkerState | None:
        """Return a member."""
        return self._workers.get(name)

    def begin(
        self, *, epoch: int, evaluation: int, versions: tuple[ShardVersion, ...], batch: BatchRange
    ) -> None:
        """An evaluation begins; nobody has anything to do."""
        self._epoch, self._evaluation = epoch, evaluation
        self._versions, self._batch = versions, batch
        self.n_wasted_lost = 0
        for worker in self:
            worker.copies.clear()
            worker.n_computed = worker.n_sets = 0
            worker.spent = TimeSpent()

    # ---------------------------------------------------------------------- messages

    def take_report(self, event: Received, report: WorkReport, now: Seconds) -> WorkerState | None:
        """Take an account; return whose it is, if it may have news of this evaluation.

        A new life of a member is another one: `leave` the former first.
        """
        worker = self._workers.get(event.sender)
        life = event.incarnation, report.life
        if worker is None:
            if life <= self._gone.get(event.sender, (0, 0)):
                return None
            self._n_joined += 1
            self.n_changes += 1
            version = max(report.version, self._last_versions.get(event.sender, 0))
            worker = WorkerState(
                name=event.sender,
                number=self._n_joined,
                incarnation=event.incarnation,
                life=report.life,
                version=version,
                known=version,
                heard_at=now,
                joined_at=now,
            )
            self._workers[event.sender] = worker
            return worker
        if life != (worker.incarnation, worker.life):
            return None  # an older one
        worker.heard_at = now
        if report.epoch != self._epoch:
            return None
        if report.version > worker.known:
            worker.known = report.version
            if report.version == worker.version:
                taken = now - worker.sent_at
                worker.turnaround = _average(worker.turnaround, taken)
        if report.evaluation != self._evaluation:
            return None
        worker.n_computed = max(worker.n_computed, report.n_computed)
        return worker

    def has_restarted(self, event: Received, report: WorkReport) -> bool:
        """Return whether a member has begun another life."""
        worker = self._workers.get(event.sender)
        life = event.incarnation, report.life
        return worker is not None and life > (worker.incarnation, worker.life)

    def remove(self, name: Address, *, is_over: bool) -> WorkerState | None:
        """Forget a member; if its life `is_over`, whatever it says from now on too."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            self.n_changes += 1
            self.n_wasted_lost += worker.n_computed
            self._last_versions[name] = worker.version
            if is_over:
                self._gone[name] = worker.incarnation, worker.life
        return worker

    def silent(self, now: Seconds) -> list[Address]:
        """Return who has work, and has not been heard of for too long."""
        limit = now - self._config.suspect_seconds
        return [m.name for m in self if m.copies and max(m.heard_at, m.asked_at) < limit]

    def send_assignment(self, worker: WorkerState, now: Seconds) -> list[Action]:
        """Tell a member what it has to do now."""
        if worker.known == worker.version:
            worker.asked_at = now
        worker.version += 1
        worker.delay = self._config.retry_seconds
        return self._send(worker, now)

    def clear_tasks(self) -> None:
        """An epoch begins; what anybody has to do is of the one before."""
        for worker in self:
            worker.copies.clear()

    @property
    def chunk_seconds(self) -> Seconds:
        """How long a typical replica computes a set; 0 if nobody knows."""
        pace = typical(worker.seconds_per_example for worker in self)
        return 0.0 if pace is None else pace * self._config.chunk_sizes.chunk_size

    def cancel_all(self, now: Seconds) -> list[Action]:
        """Let everybody drop what it has to do."""
        actions: list[Action] = []
        for worker in self:
            if worker.copies:
                worker.copies.clear()
                actions += self.send_assignment(worker, now)
        return actions

    def resend(self, now: Seconds) -> list[Action]:
        """Repeat what nobody has answered for a while."""
        actions: list[Action] = []
        for worker in self:
            if worker.known < worker.version and now >= worker.sent_at + worker.delay:
                worker.delay = min(2 * worker.delay, self._config.retry_seconds_max)
                actions += self._send(worker, now)
        return actions

    def adjust_for_delay(self, seconds: Seconds) -> None:
        """Nobody drove the coordinator for so long: no silence of theirs."""
        for worker in self:
            worker.heard_at += seconds
            worker.asked_at += seconds

    def _send(self, worker: WorkerState, now: Seconds) -> list[Action]:
        worker.sent_at = now
        assignment = Assignment(
            epoch=self._epoch,
            replica_incarnation=worker.incarnation,
            replica_life=worker.life,
            version=worker.version,
            evaluation=self._evaluation,
            versions=self._versions,
            first=self._batch.first,
            n_examples=self._batch.n_examples,
            tasks=tuple(
                ChunkTask(set_index=copy.set_index, attempt=copy.attempt, grant=copy.grant)
                for copy in worker.copies.values()
            ),
        )
        return [Send(receiver=worker.name, message=assignment)]


def typical(speeds: Iterable[float | None]) -> float | None:
    """Return the median of what is known."""
    known = sorted(pace for pace in speeds if pace is not None)
    return known[len(known) // 2] if known else None


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_WEIGHT * (newest - before)
