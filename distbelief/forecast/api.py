"""The forecast API: `simulate` predicts how a job would run on a cluster.

The roles and the supervisor are those of `distbelief train`. Gradients are real, time is
virtual. The cost of work is measured on this host (`calibration`) and scaled by the speed of
the cluster's machines.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import msgspec
from rich.console import Console

from distbelief.config.job import Job
from distbelief.config.load import load_job
from distbelief.display.progress import WaitProgress
from distbelief.errors import JobError, StorageError
from distbelief.forecast.placement import HostCosts
from distbelief.forecast.prepare import Preparation
from distbelief.forecast.report import check_place, write_trace
from distbelief.forecast.run import Trial, WorkLog, check_learns_nothing
from distbelief.forecast.sweep import Axis, Variant, axes_of, best_of, combinations, usual_axes


N_SEEDS_MAX: Final = 1000


@final
class SimulationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The simulations that a user asks for."""

    job: Path | Job
    overrides: tuple[str, ...] = ()  # "TABLE.KEY=VALUE", as for `train`
    axes: tuple[Axis, ...] = ()  # the sweep
    cluster: str | None = None  # name or path; None: this host
    machines: int | None = None  # number of machines of the cluster; None: all
    suggests: bool = False  # search for the best configuration
    seeds: tuple[int, ...] = (0,)  # one run of each variant per seed
    trace: Path | None = None  # file for the timeline of the first run
    # True: cost of work as measured on this host. False: cost as computed by the roles.
    measures: bool = True
    priced: bool = False  # times and bytes only: the model is not run

    def __post_init__(self) -> None:
        if not 1 <= len(self.seeds) <= N_SEEDS_MAX:
            raise JobError(f"--seeds {len(self.seeds)}: use 1 to {N_SEEDS_MAX}")
        if min(self.seeds) < 0:
            raise JobError(f"--seed {min(self.seeds)}: use 0 or more")
        if self.machines is not None and self.machines < 1:
            raise JobError(f"--machines {self.machines}: use 1 or more")
        if self.trace is not None and (self.axes or self.suggests):
            raise JobError(
                f"--trace {self.trace} needs a single configuration: leave out --sweep and "
                "--suggest"
            )
        if self.suggests and self.machines is None:
            raise JobError("--suggest needs a number of machines: add for example --machines 16")


@final
class TimelineResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the timeline of a run was written."""

    n_spans_lost: int  # pieces of work that did not fit
    error: StorageError | None  # why it could not be written


@final
class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `simulate`.

    Attributes:
        job: The job of the first variant.
        cluster: The cluster's name.
        constants: Name, value and origin of every constant of the model.
        variants: All variants, in order.
        best: The suggested variant, if a suggestion was asked for.
        drawn: The timeline; None if none was asked for.
    """

    job: Job
    cluster: str
    constants: tuple[tuple[str, str, str], ...]
    variants: tuple[Variant, ...]
    best: Variant | None = None
    drawn: TimelineResult | None = None


def simulate(  # noqa: PLR0913 -- public API: all but the first are options
    job: Job | str | os.PathLike[str],
    *,
    cluster: str | None = None,
    seed: int = 0,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    sweep: Mapping[str, Sequence[object]] | None = None,
    machines: int | None = None,
    suggest: bool = False,
    priced: bool = False,
) -> Forecast:
    """Forecast how a job would run on a cluster.

    Args:
        job: A job, or the path of a job file.
        cluster: Name of a built-in cluster, or path of a cluster file; default: this host.
        seed: Seed of the first run.
        seeds: Number of runs of each variant, to see the variation.
        overrides: "TABLE.KEY=VALUE", as for `train`.
        sweep: Values by key ("cluster.replicas"): all combinations are run.
        machines: Number of machines of the cluster that may be used.
        suggest: Search for the best configuration within `machines`.
        priced: Simulate times and bytes only, without running the model.

    Raises:
        JobError: the job cannot be run, or does not fit the cluster.
    """
    axes = axes_of([f"{key}={','.join(map(str, values))}" for key, values in (sweep or {}).items()])
    wish = SimulationRequest(
        job=job if isinstance(job, Job) else Path(job),
        overrides=tuple(overrides),
        axes=tuple(axes),
        cluster=cluster,
        machines=machines,
        suggests=suggest,
        seeds=tuple(range(seed, seed + seeds)),
        priced=priced,
    )
    return run_request(wish, console=Console(quiet=True))


