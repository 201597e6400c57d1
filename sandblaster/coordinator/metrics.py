"""Metrics of a coordinator and requests of its supervisor: both outlive a run."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.roles.role import Seconds
from sandblaster.coordinator.workers import WorkerPool
from sandblaster.optimizers.base import IterationDone


NAMES: Final = ("computing", "fetching", "staging", "waiting", "algebra", "saving")


@final
class TimeShares:
    """Shares of the workers' time, over all finished evaluations.

        BeginEvaluation                               FinishEvaluation, Execute, BeginEvaluation
        ----+----------+-----------+---------+-----------+---------+-------------------+
            | fetching | computing | staging | computing | waiting | saving, algebra   |
                parameters  a chunk    its sum   the last   for others

    Workers report how long they computed; the rest is by the coordinator's clock, between
    their reports. Computing counts all attempts, also those that are dropped.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._began_at: Seconds = 0.0
        self._ended_at: Seconds | None = None  # end of the last evaluation, in this run

    def run_begins(self) -> None:
        self._ended_at = None

    def evaluation_begins(self, pool: WorkerPool, now: Seconds) -> None:
        if self._ended_at is not None:
            # Between evaluations the shards execute commands, and all workers wait.
            self._seconds["algebra"] += len(pool) * (now - self._ended_at)
        self._began_at = now

    def evaluation_ends(self, pool: WorkerPool, now: Seconds) -> None:
        for worker in pool:
            spent = worker.spent
            there = now - max(self._began_at, worker.joined_at)
            self._seconds["computing"] += spent.computing
            self._seconds["fetching"] += spent.fetching
            self._seconds["staging"] += spent.staging
            self._seconds["waiting"] += max(0.0, there - spent.total)
        self._ended_at = now

    def saved(self, pool: WorkerPool, *, since: Seconds, now: Seconds) -> None:
        if self._ended_at is not None:
            self._seconds["saving"] += len(pool) * (now - since)
            self._ended_at += now - since

    def counters(self) -> Mapping[str, float]:
        """Return each share of the total; zeros before the first evaluation ends."""
        total = sum(self._seconds.values()) or 1.0
        return {f"{name}_share": part / total for name, part in self._seconds.items()}


@final
@dataclass(slots=True, kw_only=True)
class CoordinatorMetrics:
    """Metrics of all runs together."""

    iterated: IterationDone | None = None  # the newest iteration
    offset: int = 0  # iterations before the optimizer last restarted
    samples: int = 0  # examples of all finished evaluations
    n_wasted: int = 0  # examples computed more than once
    n_backups: int = 0  # backup tasks assigned
    n_evaluations: int = 0  # evaluations begun
    shares: TimeShares = field(default_factory=TimeShares)  # of the workers' time
    save_again_at: Seconds = 0.0  # when the next checkpoint may be taken

    @property
    def iteration(self) -> int:
        return self.offset + (self.iterated.iteration if self.iterated else 0)


_N_SAVES_MAX: Final = 8


@final
@dataclass(slots=True, kw_only=True)
class PendingRequests:
    """What the supervisor has requested."""

    saves: deque[str] = field(default_factory=deque)  # labels of checkpoints to take
    # Label and error of each that was tried.
    saved: deque[tuple[str, str | None]] = field(default_factory=deque)
    stop: bool = False  # whether to end

    def request_save(self, label: str) -> None:
        """Request a checkpoint with this label at the next accepted point."""
        if label in self.saves:
            return
        if len(self.saves) >= _N_SAVES_MAX:
            error = f"{_N_SAVES_MAX} checkpoints are pending already: request them less often"
            self.saved.append((label, error))
        else:
            self.saves.append(label)
