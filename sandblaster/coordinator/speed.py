"""Speed of each worker, and how long things will take, judged by how long they took.

As in LATE (Zaharia et al. 2008), what counts is the expected end of a task, and machines
differ: each worker has a pace (seconds per example) of its own, and a task that is overdue
is expected to take as long again. A worker without a pace of its own is expected to be typical.
"""

import math
from bisect import bisect_left, insort
from typing import Final, final

from distbelief.roles.role import Seconds
from sandblaster.coordinator.finish_times import FinishTimes, Line
from sandblaster.coordinator.workers import ChunkCopy, WorkerState, typical


ASSIGNMENT_SHARE: Final = 0.01
"""Largest share of computing time that assigning may take."""

N_ASSIGNED_MAX: Final = 32
"""Chunks assigned to one worker at once."""

_OVERDUE: Final = 1.25
"""Factor of the expected time after which the expectation says nothing."""


def n_at_once(worker: WorkerState, chunk_seconds: Seconds) -> int:
    """Return how many chunks to assign at once, so that assigning costs next to nothing."""
    if worker.turnaround is None or chunk_seconds <= 0.0:
        return 1
    wanted = worker.turnaround / (ASSIGNMENT_SHARE * chunk_seconds)
    return max(1, min(N_ASSIGNED_MAX, math.ceil(wanted)))


def left(worker: WorkerState, pace: float, lag: Seconds, now: Seconds) -> tuple[Line, Seconds]:
    """Return the seconds until a worker has computed all its chunks.

    The first chunk is in progress and the others wait for it; the first of an evaluation
    waits for the parameters.

    Args:
        worker: Whose chunks.
        pace: Its seconds per example; 0: not known.
        lag: How long it waits for parameters.
        now: The time.

    Returns:
        The seconds as a line over time, and until when that line holds.
    """
    outstanding = worker.outstanding
    if not outstanding:
        return Line(0.0), math.inf
    first = outstanding[0]
    begun = max(first.assigned_at, worker.progress_at)
    expected = pace * first.n_examples + (0.0 if worker.n_chunks else lag)
    others = sum(pace * copy.n_examples for copy in outstanding[1:])
    elapsed = now - begun
    if elapsed < expected:
        return Line(begun + expected + others, -1), begun + expected
    if elapsed < _OVERDUE * expected:
        return Line(others), begun + _OVERDUE * expected
    return Line(others - begun, 1), math.inf


def seconds_to_end(workers: FinishTimes, n_chunks: int, now: Seconds) -> Seconds:
    """Return when `n_chunks` more chunks are done, if they are assigned as well as possible.

    Chunks may be divided here, so the true time is later, by less than the fastest worker
    takes for one.

    Args:
        workers: For each, the seconds until it has nothing left; its weight is its chunks
            per second.
        n_chunks: Chunks to be assigned; at least one.
        now: The time.
    """
    end, n_before = math.inf, len(workers) + 1
    while True:  # only workers that finish before `end` take part: fewer each time
        n, speed, sets = workers.below(end, now)
        # Rounding alone can bring one back that finishes exactly at the end.
        if not n or n >= n_before:
            return end
        end, n_before = (n_chunks + sets) / speed, n


def seconds_to_rival(copy: ChunkCopy, expected: Seconds, now: Seconds) -> Seconds:
    """Return by when a rival of a chunk that is being pushed must be computed to be first.

    An overdue push is expected to take as long again; a rival has its own push before it. So
    no push has a rival that may still be in time.
    """
    return now - copy.token_issued_at - expected if is_overdue(copy, expected, now) else 0.0


def is_overdue(copy: ChunkCopy, expected: Seconds, now: Seconds) -> bool:
    return now - copy.token_issued_at > max(_OVERDUE * expected, 0.0)


_PACES_PER_REFRESH: Final = 8
"""The typical pace is computed again when one of so many paces is new ..."""

_UNMEASURED_PER_REFRESH: Final = 16
"""... and one for so many workers without a pace; or ..."""

_LAG_GROWTH: Final = 1.1
"""... when a worker waits for parameters this many times as long as any before."""


@final
class SpeedModel:
    """Seconds per example and lag of all workers."""

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._sorted: list[float] = []
        self._lags: dict[int, Seconds] = {}
        self._typical = 0.0
        self._longest_lag: Seconds = 0.0
        self._n_new = 0  # paces that changed since the last refresh
        self._has_waited = False  # whether a lag has grown much since then
        self._had_unmeasured = False  # whether a worker had no pace then
        # Workers that have no pace of their own, by number.
        self.unmeasured: dict[int, WorkerState] = {}

    def update(self, worker: WorkerState) -> None:
        self._change(worker.number, worker.seconds_per_example)
        if worker.lag is not None:
            self._lags[worker.number] = worker.lag
            self._has_waited |= worker.lag > _LAG_GROWTH * self._longest_lag
        if worker.seconds_per_example is None:
            self.unmeasured[worker.number] = worker
        else:
            self.unmeasured.pop(worker.number, None)

    def forget(self, worker: WorkerState) -> None:
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
        """Compute the typical pace again, if a worker needs it and enough has changed."""
        had_unmeasured = self._had_unmeasured
        self._had_unmeasured = bool(self.unmeasured)
        is_due = not had_unmeasured or self._is_stale
        if not self.unmeasured or not is_due:
            return False
        self._n_new, self._has_waited = 0, False
        self._typical = typical(self._sorted) or 0.0
        # Not the median: where parameters reach workers one after the other, the lag of
        # the first ones would make all others look late.
        self._longest_lag = max(self._lags.values(), default=0.0)
        return True

    @property
    def _is_stale(self) -> bool:
        # With 2,000 new workers every report would refresh all rows otherwise.
        is_first = not self._typical and self.is_known
        n_of_paces = len(self._sorted) / _PACES_PER_REFRESH
        n_of_unmeasured = len(self.unmeasured) / _UNMEASURED_PER_REFRESH
        is_enough = self._n_new >= max(n_of_paces, n_of_unmeasured)
        return is_first or is_enough or self._has_waited

    @property
    def is_known(self) -> bool:
        return bool(self._sorted)

    @property
    def fastest(self) -> float:
        return self._sorted[0]

    def of(self, worker: WorkerState) -> float:
        """Return a worker's seconds per example; 0 if not known."""
        own = worker.seconds_per_example
        return self._typical if own is None else own

    def lag_of(self, worker: WorkerState) -> Seconds:
        """Return how long a worker waits for parameters, in each evaluation."""
        return self._longest_lag if worker.lag is None else worker.lag
