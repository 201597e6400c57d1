"""Worker pool: the workers as the coordinator knows them, what each has to do and its speed.

    WorkReport of an unknown worker    it joins; an Assignment follows when there is work
    Assignment                         repeated until a WorkReport knows its version
    silence                            the worker is removed; its next report adds it again

Every message carries the whole state, so a lost, late or repeated one does no harm.
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
    """One worker's attempt at one chunk."""

    chunk_index: int
    attempt: int
    n_examples: int
    assigned_at: Seconds
    result: ChunkResult | None = None
    commit_token: int = 0
    token_issued_at: Seconds = 0.0
    is_doubled: bool = False  # whether another worker has the same chunk


@final
@dataclass(slots=True)
class TimeSpent:
    """Where the time of one worker goes, in one evaluation."""

    computing: Seconds = 0.0  # seconds computing chunks
    fetching: Seconds = 0.0  # seconds before the first of them, while parameters come
    staging: Seconds = 0.0  # seconds before the others, for a push or the next assignment

    @property
    def total(self) -> Seconds:
        return self.computing + self.fetching + self.staging


@final
@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    """One worker."""

    name: Address
    incarnation: int  # of its process; of its leader's, if it is model-parallel
    version: int  # of the last assignment sent
    known: int  # newest version that its reports acknowledge
    heard_at: Seconds
    joined_at: Seconds
    generation: int = 0  # restart number of a model-parallel replica in that incarnation
    number: int = 0  # counts all workers that ever joined
    sent_at: Seconds = 0.0  # when the last assignment was sent, or sent again
    asked_at: Seconds = 0.0  # since when an answer is due
    delay: Seconds = 0.0
    progress_at: Seconds = 0.0  # when it began its present chunk, as far as one can tell
    # Its attempts, by number, in the order in which it computes them.
    copies: dict[int, ChunkCopy] = field(default_factory=dict)
    n_computed: int = 0  # examples computed in this evaluation
    n_chunks: int = 0  # chunks computed in this evaluation
    seconds_per_example: float | None = None  # average of computing; None before the first chunk
    # Average wait before the first chunk of an evaluation, mostly for parameters.
    lag: float | None = None
    turnaround: float | None = None  # average seconds from an assignment to its acknowledgement
    spent: TimeSpent = field(default_factory=TimeSpent)  # where its time goes, in this evaluation

    @property
    def outstanding(self) -> list[ChunkCopy]:
        return [copy for copy in self.copies.values() if copy.result is None]

    def record(self, result: ChunkResult, *, elapsed: Seconds) -> None:
        """Note a computed chunk; `elapsed` counts from when it could begin."""
        pace = result.seconds / max(result.n_examples, 1)
        if 0.0 < pace < math.inf:
            self.seconds_per_example = _average(self.seconds_per_example, pace)
            before = max(0.0, elapsed - result.seconds)
            self.spent.computing += result.seconds
            if self.n_chunks:
                self.spent.staging += before
            else:
                self.spent.fetching += before
                self.lag = _average(self.lag, before)
        self.n_chunks += 1


