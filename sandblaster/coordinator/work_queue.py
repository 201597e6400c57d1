"""Which replica computes which set of one batch.

    undealt --> dealt to one (or two) --> computed, granted, staged: `granting`
       ^                 |                    |
       +---- all gone ---+--- winner gone ----+

Rules (paper: Dean et al. 2012, section 4.2, and the keys of its rules):

* Sets are dealt a few at a time to whoever has almost nothing left to do, so a replica
  twice as fast does twice as many (DB-14). They are dealt in runs, first those that the
  replica computed the last time: its data is near.
* Nobody is dealt a set that the others would have done before: towards the end a slow
  replica waits. Of what it could do in time, it is dealt half: estimates err. Of the
  last sets, fewer than replicas, each is a whole one: as many replicas take one.
* A set may be dealt when it is within a window of the oldest that is not counted.
* When nothing is left to deal, an idle replica gets a second copy of the set that will
  be done last, if it would have it done before (DB-15), by more than a hiccup and a few
  percent of the evaluation. No set has three copies.

A word from a replica costs about the square root of how many there are, as `workloads`
keeps them in order; and so does every set that is dealt.
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


# The sets of one batch that nobody has been dealt, by whose data they are.
#
#     own            sets that a replica computed the last time: its data is near
#     nobody's       of those who are gone, and of data that nobody had
#     others'        the last ones of whoever has the most left
#
# Sets are taken in runs that follow each other, the first of these that there are.


@final
class PendingChunks:
    """Sets that are to be dealt.

    Args:
        owners: Who computed each set the last time; None: nobody did.
        crew: Who is there.
    """

    def __init__(self, owners: Sequence[Address | None], *, pool: WorkerPool) -> None:
        self._owners = owners
        self._pool = pool
        self._limit = 0  # sets from there on are not to be dealt yet
        self._is_assignable = bytearray(len(owners))
        self._left: dict[Address | None, list[int]] = {}  # dealable sets, by owner
        self._most: list[tuple[int, int, Address]] = []  # -how many, the first, whose
        self._gone: set[Address | None] = set()  # owners who are not there
        self._n_changes = -1  # of the crew, when that was looked up
        self._n_left = len(owners)
        self._n_assignable = 0

    def __len__(self) -> int:
        return self._n_left

    @property
    def n_assignable(self) -> int:
        """How many may be dealt now."""
        return self._n_assignable

    def release(self, limit: int) -> None:
        """Let sets below this be dealt."""
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
        """Let a set that was taken be dealt again."""
        owner = self._owners[index]
        insort(self._left[owner], index)
        self._push_owner(owner)
        self._is_assignable[index] = True
        self._n_left += 1
        self._n_assignable += 1

    def take(self, name: Address, n_wanted: int) -> list[int]:
        """Return sets for somebody: at least one, and at most so many.

        At least one must be dealable.
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
        """Remember how much an owner has left."""
        left = self._left[owner]
        if owner is not None and left:
            heappush(self._most, (-len(left), left[0], owner))

    def _busiest_owner(self) -> Address:
        """Return who has the most left; what was true some time ago is let go of."""
        while True:
            n, first, owner = self._most[0]
            left = self._left[owner]
            if left and (-n, first) == (len(left), left[0]):
                return owner
            heappop(self._most)


def _first_run(indices: list[int]) -> list[int]:
    """Return the first ones, as far as they follow each other."""
    run = indices[:1]
    for index in indices[1:]:
        if index != run[-1] + 1:
            break
        run.append(index)
    return run


# What every replica still has to compute, and how long that takes, kept in order.
#
# Who is told of something, says something or is late is looked at again, and nobody else
# is: so dealing to one of 2,000 replicas costs little more than to one of two.
#
#     all        seconds until a member has nothing left; its weight is its speed
#     hungry     those who have almost nothing left, with one set more
#     idle       those who have nothing left, by how long a set would take them
#     latest     the last set of each, of which there is no second copy
#     pushed     granted sets without a second copy, by their age

_ROUNDING: Final = 1e-9
"""What is later by no more than this share is as early."""

_N_WHOLE_MAX: Final = 512
"""Sets that are looked at one by one: of more the last ones matter little."""


