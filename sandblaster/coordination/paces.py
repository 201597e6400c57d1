"""How fast replicas compute, and fetch before: each its own way, newcomers as others.

The typical pace is looked up again when an eighth of all paces are new, and one for 16
members who have none: of 2,000 replicas that have just begun, all would be looked at
again for each word otherwise.
"""

from bisect import bisect_left, insort
from typing import Final, final

from distbelief.roles import Seconds
from sandblaster.coordination.crew import Member, typical


_PACES_OF_NEWS: Final = 8
"""The typical pace is looked up again when one of so many paces is new ..."""

_NEWCOMERS_OF_NEWS: Final = 16
"""... and one for so many members without a pace."""


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
        self._typical_lag: Seconds = 0.0
        self._n_new = 0  # since that was looked up
        self._had_newcomers = False  # then
        self.newcomers: dict[int, Member] = {}

    def look(self, member: Member) -> None:
        """Take the pace that a member has now."""
        self._change(member.number, member.seconds_per_example)
        if member.lag is not None:
            self._lags[member.number] = member.lag
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
        self._n_new = 0
        self._typical = typical(self._sorted) or 0.0
        self._typical_lag = typical(self._lags.values()) or 0.0
        return True

    @property
    def _has_news(self) -> bool:
        is_first = not self._typical and self.is_known
        n_of_paces = len(self._sorted) / _PACES_OF_NEWS
        n_of_newcomers = len(self.newcomers) / _NEWCOMERS_OF_NEWS
        return is_first or self._n_new >= max(n_of_paces, n_of_newcomers)

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
        return self._typical_lag if member.lag is None else member.lag