@final
class WorkerPool:
    """All workers that are there."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._workers: dict[Address, WorkerState] = {}
        # Newest incarnation known to be over, and the restart number within it.
        self._gone: dict[Address, tuple[int, int]] = {}
        # Last version sent to each removed worker: the assignment may still arrive there.
        self._last_versions: dict[Address, int] = {}
        self._epoch = 0
        self._evaluation = 0
        self._versions: tuple[ShardVersion, ...] = ()
        self._batch = BatchRange(first=0, n_examples=0)
        self._n_joined = 0
        self.n_changes = 0  # how often a worker joined or left
        self.n_wasted_lost = 0  # examples that removed workers computed, in this evaluation

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def n_computed(self) -> int:
        return self.n_wasted_lost + sum(worker.n_computed for worker in self)

    def get(self, name: Address) -> WorkerState | None:
        return self._workers.get(name)

    def begin(
        self, *, epoch: int, evaluation: int, versions: tuple[ShardVersion, ...], batch: BatchRange
    ) -> None:
        """Begin an evaluation; no worker has anything to do."""
        self._epoch, self._evaluation = epoch, evaluation
        self._versions, self._batch = versions, batch
        self.n_wasted_lost = 0
        for worker in self:
            worker.copies.clear()
            worker.n_computed = worker.n_chunks = 0
            worker.spent = TimeSpent()

    def take_report(self, event: Received, report: WorkReport, now: Seconds) -> WorkerState | None:
        """Take a report; return its worker, if it may have news of this evaluation.

        A new incarnation is another worker: `remove` the former first.
        """
        worker = self._workers.get(event.sender)
        generation = event.incarnation, report.generation
        if worker is None:
            if generation <= self._gone.get(event.sender, (0, 0)):
                return None
            self._n_joined += 1
            self.n_changes += 1
            version = max(report.version, self._last_versions.get(event.sender, 0))
            worker = WorkerState(
                name=event.sender,
                number=self._n_joined,
                incarnation=event.incarnation,
                generation=report.generation,
                version=version,
                known=version,
                heard_at=now,
                joined_at=now,
            )
            self._workers[event.sender] = worker
            return worker
        if generation != (worker.incarnation, worker.generation):
            return None  # from an older incarnation
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
        worker = self._workers.get(event.sender)
        generation = event.incarnation, report.generation
        return worker is not None and generation > (worker.incarnation, worker.generation)

    def remove(self, name: Address, *, is_over: bool) -> WorkerState | None:
        """Remove a worker; if its incarnation `is_over`, ignore later reports of that too."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            self.n_changes += 1
            self.n_wasted_lost += worker.n_computed
            self._last_versions[name] = worker.version
            if is_over:
                self._gone[name] = worker.incarnation, worker.generation
        return worker

    def silent(self, now: Seconds) -> list[Address]:
        """Return the workers that have work and have been silent for too long."""
        limit = now - self._config.suspect_seconds
        return [m.name for m in self if m.copies and max(m.heard_at, m.asked_at) < limit]

    def send_assignment(self, worker: WorkerState, now: Seconds) -> list[Action]:
        if worker.known == worker.version:
            worker.asked_at = now
        worker.version += 1
        worker.delay = self._config.retry_seconds
        return self._send(worker, now)

    def clear_tasks(self) -> None:
        for worker in self:
            worker.copies.clear()

    @property
    def chunk_seconds(self) -> Seconds:
        pace = typical(worker.seconds_per_example for worker in self)
        return 0.0 if pace is None else pace * self._config.chunk_sizes.chunk_size

    def cancel_all(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for worker in self:
            if worker.copies:
                worker.copies.clear()
                actions += self.send_assignment(worker, now)
        return actions

    def resend(self, now: Seconds) -> list[Action]:
        """Send again what workers have not acknowledged for a while."""
        actions: list[Action] = []
        for worker in self:
            if worker.known < worker.version and now >= worker.sent_at + worker.delay:
                worker.delay = min(2 * worker.delay, self._config.retry_seconds_max)
                actions += self._send(worker, now)
        return actions

    def adjust_for_delay(self, seconds: Seconds) -> None:
        """Shift all deadlines by the coordinator's own delay: no worker was silent then."""
        for worker in self:
            worker.heard_at += seconds
            worker.asked_at += seconds

    def _send(self, worker: WorkerState, now: Seconds) -> list[Action]:
        worker.sent_at = now
        assignment = Assignment(
            epoch=self._epoch,
            replica_incarnation=worker.incarnation,
            replica_generation=worker.generation,
            version=worker.version,
            evaluation=self._evaluation,
            versions=self._versions,
            first=self._batch.first,
            n_examples=self._batch.n_examples,
            tasks=tuple(
                ChunkTask(
                    chunk_index=copy.chunk_index,
                    attempt=copy.attempt,
                    commit_token=copy.commit_token,
                )
                for copy in worker.copies.values()
            ),
        )
        return [Send(receiver=worker.name, message=assignment)]


def typical(speeds: Iterable[float | None]) -> float | None:
    """Return the median of the known values."""
    known = sorted(pace for pace in speeds if pace is not None)
    return known[len(known) // 2] if known else None


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_WEIGHT * (newest - before)