@final
@dataclass(slots=True, eq=False)
class _Row:
    """What is known of a member.

    Attributes:
        member: Who it is.
        n_looks: How often it was looked at.
        latest: Its last set to compute that has no second copy.
        grants: Of what it pushes, and has no second copy.
    """

    worker: WorkerState
    n_refreshes: int = 0
    latest: ChunkCopy | None = None
    grants: list[int] | None = None


@final
class ExpectedFinish:
    """The workloads of a crew, during one evaluation.

    Args:
        config: Of the coordinator.
        crew: Who is there.
    """

    def __init__(self, config: CoordinatorConfig, pool: WorkerPool) -> None:
        self._set_size = config.chunk_sizes.chunk_size
        self._pool = pool
        self._rows: dict[int, _Row] = {}
        self._touched: dict[int, WorkerState] = {}
        self._due: list[tuple[Seconds, int, int]] = []  # when, whose row, its n_looks
        self._speeds = SpeedModel()
        self._all, self._nearly_idle, self._idle = FinishTimes(), FinishTimes(), FinishTimes()
        self._with_one_more = FinishTimes()  # all, had they one set more
        self._latest, self._pushed = FinishTimes(), FinishTimes()
        self._pushes: dict[int, tuple[WorkerState, ChunkCopy]] = {}  # by grant
        for worker in pool:
            self.touch(worker)

    # ------------------------------------------------------------------------ looking

    def touch(self, worker: WorkerState) -> None:
        """Something of this member has changed, or it has come or gone."""
        self._touched[worker.number] = worker

    def refresh(self, now: Seconds) -> None:
        """Look at whom was touched, or is late by now."""
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
        """See who it is, and whether it is there."""
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
        for grant in row.grants or ():
            self._pushed.drop(grant)
            del self._pushes[grant]
        row.grants = None

    def _refresh_row(self, number: int, worker: WorkerState, now: Seconds) -> None:
        row, pace = self._rows[number], self.pace(worker)
        row.n_refreshes += 1
        line, until = left(worker, pace, self._speeds.lag_of(worker), now)
        if until < math.inf:
            heappush(self._due, (until, number, row.n_refreshes))
        chunk_seconds = pace * self._set_size
        if pace:
            self._all.put(number, line, weight=1.0 / chunk_seconds)
            self._with_one_more.put(number, line.later(chunk_seconds))
        n_held = len(worker.outstanding)
        own = self.seconds_from_idle(worker, self._set_size) or math.inf
        _put(self._idle, number, None if n_held else Line(own))
        is_nearly_idle = n_held <= n_at_once(worker, chunk_seconds) // 2 + 1
        _put(self._nearly_idle, number, line.later(chunk_seconds) if is_nearly_idle else None)
        self._refresh_copies(row, line, pace)

    def _refresh_copies(self, row: _Row, line: Line, pace: float) -> None:
        """See which of its copies others might make."""
        number = row.worker.number
        row.latest, after = None, 0.0
        for copy in reversed(row.worker.outstanding):
            if not copy.is_doubled:
                row.latest = copy
                break
            after += pace * copy.n_examples
        _put(self._latest, number, line.later(-after) if row.latest else None)
        self._forget_grants(row)
        row.grants = []
        for copy in row.worker.copies.values():
            if copy.result is not None and copy.grant and not copy.is_doubled:
                row.grants.append(copy.grant)
                self._pushes[copy.grant] = row.worker, copy
                self._pushed.put(copy.grant, Line(-copy.token_issued_at, 1))

    # -------------------------------------------------------------------- what is seen

    @property
    def is_known(self) -> bool:
        """Has anybody computed a set?"""
        return self._speeds.is_known

    def pace(self, worker: WorkerState) -> float:
        """Return a member's seconds per example; 0 if nobody knows."""
        return self._speeds.of(worker)

    def chunk_seconds(self, worker: WorkerState) -> Seconds:
        """Return how long a member computes a set; 0 if nobody knows."""
        return self.pace(worker) * self._set_size

    def seconds_from_idle(self, worker: WorkerState, n_examples: int) -> Seconds:
        """Return how long a member takes that has nothing else; 0 if nobody knows."""
        pace = self.pace(worker)
        lag = 0.0 if worker.n_sets else self._speeds.lag_of(worker)
        return pace * n_examples + lag if pace else 0.0

    def end(self, n_sets: int, now: Seconds) -> Seconds:
        """Return in how many seconds all sets will be done, if so many more are dealt.

        A pace must be known. Sets cannot be parted: the quickest may be late by one.
        """
        fastest = self._speeds.fastest * self._set_size
        return seconds_to_end(self._all, n_sets, now) + fastest

    def end_of_whole(self, n_sets: int, now: Seconds) -> Seconds:
        """Return when so many sets will be done if none of them is parted.

        Where there are more members than sets, the first to be free take one each,
        while `end` has everybody do a part. 0 if sets are too many to look at.
        """
        if n_sets > _N_WHOLE_MAX:
            return 0.0
        others, end = self._with_one_more.shortest(now), 0.0
        other = next(others, None)
        again: list[tuple[Seconds, Seconds]] = []  # when done once more; of each set
        for _ in range(n_sets):
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
        """Return how many more sets a member would do until then."""
        lag = self._speeds.lag_of(worker)
        line, _ = left(worker, self.pace(worker), lag, now)
        n_sets = (end - line.at(now)) / self.chunk_seconds(worker)
        return max(0, math.floor(n_sets + _ROUNDING))

    def nearly_idle(self, end: Seconds = math.inf, now: Seconds = 0.0) -> list[WorkerState]:
        """Return who has almost nothing left, and would do one set more until then."""
        limit = end + _ROUNDING * abs(end)
        return [self._rows[n].worker for n in self._nearly_idle.at_most(limit, now)]

    def idle(self, seconds: Seconds = math.inf) -> list[WorkerState]:
        """Return who has nothing left, and would do a whole set within that time."""
        return [self._rows[n].worker for n in self._idle.at_most(seconds, 0.0)]

    def last(
        self, now: Seconds, *, push: Seconds, other_than: WorkerState | None = None
    ) -> tuple[Seconds, ChunkCopy] | None:
        """Return what will be done last of what has one copy.

        And in how many seconds it will be computed, or a rival of it has to be.

        Args:
            now: The time.
            push: How long a push is expected to take.
            other_than: Whose are left out; somebody who has nothing left to compute.
        """
        found: tuple[Seconds, ChunkCopy] | None = None
        for seconds, number in self._latest.longest(now):
            latest = self._rows[number].latest
            assert latest is not None
            found = seconds, latest
            break
        # The oldest is the one that is most late.
        grants = (grant for _, grant in self._pushed.longest(now))
        copy = self._first(grants, other_than)
        seconds = seconds_to_rival(copy, push, now) if copy else 0.0
        if copy is None or seconds <= (found[0] if found else 0.0):
            return found
        return seconds, copy

    def _first(self, grants: Iterator[int], other_than: WorkerState | None) -> ChunkCopy | None:
        pushes = (self._pushes[grant] for grant in grants)
        return next((copy for owner, copy in pushes if owner is not other_than), None)


