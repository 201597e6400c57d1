"""Is a forecast true? Jobs in virtual time beside the same jobs in processes here.

    step         of a replica; of an iteration, where there is a coordinator
    samples/s    of all replicas, while it went steadily
    staleness    of a push, mean, in pushes
    pushed, fetched    bytes between replicas and shards: equal to the last one
    others       cores that were taken by what is not of this benchmark

Nothing is fitted on the jobs that are compared: constants are measured on single pieces of work
and on messages (`simulation.forecast.calibration`), and printed.
A broken job is broken alike on both sides: a replica that stands still for a while, or
has its processor a part of the time only. Both runs are of this host, and compared by what the
supervisor reports of either. Bytes have to be equal to the last one.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.core.files import scratch
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.trainer import run_job
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.chaos.local_faults import PERIOD_SECONDS, FaultInjector
from distbelief.simulation.chaos.schedule import FaultEvent, faults_of
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault, Pause
from distbelief.simulation.forecast.calibration import Rate, Rates, begun_in, measure, save_rates
from distbelief.simulation.forecast.placed_cluster import HostCosts, PlacedCluster
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.simulation.forecast.run import N_EVENTS_MAX, run_simulated
from distbelief.supervisor.view import JobView, Point
from experiments.benchmarks.measuring import measurement


EDGE: Final = 0.1
N_POINTS_MIN: Final = 4
REPORT_SECONDS: Final = 0.25


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs."""

    step_seconds: Seconds | None  # of a replica; of an iteration, where there is a coordinator
    samples_per_second: float | None  # while it went steadily, see `steady_rate`
    staleness_mean: float | None  # in pushes
    pushed_bytes: int  # from replicas to shards
    fetched_bytes: int  # from shards to replicas
    steps: int  # of all replicas
    seconds: Seconds  # of training
    error: str | None  # why the job failed, if it did


