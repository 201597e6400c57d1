"""Worker pool: the workers as the coordinator knows them, what each has to do and its speed.

    WorkReport of an unknown worker    it joins; an Assignment follows when there is work
    Assignment                         repeated until a WorkReport knows its version
    silence                            the worker is removed; its next report adds it again

Every message carries the whole state, so a lost, late or repeated one does no harm.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.core.reliable import Backoff, Silence
from distbelief.protocol import Assignment, ChunkResult, ChunkTask, ShardVersion, WorkReport
from distbelief.protocol.role import Action, Address, Received, Seconds, Send
from sandblaster.chunks import ChunkSizes


_NEWEST_WEIGHT: Final = 0.3
"""Weight of the newest measurement in an average."""


@final
@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    chunk_sizes: ChunkSizes  # how batches are divided; every worker must have the same
    # Chunks beyond the oldest unfinished one that may be assigned. It bounds the memory of the
    # shards: half as many vectors at most; mostly a few.
    window_chunks: int = 64
    backups: bool = True  # give idle workers backup tasks
    # Least time that a backup task is expected to save. Less is noise of the operating system;
    # with tiny chunks all would be computed twice.
    backup_seconds_min: Seconds = 0.05
    retry_seconds: Seconds = 0.5  # a command or assignment is repeated; the pause doubles
    retry_seconds_max: Seconds = 4.0
    suspect_seconds: Seconds = 5.0  # a worker silent for so long loses its chunks
    silence_seconds_max: Seconds = 60.0  # a shard silent for so long ends the run
    starved_seconds_max: Seconds = 600.0  # so long without any worker ends the run
    n_warm: int = 0  # workers of a warm start; 0: there is none
    await_begin: bool = True  # wait for `StartTraining`
    goal: str = ""  # method and function; saved states of another goal are not used
    # The method is a program of rounds: parameters are all that savepoints have, and it goes on
    # from a savepoint or from the start, and nowhere else.
    in_rounds: bool = False


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Chunk:
    index: int
    start: int  # its first position
    n_examples: int
    attempts: dict[int, "Attempt"] = field(default_factory=dict)  # by number
    winner: "Attempt | None" = None  # the attempt that has the commit token
    staged: ChunkResult | None = None  # its result, once every shard holds the gradient
    # Of a task of a round; see `ChunkTask`.
    content: bytes = b""
    after: int = 0
    adds_after: int = 0


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One worker's attempt at one chunk."""

    number: int
    chunk: Chunk
    worker: "WorkerState"
    assigned_at: Seconds
    result: ChunkResult | None = None
    commit_token: int = 0
    token_issued_at: Seconds = 0.0


@final
@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    name: Address
    generation: tuple[int, int]  # incarnation of its process (its leader's), restart within it
    version: int  # of the last assignment sent
    known: int  # newest version that its reports acknowledge
    joined_at: Seconds
    number: int  # counts all workers that ever joined
    backoff: Backoff  # of its assignment
    silence: Silence = field(default_factory=Silence)
    sent_at: Seconds = 0.0  # when the last assignment was sent, or sent again
    progress_at: Seconds = 0.0  # when it began its present chunk, as far as one can tell
    # Its attempts, by number, in the order in which it computes them.
    attempts: dict[int, Attempt] = field(default_factory=dict)
    outstanding: dict[int, Attempt] = field(default_factory=dict)  # those that have no result
    n_computed: int = 0  # examples computed in this evaluation
    n_chunks: int = 0  # chunks computed in this evaluation
    seconds_per_example: float | None = None  # average of computing; None before the first chunk
    # Average wait before the first chunk of an evaluation, mostly for parameters.
    lag: float | None = None
    turnaround: float | None = None  # average seconds from an assignment to its acknowledgement
    # Seconds in this evaluation: "computing" chunks; "fetching" parameters before the first of
    # them; "staging", before the others, for a push or the next assignment.
    spent: dict[str, Seconds] = field(default_factory=dict)

    def clear(self) -> None:
        self.attempts.clear()
        self.outstanding.clear()