def _put(ranked: FinishTimes, number: int, line: Line | None) -> None:
    if line is None:
        ranked.drop(number)
    else:
        ranked.put(number, line)


# Whose result counts, of each set of one batch.
#
#     dealt --> computed: granted to the first --> staged on every shard --> folded
#                  |                                  |
#                  +---- the winner gone: fenced -----+
#
# Rules:
#
# * The first computed copy is granted its push, under a new number; others are dropped,
#   and move no bytes. So each set is pushed once, unless the winner is lost: then its
#   grant is void, and the next copy is granted under another number.
# * A winner that does not come to its end is rivalled by a copy dealt after its grant; if
#   that one is computed first, the winner is taken for lost, and pushes to take longer.
# * Loss and count of a set come from the copy whose gradient counts.

N_VOID_MAX: Final = 8
"""Void grants under which shards may hold something; then nothing is granted until they
have forgotten them. So they stage at most so many more than sets are dealt."""


@final
@dataclass(slots=True)
class EpochCounters:
    """What is counted on from evaluation to evaluation, within an epoch."""

    attempt: int = 0
    grant: int = 0
    owners: dict[int, Address] = field(default_factory=dict)  # first position -> whose
    push_seconds: Seconds = 0.0  # from a grant to its staging; an average


@final
@dataclass(slots=True, eq=False)
class _Chunk:
    """One set of the batch."""

    start: int  # its first position
    holders: dict[int, WorkerState] = field(default_factory=dict)  # attempt -> who has it
    winner: int = 0  # attempt; 0: none is granted
    staged: ChunkResult | None = None


