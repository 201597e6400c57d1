"""Replicas that are slow, and replicas that are killed: what that costs Sandblaster.

They are paced: they sleep instead of computing, so that four of them fit on two cores.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from distbelief.config import toml
from distbelief.config.load import parse_job
from distbelief.run.metrics_file import Measurement, read_metrics
from distbelief.run.result import Run
from distbelief.supervisor.view import JobView
from distbelief.trainer import Watch, train
from experiments.benchmarks.measuring import measurement


PROBLEMS: Final = "experiments.benchmarks.batches.problems"
N_REPLICAS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Ours:
    """What a job came to."""

    run: Run
    lines: list[Measurement]  # its metrics: one of each iteration, as far as they are seen

    @property
    def figures(self) -> dict[str, float]:
        return self.run.summary.figures

    @property
    def training_seconds(self) -> float:
        """Of all evaluations, by the pace of those after the first.

        Before that processes start, and build their data, each at its own pace.
        """
        return self.seconds_per_example() * self.run.summary.samples

    def seconds_per_example(self) -> float:
        """Return it, between the first and the last iteration that were seen.

        Lines from before the first tell of the start of the processes.
        """
        begun = [line for line in self.lines if line.samples]
        if not begun:
            raise RuntimeError("the job ended before anything of it was seen")
        seen = {line.samples: line.time for line in reversed(begun)}
        first, last = min(seen), max(seen)
        if first == last:
            return float("nan")  # too quick to be seen
        return (seen[last] - seen[first]) / (last - first)


def job(
    tables: dict[str, dict[str, object]],
    *,
    watch: Watch | None = None,
    snapshot_every: str = "30 s",
) -> Ours:
    with TemporaryDirectory() as folder:
        output = {
            "directory": f"{folder}/run",
            "report_every": "100 ms",
            "snapshot_every": snapshot_every,
        }
        text = toml.write({**tables, "output": output})
        run = train(parse_job(text, path="sandblaster.toml"), show=False, watch=watch)
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        if run.summary.error is not None:
            raise RuntimeError(run.summary.error)
        return Ours(run=run, lines=lines)


N_PACED: Final = 4
PACE_SECONDS: Final = 1e-3  # of a sample
SLOWNESS: Final = 5.0
PORTIONS_PER_SET: Final = 2


def straggler(*, small: bool) -> dict[str, float]:
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
