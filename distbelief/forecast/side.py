"""One run of a job, by what its supervisor tells: be it in virtual time or for real."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, final

import msgspec

from distbelief.job.configuration.sections import Job
from distbelief.job.display.view import Point, SupervisorView
from distbelief.roles import Seconds


EDGE: Final = 0.1
N_POINTS_MIN: Final = 4


@final
class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs.

    Attributes:
        step_seconds: Of a replica; of an iteration, where there is a coordinator.
        samples_per_second: While it went steadily, see `steady_rate`.
        staleness_mean: In pushes.
        pushed_bytes: From replicas to shards.
        fetched_bytes: From shards to replicas.
        steps: Of all replicas.
        seconds: Of training.
        error: Why the job failed, if it did.
    """

    step_seconds: Seconds | None
    samples_per_second: float | None
    staleness_mean: float | None
    pushed_bytes: int
    fetched_bytes: int
    steps: int
    seconds: Seconds
    error: str | None


def side_of(view: SupervisorView, job: Job, *, error: str | None) -> Side:
    """Return a run as one side, by what its supervisor knew last."""
    together = any(role.name == "coordinator" for role in view.roles)
    n_trainers = 1 if together else job.cluster.replicas
    rate = steady_rate(view.history)
    if rate is None and view.training_seconds:
        rate = view.samples / view.training_seconds
    per_step = view.samples / view.step if view.step else 0.0
    return Side(
        step_seconds=per_step * n_trainers / rate if rate else None,
        samples_per_second=rate,
        staleness_mean=view.staleness_mean,
        pushed_bytes=view.bytes_in,
        fetched_bytes=view.bytes_out,
        steps=view.step,
        seconds=view.training_seconds,
        error=error,
    )


def steady_rate(history: Sequence[Point]) -> float | None:
    """Return samples per second between the first tenth of the samples and the last.

    How long processes take to start and to end is no matter of steps. Only points count
    at which there were more samples than before: those of a batch come all at once.
    None if the run was too short for that.
    """
    if not history:
        return None
    total = history[-1].samples
    rising = [now for last, now in pairwise(history) if now.samples > last.samples]
    inner = [p for p in rising if EDGE * total <= p.samples <= (1 - EDGE) * total]
    if len(inner) < N_POINTS_MIN or inner[-1].seconds <= inner[0].seconds:
        return None
    seconds = inner[-1].seconds - inner[0].seconds
    return (inner[-1].samples - inner[0].samples) / seconds