@final
class Commits:
    """The copies of all sets of one evaluation.

    Args:
        starts: The first position of each set.
        numbers: To go on counting.
        loads: Told of whose copies change.

    Attributes:
        digest: Of the grants that count.
        n_counted: Sets folded on every shard.
        n_sets: Of the batch.
        lowest: The first set that is not counted.
        is_finite: No loss and no gradient so far was NaN or infinite.
        changed: Who has something else to do than it was told.
    """

    def __init__(self, starts: range, *, numbers: EpochCounters, loads: ExpectedFinish) -> None:
        self._numbers = numbers
        self._loads = loads
        self._sets = [_Chunk(start) for start in starts]
        self._counted: set[int] = set()
        self._staged: list[GrantedChunk] = []  # to be folded
        self._void: list[int] = []
        self._n_void = 0  # that shards may hold
        self._without_token: set[int] = set()  # for that reason
        self.n_sets = len(starts)
        self.lowest = 0
        self.digest = 0
        self.n_counted = 0
        self.is_finite = True
        self.changed: dict[Address, WorkerState] = {}

    # ------------------------------------------------------------------------ results

    @property
    def is_complete(self) -> bool:
        """Does every set count?"""
        return self.n_counted == self.n_sets

    @property
    def has_staged(self) -> bool:
        """Is there anything to tell the shards?"""
        return bool(self._staged or self._void)

    @property
    def loss(self) -> float:
        """Sum over all examples, exactly rounded."""
        return math.fsum(one.staged.loss for one in self._sets if one.staged is not None)

    @property
    def n_examples(self) -> int:
        """In the sets that are staged."""
        return sum(one.staged.n_examples for one in self._sets if one.staged)

    def to_commit(self) -> tuple[tuple[GrantedChunk, ...], tuple[int, ...]]:
        """Return the sets that every shard holds, and void grants; each once."""
        sets, void = tuple(self._staged), tuple(self._void)
        self._staged, self._void = [], []
        return sets, void

    def committed(
        self, sets: tuple[GrantedChunk, ...], void: tuple[int, ...], now: Seconds
    ) -> None:
        """These count now, and those are forgotten."""
        self._n_void -= len(void)
        if void:
            without_token, self._without_token = sorted(self._without_token), set()
            for index in without_token:
                self._issue_token(self._sets[index], now)
        for one in sets:
            self._counted.add(one.set_index)
            self.digest ^= one.grant
        self.n_counted += len(sets)
        while self.lowest in self._counted:
            self._counted.remove(self.lowest)
            self.lowest += 1

    # ------------------------------------------------------------------------- copies

    def add_copy(self, worker: WorkerState, copy: ChunkCopy) -> None:
        """A member is dealt a copy."""
        worker.copies[copy.attempt] = copy
        self._sets[copy.set_index].holders[copy.attempt] = worker
        self._note_change(worker, copy)

    def report(self, worker: WorkerState, report: WorkReport, now: Seconds) -> None:
        """A member says how it stands."""
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
            elif result.staged and copy.grant:
                self._stage(worker, copy, now)

    def lost(self, worker: WorkerState, now: Seconds) -> list[int]:
        """A member is gone; return the sets that nobody has now."""
        without: list[int] = []
        for copy in list(worker.copies.values()):
            self._drop(worker, copy)
            one = self._sets[copy.set_index]
            if one.winner == copy.attempt and one.staged is None:
                self._fence(one, copy)
            self._issue_token(one, now)
            if not one.holders and one.staged is None:
                without.append(copy.set_index)
        return without

    def _computed(
        self, worker: WorkerState, copy: ChunkCopy, result: ChunkResult, now: Seconds
    ) -> None:
        copy.result = result
        one = self._sets[copy.set_index]
        if not math.isfinite(result.loss):
            self.is_finite = False
            return
        if one.winner:
            winner = one.holders[one.winner].copies[one.winner]
            if copy.assigned_at <= winner.token_issued_at:
                self._drop(worker, copy)
                return
            # Late is taken to be as long again (`estimates`): so rivals come ever more
            # slowly, and even where every push takes longer than a set, one ends.
            late = 2.0 * (now - winner.token_issued_at)
            self._numbers.push_seconds = max(self._numbers.push_seconds, late)
            self._drop(one.holders[one.winner], winner)
            self._fence(one, winner)
        self._issue_token(one, now)

    def _issue_token(self, one: _Chunk, now: Seconds) -> None:
        """Grant the first computed copy its push, if none is; drop the others."""
        if one.winner or one.staged is not None:
            return
        for attempt, worker in one.holders.items():
            copy = worker.copies[attempt]
            if copy.result is not None:
                break
        else:
            return
        if self._n_void >= N_VOID_MAX:
            self._without_token.add(copy.set_index)
            return
        one.winner = attempt
        self._numbers.grant += 1
        copy.grant, copy.token_issued_at = self._numbers.grant, now
        self._note_change(worker, copy)
        self._drop_others(one, attempt)

    def _drop_others(self, one: _Chunk, attempt: int) -> None:
        for other, holder in list(one.holders.items()):
            if other != attempt:
                self._drop(holder, holder.copies[other])

    def _stage(self, worker: WorkerState, copy: ChunkCopy, now: Seconds) -> None:
        one = self._sets[copy.set_index]
        assert one.winner == copy.attempt, (one, copy)
        one.staged = copy.result
        taken = now - copy.token_issued_at
        self._numbers.push_seconds += 0.3 * (taken - self._numbers.push_seconds)
        self._staged.append(GrantedChunk(set_index=copy.set_index, grant=copy.grant))
        self._numbers.owners[one.start] = worker.name
        self._drop(worker, copy)
        self._drop_others(one, copy.attempt)

    def _fence(self, one: _Chunk, copy: ChunkCopy) -> None:
        one.winner = 0
        self._void.append(copy.grant)
        self._n_void += 1

    def _drop(self, worker: WorkerState, copy: ChunkCopy) -> None:
        worker.copies.pop(copy.attempt, None)
        self._sets[copy.set_index].holders.pop(copy.attempt, None)
        self._note_change(worker, copy)

    def _note_change(self, worker: WorkerState, copy: ChunkCopy) -> None:
        """A member has something else to do; others of that set may have a rival."""
        self.changed[worker.name] = worker
        self._loads.touch(worker)
        holders = self._sets[copy.set_index].holders
        for attempt, holder in holders.items():
            holder.copies[attempt].is_doubled = len(holders) > 1
            self._loads.touch(holder)


