"""Whose result counts, of each set of one batch.

    dealt --> computed: granted to the first --> staged on every shard --> folded
                 |                                  |
                 +---- the winner gone: fenced -----+

Rules:

* The first computed copy is granted its push, under a new number; others are dropped,
  and move no bytes. So each set is pushed once, unless the winner is lost: then its
  grant is void, and the next copy is granted under another number.
* A winner that does not come to its end is rivalled by a copy dealt after its grant; if
  that one is computed first, the winner is taken for lost, and pushes to take longer.
* Loss and count of a set come from the copy whose gradient counts.
"""

import math
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.messages import Account, GrantedSet, SetResult
from distbelief.roles import Address, Seconds
from sandblaster.coordination.crew import Copy, Member
from sandblaster.coordination.workloads import Workloads


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

    start: int  # its first position
    holders: dict[int, Member] = field(default_factory=dict)  # attempt -> who has it
    winner: int = 0  # attempt; 0: none is granted
    staged: SetResult | None = None


@final
class Granting:
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

    def __init__(self, starts: range, *, numbers: Numbers, loads: Workloads) -> None:
        self._numbers = numbers
        self._loads = loads
        self._sets = [_Set(start) for start in starts]
        self._counted: set[int] = set()
        self._staged: list[GrantedSet] = []  # to be folded
        self._void: list[int] = []
        self._n_void = 0  # that shards may hold
        self._ungranted: set[int] = set()  # for that reason
        self.n_sets = len(starts)
        self.lowest = 0
        self.digest = 0
        self.n_counted = 0
        self.is_finite = True
        self.changed: dict[Address, Member] = {}

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

    def to_fold(self) -> tuple[tuple[GrantedSet, ...], tuple[int, ...]]:
        """Return the sets that every shard holds, and void grants; each once."""
        sets, void = tuple(self._staged), tuple(self._void)
        self._staged, self._void = [], []
        return sets, void

    def folded(self, sets: tuple[GrantedSet, ...], void: tuple[int, ...], now: Seconds) -> None:
        """These count now, and those are forgotten."""
        self._n_void -= len(void)
        if void:
            ungranted, self._ungranted = sorted(self._ungranted), set()
            for index in ungranted:
                self._grant_next(self._sets[index], now)
        for one in sets:
            self._counted.add(one.set_index)
            self.digest ^= one.grant
        self.n_counted += len(sets)
        while self.lowest in self._counted:
            self._counted.remove(self.lowest)
            self.lowest += 1

    # ------------------------------------------------------------------------- copies

    def give(self, member: Member, copy: Copy) -> None:
        """A member is dealt a copy."""
        member.copies[copy.attempt] = copy
        self._sets[copy.set_index].holders[copy.attempt] = member
        self._changes(member, copy)

    def account(self, member: Member, account: Account, now: Seconds) -> None:
        """A member says how it stands."""
        for result in account.results:
            copy = member.copies.get(result.attempt)
            if copy is None:
                continue
            if copy.result is None:
                elapsed = now - max(copy.dealt_at, member.progress_at)
                member.measured(result, elapsed=elapsed)
                member.progress_at = now
                self._computed(member, copy, result, now)
            elif not math.isfinite(result.loss):
                self.is_finite = False
            elif result.staged and copy.grant:
                self._stage(member, copy, now)

    def lost(self, member: Member, now: Seconds) -> list[int]:
        """A member is gone; return the sets that nobody has now."""
        without: list[int] = []
        for copy in list(member.copies.values()):
            self._drop(member, copy)
            one = self._sets[copy.set_index]
            if one.winner == copy.attempt and one.staged is None:
                self._fence(one, copy)
            self._grant_next(one, now)
            if not one.holders and one.staged is None:
                without.append(copy.set_index)
        return without

    def _computed(self, member: Member, copy: Copy, result: SetResult, now: Seconds) -> None:
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
            # Late is taken to be as long again (`estimates`): so rivals come ever more
            # slowly, and even where every push takes longer than a set, one ends.
            late = 2.0 * (now - winner.granted_at)
            self._numbers.push_seconds = max(self._numbers.push_seconds, late)
            self._drop(one.holders[one.winner], winner)
            self._fence(one, winner)
        self._grant_next(one, now)

    def _grant_next(self, one: _Set, now: Seconds) -> None:
        """Grant the first computed copy its push, if none is; drop the others."""
        if one.winner or one.staged is not None:
            return
        for attempt, member in one.holders.items():
            copy = member.copies[attempt]
            if copy.result is not None:
                break
        else:
            return
        if self._n_void >= N_VOID_MAX:
            self._ungranted.add(copy.set_index)
            return
        one.winner = attempt
        self._numbers.grant += 1
        copy.grant, copy.granted_at = self._numbers.grant, now
        self._changes(member, copy)
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
        self._numbers.owners[one.start] = member.name
        self._drop(member, copy)
        self._drop_others(one, copy.attempt)

    def _fence(self, one: _Set, copy: Copy) -> None:
        one.winner = 0
        self._void.append(copy.grant)
        self._n_void += 1

    def _drop(self, member: Member, copy: Copy) -> None:
        member.copies.pop(copy.attempt, None)
        self._sets[copy.set_index].holders.pop(copy.attempt, None)
        self._changes(member, copy)

    def _changes(self, member: Member, copy: Copy) -> None:
        """A member has something else to do; others of that set may have a rival."""
        self.changed[member.name] = member
        self._loads.touch(member)
        holders = self._sets[copy.set_index].holders
        for attempt, holder in holders.items():
            holder.copies[attempt].is_doubled = len(holders) > 1
            self._loads.touch(holder)