def run_request(wish: SimulationRequest, *, console: Console) -> Forecast:
    """Run all simulations of a request.

    Raises:
        JobError: the job, cluster or sweep is not valid.
        StorageError: the disk has no space for the timeline.
    """
    axes = wish.axes
    if wish.suggests and not axes:
        assert wish.machines is not None
        axes = tuple(usual_axes(wish.machines))
    chosen = list(combinations(axes))
    jobs = [_job(wish, settings) for settings in chosen]
    hosts = HostCosts(wish.cluster, machines=wish.machines, measures=wish.measures)
    if wish.priced:
        check_learns_nothing(jobs[0], suggests=wish.suggests)
    if wish.trace is not None:
        check_place(wish.trace)
    n_runs = len(chosen) * len(wish.seeds)
    with Preparation() as staging, WaitProgress(console, n_runs=n_runs) as waiting:
        trials = [
            Trial.of(
                staging.stage(job),
                hosts.hosting(job, tell=waiting.say),
                settings,
                priced_by=staging if wish.priced else None,
            )
            for job, settings in zip(jobs, chosen, strict=True)
        ]
        # Check that all variants fit before the first of the long runs.
        planned = [(trial, _planned(wish, trial)) for trial in trials]
        tried = [_tried(wish, trial, variant, waiting) for trial, variant in planned]
    variants = tuple(variant for variant, _ in tried)
    best = None
    if wish.suggests:
        assert wish.machines is not None
        best = best_of(variants, n_machines=wish.machines)
    return Forecast(
        job=jobs[0],
        cluster=hosts.cluster.name,
        constants=hosts.constants,
        variants=variants,
        best=best,
        drawn=next((drawn for _, drawn in tried if drawn is not None), None),
    )


def _job(wish: SimulationRequest, settings: Mapping[str, str]) -> Job:
    if isinstance(wish.job, Job):
        if settings or wish.overrides:
            raise JobError("a Job object cannot be varied: give the path of a job file")
        return wish.job
    overrides = [*wish.overrides, *(f"{key}={v}" for key, v in settings.items())]
    return load_job(wish.job, overrides=overrides)


def _planned(wish: SimulationRequest, trial: Trial) -> Variant:
    # A suggestion skips variants that do not fit; otherwise they are an error.
    if wish.suggests:
        return trial.variant(machines=wish.machines)
    variant = trial.variant()
    if variant.left_out is not None:
        with_what = f"with {trial.name}: " if trial.settings else ""
        raise JobError(f"{with_what}{variant.left_out}")
    return variant


def _tried(
    wish: SimulationRequest, trial: Trial, variant: Variant, waiting: WaitProgress
) -> tuple[Variant, TimelineResult | None]:
    if variant.left_out is not None:
        for _ in wish.seeds:
            waiting.end()
        return variant, None
    outcomes, drawn = [], None
    for index, seed in enumerate(wish.seeds):
        draws = wish.trace is not None and not index
        ended = trial.run(seed=seed, waiting=waiting, keeps_spans=draws)
        if draws and wish.trace is not None:
            drawn = _drawn(wish.trace, ended.ledger)
        outcomes.append(ended.outcome)
    return msgspec.structs.replace(variant, outcomes=tuple(outcomes)), drawn


def _drawn(path: Path, ledger: WorkLog) -> TimelineResult:
    # The results of a long run must not be lost because its timeline cannot be written.
    error = None
    try:
        write_trace(path, ledger)
    except StorageError as refused:
        error = refused
    return TimelineResult(n_spans_lost=ledger.lost_spans, error=error)
