"""How fast replicas compute, and fetch before: each its own way, newcomers as others.

A newcomer computes at the typical pace, and waits for parameters as long as whoever has
waited longest: where they come to one after the other, those who have them first say
nothing of the others, who would all be late by them.

Both are looked up again when an eighth of all paces are new, and one for 16 members who
have none, or somebody has waited longer: of 2,000 replicas that have just begun, all
would be looked at again for each word otherwise.
"""

from bisect import bisect_left, insort
from typing import Final, final

from distbelief.roles import Seconds
from sandblaster.coordination.crew import Member, typical


_PACES_OF_NEWS: Final = 8
"""The typical pace is looked up again when one of so many paces is new ..."""

_NEWCOMERS_OF_NEWS: Final = 16
"""... and one for so many members without a pace; or ..."""

_WAIT_OF_NEWS: Final = 1.1
"""... if somebody has waited this many times as long for parameters as anybody else."""


@final
class Paces:
    """Seconds per example, of all members.

    Attributes:
        newcomers: Who have no pace of their own, by number.
    """

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._sorted: list[float] = []
        self._lags: dict[int, Seconds] = {}
        self._typical = 0.0
        self._longest_lag: Seconds = 0.0
        self._n_new = 0  # since those were looked up
        self._has_waited = False  # much longer than anybody had until then
        self._had_newcomers = False  # then
        self.newcomers: dict[int, Member] = {}

    def look(self, member: Member) -> None:
        """Take the pace that a member has now."""
        self._change(member.number, member.seconds_per_example)
        if member.lag is not None:
            self._lags[member.number] = member.lag
            self._has_waited |= member.lag > _WAIT_OF_NEWS * self._longest_lag
        if member.seconds_per_example is None:
            self.newcomers[member.number] = member
        else:
            self.newcomers.pop(member.number, None)

    def forget(self, member: Member) -> None:
        """A member is gone."""
        self._change(member.number, None)
        self._lags.pop(member.number, None)
        self.newcomers.pop(member.number, None)

    def _change(self, number: int, pace: float | None) -> None:
        before = self._own.pop(number, None)
        if pace is not None:
            self._own[number] = pace
        if pace == before:
            return
        self._n_new += 1
        if before is not None:
            del self._sorted[bisect_left(self._sorted, before)]
        if pace is not None:
            insort(self._sorted, pace)

    def look_up_typical(self) -> bool:
        """Look up the typical pace, if somebody needs it, and there is enough news."""
        had_newcomers = self._had_newcomers
        self._had_newcomers = bool(self.newcomers)
        is_due = not had_newcomers or self._has_news
        if not self.newcomers or not is_due:
            return False
        self._n_new, self._has_waited = 0, False
        self._typical = typical(self._sorted) or 0.0
        self._longest_lag = max(self._lags.values(), default=0.0)
        return True

    @property
    def _has_news(self) -> bool:
        is_first = not self._typical and self.is_known
        n_of_paces = len(self._sorted) / _PACES_OF_NEWS
        n_of_newcomers = len(self.newcomers) / _NEWCOMERS_OF_NEWS
        is_enough = self._n_new >= max(n_of_paces, n_of_newcomers)
        return is_first or is_enough or self._has_waited

    # -------------------------------------------------------------------- what is seen

    @property
    def is_known(self) -> bool:
        """Has anybody computed a set?"""
        return bool(self._sorted)

    @property
    def quickest(self) -> float:
        """The least of all; some must be known."""
        return self._sorted[0]

    def of(self, member: Member) -> float:
        """Return a member's; 0 if nobody knows."""
        own = member.seconds_per_example
        return self._typical if own is None else own

    def lag_of(self, member: Member) -> Seconds:
        """Return how long a member waits for parameters, in each evaluation."""
        return self._longest_lag if member.lag is None else member.lag
