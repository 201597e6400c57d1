"""How fast replicas compute, and fetch before: each its own way, newcomers as others.

A newcomer computes at the typical pace, and waits for parameters as long as whoever has
waited longest: where they come to one after the other, those who have them first say
nothing of the others, who would all be late by them.

Both are looked up again when an eighth of all paces are new, and one for 16 members who
have none, or somebody has waited longer: of 2,000 replicas that have just begun, all
would be looked at again for each word otherwise.
"""

import math
from bisect import bisect_left, insort
from typing import Final, final

from distbelief.roles.role import Seconds
from sandblaster.coordinator.finish_times import FinishTimes, Line
from sandblaster.coordinator.workers import ChunkCopy, WorkerState, typical


# How long things will take, from how long they took.
#
# LATE (Zaharia et al. 2008) showed that what matters is the time to the end of a task,
# not its progress, and that machines differ: so each replica has a pace of its own, and a
# try that takes longer than it should is expected to take as long again.

ASSIGNMENT_SHARE: Final = 0.01
"""Of the time of computing that dealing may take."""

N_ASSIGNED_MAX: Final = 32
"""Sets dealt to one replica at once."""

_OVERDUE: Final = 1.25
"""Times what was expected: then the expectation is worth nothing."""


def n_at_once(worker: WorkerState, chunk_seconds: Seconds) -> int:
    """Return how many sets to deal at once, so that dealing costs next to nothing."""
    if worker.turnaround is None or chunk_seconds <= 0.0:
        return 1
    wanted = worker.turnaround / (ASSIGNMENT_SHARE * chunk_seconds)
    return max(1, min(N_ASSIGNED_MAX, math.ceil(wanted)))


def left(worker: WorkerState, pace: float, lag: Seconds, now: Seconds) -> tuple[Line, Seconds]:
    """Return the seconds until a member has computed all that it was dealt.

    The first set is under way, the others wait for it; the first of an evaluation waits
    for the parameters.

    Args:
        member: Who.
        pace: Its seconds per example; 0: nobody knows.
        lag: How long it waits for parameters.
        now: The time.

    Returns:
        What holds now, and until when it does.
    """
    outstanding = worker.outstanding
    if not outstanding:
        return Line(0.0), math.inf
    first = outstanding[0]
    begun = max(first.assigned_at, worker.progress_at)
    expected = pace * first.n_examples + (0.0 if worker.n_sets else lag)
    others = sum(pace * copy.n_examples for copy in outstanding[1:])
    elapsed = now - begun
    if elapsed < expected:
        return Line(begun + expected + others, -1), begun + expected
    if elapsed < _OVERDUE * expected:
        return Line(others), begun + _OVERDUE * expected
    return Line(others - begun, 1), math.inf


def seconds_to_end(workers: FinishTimes, n_sets: int, now: Seconds) -> Seconds:
    """Return when so many more sets will be done, if they are dealt as well as can be.

    No member gets a set that another would have done before; sets may be parted, so the
    true time is later, by less than the quickest member takes for one.

    Args:
        members: Of each, the seconds until it has nothing left to compute; its weight
            is how many sets it computes per second.
        n_sets: To be dealt; at least one.
        now: The time.
    """
    end, n_before = math.inf, len(workers) + 1
    while True:  # of those who have done before all others have: fewer each time
        n, speed, sets = workers.below(end, now)
        # More of them, by rounding alone, where one is done as all the others are.
        if not n or n >= n_before:
            return end
        end, n_before = (n_sets + sets) / speed, n


def seconds_to_rival(copy: ChunkCopy, expected: Seconds, now: Seconds) -> Seconds:
    """Return by when a rival of a granted set must be computed to be done before it.

    Whoever is late takes as long again; a rival has all of its own push before it. So
    nobody rivals a push that may yet be in time.
    """
    return now - copy.token_issued_at - expected if is_overdue(copy, expected, now) else 0.0


def is_overdue(copy: ChunkCopy, expected: Seconds, now: Seconds) -> bool:
    """Return whether the push of a granted set takes longer than it should."""
    return now - copy.token_issued_at > max(_OVERDUE * expected, 0.0)


_PACES_PER_REFRESH: Final = 8
"""The typical pace is looked up again when one of so many paces is new ..."""

_UNMEASURED_PER_REFRESH: Final = 16
"""... and one for so many members without a pace; or ..."""

_LAG_GROWTH: Final = 1.1
"""... if somebody has waited this many times as long for parameters as anybody else."""


@final
class SpeedModel:
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
        self._had_unmeasured = False  # then
        self.unmeasured: dict[int, WorkerState] = {}

    def update(self, worker: WorkerState) -> None:
        """Take the pace that a member has now."""
        self._change(worker.number, worker.seconds_per_example)
        if worker.lag is not None:
            self._lags[worker.number] = worker.lag
            self._has_waited |= worker.lag > _LAG_GROWTH * self._longest_lag
        if worker.seconds_per_example is None:
            self.unmeasured[worker.number] = worker
        else:
            self.unmeasured.pop(worker.number, None)

    def forget(self, worker: WorkerState) -> None:
        """A member is gone."""
        self._change(worker.number, None)
        self._lags.pop(worker.number, None)
        self.unmeasured.pop(worker.number, None)

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

    def refresh_typical(self) -> bool:
        """Look up the typical pace, if somebody needs it, and there is enough news."""
        had_unmeasured = self._had_unmeasured
        self._had_unmeasured = bool(self.unmeasured)
        is_due = not had_unmeasured or self._is_stale
        if not self.unmeasured or not is_due:
            return False
        self._n_new, self._has_waited = 0, False
        self._typical = typical(self._sorted) or 0.0
        self._longest_lag = max(self._lags.values(), default=0.0)
        return True

    @property
    def _is_stale(self) -> bool:
        is_first = not self._typical and self.is_known
        n_of_paces = len(self._sorted) / _PACES_PER_REFRESH
        n_of_unmeasured = len(self.unmeasured) / _UNMEASURED_PER_REFRESH
        is_enough = self._n_new >= max(n_of_paces, n_of_unmeasured)
        return is_first or is_enough or self._has_waited

    # -------------------------------------------------------------------- what is seen

    @property
    def is_known(self) -> bool:
        """Has anybody computed a set?"""
        return bool(self._sorted)

    @property
    def fastest(self) -> float:
        """The least of all; some must be known."""
        return self._sorted[0]

    def of(self, worker: WorkerState) -> float:
        """Return a member's; 0 if nobody knows."""
        own = worker.seconds_per_example
        return self._typical if own is None else own

    def lag_of(self, worker: WorkerState) -> Seconds:
        """Return how long a member waits for parameters, in each evaluation."""
        return self._longest_lag if worker.lag is None else worker.lag
