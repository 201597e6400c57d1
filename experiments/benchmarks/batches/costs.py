"""What Sandblaster takes beyond the pure gradient, and what slow and killed replicas cost it.

`overhead`, on the speech net of the paper: the machine changes its speed by more than what is to be
seen. So job and plain processes take turns of a few seconds on the same cores; between its turns a
job is stopped by signals, supervisor included. Each evaluation of the job is compared with plain
turns within it. Each process that computes has a core of its own: the kernel is known to put two on
one while another idles. Checkpoints, which would fall into some evaluations only, are left out, and
so are the first evaluations, in which the shards' memory grows with the history: pages that were
never touched are expensive on a virtual machine (here 1.75 ms a MiB).

    job      [----]      [----]      [-|--]      [----]
    plain          [----]      [----]      [----]      [----]
                                       ^ an evaluation has ended

`straggler` and `killed` have paced replicas: they sleep instead of computing, so that four of them
fit on two cores.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import harmonic_mean
from tempfile import TemporaryDirectory
from typing import Final

from distbelief.config import toml
from distbelief.config.load import parse_job
from distbelief.job.callbacks import Watch
from distbelief.job.run.metrics_file import Measurement, read_metrics
from distbelief.job.run.result import Run
from distbelief.job.trainer import run_job
from distbelief.supervisor.view import JobView
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.workers import Workers, module, send
from experiments.benchmarks.measuring.workload import Workload


PROBLEMS: Final = "experiments.benchmarks.batches.problems"
N_REPLICAS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Ours:
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
    problem: str,
    algorithm: toml.Table,
    *,
    model: toml.Table | None = None,
    data: toml.Table | None = None,
    replicas: int = N_REPLICAS,
    stop: toml.Table | None = None,
    watch: Watch | None = None,
    snapshot_every: str = "30 s",
) -> Ours:
    """Minimise a problem of `batches.problems`: with these tables, and these arguments of data."""
    factory = f"{PROBLEMS}:{problem}"
    with TemporaryDirectory() as folder:
        tables = {
            "model": {"factory": f"{factory}_net", **(model or {})},
            "data": {"train": {"factory": f"{factory}_data", "arguments": data or {}}},
            "algorithm": {"name": "sandblaster", "tolerance": 0.0, **algorithm},
            "cluster": {"replicas": replicas, "shards": 2},
            "stop": stop or {},
            "output": {
                "directory": f"{folder}/run",
                "report_every": "100 ms",
                "snapshot_every": snapshot_every,
            },
        }
        job = parse_job(toml.write(tables), path="sandblaster.toml")
        run = run_job(job, show=False, callbacks=[] if watch is None else [watch])
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
    algorithm = {
        "method": "gradient-descent",
        "loss": "mse",
        "portion": _portion(small=small),
        "portions_per_set": PORTIONS_PER_SET,
        "value_tolerance": 0.0,
        "max_evaluations": 8,
        "backups": backups,
    }
    model = {"arguments": {"seconds": PACE_SECONDS, "slowness": slowness}}
    return job("paced", algorithm, model=model, data={"n": n}, replicas=N_PACED, watch=watch)


PORTION: Final = 250
TURN_SECONDS: Final = 3.0
N_EVALUATIONS: Final = 3
HISTORY: Final = 2
# Evaluations until nothing more is allocated: pairs of that history, one more for a trial, and what
# two cuts keep
N_GROWING: Final = 6


@dataclass(slots=True)
class Side:
    """What one side does in a stretch: an evaluation, or more, if an iteration takes several."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all its processes
    n_examples: int = 0

    def over(self, other: "Side") -> float:
        """Return by which share an example takes longer than with the other."""
        return self.seconds / self.n_examples * other.n_examples / other.seconds - 1.0

    def cpu_over(self, other: "Side") -> float:
        """By the processors' time: what keeps a core busy, without the waiting."""
        return self.cpu_seconds / self.n_examples * other.n_examples / other.cpu_seconds - 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Turns:
    """Watches a job, and takes the machine from it for every other turn.

    The first evaluations are no part of it: caches fill, and memory is mapped.
    """

    plain: Workers  # processes that compute portions, one for each replica
    n_growing: int  # evaluations that are no part of it
    n_stretches: int  # after which the job is ended
    stretches: list[tuple[Side, Side]] = field(default_factory=list)  # ours and theirs, so far
    _samples: int = 0
    _n_seen: int = 0  # ends of evaluations
    _since: float = 0.0  # when the job's turn began
    _cpu_since: float = 0.0
    _ours: Side = field(default_factory=Side)
    _theirs: Side = field(default_factory=Side)

    def __call__(self, view: JobView) -> bool:
        pids = [role.pid for role in view.roles if role.pid is not None]
        if view.samples > self._samples:
            self._end_stretch(view, pids)
        elif self._counts and time.perf_counter() - self._since > TURN_SECONDS:
            self._count(pids)
            self._let_others(pids)
            self._begin(pids)
        return len(self.stretches) >= self.n_stretches

    @property
    def _counts(self) -> bool:
        return self._n_seen >= self.n_growing

    def _end_stretch(self, view: JobView, pids: Sequence[int]) -> None:
        counted = self._counts
        self._ours.n_examples = view.samples - self._samples
        self._samples = view.samples
        self._n_seen += 1
        if self._n_seen == 1:
            _bind(view)
        if counted:
            self._count(pids)
            if not self._theirs.n_examples:
                self._let_others(pids)
            self.stretches.append((self._ours, self._theirs))
        self._ours, self._theirs = Side(), Side()
        self._begin(pids)

    def _begin(self, pids: Sequence[int]) -> None:
        self._cpu_since = measurement.cpu_seconds(pids)
        self._since = time.perf_counter()

    def _count(self, pids: Sequence[int]) -> None:
        self._ours.seconds += time.perf_counter() - self._since
        self._ours.cpu_seconds += measurement.cpu_seconds(pids) - self._cpu_since

    def _let_others(self, pids: Sequence[int]) -> None:
        send(signal.SIGSTOP, pids)
        plain, theirs = self.plain, self._theirs
        try:
            turn = plain.turn(seconds=TURN_SECONDS, first_core=0)
        finally:
            send(signal.SIGCONT, pids)
        # Each at its own pace, as if they shared the work as well as can be.
        n_steps = len(turn.steps)
        theirs.seconds += harmonic_mean([sum(steps) for steps in turn.of_each])
        theirs.n_examples += N_REPLICAS * PORTION * n_steps
        theirs.cpu_seconds += turn.cpu_seconds * n_steps