@final
class WorkerPool:
    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._workers: dict[Address, WorkerState] = {}
        # Newest generation known to be over.
        self._gone: dict[Address, tuple[int, int]] = {}
        # Last version sent to each removed worker: the assignment may still arrive there.
        self._last_versions: dict[Address, int] = {}
        self._series = 0
        self._evaluation = 0
        self._versions: tuple[ShardVersion, ...] = ()
        self._n_examples = 0  # of the batch
        self._n_joined = 0
        self._n_of_removed = 0  # examples that removed workers computed, in this evaluation
        self._estimates: tuple[float, Seconds] | None = None  # None: to be computed

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def n_computed(self) -> int:
        return self._n_of_removed + sum(worker.n_computed for worker in self)

    def estimates(self) -> tuple[float, Seconds]:
        """Return the median pace and the longest lag of all workers; 0: none is known."""
        # With thousands of workers these are asked for more often than they change.
        if self._estimates is None:
            paces = sorted(w.seconds_per_example for w in self if w.seconds_per_example is not None)
            # Not the median lag: where parameters reach workers one after the other, the lag of
            # the first ones would make all others look late.
            lag = max((worker.lag for worker in self if worker.lag is not None), default=0.0)
            self._estimates = (paces[len(paces) // 2] if paces else 0.0), lag
        return self._estimates

    @property
    def chunk_seconds(self) -> Seconds:
        return self.estimates()[0] * self._config.chunk_sizes.chunk_size

    def record(self, worker: WorkerState, result: ChunkResult, *, elapsed: Seconds) -> None:
        """Note a computed chunk; `elapsed` counts from when it could begin."""
        self._estimates = None
        pace = result.seconds / max(result.n_examples, 1)
        if 0.0 < pace < math.inf:
            worker.seconds_per_example = _average(worker.seconds_per_example, pace)
            before = max(0.0, elapsed - result.seconds)
            if not worker.n_chunks:
                worker.lag = _average(worker.lag, before)
            name = "staging" if worker.n_chunks else "fetching"
            for share, seconds in (("computing", result.seconds), (name, before)):
                worker.spent[share] = worker.spent.get(share, 0.0) + seconds
        worker.n_chunks += 1

    def get(self, name: Address) -> WorkerState | None:
        return self._workers.get(name)

    def begin(
        self, *, series: int, evaluation: int, versions: tuple[ShardVersion, ...], n_examples: int
    ) -> None:
        """Begin an evaluation or rounds; no worker has anything to do."""
        self._series, self._evaluation = series, evaluation
        self._versions, self._n_examples = versions, n_examples
        self._n_of_removed = 0
        for worker in self:
            worker.clear()
            worker.n_computed = worker.n_chunks = 0
            worker.spent.clear()

    def clear_tasks(self) -> None:
        for worker in self:
            worker.clear()

    def has_restarted(self, event: Received, report: WorkReport) -> bool:
        worker = self._workers.get(event.sender)
        return worker is not None and worker.generation < (event.incarnation, report.generation)

    def take_report(self, event: Received, report: WorkReport, now: Seconds) -> WorkerState | None:
        """Take a report; return its worker if it has news. First `remove` an older incarnation."""
        worker = self._workers.get(event.sender)
        generation = event.incarnation, report.generation
        if worker is None:
            return self._join(event.sender, generation, report, now)
        if generation != worker.generation:
            return None  # from an older incarnation
        worker.silence.heard(now)
        if report.series != self._series:
            return None
        if report.version > worker.known:
            worker.known = report.version
            if report.version == worker.version:
                worker.turnaround = _average(worker.turnaround, now - worker.sent_at)
        if report.evaluation != self._evaluation:
            return None
        worker.n_computed = max(worker.n_computed, report.n_computed)
        return worker

    def _join(
        self, name: Address, generation: tuple[int, int], report: WorkReport, now: Seconds
    ) -> WorkerState | None:
        if generation <= self._gone.get(name, (0, 0)):
            return None
        self._n_joined += 1
        version = max(report.version, self._last_versions.get(name, 0))
        worker = WorkerState(
            name=name,
            number=self._n_joined,
            generation=generation,
            version=version,
            known=version,
            joined_at=now,
            backoff=Backoff(self._config.retry_seconds, self._config.retry_seconds_max),
        )
        worker.silence.start(now)
        self._workers[name], self._estimates = worker, None
        return worker

    def remove(self, name: Address, *, is_over: bool) -> WorkerState | None:
        """Remove a worker; if its incarnation `is_over`, ignore later reports of that too."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._estimates = None
            self._n_of_removed += worker.n_computed
            self._last_versions[name] = worker.version
            if is_over:
                self._gone[name] = worker.generation
        return worker

    def add_delay(self, late: Seconds, now: Seconds) -> None:
        """Do not count time by which the coordinator itself was late as silence of workers."""
        for worker in self:
            worker.silence.add_delay(late, now)

    def silent(self, now: Seconds) -> list[Address]:
        """Return the workers that have work and have been silent for too long."""
        limit = self._config.suspect_seconds
        return [m.name for m in self if m.attempts and m.silence.silent(now) > limit]

    # --- assignments ---

    def send_assignment(self, worker: WorkerState, now: Seconds) -> list[Action]:
        if worker.known == worker.version:
            worker.silence.heard(now)  # until now there was nothing to answer
        worker.version += 1
        worker.backoff.start(now)
        return self._send(worker, now)

    def cancel_all(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for worker in self:
            if worker.attempts:
                worker.clear()
                actions += self.send_assignment(worker, now)
        return actions

    def resend(self, now: Seconds) -> list[Action]:
        """Send again what workers have not acknowledged for a while."""
        actions: list[Action] = []
        for worker in self:
            if worker.known < worker.version and worker.backoff.again(now):
                actions += self._send(worker, now)
        return actions

    def _send(self, worker: WorkerState, now: Seconds) -> list[Action]:
        worker.sent_at = now
        incarnation, generation = worker.generation
        assignment = Assignment(
            series=self._series,
            replica_incarnation=incarnation,
            replica_generation=generation,
            version=worker.version,
            evaluation=self._evaluation,
            versions=self._versions,
            n_examples=self._n_examples,
            tasks=tuple(
                ChunkTask(
                    chunk_index=one.chunk.index,
                    attempt=one.number,
                    commit_token=one.commit_token,
                    content=one.chunk.content,
                    after=one.chunk.after,
                    adds_after=one.chunk.adds_after,
                )
                for one in worker.attempts.values()
            ),
        )
        return [Send(receiver=worker.name, message=assignment)]


SHARES: Final = ("computing", "fetching", "staging", "waiting", "algebra", "saving")


@final
class TimeShares:
    """Shares of the workers' time, over all finished evaluations.

        BeginEvaluation                               FinishEvaluation, Execute, BeginEvaluation
        ----+----------+-----------+---------+-----------+---------+-------------------+
            | fetching | computing | staging | computing | waiting | saving, algebra   |
                parameters  a chunk    its sum   the last   for others

    Workers report how long they computed; the rest is by the coordinator's clock, between
    their reports. Computing counts all attempts, also those that are dropped.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(SHARES, 0.0)
        self._began_at: Seconds = 0.0
        self._ended_at: Seconds | None = None  # end of the last evaluation, in this run

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    def resume(self, seconds: Mapping[str, float]) -> None:
        """Go on from those of an earlier incarnation, unless more have been counted already."""
        for share, before in self._seconds.items():
            self._seconds[share] = max(before, seconds.get(share, 0.0))

    def run_begins(self) -> None:
        self._ended_at = None

    def evaluation_begins(self, pool: WorkerPool, now: Seconds) -> None:
        if self._ended_at is not None:
            # Between evaluations the shards execute commands, and all workers wait.
            self._seconds["algebra"] += len(pool) * (now - self._ended_at)
        self._began_at = now

    def evaluation_ends(self, pool: WorkerPool, now: Seconds) -> None:
        for worker in pool:
            there = now - max(self._began_at, worker.joined_at)
            self._seconds["waiting"] += max(0.0, there - sum(worker.spent.values()))
            for share, seconds in worker.spent.items():
                self._seconds[share] += seconds
        self._ended_at = now

    def saved(self, pool: WorkerPool, *, since: Seconds, now: Seconds) -> None:
        if self._ended_at is not None:
            self._seconds["saving"] += len(pool) * (now - since)
            self._ended_at += now - since

    def counters(self) -> Mapping[str, float]:
        """Return each share of the total; zeros before the first evaluation ends."""
        total = sum(self._seconds.values()) or 1.0
        return {f"{name}_share": part / total for name, part in self._seconds.items()}


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_WEIGHT * (newest - before)
