"""What Sandblaster costs beside one process, and what a slow replica costs it.

    python experiments/benchmarks/sandblaster.py [--small] [--only NAME ...]

    optimum     logistic regression (50,000 x 500) and an MLP on digits: seconds and
                evaluations to 1e-6 of the optimum (digits, which has many: to
                5 % above the one that scipy finds); two replicas and two
                shards, beside scipy, torch.optim.LBFGS and Vowpal Wabbit, on the same
                cores. The start of the processes is told apart.
    overhead    the speech net (41,777,152 parameters), batches of 20,000 frames: time
                of an evaluation over that of the pure gradient, computed by as many
                plain processes; one round of these before, one after
    straggler   one of four replicas five times slower (paced processes): time of an
                evaluation over what the summed speeds allow; the same without backup
                tasks; examples computed in vain

All figures: lower is better.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import torch
from torch import nn
from torch.nn import functional

from distbelief.job import toml_text
from distbelief.job.jobfile import parse_job
from distbelief.job.metrics import Measurement, read_metrics
from distbelief.job.run import Run
from distbelief.job.training import train
from distbelief.runtime.losses import Loss
from experiments.benchmarks import batch_peers as peers, measurement
from experiments.benchmarks.batch_peers import Outcome
from experiments.benchmarks.batch_problems import (
    Objective,
    digits_data,
    digits_net,
    logistic_data,
    logistic_loss,
    logistic_net,
)


HERE = "experiments.benchmarks.batch_problems"
N_REPLICAS = 2
SLOWNESS = 5.0

_PURE = """
import sys, time
import torch
from torch.nn import functional
from experiments.benchmarks.workload import Workload
torch.set_num_threads(1)
n_frames, portion, small = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
load = Workload(net="speech", batch_size=portion, small=small)
net, (inputs, targets) = load.module(), load.samples()
def portion_gradient():
    (functional.cross_entropy(net(inputs), targets) * len(inputs)).backward()
