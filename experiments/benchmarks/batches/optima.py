"""Races to an optimum: Sandblaster, scipy, torch.optim.LBFGS and Vowpal Wabbit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.nn import functional

from distbelief.task.losses import Loss
from experiments.benchmarks.batches import peers
from experiments.benchmarks.batches.jobs import N_REPLICAS, PROBLEMS, job
from experiments.benchmarks.batches.peers import Outcome
from experiments.benchmarks.batches.problems import (
    Objective,
    digits_data,
    digits_net,
    logistic_data,
    logistic_loss,
    logistic_net,
)
from experiments.benchmarks.measuring import measurement


@final
@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is raced for.

    Attributes:
        name: Of its functions in `batches.problems`.
        data: Inputs and targets.
        net: Makes the model.
        loss: Of it.
        loss_name: As a job file has it.
        l2: Penalty.
        share: Of the optimum, above which the target lies.
        arguments: Of its data, in a job file.
        portion: Samples that a replica computes at once.
    """

    name: str
    data: tuple[torch.Tensor, torch.Tensor]
    net: Callable[[], nn.Module]
    loss: Loss
    loss_name: str
    l2: float
    share: float
    arguments: dict[str, object]
    portion: int

    def objective(self) -> Objective:
        """Return it for one process, from the beginning."""
        # As in the process that tries a job out.
        torch.manual_seed(0)
        return Objective(self.net(), self.data, loss=self.loss, l2=self.l2)


def by_sandblaster(problem: Problem, *, target: float) -> tuple[Outcome, float]:
    """Return what we come to, and how long the start took."""
    ours = job(
        {
            "model": {"factory": f"{PROBLEMS}:{problem.name}_net"},
            "data": {
                "train": {
                    "factory": f"{PROBLEMS}:{problem.name}_data",
                    "arguments": problem.arguments,
                }
            },
            "algorithm": {
                "name": "sandblaster",
                "loss": problem.loss_name,
                "l2": problem.l2,
                "tolerance": 0.0,
                "max_evaluations": 1000,
                "portion": problem.portion,
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
            loss_name=f"{PROBLEMS}:logistic_loss",
            l2=1e-4,
            share=1e-6,
            arguments={"n": n},
            portion=min(2048, n // 8),  # a sample is 500 multiplications
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
            portion=256,
        ),
    ]


def optimum(*, small: bool) -> dict[str, float]:
    """Race to the optimum."""
    torch.set_num_threads(1 if small else N_REPLICAS)
    evaluations = {"ours": 0, "scipy": 0}
    for problem in problems(small=small):
        least = peers.optimum(problem.objective(), small=small)
        target = least * (1.0 + problem.share)
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
