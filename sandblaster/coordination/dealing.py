"""Which replica computes which set of one batch, and whose result counts.

    undealt --> dealt to one (or two) --> computed: granted to the first --> staged
       ^                 |                              |                      |
       +---- all gone ---+------- the winner gone ------+                    fold

Rules (paper: Dean et al. 2012, section 4.2, and the keys of its rules):

* Sets are dealt a few at a time to whoever has almost nothing left to do, so a replica
  twice as fast does twice as many (DB-14). They are dealt in runs, first those that the
  replica computed the last time: its data is near.
* Nobody is dealt a set that the others would have done before: towards the end a slow
  replica waits. Of what it could do in time, it is dealt half: estimates err.
* A set may be dealt when it is within a window of the oldest that is not counted.
* When nothing is left to deal, an idle replica gets a second copy of the set that will
  be done last, if it would have it done before (DB-15), by more than a hiccup and a few
  percent of the evaluation. No set has three copies.
* The first computed copy is granted its push, under a new number; others are dropped,
  and move no bytes. So each set is pushed once, unless the winner is lost: then its
  grant is void, and the next copy is granted under another number.
* A winner that does not come to its end is rivalled by a copy dealt after its grant; if
  that one is computed first, the winner is taken for lost.
* Loss and count of a set come from the copy whose gradient counts.
"""

import math
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.messages import Account, GrantedSet, SetResult
from distbelief.roles import Address, Seconds
from sandblaster.coordination.coordinator_config import CoordinatorConfig
from sandblaster.coordination.crew import Copy, Crew, Member
from sandblaster.coordination.estimates import (
    n_at_once,
    push_seconds,
    remaining,
    seconds_of,
    seconds_to_end,
)
from sandblaster.sets import BatchRange


_MARGIN: Final = 1.2
"""A backup must promise to be earlier by this factor ..."""

_SHARE: Final = 0.02
"""... and by this share of the time that the evaluation has taken."""

_N_COPIES_MAX: Final = 2

N_VOID_MAX: Final = 8
"""Void grants under which shards may hold something; then nothing is granted until they
have forgotten them. So they stage at most so many more than sets are dealt."""


@final
@dataclass(slots=True)
class Numbers:
    """What is counted on from evaluation to evaluation, within an epoch."""

    attempt: int = 0
    grant: int = 0
    owners: dict[int, Address] = field(default_factory=dict)  # first position -> whose
    push_seconds: Seconds = 0.0  # from a grant to its staging; an average


@final
@dataclass(slots=True, eq=False)
class _Set:
    """One set of the batch."""

    holders: dict[int, Member] = field(default_factory=dict)  # attempt -> who has it
    winner: int = 0  # attempt; 0: none is granted
    staged: SetResult | None = None


