"""The tasks of rounds: which worker computes which, and whose result counts.

A block of the data stays with the worker that has it, until that is lost. Where no block keeps
anything from round to round, blocks also move to workers that have fewer, and a task that takes
far longer than the others gets a second attempt. The first attempt that all shards hold counts.

    round       0    1    2    3         staleness 1
    takes       T0   T0   T1   T2        tables after so many rounds
    is open     from the beginning, or when the round two before it is committed

One more round is scheduled while these are computed.
"""

from collections import Counter, deque
from typing import Final, TypeAlias, final

from distbelief.protocol import WorkReport
from distbelief.protocol.role import Seconds
from sandblaster.coordinator.work_queue import SeriesCounters
from sandblaster.coordinator.workers import (
    Attempt,
    Chunk,
    CoordinatorConfig,
    WorkerPool,
    WorkerState,
)
from sandblaster.optimizers.base import N_BYTES_MAX, Rounds


_LATE: Final = 3.0  # times the slowest other task of the rounds

_Round: TypeAlias = list[Chunk]
"""Its tasks, in their order."""


@final
class RoundQueue:
    """The rounds of one request.

    Args:
        config: Of the coordinator.
        pool: The workers.
        request: The rounds.
        counters: Of the series.
        command: The last command before the first round.
    """

    is_finite = True  # tasks have no loss

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        pool: WorkerPool,
        request: Rounds,
        counters: SeriesCounters,
        command: int,
    ) -> None:
        self._config = config
        self._pool = pool
        self._counters = counters
        self._request = request
        self._command = command
        self._may_move = request.may_move
        # By block, the worker that is to compute it next. This plan ends with the request:
        # `counters.blocks` names a worker only after its result has counted.
        self._owners = dict(counters.blocks)
        self._balanced: set[int] = set()  # workers among which blocks were balanced
        self._pending: list[Chunk] = []
        self._open: deque[_Round] = deque()  # those at work, which are not committed
        self._n_opened = 0
        self._n_committed = 0
        self._reports: list[bytes] = []  # of the others
        self._changed: dict[int, WorkerState] = {}
        self._slowest: Seconds = 0.0  # of those done
        self.lost_block: int | None = None  # its worker is gone, with what it kept
        self.n_chunks = 0  # scheduled so far
        self.n_counted = 0  # that all shards hold
        self.n_backups = 0
        self._next = self._schedule(0)
        self._open_rounds()

    @property
    def is_complete(self) -> bool:
        """Whether the last round has been given to `commit`."""
        return self._next is None and not self._open

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """The attempts of the oldest round that count, in the order of its tasks; None: not all."""
        winners = [one.winner for one in self._open[0]]
        found = tuple(one.number for one in winners if one is not None)
        return found if len(found) == len(winners) else None

    @property
    def changes_nothing(self) -> bool:
        """Whether there is nothing to commit: the only round is staged, and adds to no rows."""
        is_alone = self._n_opened == 1 and self._next is None
        return is_alone and not any(one.staged and one.staged.adds for one in self._open[0])

    @property
    def reports(self) -> tuple[bytes, ...]:
        return tuple(self._reports)

    def commit(self) -> int:
        """Close the oldest round, all of which is staged.

        Return the command whose rows the oldest task that is left takes; 0: no older ones than
        this round leaves.
        """
        closed = self._open.popleft()
        self._reports += [one.staged.content for one in closed if one.staged is not None]
        n_after = self._n_committed + 1 - self._request.staleness
        is_last = self.is_complete or not self._request.staleness
        return 0 if is_last else self._command + max(0, n_after)

    def committed(self) -> None:
        """All shards have committed that round: another one may begin."""
        self._n_committed += 1
        self._open_rounds()

    def _open_rounds(self) -> None:
        most = self._n_committed + self._request.staleness
        while self._next is not None and self._n_opened <= most:
            self._open.append(self._next)
            self._pending += self._next
            self._n_opened += 1
            self._next = self._schedule(self._n_opened)

    def _schedule(self, number: int) -> _Round | None:
        tasks = next(self._request.rounds, None)
        if tasks is None:
            return None
        self.n_chunks += len(tasks)
        return [
            Chunk(
                index=block,
                start=block,
                n_examples=1,
                content=content,
                after=self._command + max(0, number - self._request.staleness),
                adds_after=self._command + number,
            )
            for block, content in tasks
        ]

    def take_report(self, worker: WorkerState, report: WorkReport, now: Seconds) -> None:
        for result in report.results:
            one = worker.attempts.get(result.attempt)
            if one is None or not result.staged:
                continue
            chunk = one.chunk
            # Until then the worker had another task to compute.
            since = max(one.assigned_at, worker.progress_at)
            self._pool.record(worker, result, elapsed=now - since)
            worker.progress_at = now
            self._slowest = max(self._slowest, now - one.assigned_at)
            chunk.winner, chunk.staged = one, result
            self.n_counted += 1
            # It has what others may lack.
            self._counters.blocks[chunk.index] = self._owners[chunk.index] = worker.number
            for other in list(chunk.attempts.values()):
                self._drop(other)
                if other is not one:
                    self._changed[other.worker.number] = other.worker
        if worker.attempts and sum(len(one.content) for one in report.results) > N_BYTES_MAX // 2:
            self._changed[worker.number] = worker  # it may have more than fit into a message

    def touch(self, worker: WorkerState) -> None:
        """Nothing to do: every event is followed by `assign`."""

    def rank(self) -> None:
        """Nothing to do: as `touch`."""

    def lost(self, worker: WorkerState, now: Seconds) -> None:
        """Have other workers compute its tasks."""
        del now
        for one in list(worker.attempts.values()):
            self._drop(one)
            if not one.chunk.attempts:
                self._pending.append(one.chunk)

    def changed(self) -> list[WorkerState]:
        """Return the workers whose assignment has changed since the last call."""
        changed, self._changed = list(self._changed.values()), {}
        return [worker for worker in changed if worker is self._pool.get(worker.name)]

    def assign(self, now: Seconds) -> None:
        """Give pending tasks to the workers of their blocks."""
        workers = {worker.number: worker for worker in self._pool}
        if not workers or self.lost_block is not None:
            return
        if self._may_move and not workers.keys() <= self._balanced:
            self._balance(workers)
        owners, pending = self._owners, self._pending
        self._pending = []
        full: set[int] = set()  # workers: the tasks of a block stay in the order of rounds
        for chunk in sorted(pending, key=lambda one: (one.adds_after, one.index)):
            number = owners.get(chunk.index)
            if number is not None and number not in workers and not self._may_move:
                self.lost_block = chunk.index
                return
            if number not in workers:
                number = owners[chunk.index] = min(self._loads(workers))[1]
            worker = workers[number]
            n_bytes = sum(len(one.chunk.content) for one in worker.attempts.values())
            is_over = worker.attempts and n_bytes + len(chunk.content) > N_BYTES_MAX
            if is_over or number in full:
                full.add(number)
                self._pending.append(chunk)
            else:
                self._attempt(chunk, worker, now)
        if self._may_move and self._config.backups:
            self._start_backups(workers, now)

    def validate(self) -> None:
        """Check what holds after every event; only simulations call it."""
        for one in (chunk for tasks in self._open for chunk in tasks):
            is_waiting = one in self._pending or bool(one.attempts)
            assert (one.staged is not None) != is_waiting or self.lost_block is not None, one
            assert len(one.attempts) <= 2, one
            known = self._counters.blocks.get(one.index)
            workers = {attempt.worker.number for attempt in one.attempts.values()}
            assert self._may_move or known is None or workers <= {known}, one

    def _loads(self, workers: dict[int, WorkerState]) -> list[tuple[int, int]]:
        """Return how many blocks each worker has, with its number."""
        counts = Counter(self._owners.values())
        return [(counts[number], number) for number in workers]

    def _balance(self, workers: dict[int, WorkerState]) -> None:
        """Let workers that have come take blocks of those that have more, also assigned ones."""
        self._balanced, owners = set(workers), self._owners
        chunks = [chunk for tasks in self._open for chunk in tasks]
        done = {chunk.index for chunk in chunks if chunk.staged is not None}
        moved: set[int] = set()
        while True:
            (least, to), (most, source) = min(loads := self._loads(workers)), max(loads)
            free = [one for one, number in owners.items() if number == source and one not in done]
            if most - least < 2 or not free:
                break
            owners[block := max(free)] = to  # the last one: its worker has hardly begun it
            moved.add(block)
        for chunk in chunks:
            if chunk.index in moved and chunk.attempts:
                for one in list(chunk.attempts.values()):
                    self._drop(one)
                    self._changed[one.worker.number] = one.worker
                self._pending.append(chunk)

    def _attempt(self, chunk: Chunk, worker: WorkerState, now: Seconds) -> None:
        self._counters.attempt += 1
        one = Attempt(number=self._counters.attempt, chunk=chunk, worker=worker, assigned_at=now)
        chunk.attempts[one.number] = worker.attempts[one.number] = one
        self._changed[worker.number] = worker

    def _drop(self, one: Attempt) -> None:
        one.worker.attempts.pop(one.number, None)
        one.chunk.attempts.pop(one.number, None)

    def _start_backups(self, workers: dict[int, WorkerState], now: Seconds) -> None:
        least = max(_LATE * self._slowest, self._config.backup_seconds_min)
        late = [
            one
            for tasks in self._open
            for chunk in tasks
            if self.n_counted and len(chunk.attempts) == 1
            for one in chunk.attempts.values()
            if now - one.assigned_at > least
        ]
        idle = [worker for worker in workers.values() if not worker.attempts]
        for one, worker in zip(late, idle, strict=False):
            self.n_backups += 1
            self._attempt(one.chunk, worker, now)