def side_of(view: JobView, job: Job, *, error: str | None) -> Side:
    together = any(role.name == "coordinator" for role in view.roles)
    n_trainers = 1 if together else job.cluster.n_replicas
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


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Both runs of a job, and what the simulated one rests on."""

    job: str
    simulated: Side
    real: Side
    constants: tuple[tuple[str, str], ...] = ()

    def error_of(self, figure: str) -> float | None:
        simulated: float | None = getattr(self.simulated, figure)
        real: float | None = getattr(self.real, figure)
        if simulated is None or not real:
            return None
        return abs(simulated / real - 1.0)


def both_ways(
    job: Job, *, seed: int = 0, blows: Sequence[FaultEvent] = (), horizon: Seconds = 1.0
) -> Agreement:
    """Run a job for real, and in virtual time, its work measured before and after.

    The job is best ended by [algorithm] max_steps, or by iterations, so that both runs do the same
    work. Blows break something in both; `horizon` seconds of training are what they are laid over.
    """
    # A machine is as fast as it is just now: what was kept may be of another day, and
    # within a minute, of virtual machines, the same step takes a fifth more or less.
    n_processes = os.cpu_count() or 1
    before = measure(job, n_processes=n_processes)
    real = real_side(job, blows=blows, horizon=horizon)
    save_rates(job, mean_of([before, measure(job, n_processes=n_processes)]))
    simulated, constants = simulated_side(job, seed=seed, blows=blows, horizon=horizon)
    return Agreement(job=job.name, simulated=simulated, real=real, constants=constants)


def mean_of(found: Sequence[Rates]) -> Rates:
    """Return the mean of several measurements of one job; work is weighted by its pieces."""
    work: dict[str, Rate] = {}
    for rates in found:
        for key, rate in rates.work.items():
            other = work.get(key, msgspec.structs.replace(rate, n=0))
            n = rate.n + other.n
            seconds = (rate.n * rate.seconds + other.n * other.seconds) / max(1, n)
            waiting = (rate.n * rate.waiting + other.n * other.waiting) / max(1, n)
            work[key] = Rate(unit=rate.unit, seconds=seconds, n=n, waiting=waiting)
    return Rates(work=work, share=min(rates.share for rates in found))


def simulated_side(
    job: Job, *, seed: int, blows: Sequence[FaultEvent] = (), horizon: Seconds = 1.0
) -> tuple[Side, tuple[tuple[str, str], ...]]:
    """Run a job in virtual time, on this host as it was measured; return every constant too."""
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
    """Run a job in processes of this host; what it leaves behind is removed."""
    views: list[JobView] = []

    def look(view: JobView) -> bool:
        views[:] = [view]
        return attacker.watch(view)

    attacker = FaultInjector(lambda _: blows, horizon=horizon)
    with scratch() as folder, attacker:
        output = msgspec.structs.replace(_reporting(job).output, directory=str(folder / "run"))
        job = msgspec.structs.replace(job, output=output)
        with LocalLauncher() as launcher:
            run = run_job(job, show=False, launcher=launcher, callbacks=[look])
    return side_of(views[-1], job, error=run.summary.error)


def _reporting(job: Job) -> Job:
    output = msgspec.structs.replace(job.output, report_every=REPORT_SECONDS)
    return msgspec.structs.replace(job, output=output)


JOB: Final = """
[model]
factory = "experiments.benchmarks.simulated.task:net"
arguments = { width = 440, hidden = 1024, layers = 4 }
[data.train]
factory = "experiments.benchmarks.simulated.task:samples"
arguments = { width = 440, n_samples = 8192 }
[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 64
max_steps = 150
rule = { name = "adagrad", learning_rate = 0.01 }
[cluster]
replicas = 2
shards = 1
[stop]
epochs = 1000
[output]
directory = "runs/simulation"
"""
SANDBLAST: Final = JOB.replace(
    """name = "downpour"
loss = "cross_entropy"
batch_size = 64
max_steps = 150
rule = { name = "adagrad", learning_rate = 0.01 }""",
    """name = "sandblaster"
loss = "cross_entropy"
max_evaluations = 24
tolerance = 0.0
value_tolerance = 0.0
portion = 256""",
).replace("n_samples = 8192", "n_samples = 4096")


HORIZON: Final = 10.0  # seconds of training that blows are laid over
STALENESS_MIN: Final = 0.1  # pushes; a replica that is alone meets none but at its start
PAUSED: Final = FaultEvent(kind="pause", role="replica-1", at=0.2, lasts=0.2)
SLOWED: Final = FaultEvent(kind="slow", role="replica-1", at=0.1, lasts=10.0, factor=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job to be run both ways."""

    name: str
    text: str = JOB
    overrides: tuple[str, ...] = ()
    blows: tuple[FaultEvent, ...] = ()

    @property
    def job(self) -> Job:
        path = Path("simulation.toml")
        return parse_job(self.text, path=path, overrides=self.overrides)


ALONE: Final = ("cluster.replicas=1", "algorithm.max_steps=250")
SPLIT: Final = ("cluster.replicas=1", "cluster.partitions=2")

# Each is over in two minutes, so they can be measured one by one
CASES: Final[Mapping[str, Case]] = {
    "alone": Case(name="Downpour, 1 replica, 1 shard", overrides=ALONE),
    "two": Case(name="Downpour, 2 replicas, 1 shard"),
    "shards": Case(name="Downpour, 2 replicas, 2 shards", overrides=("cluster.shards=2",)),
    "paused": Case(name="Downpour 2 x 1, a replica paused 2 s", blows=(PAUSED,)),
    "slowed": Case(name="Downpour 2 x 1, a replica slowed 3 times", blows=(SLOWED,)),
    "split": Case(name="2 machines of a replica, 1 shard", overrides=SPLIT),
    "sandblaster": Case(name="Sandblaster, 2 replicas, 1 shard", text=SANDBLAST),
}

TINY: Final = ("model.arguments.hidden=32",)


def truth(names: Sequence[str] = tuple(CASES), *, small: bool = False) -> dict[str, float]:
    found: list[Agreement] = []
    rows: dict[str, dict[str, str]] = {}
    others = [0.0]
    for case in [CASES[name] for name in names]:
        job = replace(case, overrides=(*case.overrides, *(TINY if small else ()))).job
        with measurement.usage() as used:
            found.append(both_ways(job, blows=case.blows, horizon=HORIZON))
        others.append(used.others)
        rows[case.name] = {**_row(found[-1]), "others": f"{used.others:.2f}"}
        print(case.name, rows[case.name], flush=True)
    for name, value in found[-1].constants if found else ():
        print(f"  {name}: {value}")
    measurement.show("simulated / real on this host", rows)
    # Of other jobs a share of the staleness says nothing.
    stale = [both for both in found if (both.real.staleness_mean or 0.0) >= STALENESS_MIN]
    return {
        "step_time_error": _worst(found, "step_seconds"),
        "samples_per_second_error": _worst(found, "samples_per_second"),
        "staleness_error": _worst(stale, "staleness_mean"),
        "bytes_differ": float(sum(not _equal_bytes(both) for both in found)),
        "others": max(others),
    }


def _row(both: Agreement) -> dict[str, str]:
    cells = {}
    for figure in ("step_seconds", "samples_per_second", "staleness_mean"):
        simulated, real = getattr(both.simulated, figure), getattr(both.real, figure)
        if simulated is not None and real is not None:
            cells[figure] = f"{simulated:.4g} / {real:.4g}"
    for figure in ("pushed_bytes", "fetched_bytes", "steps"):
        cells[figure] = f"{getattr(both.simulated, figure)} / " + str(getattr(both.real, figure))
    return cells


def _worst(found: Sequence[Agreement], figure: str) -> float:
    errors = [both.error_of(figure) for both in found]  # None: has none
    return max((error for error in errors if error is not None), default=0.0)


def _equal_bytes(both: Agreement) -> bool:
    return all(
        getattr(both.simulated, figure) == getattr(both.real, figure)
        for figure in ("pushed_bytes", "fetched_bytes")
    )
