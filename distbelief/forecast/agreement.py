"""A job run twice, in virtual time and for real: do the figures agree?

Both runs are of this host. What is compared is what the supervisor tells of either, so
both are measured alike. Bytes are compared per step where the runs took as many, for
they are to be the same to the last one.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

import msgspec

from distbelief.forecast.hosts import Hosts
from distbelief.forecast.staging import Staging
from distbelief.forecast.virtual_run import run_virtually
from distbelief.job.launcher import Launcher
from distbelief.job.sections import Job
from distbelief.job.training import train
from distbelief.job.view import Point, SupervisorView
from distbelief.roles import Seconds
from distbelief.simulation.faults import Fault


EDGE: Final = 0.1
N_POINTS_MIN: Final = 4
REPORT_SECONDS: Final = 0.25

Watch = Callable[[SupervisorView], bool]


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


@final
class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Both runs of a job."""

    job: str
    simulated: Side
    real: Side

    def error_of(self, figure: str) -> float | None:
        """Return how far a simulated figure is from the real one, as a share."""
        simulated: float | None = getattr(self.simulated, figure)
        real: float | None = getattr(self.real, figure)
        if simulated is None or not real:
            return None
        return abs(simulated / real - 1.0)


def both_ways(
    job: Job,
    *,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    watch: Watch | None = None,
) -> Agreement:
    """Run a job in virtual time and for real, on this host.

    Args:
        job: The job. It is best ended by [algorithm] max_steps, or by iterations, so
            that both runs do the same work.
        seed: Of the simulation.
        faults: What breaks in the simulation.
        watch: What breaks the real run alike: called with its views.

    Raises:
        JobError: the job cannot be run.
    """
    simulated = simulated_side(job, seed=seed, faults=faults)
    real = real_side(job, watch=watch)
    return Agreement(job=job.name, simulated=simulated, real=real)


def simulated_side(job: Job, *, seed: int, faults: Sequence[Fault] = ()) -> Side:
    """Run a job in virtual time, on this host as it was measured.

    Raises:
        JobError: the job cannot be run.
    """
    job = _reporting(job)
    hosts = Hosts(None, machines=None, measures=True)
    with Staging() as staging:
        staged = staging.stage(job)
        hosting = hosts.hosting(job, tell=lambda _: None)
        ended = run_virtually(staged, hosting, seed=seed, faults=faults)
    return side_of(ended.view, job, error=ended.outcome.error)


def real_side(job: Job, *, watch: Watch | None = None) -> Side:
    """Run a job in processes of this host; what it leaves behind is removed.

    Raises:
        JobError: the job cannot be run.
    """
    views: list[SupervisorView] = []

    def look(view: SupervisorView) -> bool:
        views[:] = [view]
        return watch is not None and watch(view)

    with tempfile.TemporaryDirectory(prefix="distbelief-real-") as folder:
        output = msgspec.structs.replace(
            _reporting(job).output, directory=str(Path(folder) / "run")
        )
        with Launcher() as launcher:
            run = train(
                msgspec.structs.replace(job, output=output),
                show=False,
                launcher=launcher,
                watch=look,
            )
    return side_of(views[-1], job, error=run.summary.error)


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

    How long processes take to start and to end is no matter of steps. None if the run
    was too short for that.
    """
    if not history:
        return None
    total = history[-1].samples
    inner = [p for p in history if EDGE * total <= p.samples <= (1 - EDGE) * total]
    if len(inner) < N_POINTS_MIN or inner[-1].seconds <= inner[0].seconds:
        return None
    seconds = inner[-1].seconds - inner[0].seconds
    return (inner[-1].samples - inner[0].samples) / seconds


def _reporting(job: Job) -> Job:
    """Return the job, with a curve of many points."""
    output = msgspec.structs.replace(job.output, report_every=REPORT_SECONDS)
    return msgspec.structs.replace(job, output=output)
