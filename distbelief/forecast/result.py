"""What a run in virtual time came to, as figures; and how they vary over seeds.

step time       of one replica: the time of training, over its share of the steps
time to target  of training, until the rule of [stop] that asks for one was met; all of
                it, if what is measured when it is over is the first to meet that rule
utilisation     the share of the time in which its compute lane had work
machine-hours   machines, times hours from the first process to the last
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import msgspec
import numpy as np

from distbelief.config.job import Job, StopTable
from distbelief.roles.role import Seconds
from distbelief.supervisor.stop_rules import Reached, StopRules
from distbelief.supervisor.view import JobView, Point


@final
class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        seed: Of the simulation.
        ended: Why it ended, in the supervisor's words.
        error: Why it failed, if it did.
        seconds: Virtual, of the whole job.
        training_seconds: Since the first replica began to train.
        n_machines: Of the cluster, that it took.
        samples: Trained on, by all replicas.
        steps: Of all replicas; of a job with a coordinator, iterations.
        step_seconds: Of one replica; of one iteration.
        samples_per_second: Mean over the time of training.
        target_seconds: Of training, until the target was reached; None if it was not,
            or none was asked for.
        metric_name: What `metric` is.
        metric: Held out, last measured.
        held_out_loss: Likewise.
        loss: Of training, last.
        staleness_mean: In pushes.
        staleness_p95: In pushes.
        pushed_bytes: From replicas to shards.
        fetched_bytes: From shards to replicas (and to the evaluator).
        traffic: Bytes of messages, by kind of link.
        utilisation: By kind of role.
        machine_hours: See above.
        pushes_lost: Acknowledged, and gone.
        restarts: Of all roles.
        n_messages: Delivered.
        digest: Of the trace: equal runs have equal ones.
        history: The curve.
        figures: What else the algorithm counts, by name.
    """

    seed: int
    ended: str | None
    error: str | None
    seconds: Seconds
    training_seconds: Seconds
    n_machines: int
    samples: int
    steps: int
    step_seconds: Seconds | None
    samples_per_second: float | None
    target_seconds: Seconds | None
    metric_name: str
    metric: float | None
    held_out_loss: float | None
    loss: float | None
    staleness_mean: float | None
    staleness_p95: float | None
    pushed_bytes: int
    fetched_bytes: int
    traffic: Mapping[str, float]
    utilisation: Mapping[str, float]
    machine_hours: float
    pushes_lost: int
    restarts: int
    n_messages: int
    digest: str
    history: tuple[Point, ...] = ()
    figures: Mapping[str, float] = {}


@final
class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over several seeds.

    Attributes:
        p10: A tenth of the runs has less.
        p50: The median.
        p90: A tenth of the runs has more.
        n: How many runs have this figure at all.
    """

    p10: float
    p50: float
    p90: float
    n: int

    @staticmethod
    def of(values: Sequence[float | None]) -> "Spread | None":
        """Return the spread of those that there are; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p10, p50, p90 = (float(q) for q in np.quantile(known, [0.1, 0.5, 0.9]))
        return Spread(p10=p10, p50=p50, p90=p90, n=len(known))


FIGURES: Final[Mapping[str, Callable[[Outcome], float | None]]] = {
    "step_seconds": lambda run: run.step_seconds,
    "samples_per_second": lambda run: run.samples_per_second,
    "target_seconds": lambda run: run.target_seconds,
    "training_seconds": lambda run: run.training_seconds,
    "metric": lambda run: run.metric,
    "loss": lambda run: run.loss,
    "staleness_mean": lambda run: run.staleness_mean,
    "staleness_p95": lambda run: run.staleness_p95,
    "pushed_bytes": lambda run: float(run.pushed_bytes),
    "fetched_bytes": lambda run: float(run.fetched_bytes),
    "machine_hours": lambda run: run.machine_hours,
    "pushes_lost": lambda run: float(run.pushes_lost),
}
"""Figures that are shown with their spread, by name."""


def spreads(outcomes: Sequence[Outcome]) -> dict[str, Spread]:
    """Return the spread of every figure that any run has."""
    found = {
        name: Spread.of([figure(outcome) for outcome in outcomes])
        for name, figure in FIGURES.items()
    }
    return {name: spread for name, spread in found.items() if spread is not None}


def has_target(job: Job) -> bool:
    """Return whether [stop] asks for an accuracy or a loss."""
    return job.stop.accuracy is not None or job.stop.loss is not None


def reached_at(job: Job, view: JobView) -> Seconds | None:
    """Return when, of the time of training, the target of [stop] was met."""
    if not has_target(job):
        return None
    if (view.stop_reason or "").endswith("reached"):
        return view.training_seconds
    target = StopTable(accuracy=job.stop.accuracy, loss=job.stop.loss)
    rules = StopRules(target, n_train=1, has_test=job.data.test is not None)
    last = Reached(
        samples=0, seconds=0.0, metric=view.metric, held_out_loss=view.held_out_loss, loss=view.loss
    )
    return None if rules.reason(last) is None else view.training_seconds


def step_seconds(view: JobView, *, n_trainers: int) -> Seconds | None:
    """Return the seconds of a step.

    Args:
        view: The last one.
        n_trainers: Replicas that take steps side by side; 1 if they take them together.
    """
    if not view.step:
        return None
    return view.training_seconds * n_trainers / view.step
