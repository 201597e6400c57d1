"""A job run twice, in virtual time and for real: do the figures agree?

Both runs are of this host. What is compared is what the supervisor tells of either, so
both are measured alike. Bytes are compared per step where the runs took as many, for
they are to be the same to the last one.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, final

import msgspec

from distbelief.forecast.chaos.hands import PERIOD_SECONDS
from distbelief.forecast.chaos.real import Attacker
from distbelief.forecast.chaos.schedule import Blow, faults_of
from distbelief.forecast.constants import Constant
from distbelief.forecast.hosting import Hosting
from distbelief.forecast.hosts import Hosts
from distbelief.forecast.measuring import begun_in, measure
from distbelief.forecast.rates import keep, mean_of
from distbelief.forecast.side import Side, side_of
from distbelief.forecast.staging import StagedJob, Staging
from distbelief.forecast.virtual_run import run_virtually
from distbelief.forecast.watching import N_EVENTS_MAX
from distbelief.job.configuration.sections import Job
from distbelief.job.display.view import SupervisorView
from distbelief.job.processes.launcher import Launcher
from distbelief.job.training import train
from distbelief.roles import Address, Seconds
from distbelief.scratch import scratch
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault, Pause


REPORT_SECONDS: Final = 0.25


@final
class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Both runs of a job, and what the simulated one rests on."""

    job: str
    simulated: Side
    real: Side
    constants: tuple[Constant, ...] = ()

    def error_of(self, figure: str) -> float | None:
        """Return how far a simulated figure is from the real one, as a share."""
        simulated: float | None = getattr(self.simulated, figure)
        real: float | None = getattr(self.real, figure)
        if simulated is None or not real:
            return None
        return abs(simulated / real - 1.0)


def both_ways(
    job: Job, *, seed: int = 0, blows: Sequence[Blow] = (), horizon: Seconds = 1.0
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
    keep(job, mean_of([before, measure(job, n_processes=n_processes)]))
    simulated, constants = simulated_side(job, seed=seed, blows=blows, horizon=horizon)
    return Agreement(job=job.name, simulated=simulated, real=real, constants=constants)


def simulated_side(
    job: Job, *, seed: int, blows: Sequence[Blow] = (), horizon: Seconds = 1.0
) -> tuple[Side, tuple[Constant, ...]]:
    """Run a job in virtual time, on this host as it was measured.

    Returns:
        What came of it, and every constant it rests on.

    Raises:
        JobError: the job cannot be run.
    """
    job = _reporting(job)
    hosts = Hosts(None, machines=None, measures=True)
    with Staging() as staging:
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
        ended = run_virtually(staged, hosting, seed=seed, faults=faults)
    side = side_of(ended.view, job, error=ended.outcome.error)
    return side, hosts.constants


def as_dealt(blow: Blow, *, horizon: Seconds, roles: Sequence[str]) -> Sequence[Fault]:
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


def training_begins(staged: StagedJob, hosting: Hosting, *, seed: int) -> Seconds:
    """Return when the supervisor of an undisturbed run hears of the first samples."""
    simulation = SimulatedCluster(
        hosting.builders(staged), seed=seed, options=hosting.options(staged)
    )
    simulation.run_until(lambda: begun_in(simulation), max_events=N_EVENTS_MAX)
    return simulation.now


def real_side(job: Job, *, blows: Sequence[Blow] = (), horizon: Seconds = 1.0) -> Side:
    """Run a job in processes of this host; what it leaves behind is removed.

    Raises:
        JobError: the job cannot be run.
    """
    views: list[SupervisorView] = []

    def look(view: SupervisorView) -> bool:
        views[:] = [view]
        return attacker.watch(view)

    attacker = Attacker(lambda _: blows, horizon=horizon)
    with scratch() as folder, attacker.turns:
        output = msgspec.structs.replace(_reporting(job).output, directory=str(folder / "run"))
        with Launcher() as launcher:
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
