"""The result of a simulated run, and the spread of results over seeds.

step time       of one replica: training time divided by its share of the steps
time to target  training time until the target of [stop] was met; the whole training time if
                only the final evaluation met it
utilization     share of the time in which the compute executor of a role had work
machine-hours   machines times hours, from the first process to the last
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
    """The metrics of one simulated run."""

    seed: int
    ended: str | None  # stop reason of the supervisor
    error: str | None  # why it failed
    seconds: Seconds  # virtual, of the whole job
    training_seconds: Seconds  # since the first replica began to train
    n_machines: int  # of the cluster, used by the job
    samples: int  # of all replicas
    steps: int  # of all replicas; iterations of a job with a coordinator
    step_seconds: Seconds | None  # of one replica; of one iteration
    samples_per_second: float | None  # mean over the training time
    target_seconds: Seconds | None  # None: not reached, or no target
    metric_name: str
    metric: float | None  # last evaluation on held-out data
    held_out_loss: float | None  # last evaluation on held-out data
    loss: float | None  # last training loss
    staleness_mean: float | None  # in pushes
    staleness_p95: float | None
    pushed_bytes: int  # from replicas to shards
    fetched_bytes: int  # from shards to replicas and the evaluator
    traffic: Mapping[str, float]  # bytes of messages, by the kinds of the two roles
    utilisation: Mapping[str, float]  # by kind of role
    machine_hours: float
    pushes_lost: int  # acknowledged, then lost
    restarts: int  # of all roles
    n_messages: int  # delivered
    digest: str  # of the trace: equal runs have equal digests
    history: tuple[Point, ...] = ()
    figures: Mapping[str, float] = {}  # other metrics of the algorithm


@final
class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of one metric over several seeds."""

    p10: float
    p50: float
    p90: float
    n: int  # number of runs that have this metric

    @staticmethod
    def of(values: Sequence[float | None]) -> "Spread | None":
        """Return the spread of the values that are not None; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p10, p50, p90 = (float(q) for q in np.quantile(known, [0.1, 0.5, 0.9]))
        return Spread(p10=p10, p50=p50, p90=p90, n=len(known))


# Metrics that are shown with their spread over seeds.
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


def spreads(outcomes: Sequence[Outcome]) -> dict[str, Spread]:
    """Return the spread of each metric that at least one run has."""
    found = {
        name: Spread.of([figure(outcome) for outcome in outcomes])
        for name, figure in FIGURES.items()
    }
    return {name: spread for name, spread in found.items() if spread is not None}


def has_target(job: Job) -> bool:
    """Return whether [stop] has a target: an accuracy or a loss."""
    return job.stop.accuracy is not None or job.stop.loss is not None


def reached_at(job: Job, view: JobView) -> Seconds | None:
    """Return the training time at which the target of [stop] was met; None if it was not."""
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
    """Return the seconds of a step, or None before the first one.

    Args:
        view: The last view of the job.
        n_trainers: Number of replicas; 1 if they take each step together (batch methods).
    """
    if not view.step:
        return None
    return view.training_seconds * n_trainers / view.step
