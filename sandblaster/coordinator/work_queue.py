"""Work queue: which worker computes which chunk of a batch, and whose result counts.

    pending --> assigned to one (or two) --> computed, committing, staged (`Commits`)
       ^                  |                      |
       +---- all lost ----+---- winner lost -----+

Rules (Dean et al. 2012, section 4.2):

* Chunks go a few at a time to workers that have almost nothing left (DB-14).
* Near the end a chunk goes only to a worker that finishes it before the others would.
* When none is left, an idle worker gets a backup task: a second copy (DB-15), never a third.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import Final, final

from distbelief.protocol import ChunkResult, GrantedChunk, WorkReport
from distbelief.roles.role import Address, Seconds
from sandblaster.chunks import BatchRange
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.finish_times import FinishTimes, Line
from sandblaster.coordinator.speed import (
    SpeedModel,
    left,
    n_at_once,
    seconds_to_end,
    seconds_to_rival,
)
from sandblaster.coordinator.workers import ChunkCopy, WorkerPool, WorkerState


# --- pending chunks ---


@final
class PendingChunks:
    """Chunks that no worker has, by the worker that computed them last: its data is near.

    A worker is given a run of consecutive chunks: first its own, then those of workers that
    are gone, then the last ones of the worker that has the most left.

    Args:
        owners: Worker that computed each chunk last; None: no worker did.
        pool: The workers that are there.
    """

    def __init__(self, owners: Sequence[Address | None], *, pool: WorkerPool) -> None:
        self._owners = owners
        self._pool = pool
        self._limit = 0  # chunks from here on are outside the window
        self._is_assignable = bytearray(len(owners))
        self._left: dict[Address | None, list[int]] = {}  # assignable chunks, by owner
        self._most: list[tuple[int, int, Address]] = []  # heap of (-count, first, owner)
        self._gone: set[Address | None] = set()  # owners that left
        self._n_changes = -1  # of the pool, when `_gone` was computed
        self._n_left = len(owners)
        self._n_assignable = 0

    def __len__(self) -> int:
        return self._n_left

    @property
    def n_assignable(self) -> int:
        return self._n_assignable

    def release(self, limit: int) -> None:
        """Let chunks below this index be assigned."""
        limit = min(limit, len(self._owners))
        if limit <= self._limit:
            return
        new = range(self._limit, limit)
        for index in new:
            owner = self._owners[index]
            if owner not in self._left:
                self._left[owner] = []
                self._n_changes = -1
            self._left[owner].append(index)
            self._is_assignable[index] = True
        for owner in {self._owners[index] for index in new}:
            self._push_owner(owner)
        self._n_assignable += len(new)
        self._limit = limit

    def put_back(self, index: int) -> None:
        owner = self._owners[index]
        insort(self._left[owner], index)
        self._push_owner(owner)
        self._is_assignable[index] = True
        self._n_left += 1
        self._n_assignable += 1

    def take(self, name: Address, n_wanted: int) -> list[int]:
        """Remove and return chunks for a worker: at least one, at most `n_wanted`.

        At least one must be assignable.
        """
        own = self._left.get(name)
        if own:
            run = self._run(own[0], n_wanted, {name})
        else:
            gone = self._absent_owners()
            heads = [left[0] for owner in gone if (left := self._left.get(owner))]
            if heads:
                run = self._run(min(heads), n_wanted, gone)
            else:
                most = self._left[self._busiest_owner()]
                run = _first_run(most[-n_wanted:])
        for index in run:
            self._remove(index)
        return run

    def _run(
        self, first: int, n_wanted: int, owners: set[Address | None] | set[Address]
    ) -> list[int]:
        stop = min(first + n_wanted, self._limit)
        index = first + 1
        while index < stop and self._is_assignable[index] and self._owners[index] in owners:
            index += 1
        return list(range(first, index))

    def _remove(self, index: int) -> None:
        owner = self._owners[index]
        left = self._left[owner]
        del left[bisect_left(left, index)]
        self._push_owner(owner)
        self._is_assignable[index] = False
        self._n_left -= 1
        self._n_assignable -= 1

    def _absent_owners(self) -> set[Address | None]:
        if self._n_changes != self._pool.n_changes:
            self._n_changes = self._pool.n_changes
            self._gone = {
                owner for owner in self._left if owner is None or self._pool.get(owner) is None
            }
        return self._gone

    def _push_owner(self, owner: Address | None) -> None:
        left = self._left[owner]
        if owner is not None and left:
            heappush(self._most, (-len(left), left[0], owner))

    def _busiest_owner(self) -> Address:
        while True:  # the heap keeps outdated entries: drop them as they come up
            n, first, owner = self._most[0]
            left = self._left[owner]
            if left and (-n, first) == (len(left), left[0]):
                return owner
            heappop(self._most)


def _first_run(indices: list[int]) -> list[int]:
    run = indices[:1]
    for index in indices[1:]:
        if index != run[-1] + 1:
            break
        run.append(index)
    return run


# --- expected finish times ---

_ROUNDING: Final = 1e-9
"""Relative difference below which two times count as equal."""

_N_UNDIVIDED_MAX: Final = 512
"""Up to so many chunks are looked at one by one: of more the last ones matter little."""


@final
@dataclass(slots=True, eq=False)
class _Row:
    """What is known of a worker."""

    worker: WorkerState  # which one
    n_refreshes: int = 0  # how often the row was computed; an older due time is void
    latest: ChunkCopy | None = None  # its last chunk to compute that has no second copy
    commit_tokens: list[int] | None = None  # commit tokens of its pushes that have no second copy


@final
class ExpectedFinish:
    """When each worker will finish what it has, kept in order, during one evaluation.

    Only workers whose state changed, or that are late, are computed again: with 2,000 workers
    an assignment costs little more than with two.
    """

    def __init__(self, config: CoordinatorConfig, pool: WorkerPool) -> None:
        self._chunk_size = config.chunk_sizes.chunk_size
        self._pool = pool
        self._rows: dict[int, _Row] = {}
        self._touched: dict[int, WorkerState] = {}
        self._due: list[tuple[Seconds, int, int]] = []  # (when, row, its n_refreshes)
        self._speeds = SpeedModel()
        # `_all` is weighted by chunks per second; `_latest` holds the last chunk of each
        # worker without a second copy, `_pushed` pushes without one, by age.
        self._all, self._nearly_idle, self._idle = FinishTimes(), FinishTimes(), FinishTimes()
        self._with_one_more = FinishTimes()  # all, with one chunk more
        self._latest, self._pushed = FinishTimes(), FinishTimes()
        self._pushes: dict[int, tuple[WorkerState, ChunkCopy]] = {}  # by token
        for worker in pool:
            self.touch(worker)

    def touch(self, worker: WorkerState) -> None:
        """Note that the state of this worker has changed."""
        self._touched[worker.number] = worker

    def refresh(self, now: Seconds) -> None:
        while self._due and self._due[0][0] <= now:
            _, number, n_refreshes = heappop(self._due)
            row = self._rows.get(number)
            if row is not None and row.n_refreshes == n_refreshes:
                self.touch(row.worker)
        if not self._touched:
            return
        for worker in self._touched.values():
            self._admit(worker)
        if self._speeds.refresh_typical():
            self._touched.update(self._speeds.unmeasured)
        touched, self._touched = self._touched, {}
        for number, worker in touched.items():
            if number in self._rows:
                self._refresh_row(number, worker, now)

    def _admit(self, worker: WorkerState) -> None:
        if self._pool.get(worker.name) is worker:
            self._rows.setdefault(worker.number, _Row(worker))
            self._speeds.update(worker)
            return
        row = self._rows.pop(worker.number, None)
        self._speeds.forget(worker)
        for ranked in (self._all, self._with_one_more, self._nearly_idle, self._idle):
            ranked.drop(worker.number)
        self._latest.drop(worker.number)
        if row is not None:
            self._forget_grants(row)

    def _forget_grants(self, row: _Row) -> None:
        for commit_token in row.commit_tokens or ():
            self._pushed.drop(commit_token)
            del self._pushes[commit_token]
        row.commit_tokens = None

    def _refresh_row(self, number: int, worker: WorkerState, now: Seconds) -> None:
        row, pace = self._rows[number], self.pace(worker)
        row.n_refreshes += 1
        line, until = left(worker, pace, self._speeds.lag_of(worker), now)
        if until < math.inf:
            heappush(self._due, (until, number, row.n_refreshes))
        chunk_seconds = pace * self._chunk_size
        if pace:
            self._all.put(number, line, weight=1.0 / chunk_seconds)
            self._with_one_more.put(number, line.later(chunk_seconds))
        n_held = len(worker.outstanding)
        own = self.seconds_from_idle(worker, self._chunk_size) or math.inf
        _put(self._idle, number, None if n_held else Line(own))
        is_nearly_idle = n_held <= n_at_once(worker, chunk_seconds) // 2 + 1
        _put(self._nearly_idle, number, line.later(chunk_seconds) if is_nearly_idle else None)
        self._refresh_copies(row, line, pace)

    def _refresh_copies(self, row: _Row, line: Line, pace: float) -> None:
        number = row.worker.number
        row.latest, after = None, 0.0
        for copy in reversed(row.worker.outstanding):
            if not copy.is_doubled:
                row.latest = copy
                break
            after += pace * copy.n_examples
        _put(self._latest, number, line.later(-after) if row.latest else None)
        self._forget_grants(row)
        row.commit_tokens = []
        for copy in row.worker.copies.values():
            if copy.result is not None and copy.commit_token and not copy.is_doubled:
                row.commit_tokens.append(copy.commit_token)
                self._pushes[copy.commit_token] = row.worker, copy
                self._pushed.put(copy.commit_token, Line(-copy.token_issued_at, 1))

    @property
    def is_known(self) -> bool:
        return self._speeds.is_known

    def pace(self, worker: WorkerState) -> float:
        return self._speeds.of(worker)

    def chunk_seconds(self, worker: WorkerState) -> Seconds:
        return self.pace(worker) * self._chunk_size

    def seconds_from_idle(self, worker: WorkerState, n_examples: int) -> Seconds:
        pace = self.pace(worker)
        lag = 0.0 if worker.n_chunks else self._speeds.lag_of(worker)
        return pace * n_examples + lag if pace else 0.0

    def end(self, n_chunks: int, now: Seconds) -> Seconds:
        """Return in how many seconds all chunks are done if `n_chunks` more are assigned.

        The speed of some worker must be known.
        """
        # Chunks cannot be divided: the fastest worker may be late by one.
        fastest = self._speeds.fastest * self._chunk_size
        return seconds_to_end(self._all, n_chunks, now) + fastest

    def end_undivided(self, n_chunks: int, now: Seconds) -> Seconds:
        """Return in how many seconds `n_chunks` chunks are done if each goes to one worker.

        With more workers than chunks only the first to be free get one, while `end` lets all
        workers share. 0 if there are too many chunks to look at each.
        """
        if n_chunks > _N_UNDIVIDED_MAX:
            return 0.0
        others, end = self._with_one_more.shortest(now), 0.0
        other = next(others, None)
        again: list[tuple[Seconds, Seconds]] = []  # (when one more is done, seconds per chunk)
        for _ in range(n_chunks):
            if other is not None and (not again or other[0] <= again[0][0]):
                end = other[0]
                seconds = self.chunk_seconds(self._rows[other[1]].worker)
                heappush(again, (end + seconds, seconds))
                other = next(others, None)
            elif again:
                end, seconds = again[0]
                heapreplace(again, (end + seconds, seconds))
        return end

    def n_in_time(self, worker: WorkerState, end: Seconds, now: Seconds) -> int:
        lag = self._speeds.lag_of(worker)
        line, _ = left(worker, self.pace(worker), lag, now)
        n_chunks = (end - line.at(now)) / self.chunk_seconds(worker)
        return max(0, math.floor(n_chunks + _ROUNDING))

    def nearly_idle(self, end: Seconds = math.inf, now: Seconds = 0.0) -> list[WorkerState]:
        limit = end + _ROUNDING * abs(end)
        return [self._rows[n].worker for n in self._nearly_idle.at_most(limit, now)]

    def idle(self, seconds: Seconds = math.inf) -> list[WorkerState]:
        return [self._rows[n].worker for n in self._idle.at_most(seconds, 0.0)]

    def last(
        self, now: Seconds, *, push: Seconds, other_than: WorkerState | None = None
    ) -> tuple[Seconds, ChunkCopy] | None:
        """Return the chunk with one copy that will finish last, and the seconds until then.

        For a chunk that is being pushed: the seconds by which a rival must be computed.

        Args:
            now: The time.
            push: How long a push is expected to take.
            other_than: Worker whose chunks are left out; it has nothing left to compute.
        """
        found: tuple[Seconds, ChunkCopy] | None = None
        for seconds, number in self._latest.longest(now):
            latest = self._rows[number].latest
            assert latest is not None
            found = seconds, latest
            break
        # The oldest push is the latest one.
        commit_tokens = (commit_token for _, commit_token in self._pushed.longest(now))
        copy = self._first(commit_tokens, other_than)
        seconds = seconds_to_rival(copy, push, now) if copy else 0.0
        if copy is None or seconds <= (found[0] if found else 0.0):
            return found
        return seconds, copy

    def _first(
        self, commit_tokens: Iterator[int], other_than: WorkerState | None
    ) -> ChunkCopy | None:
        pushes = (self._pushes[commit_token] for commit_token in commit_tokens)
        return next((copy for owner, copy in pushes if owner is not other_than), None)


def _put(ranked: FinishTimes, number: int, line: Line | None) -> None:
    if line is None:
        ranked.drop(number)
    else:
        ranked.put(number, line)


# --- commits ---

N_VOID_MAX: Final = 8
"""Void tokens under which shards may hold a sum; then no token is issued until they have
dropped those. So shards stage at most so many more sums than chunks are assigned."""


@final
@dataclass(slots=True)
class EpochCounters:
    """Counters and averages that live through all evaluations of an epoch."""

    attempt: int = 0
    commit_token: int = 0
    owners: dict[int, Address] = field(default_factory=dict)  # first position -> last worker
    push_seconds: Seconds = 0.0  # from a token to its staging; an average


@final
@dataclass(slots=True, eq=False)
class _Chunk:
    """One chunk of the batch."""

    start: int  # its first position
    holders: dict[int, WorkerState] = field(default_factory=dict)  # by attempt
    winner: int = 0  # the attempt that has the token; 0: none
    staged: ChunkResult | None = None


@final
class Commits:
    """Copies of all chunks of one evaluation, and which of them counts.

        assigned --> computed: the first gets a commit token --> staged on all shards --> committed
                         |                                          |
                         +------- winner lost: token is void -------+

    Each chunk is pushed once, unless the winner is lost: then its token is void, and the next
    copy gets another. Loss and count of a chunk come from the copy whose gradient counts.
    """

    def __init__(self, starts: range, *, counters: EpochCounters, loads: ExpectedFinish) -> None:
        self._counters = counters
        self._loads = loads
        self._chunks = [_Chunk(start) for start in starts]
        self._counted: set[int] = set()
        self._staged: list[GrantedChunk] = []  # to be committed
        self._void: list[int] = []
        self._n_void = 0  # void tokens that shards may hold
        self._without_token: set[int] = set()  # chunks that wait because of N_VOID_MAX
        self.n_chunks = len(starts)  # chunks of the batch
        self.lowest = 0  # the first chunk that does not count yet
        self.digest = 0  # exclusive or of the tokens that count
        self.n_counted = 0  # chunks that all shards have committed
        self.is_finite = True  # no loss and no gradient so far was NaN or infinite
        # Workers whose next assignment differs from the last one.
        self.changed: dict[Address, WorkerState] = {}

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

    def to_commit(self) -> tuple[tuple[GrantedChunk, ...], tuple[int, ...]]:
        """Return the chunks that every shard holds, and void tokens; each once."""
        sets, void = tuple(self._staged), tuple(self._void)
        self._staged, self._void = [], []
        return sets, void

    def committed(
        self, sets: tuple[GrantedChunk, ...], void: tuple[int, ...], now: Seconds
    ) -> None:
        self._n_void -= len(void)
        if void:
            without_token, self._without_token = sorted(self._without_token), set()
            for index in without_token:
                self._issue_token(self._chunks[index], now)
        for one in sets:
            self._counted.add(one.chunk_index)
            self.digest ^= one.commit_token
        self.n_counted += len(sets)
        while self.lowest in self._counted:
            self._counted.remove(self.lowest)
            self.lowest += 1

    def add_copy(self, worker: WorkerState, copy: ChunkCopy) -> None:
        worker.copies[copy.attempt] = copy
        self._chunks[copy.chunk_index].holders[copy.attempt] = worker
        self._note_change(worker, copy)

    def take_report(self, worker: WorkerState, report: WorkReport, now: Seconds) -> None:
        for result in report.results:
            copy = worker.copies.get(result.attempt)
            if copy is None:
                continue
            if copy.result is None:
                elapsed = now - max(copy.assigned_at, worker.progress_at)
                worker.record(result, elapsed=elapsed)
                worker.progress_at = now
                self._computed(worker, copy, result, now)
            elif not math.isfinite(result.loss):
                self.is_finite = False
            elif result.staged and copy.commit_token:
                self._stage(worker, copy, now)

    def lost(self, worker: WorkerState, now: Seconds) -> list[int]:
        """Drop the copies of a worker; return the chunks that no worker has now."""
        without: list[int] = []
        for copy in list(worker.copies.values()):
            self._drop(worker, copy)
            one = self._chunks[copy.chunk_index]
            if one.winner == copy.attempt and one.staged is None:
                self._fence(one, copy)
            self._issue_token(one, now)
            if not one.holders and one.staged is None:
                without.append(copy.chunk_index)
        return without

    def _computed(
        self, worker: WorkerState, copy: ChunkCopy, result: ChunkResult, now: Seconds
    ) -> None:
        copy.result = result
        one = self._chunks[copy.chunk_index]
        if not math.isfinite(result.loss):
            self.is_finite = False
            return
        if one.winner:
            winner = one.holders[one.winner].copies[one.winner]
            # Only a copy assigned after the token is a rival; an older one is simply late.
            if copy.assigned_at <= winner.token_issued_at:
                self._drop(worker, copy)
                return
            # The estimate doubles each time, so rivals come ever more slowly: even where
            # every push takes longer than a chunk, one of them ends.
            late = 2.0 * (now - winner.token_issued_at)
            self._counters.push_seconds = max(self._counters.push_seconds, late)
            self._drop(one.holders[one.winner], winner)
            self._fence(one, winner)
        self._issue_token(one, now)

    def _issue_token(self, one: _Chunk, now: Seconds) -> None:
        if one.winner or one.staged is not None:
            return
        for attempt, worker in one.holders.items():
            copy = worker.copies[attempt]
            if copy.result is not None:
                break
        else:
            return
        if self._n_void >= N_VOID_MAX:
            self._without_token.add(copy.chunk_index)
            return
        one.winner = attempt
        self._counters.commit_token += 1
        copy.commit_token, copy.token_issued_at = self._counters.commit_token, now
        self._note_change(worker, copy)
        self._drop_others(one, attempt)

    def _drop_others(self, one: _Chunk, attempt: int) -> None:
        for other, holder in list(one.holders.items()):
            if other != attempt:
                self._drop(holder, holder.copies[other])

    def _stage(self, worker: WorkerState, copy: ChunkCopy, now: Seconds) -> None:
        one = self._chunks[copy.chunk_index]
        assert one.winner == copy.attempt, (one, copy)
        one.staged = copy.result
        taken = now - copy.token_issued_at
        self._counters.push_seconds += 0.3 * (taken - self._counters.push_seconds)
        self._staged.append(
            GrantedChunk(chunk_index=copy.chunk_index, commit_token=copy.commit_token)
        )
        # In the next evaluation this worker gets the chunk first: it has the data.
        self._counters.owners[one.start] = worker.name
        self._drop(worker, copy)
        self._drop_others(one, copy.attempt)

    def _fence(self, one: _Chunk, copy: ChunkCopy) -> None:
        one.winner = 0
        self._void.append(copy.commit_token)
        self._n_void += 1

    def _drop(self, worker: WorkerState, copy: ChunkCopy) -> None:
        worker.copies.pop(copy.attempt, None)
        self._chunks[copy.chunk_index].holders.pop(copy.attempt, None)
        self._note_change(worker, copy)

    def _note_change(self, worker: WorkerState, copy: ChunkCopy) -> None:
        self.changed[worker.name] = worker
        self._loads.touch(worker)
        holders = self._chunks[copy.chunk_index].holders
        for attempt, holder in holders.items():
            holder.copies[attempt].is_doubled = len(holders) > 1
            self._loads.touch(holder)


_MARGIN: Final = 1.2
"""A backup task must be expected to finish earlier by this factor ..."""

_SHARE: Final = 0.02
"""... and by this share of the time that the evaluation has taken so far."""


@final
class WorkQueue:
    """The chunks of one evaluation."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        pool: WorkerPool,
        batch: BatchRange,
        counters: EpochCounters,
    ) -> None:
        self._config = config
        self._pool = pool
        self._batch = batch
        self._counters = counters
        self._loads = ExpectedFinish(config, pool)
        stop, size = batch.first + batch.n_examples, config.chunk_sizes.chunk_size
        starts = range(batch.first, stop, size)
        self.commits = Commits(starts, counters=counters, loads=self._loads)  # which results count
        self._pending = PendingChunks([counters.owners.get(s) for s in starts], pool=pool)
        self._began_at: Seconds | None = None  # when there was the first worker
        self.n_backups = 0  # backup tasks assigned

    def touch(self, worker: WorkerState) -> None:
        self._loads.touch(worker)

    def take_report(self, worker: WorkerState, report: WorkReport, now: Seconds) -> None:
        self._loads.touch(worker)
        self.commits.take_report(worker, report, now)

    def lost(self, worker: WorkerState, now: Seconds) -> None:
        self._loads.touch(worker)
        for chunk_index in self.commits.lost(worker, now):
            self._pending.put_back(chunk_index)

    def changed(self) -> list[WorkerState]:
        """Return the workers whose assignment has changed since the last call."""
        changed, self.commits.changed = list(self.commits.changed.values()), {}
        return [worker for worker in changed if worker is self._pool.get(worker.name)]

    def assign(self, now: Seconds) -> None:
        """Give chunks to workers that have almost none left."""
        if not len(self._pool):
            return
        if self._began_at is None:
            self._began_at = now
        self._pending.release(self.commits.lowest + self._config.window_chunks)
        self._loads.refresh(now)
        if self._pending.n_assignable:
            if self._loads.is_known:
                self._assign_by_speed(now)
            else:
                self._assign_evenly(now)
            self._loads.refresh(now)
        if self._config.backups and not self._pending.n_assignable:
            self._start_backups(now)

    def _assign_evenly(self, now: Seconds) -> None:
        # No speed is known yet: all workers get the same.
        def fair() -> int:
            return max(1, len(self._pending) // (2 * len(self._pool)))

        loads = self._loads
        for worker in _least_loaded_first(loads.nearly_idle() if fair() > 1 else loads.idle()):
            self._assign_some(worker, min(2, fair()) - len(worker.outstanding), now)

    def _assign_by_speed(self, now: Seconds) -> None:
        loads, pending = self._loads, self._pending
        whole = loads.end_undivided(len(pending), now)
        end = max(whole, loads.end(len(pending), now))
        for worker in _least_loaded_first(loads.nearly_idle(end, now)):
            if not pending.n_assignable:
                break
            n_in_time = loads.n_in_time(worker, end, now)
            at_once = n_at_once(worker, loads.chunk_seconds(worker))
            n_most = at_once + 1 - len(worker.outstanding)
            # Half of what it could do in time, for estimates err.
            n_given = self._assign_some(worker, min(n_most, math.ceil(n_in_time / 2)), now)
            if n_given and n_given == n_in_time and pending.n_assignable:
                # The last of these ends later than if it were divided, so the others
                # have less to do. Otherwise the end stays where it was.
                loads.refresh(now)
                end = max(whole, loads.end(len(pending), now))

    def _assign_some(self, worker: WorkerState, n_wanted: int, now: Seconds) -> int:
        if n_wanted < 1 or not self._pending.n_assignable:
            return 0
        taken = self._pending.take(worker.name, n_wanted)
        for chunk_index in taken:
            self._assign_one(worker, chunk_index, now)
        return len(taken)

    def _assign_one(self, worker: WorkerState, chunk_index: int, now: Seconds) -> None:
        self._counters.attempt += 1
        if not worker.outstanding:
            worker.progress_at = now
        copy = ChunkCopy(
            chunk_index=chunk_index,
            attempt=self._counters.attempt,
            n_examples=self._n_examples(chunk_index),
            assigned_at=now,
        )
        self.commits.add_copy(worker, copy)

    def _n_examples(self, chunk_index: int) -> int:
        start, stop = self._batch.chunk_bounds(chunk_index, self._config.chunk_sizes)
        return stop - start

    # --- backup tasks ---

    def _start_backups(self, now: Seconds) -> None:
        limit = self._limit(now)
        size = self._config.chunk_sizes.chunk_size
        for worker in _least_loaded_first(self._loads.idle(limit)) if limit > 0.0 else ():
            # The chunk that was last may have got its second copy in this loop.
            own = self._loads.seconds_from_idle(worker, size)
            if own <= limit and self._start_backup(worker, now):
                limit = min(limit, self._limit(now))

    def _limit(self, now: Seconds) -> Seconds:
        last = self._loads.last(now, push=self._counters.push_seconds)
        if last is None:
            return 0.0
        # A worker that takes longer for a whole chunk is no use for a smaller one either.
        seconds, copy = last
        worth = min(seconds / _MARGIN, seconds - self._min_saving(now))
        return worth * self._config.chunk_sizes.chunk_size / copy.n_examples

    def _start_backup(self, worker: WorkerState, now: Seconds) -> bool:
        push = self._counters.push_seconds
        last = self._loads.last(now, push=push, other_than=worker)
        if last is None:
            return False
        seconds, copy = last
        own = self._loads.seconds_from_idle(worker, copy.n_examples)
        if not own or seconds <= max(_MARGIN * own, own + self._min_saving(now)):
            return False
        self.n_backups += 1
        self._assign_one(worker, copy.chunk_index, now)
        self._loads.refresh(now)
        return True

    def _min_saving(self, now: Seconds) -> Seconds:
        assert self._began_at is not None
        taken = now - self._began_at
        return max(self._config.backup_seconds_min, _SHARE * taken)


def _least_loaded_first(workers: list[WorkerState]) -> list[WorkerState]:
    return sorted(workers, key=lambda m: (len(m.outstanding), m.name))
