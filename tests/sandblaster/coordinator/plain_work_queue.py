"""A work queue that follows the rules at any cost: R^2 log R per report."""

import math
from bisect import insort
from collections.abc import Iterable, Iterator

from distbelief.protocol import WorkReport
from distbelief.roles.role import Address, Seconds
from sandblaster.chunks import BatchRange
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.speed import n_at_once, seconds_to_rival
from sandblaster.coordinator.work_queue import Commits, EpochCounters, ExpectedFinish
from sandblaster.coordinator.workers import ChunkCopy, WorkerPool, WorkerState, typical


class PlainWorkQueue:
    """Assigns chunks; looks at all workers each time."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        pool: WorkerPool,
        batch: BatchRange,
        counters: EpochCounters,
    ) -> None:
        self.config, self.pool, self.batch, self.counters = config, pool, batch, counters
        stop = batch.first + batch.n_examples
        starts = range(batch.first, stop, config.chunk_sizes.chunk_size)
        loads = ExpectedFinish(config, pool)  # not used
        self.commits = Commits(starts, counters=counters, loads=loads)
        self.pending = list(range(len(starts)))
        self.began_at: Seconds | None = None
        self.whole: Seconds = 0.0
        self.n_backups = 0

    def take_report(self, worker: WorkerState, report: WorkReport, now: Seconds) -> None:
        self.commits.take_report(worker, report, now)

    def touch(self, worker: WorkerState) -> None:
        """Nothing is remembered."""

    def lost(self, worker: WorkerState, now: Seconds) -> None:
        for chunk_index in self.commits.lost(worker, now):
            insort(self.pending, chunk_index)

    def changed(self) -> list[WorkerState]:
        changed, self.commits.changed = list(self.commits.changed.values()), {}
        return [worker for worker in changed if worker is self.pool.get(worker.name)]

    # --- assigning ---

    def assign(self, now: Seconds) -> None:
        workers = sorted(self.pool, key=lambda m: (len(m.outstanding), m.name))
        if workers and self.began_at is None:
            self.began_at = now
        self.whole = self.end_undivided(now)
        for worker in workers:
            n_wanted = self.n_wanted(worker, now) if self.pending else 0
            if n_wanted:
                for chunk_index in self.take(worker, n_wanted):
                    self.send(worker, chunk_index, now)
        if self.config.backups and not self.dealable:
            for worker in workers:
                if not worker.outstanding:
                    self.back_up(worker, now)

    def n_wanted(self, worker: WorkerState, now: Seconds) -> int:
        n_held = len(worker.outstanding)
        at_once = n_at_once(worker, self.chunk_seconds(worker))
        if n_held > at_once // 2 + 1:
            return 0
        n_most = at_once + 1 - n_held
        if self.chunk_seconds(worker) <= 0.0:
            fair = max(1, len(self.pending) // (2 * len(self.pool)))
            return max(0, min(n_most, fair - n_held))
        return min(n_most, math.ceil(self.n_in_time(worker, now) / 2))

    def n_in_time(self, worker: WorkerState, now: Seconds) -> int:
        paces = {m.name: self.chunk_seconds(m) for m in self.pool}
        begins = {
            m.name: max(remaining(m, self.pool, now).values(), default=0.0) for m in self.pool
        }
        speed, sets, end = 0.0, float(len(self.pending)), math.inf
        for begin, name in sorted((begin, name) for name, begin in begins.items()):
            if begin >= end:
                break
            speed += 1.0 / paces[name]
            sets += begin / paces[name]
            end = sets / speed
        left = max(self.whole, end + min(paces.values())) - begins[worker.name]
        return max(0, math.floor(left / paces[worker.name] + 1e-9))

    def end_undivided(self, now: Seconds) -> Seconds:
        """All that the workers could do, one chunk after the other, in order of time."""
        n_chunks = len(self.pending)
        ends: list[Seconds] = []
        for worker in self.pool:
            seconds = self.chunk_seconds(worker)
            if seconds:
                end = max(remaining(worker, self.pool, now).values(), default=0.0)
                for _ in range(n_chunks):
                    end += seconds
                    ends.append(end)
        return sorted(ends)[n_chunks - 1] if n_chunks and ends else 0.0

    def chunk_seconds(self, worker: WorkerState) -> Seconds:
        return seconds_of(worker, self.config.chunk_sizes.chunk_size, self.pool)

    def send(self, worker: WorkerState, chunk_index: int, now: Seconds) -> None:
        self.counters.attempt += 1
        start, stop = self.batch.chunk_bounds(chunk_index, self.config.chunk_sizes)
        if not worker.outstanding:
            worker.progress_at = now
        copy = ChunkCopy(
            chunk_index=chunk_index,
            attempt=self.counters.attempt,
            n_examples=stop - start,
            assigned_at=now,
        )
        self.commits.add_copy(worker, copy)

    def take(self, worker: WorkerState, n_wanted: int) -> list[int]:
        dealable = self.dealable
        if not dealable:
            return []
        whose = {index: self.owner(index) for index in dealable}
        present = {m.name for m in self.pool}
        for wanted in (
            [i for i in dealable if whose[i] == worker.name],
            [i for i in dealable if whose[i] not in present],
        ):
            if wanted:
                taken = run(wanted, n_wanted)
                break
        else:
            left: dict[Address | None, list[int]] = {}
            for index in dealable:
                left.setdefault(whose[index], []).append(index)
            most = max(left.values(), key=len)
            taken = run(most[-n_wanted:], n_wanted)
        self.pending = [index for index in self.pending if index not in taken]
        return taken

    @property
    def dealable(self) -> list[int]:
        limit = self.commits.lowest + self.config.window_chunks
        return [index for index in self.pending if index < limit]

    def owner(self, chunk_index: int) -> Address | None:
        start, _ = self.batch.chunk_bounds(chunk_index, self.config.chunk_sizes)
        return self.counters.owners.get(start)

    # ------------------------------------------------------------------- backup tasks

    def back_up(self, worker: WorkerState, now: Seconds) -> None:
        assert self.began_at is not None
        least = max(self.config.backup_seconds_min, 0.02 * (now - self.began_at))
        latest, most = None, 0.0
        for copy, seconds in self.unfinished(now):
            holders = self.commits._chunks[copy.chunk_index].holders
            if len(holders) >= 2 or worker in holders.values():
                continue
            if seconds > most:
                latest, most = copy, seconds
        if latest is None:
            return
        own = seconds_of(worker, latest.n_examples, self.pool)
        if own and not worker.n_chunks:
            own += lag_of(worker, self.pool)
        if own > 0.0 and most > max(1.2 * own, own + least):
            self.n_backups += 1
            self.send(worker, latest.chunk_index, now)

    def unfinished(self, now: Seconds) -> Iterator[tuple[ChunkCopy, Seconds]]:
        for worker in self.pool:
            times = remaining(worker, self.pool, now)
            for copy in worker.copies.values():
                if copy.result is None:
                    yield copy, times[copy.attempt]
                elif copy.commit_token:
                    yield copy, seconds_to_rival(copy, self.counters.push_seconds, now)


def seconds_of(worker: WorkerState, n_examples: int, others: Iterable[WorkerState]) -> Seconds:
    """Return how long a worker computes so many examples; 0 if not known."""
    pace = worker.seconds_per_example
    if pace is None:
        pace = typical(other.seconds_per_example for other in others)
    return 0.0 if pace is None else pace * n_examples


def lag_of(worker: WorkerState, others: Iterable[WorkerState]) -> Seconds:
    """Return how long a worker waits for parameters."""
    if worker.lag is not None:
        return worker.lag
    return max((other.lag for other in others if other.lag is not None), default=0.0)


def remaining(
    worker: WorkerState, others: Iterable[WorkerState], now: Seconds
) -> dict[int, Seconds]:
    """Return in how many seconds each chunk of a worker is computed, by attempt."""
    others = tuple(others)
    at: Seconds = 0.0
    times: dict[int, Seconds] = {}
    for copy in worker.outstanding:
        expected = seconds_of(worker, copy.n_examples, others)
        if not times:
            if not worker.n_chunks:
                expected += lag_of(worker, others)
            elapsed = now - max(copy.assigned_at, worker.progress_at)
            on_time = elapsed < 1.25 * expected
            at = max(expected - elapsed, 0.0) if on_time else elapsed
        else:
            at += expected
        times[copy.attempt] = at
    return times


def run(indices: list[int], n_max: int) -> list[int]:
    """Return the first indices that follow each other, so many at the most."""
    found = [indices[0]]
    for index in indices[1:n_max]:
        if index != found[-1] + 1:
            break
        found.append(index)
    return found
