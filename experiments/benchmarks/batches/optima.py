"""Races to an optimum: Sandblaster, scipy and torch.optim.LBFGS.

Each peer minimises the same objective in one process with as many threads as the job has replicas,
and reports when it first was at the target, and after how many evaluations.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(kw_only=True)
class Outcome:
    """When a loss was first at a target."""

    target: float
    loss: float = math.inf  # the best
    seconds: float | None = None  # until it was at the target; None: it never was
    n_evaluations: int | None = None  # likewise
    begun: float = field(default_factory=time.perf_counter)

    def note(self, loss: float, objective: Objective) -> None:
        self.loss = min(self.loss, loss)
        if loss <= self.target and self.seconds is None:
            self.seconds = time.perf_counter() - self.begun
            self.n_evaluations = objective.n_evaluations


def least_loss(objective: Objective, *, small: bool) -> float:
    """Return the least loss that scipy finds: as exactly as it can, if not small."""
    n_max = 60 if small else 5000
    options = {"maxiter": n_max, "maxfun": 2 * n_max, "ftol": 0.0, "gtol": 1e-11}
    found = scipy_minimize(  # type: ignore[call-overload]  # its stub wants *args
        objective, objective.initial, jac=True, method="L-BFGS-B", options=options
    )
    return float(found.fun)


def by_scipy(objective: Objective, target: float) -> Outcome:
    outcome = Outcome(target=target)

    def watched(point: Doubles) -> tuple[float, Doubles]:
        loss, gradient = objective(point)
        outcome.note(loss, objective)
        return loss, gradient

    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-9}
    scipy_minimize(  # type: ignore[call-overload]  # as above
        watched, objective.initial, jac=True, method="L-BFGS-B", options=options
    )
    return outcome


def by_torch(objective: Objective, target: float) -> Outcome:
    outcome = Outcome(target=target)
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
        outcome.note(loss, objective)
        return loss

    optimizer.step(closure)
    return outcome


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
    algorithm = {
        "loss": problem.loss_name,
        "l2": problem.l2,
        "max_evaluations": 1000,
        "portion": problem.portion,
    }
    ours = job(problem.name, algorithm, data=problem.arguments, stop={"loss": target})
    outcome = Outcome(target=target, loss=ours.run.summary.loss or float("nan"))
    if outcome.loss <= target:
        outcome.seconds = ours.training_seconds
        # The coordinator's own count has one more, which it had begun.
        outcome.n_evaluations = ours.run.summary.samples // len(problem.data[0])
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
    n_ours = n_scipy = 0
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
        rows = {
            name: {
                "seconds": "" if o.seconds is None else f"{o.seconds:.2f}",
                "evaluations": "" if o.n_evaluations is None else f"{o.n_evaluations}",
                "loss": f"{o.loss:.9g}",
            }
            for name, o in outcomes.items()
        }
        measurement.show(f"{title} (our start, besides: {start:.1f} s)", rows)
        if ours.n_evaluations and outcomes["scipy"].n_evaluations:
            n_ours += ours.n_evaluations
            n_scipy += outcomes["scipy"].n_evaluations
    return {"evaluations_over_scipy": n_ours / n_scipy}