@final
class Dealing:
    """The sets of one evaluation.

    Args:
        config: Of the coordinator.
        crew: Who is there.
        batch: What is to be computed.
        numbers: To go on counting.

    Attributes:
        n_backups: Second copies dealt.
        n_counted: Sets folded on every shard.
        is_finite: No loss and no gradient so far was NaN or infinite.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        crew: Crew,
        batch: BatchRange,
        numbers: Numbers,
    ) -> None:
        self._config = config
        self._crew = crew
        self._batch = batch
        self._numbers = numbers
        self.n_sets = config.cutting.n_sets(batch.n_examples)
        self._sets = [_Set() for _ in range(self.n_sets)]
        self._undealt = list(range(self.n_sets))
        self._lowest = 0  # that is not counted
        self._counted: set[int] = set()
        self._staged: list[GrantedSet] = []  # to be folded
        self._void: list[int] = []
        self._n_void = 0  # that shards may hold
        self._changed: dict[Address, Member] = {}
        self._began_at: Seconds | None = None  # when first there was anybody to deal to
        self.digest = 0  # of the grants that count
        self.n_backups = 0
        self.n_counted = 0
        self.is_finite = True

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
        return math.fsum(
            one.staged.loss for one in self._sets if one.staged is not None
        )

    @property
    def n_examples(self) -> int:
        """In the sets that are staged."""
        return sum(one.staged.n_examples for one in self._sets if one.staged)

    def to_fold(self) -> tuple[tuple[GrantedSet, ...], tuple[int, ...]]:
        """Return the sets that every shard holds, and void grants; each once."""
        sets, void = tuple(self._staged), tuple(self._void)
        self._staged, self._void = [], []
        return sets, void

    def folded(
        self, sets: tuple[GrantedSet, ...], void: tuple[int, ...], now: Seconds
    ) -> None:
        """These count now, and those are forgotten."""
        self._n_void -= len(void)
        if void:
            for pending in self._sets:
                self._grant_next(pending, now)
        for one in sets:
            self._counted.add(one.set_index)
            self.digest ^= one.grant
        self.n_counted += len(sets)
        while self._lowest in self._counted:
            self._lowest += 1

    def changed(self) -> list[Member]:
        """Return who has something else to do than it was told; once."""
        changed, self._changed = list(self._changed.values()), {}
        return [member for member in changed if member is self._crew.get(member.name)]

    # ------------------------------------------------------------------------- events

    def account(self, member: Member, account: Account, now: Seconds) -> None:
        """A member says how it stands."""
        for result in account.results:
            copy = member.copies.get(result.attempt)
            if copy is None:
                continue
            if copy.result is None:
                member.progress_at = now
                member.measured(result)
                self._computed(member, copy, result, now)
            elif not math.isfinite(result.loss):
                self.is_finite = False
            elif result.staged and copy.grant:
                self._stage(member, copy, now)

    def lost(self, member: Member, now: Seconds) -> None:
        """A member is gone, with all that it has not brought to its end."""
        for copy in list(member.copies.values()):
            self._drop(member, copy)
            one = self._sets[copy.set_index]
            if one.winner == copy.attempt and one.staged is None:
                self._fence(one, copy)
            self._grant_next(one, now)
            if not one.holders and one.staged is None:
                insort(self._undealt, copy.set_index)

    def _computed(
        self, member: Member, copy: Copy, result: SetResult, now: Seconds
    ) -> None:
        copy.result = result
        one = self._sets[copy.set_index]
        if not math.isfinite(result.loss):
            self.is_finite = False
            return
        if one.winner:
            winner = one.holders[one.winner].copies[one.winner]
            if copy.dealt_at <= winner.granted_at:
                self._drop(member, copy)
                return
            self._drop(one.holders[one.winner], winner)
            self._fence(one, winner)
        self._grant_next(one, now)

    def _grant_next(self, one: _Set, now: Seconds) -> None:
        """Grant the first computed copy its push, if none is; drop the others."""
        if one.winner or one.staged is not None or self._n_void >= N_VOID_MAX:
            return
        for attempt, member in one.holders.items():
            copy = member.copies[attempt]
            if copy.result is not None:
                break
        else:
            return
        one.winner = attempt
        self._numbers.grant += 1
        copy.grant, copy.granted_at = self._numbers.grant, now
        self._changed[member.name] = member
        self._drop_others(one, attempt)

    def _drop_others(self, one: _Set, attempt: int) -> None:
        for other, holder in list(one.holders.items()):
            if other != attempt:
                self._drop(holder, holder.copies[other])

    def _stage(self, member: Member, copy: Copy, now: Seconds) -> None:
        one = self._sets[copy.set_index]
        assert one.winner == copy.attempt, (one, copy)
        one.staged = copy.result
        taken = now - copy.granted_at
        self._numbers.push_seconds += 0.3 * (taken - self._numbers.push_seconds)
        self._staged.append(GrantedSet(set_index=copy.set_index, grant=copy.grant))
        start, _ = self._batch.set_bounds(copy.set_index, self._config.cutting)
        self._numbers.owners[start] = member.name
        self._drop(member, copy)
        self._drop_others(one, copy.attempt)

    def _fence(self, one: _Set, copy: Copy) -> None:
        one.winner = 0
        self._void.append(copy.grant)
        self._n_void += 1

    def _drop(self, member: Member, copy: Copy) -> None:
        member.copies.pop(copy.attempt, None)
        self._sets[copy.set_index].holders.pop(copy.attempt, None)
        self._changed[member.name] = member

    # ------------------------------------------------------------------------ dealing

    def deal(self, now: Seconds) -> None:
        """Give work to whoever has almost none."""
        members = sorted(self._crew, key=lambda m: (len(m.outstanding), m.name))
        if members and self._began_at is None:
            self._began_at = now
        for member in members:
            n_wanted = self._n_wanted(member, now) if self._undealt else 0
            if n_wanted:
                for set_index in self._take(member, n_wanted):
                    self._give(member, set_index, now)
        if self._config.backups and not self._dealable:
            for member in members:
                if not member.outstanding:
                    self._back_up(member, now)

    def _n_wanted(self, member: Member, now: Seconds) -> int:
        """Return how many sets to deal to a member now."""
        n_held = len(member.outstanding)
        set_seconds = self._set_seconds(member)
        at_once = n_at_once(member, set_seconds)
        if n_held > at_once // 2 + 1:
            return 0
        n_most = at_once + 1 - n_held
        if set_seconds <= 0.0:  # nobody knows how long it takes
            fair = max(1, len(self._undealt) // (2 * len(self._crew)))
            return max(0, min(n_most, fair - n_held))
        return min(n_most, math.ceil(self._n_in_time(member, now) / 2))

    def _n_in_time(self, member: Member, now: Seconds) -> int:
        """Return how many more sets a member would do until all are done."""
        paces = {m.name: self._set_seconds(m) for m in self._crew}
        begins = {
            m.name: max(remaining(m, self._crew, now).values(), default=0.0)
            for m in self._crew
        }
        known = [(begins[name], pace) for name, pace in paces.items()]
        end = seconds_to_end(known, len(self._undealt)) + min(paces.values())
        left = end - begins[member.name]
        return max(0, math.floor(left / paces[member.name]))

    def _set_seconds(self, member: Member) -> Seconds:
        return seconds_of(member, self._config.cutting.set_size, self._crew)

    def _give(self, member: Member, set_index: int, now: Seconds) -> None:
        self._numbers.attempt += 1
        start, stop = self._batch.set_bounds(set_index, self._config.cutting)
        if not member.outstanding:
            member.progress_at = now
        copy = Copy(
            set_index=set_index,
            attempt=self._numbers.attempt,
            n_examples=stop - start,
            dealt_at=now,
        )
        member.copies[copy.attempt] = copy
        self._sets[set_index].holders[copy.attempt] = member
        self._changed[member.name] = member

    def _take(self, member: Member, n_wanted: int) -> list[int]:
        """Take a run of sets to deal: its own, then nobody's, then somebody else's."""
        dealable = self._dealable
        if not dealable:
            return []
        whose = {index: self._owner(index) for index in dealable}
        present = {m.name for m in self._crew}
        for wanted in (
            [i for i in dealable if whose[i] == member.name],
            [i for i in dealable if whose[i] not in present],
        ):
            if wanted:
                taken = _run(wanted, n_wanted)
                break
        else:
            taken = _run_from_the_end(dealable, whose, n_wanted)
        self._undealt = [index for index in self._undealt if index not in taken]
        return taken

    @property
    def _dealable(self) -> list[int]:
        limit = self._lowest + self._config.window_sets
        return [index for index in self._undealt if index < limit]

    def _owner(self, set_index: int) -> Address | None:
        start, _ = self._batch.set_bounds(set_index, self._config.cutting)
        return self._numbers.owners.get(start)

    # ------------------------------------------------------------------- backup tasks

    def _back_up(self, member: Member, now: Seconds) -> None:
        """Give an idle member a copy of the set that will be done last."""
        assert self._began_at is not None
        least = max(
            self._config.backup_seconds_min, _SHARE * (now - self._began_at)
        )  # to be saved
        latest, most = -1, 0.0
        for set_index, seconds in self._unfinished(now):
            one = self._sets[set_index]
            if len(one.holders) >= _N_COPIES_MAX or member in one.holders.values():
                continue
            start, stop = self._batch.set_bounds(set_index, self._config.cutting)
            own = seconds_of(member, stop - start, self._crew)
            if own <= 0.0 or seconds <= max(_MARGIN * own, own + least):
                continue
            if seconds > most:
                latest, most = set_index, seconds
        if latest >= 0:
            self.n_backups += 1
            self._give(member, latest, now)

    def _unfinished(self, now: Seconds) -> Iterator[tuple[int, Seconds]]:
        """Yield (set, seconds to its end) of each copy that is dealt."""
        for member in self._crew:
            times = remaining(member, self._crew, now)
            for copy in member.copies.values():
                if copy.result is None:
                    yield copy.set_index, times[copy.attempt]
                elif copy.grant:
                    expected = self._numbers.push_seconds
                    yield copy.set_index, push_seconds(copy, expected, now)


def _run(indices: list[int], n_max: int) -> list[int]:
    """Return the first indices that follow each other, so many at the most."""
    run = [indices[0]]
    for index in indices[1:n_max]:
        if index != run[-1] + 1:
            break
        run.append(index)
    return run


def _run_from_the_end(
    indices: list[int], whose: Mapping[int, Address | None], n_max: int
) -> list[int]:
    """Return the last sets of whoever has the most left, in order."""
    left: dict[Address | None, list[int]] = {}
    for index in indices:
        left.setdefault(whose[index], []).append(index)
    most = max(left.values(), key=len)
    return _run(most[::-1][:n_max][::-1], n_max)
