"""A job run twice, in virtual time and for real: do the figures agree?

Both runs are of this host. What is compared is what the supervisor tells of either, so
both are measured alike. Bytes are compared per step where the runs took as many, for
they are to be the same to the last one.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, final

import msgspec

from distbelief.chaos.local_faults import PERIOD_SECONDS, FaultInjector
from distbelief.chaos.schedule import FaultEvent, faults_of
from distbelief.config.job import Job
from distbelief.core.files import scratch
from distbelief.forecast.calibration import begun_in, mean_of, measure, save_rates
from distbelief.forecast.placement import HostCosts, PlacedCluster
from distbelief.forecast.prepare import Preparation, PreparedJob
from distbelief.forecast.run import N_EVENTS_MAX, run_simulated
from distbelief.launch.local import LocalLauncher
from distbelief.roles.role import Address, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault, Pause
from distbelief.supervisor.view import JobView, Point
from distbelief.trainer import train


# One run of a job, by what its supervisor tells: be it in virtual time or for real.

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


def side_of(view: JobView, job: Job, *, error: str | None) -> Side:
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


REPORT_SECONDS: Final = 0.25


@final
class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Both runs of a job, and what the simulated one rests on."""

    job: str
    simulated: Side
    real: Side
    constants: tuple[tuple[str, str], ...] = ()

    def error_of(self, figure: str) -> float | None:
        """Return how far a simulated figure is from the real one, as a share."""
        simulated: float | None = getattr(self.simulated, figure)
        real: float | None = getattr(self.real, figure)
        if simulated is None or not real:
            return None
        return abs(simulated / real - 1.0)


def both_ways(
    job: Job, *, seed: int = 0, blows: Sequence[FaultEvent] = (), horizon: Seconds = 1.0
) -> Agreement:
    """Run a job for real, and in virtual time, its work measured before and after.

    Args:
        job: The job. It is best ended by [algorithm] max_steps, or by iterations, so
            that both runs do the same work.
        seed: Of the simulation.
        blows: What breaks, in both.
        horizon: Seconds of training that blows are laid over.

    Raises:
        JobError: the job cannot be run.
    """
    # A machine is as fast as it is just now: what was kept may be of another day, and
    # within a minute, of virtual machines, the same step takes a fifth more or less.
    n_processes = os.cpu_count() or 1
    before = measure(job, n_processes=n_processes)
    real = real_side(job, blows=blows, horizon=horizon)
    save_rates(job, mean_of([before, measure(job, n_processes=n_processes)]))
    simulated, constants = simulated_side(job, seed=seed, blows=blows, horizon=horizon)
    return Agreement(job=job.name, simulated=simulated, real=real, constants=constants)


def simulated_side(
    job: Job, *, seed: int, blows: Sequence[FaultEvent] = (), horizon: Seconds = 1.0
) -> tuple[Side, tuple[tuple[str, str], ...]]:
    """Run a job in virtual time, on this host as it was measured.

    Returns:
        What came of it, and every constant it rests on.

    Raises:
        JobError: the job cannot be run.
    """
    job = _reporting(job)
    hosts = HostCosts(None, machines=None, measures=True)
    with Preparation() as staging:
        staged = staging.stage(job)
        hosting = hosts.hosting(job, tell=lambda _: None)
        faults: list[Fault] = []
        if blows:
            begins = training_begins(staged, hosting, seed=seed)
            roles = [entry.name for entry in staged.roster]
            faults = [
                replace(fault, at=begins + fault.at)
                for blow in blows
                for fault in as_dealt(blow, horizon=horizon, roles=roles)
            ]
        ended = run_simulated(staged, hosting, seed=seed, faults=faults)
    side = side_of(ended.view, job, error=ended.outcome.error)
    return side, hosts.constants


def as_dealt(blow: FaultEvent, *, horizon: Seconds, roles: Sequence[str]) -> Sequence[Fault]:
    """Return a blow as hands deal it: who is slow stands still most of the time."""
    if blow.kind != "slow":
        return faults_of(blow, horizon=horizon, roles=roles)
    runs = PERIOD_SECONDS / blow.factor
    n_periods = math.ceil(blow.lasts * horizon / PERIOD_SECONDS)
    return [
        Pause(
            at=blow.at * horizon + index * PERIOD_SECONDS + runs,
            role=Address(blow.role),
            seconds=PERIOD_SECONDS - runs,
        )
        for index in range(n_periods)
    ]


def training_begins(staged: PreparedJob, hosting: PlacedCluster, *, seed: int) -> Seconds:
    """Return when the supervisor of an undisturbed run hears of the first samples."""
    simulation = SimulatedCluster(
        hosting.builders(staged), seed=seed, options=hosting.options(staged)
    )
    simulation.run_until(lambda: begun_in(simulation), max_events=N_EVENTS_MAX)
    return simulation.now


def real_side(job: Job, *, blows: Sequence[FaultEvent] = (), horizon: Seconds = 1.0) -> Side:
    """Run a job in processes of this host; what it leaves behind is removed.

    Raises:
        JobError: the job cannot be run.
    """
    views: list[JobView] = []

    def look(view: JobView) -> bool:
        views[:] = [view]
        return attacker.watch(view)

    attacker = FaultInjector(lambda _: blows, horizon=horizon)
    with scratch() as folder, attacker:
        output = msgspec.structs.replace(_reporting(job).output, directory=str(folder / "run"))
        with LocalLauncher() as launcher:
            run = train(
                msgspec.structs.replace(job, output=output),
                show=False,
                launcher=launcher,
                watch=look,
            )
    return side_of(views[-1], job, error=run.summary.error)


def _reporting(job: Job) -> Job:
    """Return the job, with a curve of many points."""
    output = msgspec.structs.replace(job.output, report_every=REPORT_SECONDS)
    return msgspec.structs.replace(job, output=output)