portion_gradient()
print("ready", flush=True)
sys.stdin.readline()
begun = time.perf_counter()
for _ in range(n_frames // portion):
    portion_gradient()
print(time.perf_counter() - begun)
"""


@final
@dataclass(frozen=True, kw_only=True)
class Ours:
    """What a job came to.

    Attributes:
        run: It.
        lines: Its metrics: one of each iteration, as far as they are seen.
    """

    run: Run
    lines: list[Measurement]

    @property
    def figures(self) -> dict[str, float]:
        """The coordinator's."""
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
        seen = {line.samples: line.time for line in reversed(begun)}
        first, last = min(seen), max(seen)
        if first == last:
            return float("nan")  # too quick to be seen
        return (seen[last] - seen[first]) / (last - first)


def job(tables: dict[str, dict[str, object]]) -> Ours:
    """Run a job with these tables besides the usual."""
    with TemporaryDirectory() as folder:
        output = {"directory": f"{folder}/run", "report_every": "100 ms"}
        text = toml_text.write({**tables, "output": output})
        run = train(parse_job(text, path="sandblaster.toml"), show=False)
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        if run.summary.error is not None:
            raise RuntimeError(run.summary.error)
        return Ours(run=run, lines=lines)


@final
@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is raced for.

    Attributes:
        name: Of its functions in `batch_problems`.
        data: Inputs and targets.
        net: Makes the model.
        loss: Of it.
        loss_name: As a job file has it.
        l2: Penalty.
        share: Of the optimum, above which the target lies.
        arguments: Of its data, in a job file.
    """

    name: str
    data: tuple[torch.Tensor, torch.Tensor]
    net: Callable[[], nn.Module]
    loss: Loss
    loss_name: str
    l2: float
    share: float
    arguments: dict[str, object]

    def objective(self) -> Objective:
        """Return it for one process, from the beginning."""
        # As in the process that tries a job out.
        torch.manual_seed(0)
        return Objective(self.net(), self.data, loss=self.loss, l2=self.l2)


def by_sandblaster(problem: Problem, *, target: float) -> tuple[Outcome, float]:
    """Return what we come to, and how long the start took."""
    ours = job(
        {
            "model": {"factory": f"{HERE}:{problem.name}_net"},
            "data": {
                "train": {
                    "factory": f"{HERE}:{problem.name}_data",
                    "arguments": problem.arguments,
                }
            },
            "algorithm": {
                "name": "sandblaster",
                "loss": problem.loss_name,
                "l2": problem.l2,
                "tolerance": 0.0,
                "max_evaluations": 1000,
            },
            "cluster": {"replicas": N_REPLICAS, "shards": 2},
            "stop": {"loss": target},
        }
    )
    found = ours.run.summary.loss or float("nan")
    n = len(problem.data[0])
    reached = found <= target
    outcome = Outcome(
        loss=found,
        seconds=ours.training_seconds if reached else None,
        # The coordinator's own count has one more, which it had begun.
        n_evaluations=ours.run.summary.samples // n if reached else None,
    )
    return outcome, ours.run.summary.seconds - ours.training_seconds


def problems(*, small: bool) -> list[Problem]:
    """Return all."""
    n = 2_000 if small else 50_000
    pixels, labels = digits_data().tensors
    return [
        Problem(
            name="logistic",
            data=logistic_data(n).tensors,
            net=logistic_net,
            loss=logistic_loss,
            loss_name=f"{HERE}:logistic_loss",
            l2=1e-4,
            share=1e-6,
            arguments={"n": n},
        ),
        Problem(
            name="digits",
            data=(pixels, labels),
            net=digits_net,
            loss=functional.cross_entropy,
            loss_name="cross_entropy",
            l2=1e-3,
            share=0.05,
            arguments={},
        ),
    ]


def optimum(*, small: bool) -> dict[str, float]:
    """Race to the optimum."""
    torch.set_num_threads(N_REPLICAS)
    evaluations = {"ours": 0, "scipy": 0}
    for problem in problems(small=small):
        target = peers.optimum(problem.objective()) * (1.0 + problem.share)
        ours, start = by_sandblaster(problem, target=target)
        outcomes = {
            "sandblaster": ours,
            "scipy": peers.by_scipy(problem.objective(), target),
            "torch": peers.by_torch(problem.objective(), target),
        }
        if problem.name == "logistic":
            outcomes["vowpal wabbit"] = peers.by_vowpal_wabbit(
                problem.objective(), target, data=problem.data, l2=problem.l2
            )
        title = f"{problem.name}: to {problem.share:g} of the optimum"
        _show_outcomes(title, outcomes, start=start)
        if ours.n_evaluations and outcomes["scipy"].n_evaluations:
            evaluations["ours"] += ours.n_evaluations
            evaluations["scipy"] += outcomes["scipy"].n_evaluations
    return {"evaluations_over_scipy": evaluations["ours"] / evaluations["scipy"]}


def overhead(*, small: bool) -> dict[str, float]:
    """Compare evaluations with the pure gradient."""
    portion, n_frames = 250, 2_000 if small else 20_000
    before = _pure_seconds(n_frames, portion, small=small)
    ours = job(
        {
            "model": {
                "factory": "experiments.benchmarks.speech_frames:net",
                "arguments": {"small": small},
                "initial": "seed",
            },
            "data": {
                "train": {
                    "factory": "experiments.benchmarks.speech_frames:frames",
                    "arguments": {"n": n_frames, "small": small},
                }
            },
            "algorithm": {
                "name": "sandblaster",
                "loss": "cross_entropy",
                "portion": portion,
                "history": 3,
                "max_evaluations": 30 if small else 5,
            },
            "cluster": {"replicas": N_REPLICAS, "shards": 2},
        }
    )
    after = _pure_seconds(n_frames, portion, small=small)
    seconds = ours.seconds_per_example() * n_frames
    pure = (before + after) / 2
    rows = {
        "pure gradient": {"seconds": f"{before:.2f}, {after:.2f}"},
        "sandblaster": {"seconds": f"{seconds:.2f}"},
    }
    measurement.show(f"speech net, {n_frames:,} frames, {N_REPLICAS} processes", rows)
    return {"overhead": seconds / pure - 1.0}


def _pure_seconds(n_frames: int, portion: int, *, small: bool) -> float:
    """Return the time in which plain processes compute the gradient side by side."""
    arguments = [str(n_frames // N_REPLICAS), str(portion), str(int(small))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PURE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(N_REPLICAS)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    begun = time.perf_counter()
    ends = [process.communicate("\n")[0] for process in processes]
    del begun
    return max(float(json.loads(end)) for end in ends)


def straggler(*, small: bool) -> dict[str, float]:
    """Let one of four replicas be slow."""
    n, pace = 1_000 if small else 8_000, 1e-3
    ideal = pace / (3.0 + 1.0 / SLOWNESS)  # seconds per example
    figures: dict[str, float] = {}
    rows: dict[str, dict[str, str]] = {}
    for backups, key in (
        (True, "straggler_over_ideal"),
        (False, "straggler_without_backup"),
    ):
        ours = job(
            {
                "model": {
                    "factory": f"{HERE}:paced_net",
                    "arguments": {"seconds": pace, "slowness": SLOWNESS},
                },
                "data": {
                    "train": {"factory": f"{HERE}:paced_data", "arguments": {"n": n}}
                },
                "algorithm": {
                    "name": "sandblaster",
                    "method": "gradient-descent",
                    "loss": "mse",
                    "portion": 25 if small else 50,
                    "portions_per_set": 2,
                    "tolerance": 0.0,
                    "value_tolerance": 0.0,
                    "max_evaluations": 8,
                    "backups": backups,
                },
                "cluster": {"replicas": 4, "shards": 2},
            }
        )
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


def _show_outcomes(title: str, outcomes: dict[str, Outcome], *, start: float) -> None:
    rows = {
        name: {
            "seconds": "" if o.seconds is None else f"{o.seconds:.2f}",
            "evaluations": "" if o.n_evaluations is None else f"{o.n_evaluations}",
            "loss": f"{o.loss:.9g}",
            "": o.error or "",
        }
        for name, o in outcomes.items()
    }
    measurement.show(f"{title} (our start, besides: {start:.1f} s)", rows)


PARTS = {"optimum": optimum, "overhead": overhead, "straggler": straggler}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="for a look: seconds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name in options.only:
        figures |= PARTS[name](small=options.small)
    print(f"load of this machine in the last minute: {measurement.load():.1f}")
    measurement.conclude("sandblaster", figures)


if __name__ == "__main__":
    main()