def _bind(view: JobView) -> None:
    cores = sorted(os.sched_getaffinity(0))
    replicas = [role for role in view.roles if role.name.startswith("replica")]
    for index, role in enumerate(replicas):
        if role.pid is not None:
            measurement.bind(role.pid, cores[index % len(cores)])


def overhead(*, small: bool) -> dict[str, float]:
    n_frames = 2_000 if small else 20_000
    workload = Workload(net="speech", batch_size=PORTION, small=small)
    with TemporaryDirectory() as folder:
        program = module("bare.whole_net", workload, 1, "sum")
        with Workers("plain", [program] * N_REPLICAS, Path(folder)) as workers:
            turns = Turns(plain=workers, n_growing=N_GROWING, n_stretches=N_EVALUATIONS)
            ours = job(
                "speech",
                {
                    "loss": "cross_entropy",
                    "portion": PORTION,
                    "history": HISTORY,
                    "value_tolerance": 0.0,
                },
                model={"arguments": {"small": small}, "initial": "seed"},
                data={"n": n_frames, "small": small},
                watch=turns,
                snapshot_every="1 h",
            )
    rows = {
        f"evaluation {k}": {
            "pure, s": f"{plain.seconds / plain.n_examples * n_frames:.2f}",
            "sandblaster, s": f"{own.seconds / own.n_examples * n_frames:.2f}",
            "overhead": f"{own.over(plain):.1%}",
            "of the processors' time": f"{own.cpu_over(plain):.1%}",
        }
        for k, (own, plain) in enumerate(turns.stretches, start=N_GROWING + 1)
    }
    title = f"speech net, {n_frames:,} frames, {N_REPLICAS} processes"
    measurement.show(title, rows)
    spread = measurement.Spread.of([100 * own.over(plain) for own, plain in turns.stretches])
    print(f"overhead: {spread.show()} %")
    shares = {k: v for k, v in ours.figures.items() if k.endswith("share")}
    print(", ".join(f"{name} {value:.1%}" for name, value in shares.items()))
    return {"overhead": spread.median / 100}