_MARGIN: Final = 1.2
"""A backup must promise to be earlier by this factor ..."""

_SHARE: Final = 0.02
"""... and by this share of the time that the evaluation has taken."""


@final
class WorkQueue:
    """The sets of one evaluation.

    Args:
        config: Of the coordinator.
        crew: Who is there.
        batch: What is to be computed.
        numbers: To go on counting.

    Attributes:
        sets: What came of them.
        n_backups: Second copies dealt.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        pool: WorkerPool,
        batch: BatchRange,
        numbers: EpochCounters,
    ) -> None:
        self._config = config
        self._pool = pool
        self._batch = batch
        self._numbers = numbers
        self._loads = ExpectedFinish(config, pool)
        stop, size = batch.first + batch.n_examples, config.chunk_sizes.chunk_size
        starts = range(batch.first, stop, size)
        self.commits = Commits(starts, numbers=numbers, loads=self._loads)
        self._pending = PendingChunks([numbers.owners.get(s) for s in starts], pool=pool)
        self._began_at: Seconds | None = None  # when first there was anybody to deal to
        self.n_backups = 0

    # ------------------------------------------------------------------------- events

    def heard(self, worker: WorkerState) -> None:
        """A member has come, or has spoken."""
        self._loads.touch(worker)

    def report(self, worker: WorkerState, report: WorkReport, now: Seconds) -> None:
        """A member says how it stands."""
        self._loads.touch(worker)
        self.commits.report(worker, report, now)

    def lost(self, worker: WorkerState, now: Seconds) -> None:
        """A member is gone, with all that it has not brought to its end."""
        self._loads.touch(worker)
        for set_index in self.commits.lost(worker, now):
            self._pending.put_back(set_index)

    def changed(self) -> list[WorkerState]:
        """Return who has something else to do than it was told; once."""
        changed, self.commits.changed = list(self.commits.changed.values()), {}
        return [worker for worker in changed if worker is self._pool.get(worker.name)]

    # ------------------------------------------------------------------------ dealing

    def assign(self, now: Seconds) -> None:
        """Give work to whoever has almost none."""
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
        """Give everybody the same: nobody knows how long a set takes."""

        def fair() -> int:
            return max(1, len(self._pending) // (2 * len(self._pool)))

        loads = self._loads
        for worker in _least_loaded_first(loads.nearly_idle() if fair() > 1 else loads.idle()):
            self._assign_some(worker, min(2, fair()) - len(worker.outstanding), now)

    def _assign_by_speed(self, now: Seconds) -> None:
        """Give whoever is hungry half of what it would do until all is done."""
        loads, pending = self._loads, self._pending
        whole = loads.end_of_whole(len(pending), now)
        end = max(whole, loads.end(len(pending), now))
        for worker in _least_loaded_first(loads.nearly_idle(end, now)):
            if not pending.n_assignable:
                break
            n_in_time = loads.n_in_time(worker, end, now)
            at_once = n_at_once(worker, loads.chunk_seconds(worker))
            n_most = at_once + 1 - len(worker.outstanding)
            n_given = self._assign_some(worker, min(n_most, math.ceil(n_in_time / 2)), now)
            if n_given and n_given == n_in_time and pending.n_assignable:
                # The last of these is done later than it would be if it were parted:
                # so others have less to do. Otherwise the end is where it was.
                loads.refresh(now)
                end = max(whole, loads.end(len(pending), now))

    def _assign_some(self, worker: WorkerState, n_wanted: int, now: Seconds) -> int:
        if n_wanted < 1 or not self._pending.n_assignable:
            return 0
        taken = self._pending.take(worker.name, n_wanted)
        for set_index in taken:
            self._assign_one(worker, set_index, now)
        return len(taken)

    def _assign_one(self, worker: WorkerState, set_index: int, now: Seconds) -> None:
        self._numbers.attempt += 1
        if not worker.outstanding:
            worker.progress_at = now
        copy = ChunkCopy(
            set_index=set_index,
            attempt=self._numbers.attempt,
            n_examples=self._n_examples(set_index),
            assigned_at=now,
        )
        self.commits.add_copy(worker, copy)

    def _n_examples(self, set_index: int) -> int:
        start, stop = self._batch.chunk_bounds(set_index, self._config.chunk_sizes)
        return stop - start

    # ------------------------------------------------------------------- backup tasks

    def _start_backups(self, now: Seconds) -> None:
        """Give idle members copies of the sets that will be done last."""
        limit = self._limit(now)
        size = self._config.chunk_sizes.chunk_size
        for worker in _least_loaded_first(self._loads.idle(limit)) if limit > 0.0 else ():
            # What is done last now may have been doubled since they were looked for.
            own = self._loads.seconds_from_idle(worker, size)
            if own <= limit and self._start_backup(worker, now):
                limit = min(limit, self._limit(now))

    def _limit(self, now: Seconds) -> Seconds:
        """Return how long a whole set may take whoever is to back up what is done last.

        Nobody who takes longer is worth it: a smaller set takes him no less than its
        share of that.
        """
        last = self._loads.last(now, push=self._numbers.push_seconds)
        if last is None:
            return 0.0
        seconds, copy = last
        worth = min(seconds / _MARGIN, seconds - self._min_saving(now))
        return worth * self._config.chunk_sizes.chunk_size / copy.n_examples

    def _start_backup(self, worker: WorkerState, now: Seconds) -> bool:
        """Give one a copy of what will be done last of the others', if worth it."""
        push = self._numbers.push_seconds
        last = self._loads.last(now, push=push, other_than=worker)
        if last is None:
            return False
        seconds, copy = last
        own = self._loads.seconds_from_idle(worker, copy.n_examples)
        if not own or seconds <= max(_MARGIN * own, own + self._min_saving(now)):
            return False
        self.n_backups += 1
        self._assign_one(worker, copy.set_index, now)
        self._loads.refresh(now)
        return True

    def _min_saving(self, now: Seconds) -> Seconds:
        """Return how much earlier a backup must promise to be."""
        assert self._began_at is not None
        taken = now - self._began_at
        return max(self._config.backup_seconds_min, _SHARE * taken)


def _least_loaded_first(workers: list[WorkerState]) -> list[WorkerState]:
    """Return them as they are dealt to: who has the least to do first."""
    return sorted(workers, key=lambda m: (len(m.outstanding), m.name))
