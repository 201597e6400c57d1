"""`simulate`: what a job would do on a cluster, without having one.

The roles are those of `distbelief train`, and so is the supervisor; gradients are real,
time is virtual. What work takes is measured on this host (`rates`), and carried over to
the cluster's machines by their speed.
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
    """What is to be simulated.

    Attributes:
        job: Path of the job file.
        overrides: "TABLE.KEY=VALUE", as for `train`.
        axes: What is varied.
        cluster: Name or path of a cluster; None: this host.
        machines: How many of its machines there are; None: all.
        suggests: Whether the best configuration is looked for.
        seeds: Of the runs of each variant.
        trace: Where the timeline of the first run is written.
        measures: Whether work takes what it takes on this host, measured if need be;
            else what the roles say it costs, at the speed of the cluster's machines.
        priced: Whether nothing is computed: times and bytes are all that is wanted.
    """

    job: Path | Job
    overrides: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    cluster: str | None = None
    machines: int | None = None
    suggests: bool = False
    seeds: tuple[int, ...] = (0,)
    trace: Path | None = None
    measures: bool = True
    priced: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 1 <= len(self.seeds) <= N_SEEDS_MAX:
            raise JobError(f"--seeds {len(self.seeds)}: use 1 to {N_SEEDS_MAX} runs of each")
        if min(self.seeds) < 0:
            raise JobError(f"--seed {min(self.seeds)}: use 0 or more")
        if self.machines is not None and self.machines < 1:
            raise JobError(f"--machines {self.machines}: use 1 or more")
        if self.trace is not None and (self.axes or self.suggests):
            raise JobError(
                f"--trace {self.trace}: of which configuration? Leave --sweep and --suggest out"
            )
        if self.suggests and self.machines is None:
            raise JobError(
                "--suggest: within how many machines? Give --machines, for example --machines 16"
            )


@final
class TimelineResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the timeline that was wished for.

    Attributes:
        n_spans_lost: Pieces of work that did not fit into it.
        error: Why it could not be written, if it could not.
    """

    n_spans_lost: int
    error: StorageError | None


@final
class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        job: As in the file, with what was set.
        cluster: Its name.
        constants: Name, value and origin of every figure it rests on.
        variants: All that were run, in order.
        best: The one to be suggested, if one was asked for.
        drawn: Of the timeline; None if none was wished for.
    """

    job: Job
    cluster: str
    constants: tuple[tuple[str, str, str], ...]
    variants: tuple[Variant, ...]
    best: Variant | None = None
    drawn: TimelineResult | None = None


def simulate(  # noqa: PLR0913 -- a front door: all but the first are options
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
    """Return what a job would do on a cluster.

    Args:
        job: A job, or the path of a job file.
        cluster: Name of one that comes along, or path of a cluster file; by default
            this host.
        seed: Of the first run.
        seeds: How many runs of each variant, to see how far they lie apart.
        overrides: "TABLE.KEY=VALUE", as for `train`.
        sweep: Values by key ("cluster.replicas"): all combinations are run.
        machines: How many machines of the cluster there are.
        suggest: Whether to look for the best configuration within `machines`.
        priced: Whether times and bytes are all that is wanted: nothing is computed.

    Raises:
        JobError: the job cannot be run, or the cluster cannot hold it.
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
    """Run everything that is wished for.

    Raises:
        JobError: something in it cannot be had.
        StorageError: there is no room for its timeline.
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
        # Whether all of them fit is known before the first one has taken its time.
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
            raise JobError("a job that is no file cannot be varied: give the path of its file")
        return wish.job
    overrides = [*wish.overrides, *(f"{key}={v}" for key, v in settings.items())]
    return load_job(wish.job, overrides=overrides)


def _planned(wish: SimulationRequest, trial: Trial) -> Variant:
    """Return a variant before it is run; a suggestion does without those that cannot.

    Raises:
        JobError: the machines do not hold it.
    """
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
    """Run a variant with every seed, unless it is left out.

    Returns:
        The variant, and what came of its timeline.
    """
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
    """Write a timeline; if that fails the figures of the run are there all the same."""
    error = None
    try:
        write_trace(path, ledger)
    except StorageError as refused:
        error = refused
    return TimelineResult(n_spans_lost=ledger.lost_spans, error=error)
