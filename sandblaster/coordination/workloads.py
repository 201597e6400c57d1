"""What every replica still has to compute, and how long that takes, kept in order.

Who is told of something, says something or is late is looked at again, and nobody else
is: so dealing to one of 2,000 replicas costs little more than to one of two.

    all        seconds until a member has nothing left; its weight is its speed
    hungry     those who have almost nothing left, with one set more
    idle       those who have nothing left, by how long a set would take them
    latest     the last set of each, of which there is no second copy
    pushed     granted sets without a second copy, by their age
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Final, final

from distbelief.roles import Seconds
from sandblaster.coordination.coordinator_config import CoordinatorConfig
from sandblaster.coordination.crew import Copy, Crew, Member
from sandblaster.coordination.estimates import left, n_at_once, seconds_to_end, seconds_to_rival
from sandblaster.coordination.paces import Paces
from sandblaster.coordination.ranked import Line, Ranked


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

    member: Member
    n_looks: int = 0
    latest: Copy | None = None
    grants: list[int] | None = None


@final
class Workloads:
    """The workloads of a crew, during one evaluation.

    Args:
        config: Of the coordinator.
        crew: Who is there.
    """

    def __init__(self, config: CoordinatorConfig, crew: Crew) -> None:
        self._set_size = config.cutting.set_size
        self._crew = crew
        self._rows: dict[int, _Row] = {}
        self._touched: dict[int, Member] = {}
        self._due: list[tuple[Seconds, int, int]] = []  # when, whose row, its n_looks
        self._paces = Paces()
        self._all, self._hungry, self._idle = Ranked(), Ranked(), Ranked()
        self._with_one_more = Ranked()  # all, had they one set more
        self._latest, self._pushed = Ranked(), Ranked()
        self._pushes: dict[int, tuple[Member, Copy]] = {}  # by grant
        for member in crew:
            self.touch(member)

    # ------------------------------------------------------------------------ looking

    def touch(self, member: Member) -> None:
        """Something of this member has changed, or it has come or gone."""
        self._touched[member.number] = member

    def look(self, now: Seconds) -> None:
        """Look at whom was touched, or is late by now."""
        while self._due and self._due[0][0] <= now:
            _, number, n_looks = heappop(self._due)
            row = self._rows.get(number)
            if row is not None and row.n_looks == n_looks:
                self.touch(row.member)
        if not self._touched:
            return
        for member in self._touched.values():
            self._meet(member)
        if self._paces.look_up_typical():
            self._touched.update(self._paces.newcomers)
        touched, self._touched = self._touched, {}
        for number, member in touched.items():
            if number in self._rows:
                self._look_at(number, member, now)

    def _meet(self, member: Member) -> None:
        """See who it is, and whether it is there."""
        if self._crew.get(member.name) is member:
            self._rows.setdefault(member.number, _Row(member))
            self._paces.look(member)
            return
        row = self._rows.pop(member.number, None)
        self._paces.forget(member)
        for ranked in (self._all, self._with_one_more, self._hungry, self._idle):
            ranked.drop(member.number)
        self._latest.drop(member.number)
        if row is not None:
            self._forget_grants(row)

    def _forget_grants(self, row: _Row) -> None:
        for grant in row.grants or ():
            self._pushed.drop(grant)
            del self._pushes[grant]
        row.grants = None

    def _look_at(self, number: int, member: Member, now: Seconds) -> None:
        row, pace = self._rows[number], self.pace(member)
        row.n_looks += 1
        line, until = left(member, pace, self._paces.lag_of(member), now)
        if until < math.inf:
            heappush(self._due, (until, number, row.n_looks))
        set_seconds = pace * self._set_size
        if pace:
            self._all.put(number, line, weight=1.0 / set_seconds)
            self._with_one_more.put(number, line.later(set_seconds))
        n_held = len(member.outstanding)
        own = self.seconds_to_begin_with(member, self._set_size) or math.inf
        _put(self._idle, number, None if n_held else Line(own))
        is_hungry = n_held <= n_at_once(member, set_seconds) // 2 + 1
        _put(self._hungry, number, line.later(set_seconds) if is_hungry else None)
        self._look_at_copies(row, line, pace)

    def _look_at_copies(self, row: _Row, line: Line, pace: float) -> None:
        """See which of its copies others might make."""
        number = row.member.number
        row.latest, after = None, 0.0
        for copy in reversed(row.member.outstanding):
            if not copy.is_doubled:
                row.latest = copy
                break
            after += pace * copy.n_examples
        _put(self._latest, number, line.later(-after) if row.latest else None)
        self._forget_grants(row)
        row.grants = []
        for copy in row.member.copies.values():
            if copy.result is not None and copy.grant and not copy.is_doubled:
                row.grants.append(copy.grant)
                self._pushes[copy.grant] = row.member, copy
                self._pushed.put(copy.grant, Line(-copy.granted_at, 1))

    # -------------------------------------------------------------------- what is seen

    @property
    def is_known(self) -> bool:
        """Has anybody computed a set?"""
        return self._paces.is_known

    def pace(self, member: Member) -> float:
        """Return a member's seconds per example; 0 if nobody knows."""
        return self._paces.of(member)

    def set_seconds(self, member: Member) -> Seconds:
        """Return how long a member computes a set; 0 if nobody knows."""
        return self.pace(member) * self._set_size

    def seconds_to_begin_with(self, member: Member, n_examples: int) -> Seconds:
        """Return how long a member takes that has nothing else; 0 if nobody knows."""
        pace = self.pace(member)
        lag = 0.0 if member.n_sets else self._paces.lag_of(member)
        return pace * n_examples + lag if pace else 0.0

    def end(self, n_sets: int, now: Seconds) -> Seconds:
        """Return in how many seconds all sets will be done, if so many more are dealt.

        A pace must be known. Sets cannot be parted: the quickest may be late by one.
        """
        quickest = self._paces.quickest * self._set_size
        return seconds_to_end(self._all, n_sets, now) + quickest

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
                seconds = self.set_seconds(self._rows[other[1]].member)
                heappush(again, (end + seconds, seconds))
                other = next(others, None)
            elif again:
                end, seconds = again[0]
                heapreplace(again, (end + seconds, seconds))
        return end

    def n_in_time(self, member: Member, end: Seconds, now: Seconds) -> int:
        """Return how many more sets a member would do until then."""
        lag = self._paces.lag_of(member)
        line, _ = left(member, self.pace(member), lag, now)
        n_sets = (end - line.at(now)) / self.set_seconds(member)
        return max(0, math.floor(n_sets + _ROUNDING))

    def hungry(self, end: Seconds = math.inf, now: Seconds = 0.0) -> list[Member]:
        """Return who has almost nothing left, and would do one set more until then."""
        limit = end + _ROUNDING * abs(end)
        return [self._rows[n].member for n in self._hungry.at_most(limit, now)]

    def idle(self, seconds: Seconds = math.inf) -> list[Member]:
        """Return who has nothing left, and would do a whole set within that time."""
        return [self._rows[n].member for n in self._idle.at_most(seconds, 0.0)]

    def last(
        self, now: Seconds, *, push: Seconds, other_than: Member | None = None
    ) -> tuple[Seconds, Copy] | None:
        """Return what will be done last of what has one copy.

        And in how many seconds it will be computed, or a rival of it has to be.

        Args:
            now: The time.
            push: How long a push is expected to take.
            other_than: Whose are left out; somebody who has nothing left to compute.
        """
        found: tuple[Seconds, Copy] | None = None
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

    def _first(self, grants: Iterator[int], other_than: Member | None) -> Copy | None:
        pushes = (self._pushes[grant] for grant in grants)
        return next((copy for owner, copy in pushes if owner is not other_than), None)


def _put(ranked: Ranked, number: int, line: Line | None) -> None:
    if line is None:
        ranked.drop(number)
    else:
        ranked.put(number, line)
