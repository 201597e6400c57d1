"""Replicas that are slow, and replicas that are killed: what that costs Sandblaster.

They are paced: they sleep instead of computing, so that four of them fit on two cores.
"""

import os
import signal
from typing import Final, final

from distbelief.supervisor.view import JobView
from distbelief.trainer import Watch
from experiments.benchmarks.batches.jobs import PROBLEMS, Ours, job
from experiments.benchmarks.measuring import measurement


N_PACED: Final = 4
PACE_SECONDS: Final = 1e-3  # of a sample
SLOWNESS: Final = 5.0
PORTIONS_PER_SET: Final = 2


def straggler(*, small: bool) -> dict[str, float]:
    """Let one of four replicas be slow."""
    n = 1_000 if small else 8_000
    ideal = PACE_SECONDS / (N_PACED - 1 + 1 / SLOWNESS)  # seconds per example
    figures: dict[str, float] = {}
    rows: dict[str, dict[str, str]] = {}
    for backups, key in ((True, "straggler_over_ideal"), (False, "straggler_without_backup")):
        ours = _paced_job(n, slowness=SLOWNESS, backups=backups, small=small)
        wasted = ours.figures["wasted"] / ours.run.summary.samples
        figures[key] = ours.seconds_per_example() / ideal
        if backups:
            figures["wasted"] = wasted
        rows["with backups" if backups else "without"] = {
            "evaluation, s": f"{ours.seconds_per_example() * n:.3f}",
            "ideal, s": f"{ideal * n:.3f}",
            "wasted": f"{wasted:.1%}",
        }
    measurement.show("one of four replicas 5x slower, paced", rows)
    return figures


def killed(*, small: bool) -> dict[str, float]:
    """Kill one of four replicas in each iteration; tell what was computed again."""
    n = 2_000 if small else 8_000
    killer = Killer()
    ours = _paced_job(n, slowness=1.0, backups=True, small=small, watch=killer)
    set_size = _portion(small=small) * PORTIONS_PER_SET
    n_again = ours.figures["wasted"] / set_size
    rows = {
        "killed": {
            "iterations": f"{ours.figures['iteration']:.0f}",
            "kills": f"{killer.n_kills}",
            "evaluation, s": f"{ours.seconds_per_example() * n:.3f}",
            "sets computed again": f"{n_again:.1f}",
            "of them backups": f"{ours.figures['backups']:.0f}",
            "per kill": f"{n_again / max(1, killer.n_kills):.2f}",
        }
    }
    measurement.show("one of four replicas killed in each iteration, paced", rows)
    return {}


@final
class Killer:
    """Kills one replica after the other, in the midst of each iteration."""

    def __init__(self) -> None:
        self._iteration = -1
        self._kill_at: float | None = None
        self.n_kills = 0

    def __call__(self, view: JobView) -> bool:
        """Look at the job; never end it."""
        if view.samples and view.step != self._iteration:
            self._iteration = view.step
            self._kill_at = view.now + 0.5
        if self._kill_at is not None and view.now >= self._kill_at:
            self._kill_at = None
            name = f"replica-{self.n_kills % N_PACED}"
            pid = next(role.pid for role in view.roles if role.name == name)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.n_kills += 1
        return False


def _portion(*, small: bool) -> int:
    return 25 if small else 50


def _paced_job(
    n: int, *, slowness: float, backups: bool, small: bool, watch: Watch | None = None
) -> Ours:
    tables: dict[str, dict[str, object]] = {
        "model": {
            "factory": f"{PROBLEMS}:paced_net",
            "arguments": {"seconds": PACE_SECONDS, "slowness": slowness},
        },
        "data": {"train": {"factory": f"{PROBLEMS}:paced_data", "arguments": {"n": n}}},
        "algorithm": {
            "name": "sandblaster",
            "method": "gradient-descent",
            "loss": "mse",
            "portion": _portion(small=small),
            "portions_per_set": PORTIONS_PER_SET,
            "tolerance": 0.0,
            "value_tolerance": 0.0,
            "max_evaluations": 8,
            "backups": backups,
        },
        "cluster": {"replicas": N_PACED, "shards": 2},
    }
    return job(tables, watch=watch)
