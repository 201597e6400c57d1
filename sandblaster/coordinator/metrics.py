"""What outlives a course: the figures of all, and what was asked for meanwhile."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.roles.role import Seconds
from sandblaster.coordinator.workers import WorkerPool
from sandblaster.optimizers.base import IterationDone


# What the time of a run's replicas goes into: shares, which sum to 1.
#
#     Open answered                                               Seal, Perform, Open
#     ----+----------+-----------+---------+-----------+---------+-------------------+
#         | fetching | computing | staging | computing | waiting | saving, algebra   |
#             parameters   a set     its sum    the last   for others
#
# Replicas say how long they computed; what lies between is by the coordinator's clock,
# from one word of theirs to the next. So samples that are read more slowly than they are
# computed on count as fetching and staging. What is computed in vain is computing as
# well. A replica that leaves takes its part of that evaluation with it.

NAMES: Final = ("computing", "fetching", "staging", "waiting", "algebra", "saving")


@final
class TimeShares:
    """Seconds of all replicas together, in all evaluations that came to their end."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._began_at: Seconds = 0.0
        self._ended_at: Seconds | None = None  # the evaluation before, in this course

    def run_begins(self) -> None:
        """What was under way is given up."""
        self._ended_at = None

    def evaluation_begins(self, pool: WorkerPool, now: Seconds) -> None:
        """Until now shards had orders, and replicas nothing."""
        if self._ended_at is not None:
            self._seconds["algebra"] += len(pool) * (now - self._ended_at)
        self._began_at = now

    def evaluation_ends(self, pool: WorkerPool, now: Seconds) -> None:
        """Every set counts, or none will."""
        for worker in pool:
            spent = worker.spent
            there = now - max(self._began_at, worker.joined_at)
            self._seconds["computing"] += spent.computing
            self._seconds["fetching"] += spent.fetching
            self._seconds["staging"] += spent.staging
            self._seconds["waiting"] += max(0.0, there - spent.total)
        self._ended_at = now

    def saved(self, pool: WorkerPool, *, since: Seconds, now: Seconds) -> None:
        """Snapshots were taken, between two evaluations."""
        if self._ended_at is not None:
            self._seconds["saving"] += len(pool) * (now - since)
            self._ended_at += now - since

    def counters(self) -> Mapping[str, float]:
        """Return each as a share of all; zeros before the first evaluation's end."""
        total = sum(self._seconds.values()) or 1.0
        return {f"{name}_share": part / total for name, part in self._seconds.items()}


@final
@dataclass(slots=True, kw_only=True)
class CoordinatorMetrics:
    """Of all courses together.

    Attributes:
        iterated: The newest.
        offset: Iterations before the algorithm began anew.
        samples: Examples of all evaluations that came to their end.
        n_wasted: Examples computed in vain.
        n_backups: Second copies dealt.
        n_evaluations: Begun.
        shares: Of the replicas' time.
        save_again_at: When a snapshot may be taken.
    """

    iterated: IterationDone | None = None
    offset: int = 0
    samples: int = 0
    n_wasted: int = 0
    n_backups: int = 0
    n_evaluations: int = 0
    shares: TimeShares = field(default_factory=TimeShares)
    save_again_at: Seconds = 0.0

    @property
    def iteration(self) -> int:
        """How many there were."""
        return self.offset + (self.iterated.iteration if self.iterated else 0)


@final
@dataclass(slots=True, kw_only=True)
class PendingRequests:
    """What the supervisor has asked for.

    Attributes:
        saves: Labels of snapshots.
        saved: What came of them: label, error.
        stop: Whether to end.
    """

    saves: deque[str] = field(default_factory=deque)
    saved: deque[tuple[str, str | None]] = field(default_factory=deque)
    stop: bool = False
