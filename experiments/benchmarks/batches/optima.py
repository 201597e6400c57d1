"""Races to an optimum: Sandblaster, scipy and torch.optim.LBFGS.

Each peer minimises the same objective in one process with as many threads as the job has replicas,
and reports when it first was at the target, and after how many evaluations.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize as scipy_minimize
from torch import nn
from torch.nn import functional

from distbelief.task.losses import Loss
from experiments.benchmarks.batches.costs import N_REPLICAS, PROBLEMS, job
from experiments.benchmarks.batches.problems import (
    Doubles,
    Objective,
    digits_data,
    digits_net,
    logistic_data,
    logistic_loss,
    logistic_net,
)
from experiments.benchmarks.measuring import measurement


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: float  # the best
    seconds: float | None  # until it was at the target; None: it never was
    n_evaluations: int | None  # None if it never got there


class Watched:
    """An objective that notes when it first is at a target."""

    def __init__(self, objective: Objective, target: float) -> None:
        self._objective = objective
        self._target = target
        self._begun = time.perf_counter()
        self.best = np.inf
        self.seconds: float | None = None
        self.n_evaluations: int | None = None

    def __call__(self, point: Doubles) -> tuple[float, Doubles]:
        loss, gradient = self._objective(point)
        self.note(loss)
        return loss, gradient

    def note(self, loss: float) -> None:
        self.best = min(self.best, loss)
        if loss <= self._target and self.seconds is None:
            self.seconds = time.perf_counter() - self._begun
            self.n_evaluations = self._objective.n_evaluations

    @property
    def outcome(self) -> Outcome:
        return Outcome(loss=self.best, seconds=self.seconds, n_evaluations=self.n_evaluations)


def least_loss(objective: Objective, *, small: bool) -> float:
    """Return the least loss that scipy finds: as exactly as it can, if not small."""
    n_max = 60 if small else 5000
    options = {"maxiter": n_max, "maxfun": 2 * n_max, "ftol": 0.0, "gtol": 1e-11}
    found = scipy_minimize(  # type: ignore[call-overload]  # its stub wants *args
        objective, objective.initial, jac=True, method="L-BFGS-B", options=options
    )
    return float(found.fun)


def by_scipy(objective: Objective, target: float) -> Outcome:
    watched = Watched(objective, target)
    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-9}
    scipy_minimize(  # type: ignore[call-overload]  # as above
        watched, objective.initial, jac=True, method="L-BFGS-B", options=options
    )
    return watched.outcome


def by_torch(objective: Objective, target: float) -> Outcome:
    watched = Watched(objective, target)
    optimizer = torch.optim.LBFGS(
        objective.net.parameters(),
        max_iter=2000,
        max_eval=4000,
        history_size=10,
        tolerance_grad=1e-9,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        loss = objective.backward()
        watched.note(loss)
        return loss

    optimizer.step(closure)
    return watched.outcome


@dataclass(frozen=True, kw_only=True)
class Problem:
    name: str  # of its functions in `batches.problems`
    data: tuple[torch.Tensor, torch.Tensor]  # inputs and targets
    net: Callable[[], nn.Module]  # makes the model
    loss: Loss  # of it
    loss_name: str  # as a job file has it
    l2: float  # penalty
    share: float  # of the optimum, above which the target lies
    arguments: dict[str, object]  # of its data, in a job file
    portion: int  # samples that a replica computes at once

    def objective(self) -> Objective:
        # As in the process that tries a job out.
        torch.manual_seed(0)
        return Objective(self.net(), self.data, loss=self.loss, l2=self.l2)


def by_sandblaster(problem: Problem, *, target: float) -> tuple[Outcome, float]:
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
    torch.set_num_threads(1 if small else N_REPLICAS)
    evaluations = {"ours": 0, "scipy": 0}
    for problem in problems(small=small):
        least = least_loss(problem.objective(), small=small)
        target = least * (1.0 + problem.share)
        ours, start = by_sandblaster(problem, target=target)
        outcomes = {
            "sandblaster": ours,
            "scipy": by_scipy(problem.objective(), target),
            "torch": by_torch(problem.objective(), target),
        }
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
        }
        for name, o in outcomes.items()
    }
    measurement.show(f"{title} (our start, besides: {start:.1f} s)", rows)
