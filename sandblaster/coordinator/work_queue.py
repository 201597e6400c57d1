"""Work queue: which worker computes which chunk of a batch, and whose result counts.

    pending --> attempt of one worker --> computed: the first gets a commit token
       ^          |   (or of two)            --> staged on all shards --> committed
       +-- lost --+-------- winner lost: the token is void ------+

Rules (Dean et al. 2012, section 4.2):

* Chunks go a few at a time to workers that have almost nothing left (DB-14).
* Near the end a chunk goes only to a worker that finishes it before the others would.
* When none is left, an idle worker gets a backup task: a second attempt (DB-15), never a third.

As in LATE (Zaharia et al. 2008), what counts is the expected end of a task, and machines
differ: each worker has a pace (seconds per example) of its own, and a task that is overdue
is expected to take as long again. A worker without a pace of its own is expected to be typical.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace, merge
from itertools import islice
from typing import Final, final

from distbelief.protocol import ChunkResult, GrantedChunk, WorkReport
from distbelief.protocol.role import Address, Seconds
from sandblaster.coordinator.workers import (
    Attempt,
    Chunk,
    CoordinatorConfig,
    WorkerPool,
    WorkerState,
)


N_VOID_MAX: Final = 8
"""Void tokens under which shards may hold a sum; then no token is issued until they have
dropped those. So shards stage at most so many more sums than chunks are assigned."""

N_ASSIGNED_MAX: Final = 32
"""Chunks assigned to one worker at once."""

ASSIGNMENT_SHARE: Final = 0.01
"""Largest share of computing time that assigning may take."""

_N_UNRANKED_MAX: Final = 32
"""More workers than these are ranked not at every event, but when the result of one in so many
is new, and on a timer: with 2,000 workers an event costs little more than with 32."""

_OVERDUE: Final = 1.25
"""Factor of the expected time after which the expectation says nothing."""

_MARGIN: Final = 1.2
"""A backup task must be expected to finish earlier by this factor ..."""

_SHARE: Final = 0.02
"""... and by this share of the time that the evaluation has taken so far."""

_ROUNDING: Final = 1e-9
"""Chunks by which a worker may fail to finish one in time: that is rounding."""

_N_UNDIVIDED_MAX: Final = 512
"""Up to so many chunks are looked at one by one: of more the last ones matter little."""


@final
@dataclass(slots=True)
class SeriesCounters:
    """Counters and averages that live through all evaluations of a series."""

    attempt: int = 0
    commit_token: int = 0
    owners: dict[int, Address] = field(default_factory=dict)  # first position -> last worker
    # Block of a program -> number of the worker whose result counted last: it has what is kept.
    blocks: dict[int, int] = field(default_factory=dict)
    push_seconds: Seconds = 0.0  # from a token to its staging; an average


@final
class PendingChunks:
    """Chunks that no worker has, by the worker that computed them last: its data is near.

    A worker is given a run of consecutive chunks: first its own, then those of workers that
    are gone, then the last ones of the worker that has the most left.
    """

    def __init__(self, owners: Sequence[Address | None], *, pool: WorkerPool) -> None:
        self._owners = owners  # worker that computed each chunk last; None: no worker did
        self._pool = pool
        self._limit = 0  # chunks from here on are outside the window
        self._left: dict[Address | None, list[int]] = {}  # assignable chunks, by owner
        self.n_assignable = 0

    def __len__(self) -> int:
        return self.n_assignable + len(self._owners) - self._limit

    def release(self, limit: int) -> None:
        """Let chunks below this index be assigned."""
        for index in range(self._limit, min(limit, len(self._owners))):
            self._limit += 1
            self.put_back(index)

    def put_back(self, index: int) -> None:
        insort(self._left.setdefault(self._owners[index], []), index)
        self.n_assignable += 1

    def take(self, name: Address, n_wanted: int) -> list[int]:
        """Remove and return 1 to `n_wanted` chunks for a worker; one must be assignable."""
        own = self._left.get(name)
        if own:
            run = _first_run(own[:n_wanted])
        elif gone := [
            left
            for owner, left in self._left.items()
            if owner is None or self._pool.get(owner) is None
        ]:
            run = _first_run(islice(merge(*gone), n_wanted))
        else:
            most = max(self._left.values(), key=lambda left: (len(left), -left[0]))
            run = _first_run(most[-n_wanted:])
        for index in run:
            left = self._left[self._owners[index]]
            del left[bisect_left(left, index)]
            if not left:
                del self._left[self._owners[index]]
        self.n_assignable -= len(run)
        return run


def _first_run(indices: Iterable[int]) -> list[int]:
    run: list[int] = []
    for index in indices:
        if run and index != run[-1] + 1:
            break
        run.append(index)
    return run


def end_divided(workers: Iterable[tuple[Seconds, Seconds]], n_chunks: int) -> Seconds:
    """Return in how many seconds `n_chunks` chunks are done if they can be divided at will.

    Of each worker: seconds until it has nothing left, and what it takes for a chunk. Workers
    that have enough to do until then take no part (water filling).
    """
    end, work, speed = math.inf, float(n_chunks), 0.0
    for left, seconds in sorted(workers):
        if left >= end:
            break
        work, speed = work + left / seconds, speed + 1.0 / seconds
        end = work / speed
    return end


def end_undivided(workers: Iterable[tuple[Seconds, Seconds]], n_chunks: int) -> Seconds:
    """Return the same if each chunk goes to one worker; 0 if there are too many to look at each.

    With more workers than chunks only the first to be free get one.
    """
    if n_chunks > _N_UNDIVIDED_MAX:
        return 0.0
    ends, end = [(left + seconds, seconds) for left, seconds in workers], 0.0
    heapify(ends)
    for _ in range(n_chunks):
        end, seconds = ends[0]
        heapreplace(ends, (end + seconds, seconds))
    return end


@final
class WorkQueue:
    """The chunks of one evaluation.

    Each chunk is pushed once, unless the winner is lost: then its token is void, and the next
    attempt gets another. Loss and count of a chunk come from the attempt whose gradient counts.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        pool: WorkerPool,
        n_examples: int,  # of the batch
        counters: SeriesCounters,
    ) -> None:
        self._config = config
        self._pool = pool
        self._counters = counters
        self._chunk_size = config.chunk_sizes.chunk_size
        n_chunks = config.chunk_sizes.n_chunks(n_examples)
        bounds = (config.chunk_sizes.chunk_bounds(k, n_examples) for k in range(n_chunks))
        self._chunks = [
            Chunk(index=k, start=start, n_examples=stop - start)
            for k, (start, stop) in enumerate(bounds)
        ]
        owners = [counters.owners.get(chunk.start) for chunk in self._chunks]
        self._pending = PendingChunks(owners, pool=pool)
        self._began_at: Seconds | None = None  # when there was the first worker
        # Commits.
        self._lowest = 0  # the first chunk that does not count yet
        self._counted: set[int] = set()  # chunks beyond it that count
        self._staged: list[GrantedChunk] = []  # to be committed
        self._void: list[int] = []
        self._n_void = 0  # void tokens that shards may hold
        self._without_token: set[int] = set()  # chunks that wait because of N_VOID_MAX
        # Workers, as they were ranked last.
        self._touched: dict[Address, WorkerState] = {}  # those that may need a chunk
        self._n_changes = math.inf  # results since then
        self._end_at: Seconds = 0.0  # when all is done, if all goes well
        self._typical_pace = 0.0  # 0: no pace is known
        self._longest_lag: Seconds = 0.0
        self._changed: dict[Address, WorkerState] = {}  # whose next assignment differs
        self.n_chunks = len(self._chunks)  # chunks of the batch
        self.n_counted = 0  # chunks that all shards have committed
        self.digest = 0  # exclusive or of the tokens that count
        self.is_finite = True  # no loss and no gradient so far was NaN or infinite
        self.n_backups = 0  # backup tasks assigned

    # --- results ---

    @property
    def is_complete(self) -> bool:
        return self.n_counted == self.n_chunks

    @property
    def has_staged(self) -> bool:
        return bool(self._staged or self._void)

    @property
    def loss(self) -> float:
        """Sum over all examples, exactly rounded."""
        return math.fsum(one.staged.loss for one in self._chunks if one.staged is not None)

    @property
    def n_examples(self) -> int:
        return sum(one.staged.n_examples for one in self._chunks if one.staged)

    def take_report(self, worker: WorkerState, report: WorkReport, now: Seconds) -> None:
        for result in report.results:
            one = worker.attempts.get(result.attempt)
            if one is None:
                continue
            if one.result is None:
                since = max(one.assigned_at, worker.progress_at)
                self._pool.record(worker, result, elapsed=now - since)
                worker.progress_at = now
                self._computed(one, result, now)
            elif not math.isfinite(result.loss):
                self.is_finite = False
            elif result.staged and one.commit_token:
                self._stage(one, now)

    def touch(self, worker: WorkerState) -> None:
        """Note that this worker has changed, and may need a chunk."""
        self._touched[worker.name] = worker

    def rank(self) -> None:
        """Have all workers ranked at the next `assign`."""
        self._n_changes = math.inf

    def lost(self, worker: WorkerState, now: Seconds) -> None:
        """Drop the attempts of a worker; chunks that no worker has now are pending again."""
        for one in list(worker.attempts.values()):
            self._drop(one)
            if one.chunk.winner is one:  # not staged: then it would have no attempt
                self._fence(one)
            self._issue_token(one.chunk, now)
            if not one.chunk.attempts:
                self._pending.put_back(one.chunk.index)
        self.rank()

    def changed(self) -> list[WorkerState]:
        """Return the workers whose assignment has changed since the last call."""
        changed, self._changed = list(self._changed.values()), {}
        return [worker for worker in changed if worker is self._pool.get(worker.name)]

    # --- commits ---

    def to_commit(self) -> tuple[tuple[GrantedChunk, ...], tuple[int, ...]]:
        """Return the chunks that every shard holds, and void tokens; each once."""
        chunks, void = tuple(self._staged), tuple(self._void)
        self._staged, self._void = [], []
        return chunks, void

    def committed(
        self, chunks: tuple[GrantedChunk, ...], void: tuple[int, ...], now: Seconds
    ) -> None:
        self._n_void -= len(void)
        if void:
            without_token, self._without_token = sorted(self._without_token), set()
            for index in without_token:
                self._issue_token(self._chunks[index], now)
        for granted in chunks:
            self._counted.add(granted.chunk_index)
            self.digest ^= granted.commit_token
        self.n_counted += len(chunks)
        while self._lowest in self._counted:
            self._counted.remove(self._lowest)
            self._lowest += 1

    def _computed(self, one: Attempt, result: ChunkResult, now: Seconds) -> None:
        one.result = result
        one.worker.outstanding.pop(one.number, None)
        if not math.isfinite(result.loss):
            self.is_finite = False
            return
        winner = one.chunk.winner
        if winner is not None:
            # This is its rival: older attempts were dropped when the token was issued. The
            # estimate doubles each time, so rivals come ever more slowly: even where every
            # push takes longer than a chunk, one of them ends.
            late = 2.0 * (now - winner.token_issued_at)
            self._counters.push_seconds = max(self._counters.push_seconds, late)
            self._drop(winner)
            self._fence(winner)
        self._issue_token(one.chunk, now)

    def _issue_token(self, chunk: Chunk, now: Seconds) -> None:
        if chunk.winner is not None or chunk.staged is not None:
            return
        first = next((one for one in chunk.attempts.values() if one.result is not None), None)
        if first is None:
            return
        if self._n_void >= N_VOID_MAX:
            self._without_token.add(chunk.index)
            return
        chunk.winner = first
        self._counters.commit_token += 1
        first.commit_token, first.token_issued_at = self._counters.commit_token, now
        self._note_change(first)
        self._drop_others(first)

    def _stage(self, one: Attempt, now: Seconds) -> None:
        chunk, counters = one.chunk, self._counters
        assert chunk.winner is one, (chunk.index, one.number)
        chunk.staged = one.result
        counters.push_seconds += 0.3 * (now - one.token_issued_at - counters.push_seconds)
        self._staged.append(GrantedChunk(chunk_index=chunk.index, commit_token=one.commit_token))
        # In the next evaluation this worker gets the chunk first: it has the data.
        counters.owners[chunk.start] = one.worker.name
        self._drop(one)
        self._drop_others(one)

    def _fence(self, one: Attempt) -> None:
        one.chunk.winner = None
        self._void.append(one.commit_token)
        self._n_void += 1

    def _drop_others(self, one: Attempt) -> None:
        for other in list(one.chunk.attempts.values()):
            if other is not one:
                self._drop(other)

    def _drop(self, one: Attempt) -> None:
        one.worker.attempts.pop(one.number, None)
        one.worker.outstanding.pop(one.number, None)
        one.chunk.attempts.pop(one.number, None)
        self._note_change(one)

    def _note_change(self, one: Attempt) -> None:
        self._changed[one.worker.name] = self._touched[one.worker.name] = one.worker
        self._n_changes += 1

    # --- expected times ---

    def _pace(self, worker: WorkerState) -> float:
        """Return seconds per example; 0 if not known."""
        own = worker.seconds_per_example
        return self._typical_pace if own is None else own

    def _chunk_seconds(self, worker: WorkerState) -> Seconds:
        return self._pace(worker) * self._chunk_size

    def _lag(self, worker: WorkerState) -> Seconds:
        """Return how long it waits for parameters before its next chunk."""
        if worker.n_chunks:
            return 0.0
        return self._longest_lag if worker.lag is None else worker.lag

    def _seconds_left(self, worker: WorkerState, now: Seconds) -> Seconds:
        """Return when all its chunks are computed: one is in progress, the others wait for it."""
        outstanding = iter(worker.outstanding.values())
        if (first := next(outstanding, None)) is None:
            return 0.0
        pace = self._pace(worker)
        expected = pace * first.chunk.n_examples + self._lag(worker)
        left = now - max(first.assigned_at, worker.progress_at)
        if left < _OVERDUE * expected:
            left = max(expected - left, 0.0)
        return left + sum(pace * one.chunk.n_examples for one in outstanding)

    def _rival_seconds(self, one: Attempt, now: Seconds) -> Seconds:
        """Return by when a rival of an attempt that is being pushed must be computed.

        An overdue push is expected to take as long again; a rival has its own push before it.
        So no push has a rival that may still be in time.
        """
        taken = now - one.token_issued_at
        expected = self._counters.push_seconds
        return taken - expected if taken > max(_OVERDUE * expected, 0.0) else 0.0

    # --- assigning ---

    def assign(self, now: Seconds) -> None:
        """Give chunks to workers that have almost none left."""
        if not len(self._pool):
            return
        if self._began_at is None:
            self._began_at = now
        had_any = self._pending.n_assignable > 0
        self._pending.release(self._lowest + self._config.window_chunks)
        is_due = self._n_changes >= len(self._pool) / _N_UNRANKED_MAX
        is_ranked = is_due or (self._pending.n_assignable > 0 and not had_any)
        workers, self._touched = list(self._touched.values()), {}
        if is_ranked or len(self._pool) <= _N_UNRANKED_MAX:
            workers, is_ranked, self._n_changes = list(self._pool), True, 0.0
            self._typical_pace, self._longest_lag = self._pool.estimates()
        if self._pending.n_assignable and self._typical_pace:
            if is_ranked:
                self._assign_by_speed(now)
            else:
                self._assign_until_end(workers, now)
        elif self._pending.n_assignable:
            self._assign_evenly(workers, now)
        if is_ranked and self._config.backups and not self._pending.n_assignable:
            self._start_backups(now)

    def _assign_evenly(self, workers: list[WorkerState], now: Seconds) -> None:
        # No speed is known yet: all workers get the same.
        n_held_max = 1 if self._fair() > 1 else 0
        nearly_idle = [one for one in workers if len(one.outstanding) <= n_held_max]
        for worker in sorted(nearly_idle, key=_load):
            self._assign_some(worker, min(2, self._fair()) - len(worker.outstanding), now)

    def _fair(self) -> int:
        return max(1, len(self._pending) // (2 * len(self._pool)))

    def _assign_by_speed(self, now: Seconds) -> None:
        lefts = {worker: self._seconds_left(worker, now) for worker in self._pool}
        paces = [(left, self._chunk_seconds(worker)) for worker, left in lefts.items()]
        # Chunks cannot be divided: the fastest worker may be late by one. With more workers
        # than chunks only the first to be free get one, while by `end_divided` all share.
        whole = end_undivided(paces, len(self._pending))
        fastest = min(seconds for _, seconds in paces)
        end = max(whole, end_divided(paces, len(self._pending)) + fastest)
        for worker in sorted(filter(self._is_nearly_idle, lefts), key=_load):
            n_given = self._assign_in_time(worker, lefts[worker], end, now)
            if n_given and len(lefts) <= _N_UNRANKED_MAX:
                # The others have less to do if the last of these ends later than all would.
                lefts[worker] = self._seconds_left(worker, now)
                paces = [(left, self._chunk_seconds(worker)) for worker, left in lefts.items()]
                end = max(whole, end_divided(paces, len(self._pending)) + fastest)
        self._end_at = now + end

    def _assign_until_end(self, workers: list[WorkerState], now: Seconds) -> None:
        for worker in sorted(filter(self._is_nearly_idle, workers), key=_load):
            left = self._seconds_left(worker, now)
            self._assign_in_time(worker, left, self._end_at - now, now)

    def _is_nearly_idle(self, worker: WorkerState) -> bool:
        return len(worker.outstanding) <= self._n_at_once(worker) // 2 + 1

    def _n_at_once(self, worker: WorkerState) -> int:
        """Return how many chunks to assign at once, so that assigning costs next to nothing."""
        if worker.turnaround is None:
            return 1
        wanted = worker.turnaround / (ASSIGNMENT_SHARE * self._chunk_seconds(worker))
        return max(1, min(N_ASSIGNED_MAX, math.ceil(wanted)))

    def _assign_in_time(
        self, worker: WorkerState, left: Seconds, end: Seconds, now: Seconds
    ) -> int:
        n_in_time = math.floor((end - left) / self._chunk_seconds(worker) + _ROUNDING)
        n_most = self._n_at_once(worker) + 1 - len(worker.outstanding)
        # Half of what it could do in time, for estimates err.
        return self._assign_some(worker, min(n_most, math.ceil(n_in_time / 2)), now)

    def _assign_some(self, worker: WorkerState, n_wanted: int, now: Seconds) -> int:
        if n_wanted < 1 or not self._pending.n_assignable:
            return 0
        taken = self._pending.take(worker.name, n_wanted)
        for index in taken:
            self._assign_one(worker, self._chunks[index], now)
        return len(taken)

    def _assign_one(self, worker: WorkerState, chunk: Chunk, now: Seconds) -> None:
        self._counters.attempt += 1
        if not worker.outstanding:
            worker.progress_at = now
        one = Attempt(number=self._counters.attempt, chunk=chunk, worker=worker, assigned_at=now)
        worker.attempts[one.number] = chunk.attempts[one.number] = one
        worker.outstanding[one.number] = one
        self._changed[worker.name] = worker

    # --- backup tasks ---

    def _start_backups(self, now: Seconds) -> None:
        assert self._began_at is not None
        least = max(self._config.backup_seconds_min, _SHARE * (now - self._began_at))
        smallest = self._chunks[-1].n_examples
        # With thousands of workers there is mostly none for which a backup task could pay.
        unfinished = self._unfinished(least, now)
        if not unfinished:
            return
        idle = [
            (own, worker)
            for worker in self._pool
            if not worker.outstanding and (own := self._seconds_from_idle(worker, smallest)) > 0.0
        ]
        # Most workers that are idle would have to fetch parameters first: leave them out.
        longest = unfinished[0][0]
        useful = [worker for own, worker in idle if self._is_worth(own, longest, least)]
        for worker in sorted(useful, key=_load):
            # A worker that pushes a chunk gives no second result of it.
            others = (k for k, (_, one) in enumerate(unfinished) if one.worker is not worker)
            if (k := next(others, None)) is None:
                continue
            seconds, late = unfinished[k]
            own = self._seconds_from_idle(worker, late.chunk.n_examples)
            if self._is_worth(own, seconds, least):
                self.n_backups += 1
                del unfinished[k]
                self._assign_one(worker, late.chunk, now)

    def _is_worth(self, own: Seconds, seconds: Seconds, least: Seconds) -> bool:
        return seconds > max(_MARGIN * own, own + least)

    def _seconds_from_idle(self, worker: WorkerState, n_examples: int) -> Seconds:
        pace = self._pace(worker)
        return pace * n_examples + self._lag(worker) if pace else 0.0

    def _unfinished(self, least: Seconds, now: Seconds) -> list[tuple[Seconds, Attempt]]:
        """Return attempts without a rival that take longer, and how long; the longest first."""
        found: list[tuple[Seconds, bool, int, Attempt]] = []
        for worker in self._pool:
            if not worker.attempts:
                continue
            left = self._seconds_left(worker, now)
            for one in reversed(worker.attempts.values()):
                is_pushing = one.result is not None
                seconds = self._rival_seconds(one, now) if is_pushing else left
                if not is_pushing:
                    left -= self._pace(worker) * one.chunk.n_examples
                is_single = len(one.chunk.attempts) == 1 and (one.commit_token or not is_pushing)
                if is_single and seconds > least:
                    found.append((-seconds, is_pushing, one.commit_token or worker.number, one))
        return [(-entry[0], entry[3]) for entry in sorted(found, key=lambda entry: entry[:3])]

    def validate(self) -> None:
        """Check what holds after every event; only simulations call it."""
        n_free = 0
        for chunk in self._chunks:
            attempts, winner = chunk.attempts, chunk.winner
            assert len(attempts) <= 2, f"chunk {chunk.index} has a third attempt"
            owners = [one.worker.name for one in attempts.values()]
            assert len(set(owners)) == len(owners), f"{owners} compute chunk {chunk.index} twice"
            if chunk.staged is not None:
                assert not attempts, f"chunk {chunk.index} goes on"
            elif winner is not None:
                assert winner.number in attempts, f"chunk {chunk.index} has lost its winner"
            n_free += not attempts and chunk.staged is None
        assert n_free == len(self._pending), f"{n_free} chunks are free, not {len(self._pending)}"


def _load(worker: WorkerState) -> tuple[int, Address]:
    return len(worker.outstanding), worker.name
