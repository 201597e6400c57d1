"""The forecast API: `simulate` predicts how a job would run on a cluster.

The roles and the supervisor are those of `distbelief train`. Gradients are real, time is
virtual. The cost of work is measured on this host (`calibration`) and scaled by the speed of
the cluster's machines.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import msgspec
from rich.console import Console
from rich.text import Text
from typing_extensions import override

from distbelief.config.job import Job
from distbelief.config.load import Overrides, job_of, load_job, plain
from distbelief.config.presets import PRESETS
from distbelief.config.toml import inline
from distbelief.core import notebook
from distbelief.core.arguments import checked
from distbelief.core.drawing import plot
from distbelief.core.errors import JobError, StorageError
from distbelief.core.frames import frame
from distbelief.job.display.progress import WaitProgress
from distbelief.simulation.forecast.chooser import (
    AS_GIVEN,
    BY,
    N_LAST,
    N_RUN_MAX,
    N_TRIED_MAX,
    PRESET,
    Search,
    best_of,
    front_of,
)
from distbelief.simulation.forecast.forecast_report import (
    check_place,
    remarks_on,
    table_of,
    write_trace,
)
from distbelief.simulation.forecast.limits import Stage, limit_of
from distbelief.simulation.forecast.placed_cluster import HostCosts
from distbelief.simulation.forecast.prepare import Preparation
from distbelief.simulation.forecast.run import Timeline, Trial, with_outcomes
from distbelief.simulation.forecast.sweep import (
    Axis,
    Outcome,
    Variant,
    checked_axes,
    combinations,
    has_target,
    losses,
    short,
)


if TYPE_CHECKING:
    from matplotlib.figure import Figure


N_SEEDS_MAX: Final = 1000
N_SEEDS_SUGGESTED: Final = 3  # of a suggestion, unless told otherwise
N_ALL_RUN: Final = 16  # combinations of given axes that a suggestion runs without a search


@final
class SimulationRequest(msgspec.Struct, frozen=True, kw_only=True):
    job: Path | Job | Mapping[str, object]
    overrides: Overrides = ()  # as for `train`
    axes: tuple[Axis, ...] = ()  # the sweep
    cluster: str | None = None  # name or path; None: this host
    machines: int | None = None  # number of machines of the cluster; None: all
    suggests: bool = False  # search for the best configuration
    by: str = "time"  # what the best one has least of
    seeds: tuple[int, ...] = (0,)  # one run of each variant per seed
    trace: Path | None = None  # file for the timeline of the first run
    # True: cost of work as measured on this host. False: cost as computed by the roles.
    measures: bool = True

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
class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What `distbelief.simulate` returns: the variants of a job, in virtual time."""

    job: Job  # of the first variant
    cluster: str  # its name
    constants: tuple[tuple[str, str], ...]  # name and value of each constant of the model
    variants: tuple[Variant, ...]  # one for each combination of the sweep, in order
    best: Variant | None = None  # the suggested one, if a suggestion was asked for
    front: tuple[Variant, ...] = ()  # of a suggestion: those than which none is faster and cheaper
    notes: tuple[str, ...] = ()  # of a suggestion: which presets it tried, and which it left out
    timeline: Timeline | None = None  # of the first run, if a trace was asked for

    def _repr_html_(self) -> str:
        run = [variant for variant in self.variants if variant.outcomes]
        table = table_of(run, best=self.best, front=self.front, width=notebook.WIDTH) if run else ""
        title = Text(f"{self.job.name} on {self.cluster}", "bold")
        remarks = map(Text, (*remarks_on(self.variants), *self.notes))
        return notebook.html(lambda console: console.print(title, table, *remarks, sep="\n"))

    @override
    def __repr__(self) -> str:
        n, best = len(self.variants), "" if self.best is None else f"; best: {self.best}"
        only = repr(self.variants[0]) if n == 1 else f"{n} variants"
        return f"<Forecast {self.job.name} on {self.cluster}: {only}{best}>"

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each variant and seed: settings, and figures as of `Outcome`."""
        return [row for variant in self.variants for row in variant.rows()]

    def to_pandas(self) -> object:
        """Return `rows` as a pandas.DataFrame; JobError without pandas."""
        return frame(self.rows())

    def plot(self) -> "Figure":
        """Return a matplotlib figure: loss over virtual seconds, of each variant's first run."""
        curves = {
            short(variant.settings) or "loss": losses(variant.outcomes[0])
            for variant in self.variants
            if variant.outcomes
        }
        title = f"{self.job.name} on {self.cluster}"
        return plot(curves, x="virtual seconds", y="loss", title=title)

    def plain(self) -> dict[str, object]:
        """Return what `distbelief simulate --json` prints."""
        names = ("settings", "n_machines", "spreads", "outcomes", "left_out", "replicas")
        return {
            "job": self.job.name,
            "cluster": self.cluster,
            "constants": [{"name": name, "value": value} for name, value in self.constants],
            "variants": [
                {name: getattr(v, name) for name in (*names, "limit", "warnings")}
                for v in self.variants
            ],
            "suggested": None if self.best is None else self.best.settings,
            "front": [variant.settings for variant in self.front],
            "notes": self.notes,
        }


@checked("simulate", {"replicas": "it is sweep={'cluster.replicas': [2, 4]}"})
def simulate(  # noqa: PLR0913 -- options
    job: Job | str | os.PathLike[str] | Mapping[str, object],
    *,
    cluster: str | os.PathLike[str] | None = None,
    seed: int = 0,
    seeds: int | None = None,
    overrides: Sequence[str] | Mapping[str, object] = (),
    sweep: Mapping[str, Iterable[object]] | None = None,
    machines: int | None = None,
    suggest: bool = False,
    by: str = "time",
    counted: bool = False,
    trace: str | os.PathLike[str] | None = None,
) -> Forecast:
    """Forecast how a job would run on a cluster.

    Args:
        job: The path of a job file; its tables, as a dictionary of dictionaries; or a job.
        cluster: Name of a built-in cluster, or path of a cluster file; default: this host.
        seed: Seed of the first run.
        seeds: Number of runs of each variant, to see the variation; default: 1, and 3 of those
            that a suggestion ends with.
        overrides: Values of single keys, as {"stop.epochs": 2}, or "stop.epochs=2".
        sweep: Values by key ("cluster.replicas"): all combinations are run.
        machines: Number of machines of the cluster that may be used.
        suggest: Search for the best configuration within `machines`.
        by: What the best one has least of: "time" to the target of [stop], without one of a
            sample; "loss" at the end of [stop] seconds; "price" to the target, or of a sample.
        counted: Compute the cost of work from its operations and bytes, instead of measuring it on
            this host.
        trace: File for the timeline of the run, a Chrome trace.

    Raises:
        JobError: the job cannot be run, or does not fit the cluster.
    """
    try:
        axes = checked_axes([_axis(key, values) for key, values in (sweep or {}).items()])
        request = SimulationRequest(
            job=job if isinstance(job, Job | Mapping) else Path(job),
            overrides=overrides,
            axes=tuple(axes),
            cluster=None if cluster is None else os.fspath(cluster),
            machines=machines,
            suggests=suggest,
            by=by,
            seeds=seeds_of(seed, seeds, suggests=suggest),
            trace=None if trace is None else Path(trace),
            measures=not counted,
        )
        forecast = run_request(request, console=Console(quiet=True))
        if forecast.timeline is not None and request.trace is not None:
            write_trace(request.trace, forecast.timeline)
    except (JobError, StorageError) as error:
        error.args = (_FLAG.sub("", str(error)),)
        raise
    return forecast


# In messages: Python has arguments of these names.
_FLAG: Final = re.compile(r"--(?=(?:cluster|machines|seeds?|sweep|suggest|by|trace)\b)")


def _axis(key: str, values: object) -> Axis:
    found = [] if isinstance(values, str) or not isinstance(values, Iterable) else [*values]
    if not found:
        raise JobError(f"simulate: sweep[{key!r}] is {values!r}; give a list of values")
    return Axis.named(key, [v if isinstance(v, str) else inline(plain(v)) for v in found])


def run_request(request: SimulationRequest, *, console: Console) -> Forecast:
    """Run all simulations of a request.

    JobError if the job, cluster or sweep is not valid; StorageError if the disk has no space for a
    timeline.
    """
    given = list(combinations(request.axes))
    searches = request.suggests and (not request.axes or len(given) > N_ALL_RUN)
    jobs = [_job(request, settings) for settings in ([{}] if searches else given)]
    _check_by(request, jobs[0])
    _check_presets(request)
    hosts = HostCosts(request.cluster, machines=request.machines, measures=request.measures)
    if request.trace is not None:
        check_place(request.trace)
    n_each = len(request.seeds) + bool(request.axes or searches)  # one more tells its limit
    n_runs = len(given) * n_each
    if searches:
        n_runs = N_TRIED_MAX + N_RUN_MAX + len(PRESETS) + N_LAST * n_each
    search, left_out = None, list[Variant]()
    with Preparation() as preparation, WaitProgress(console, n_runs=n_runs) as progress:

        def prepare(settings: Mapping[str, str], job: Job | None = None) -> Trial:
            job = _job(request, settings) if job is None else job
            host = hosts.hosting(job, tell=progress.say)
            return Trial(settings=settings, job=host.formed(preparation.stage(job)), host=host)

        if searches:
            assert request.machines is not None
            search = Search(
                job=jobs[0],
                axes=request.axes,
                n_machines=request.machines,
                prepare=prepare,
                stage=preparation.stage,
                progress=progress,
                seed=request.seeds[0],
                by=request.by,
            )
            trials = search.best()
            left_out = search.left_out
        else:
            trials = [prepare(*one) for one in zip(given, jobs, strict=True)]
        # Check that all variants fit before the first of the long runs.
        planned = [(trial, _planned(request, trial)) for trial in trials]
        ran = [
            _run_trial(request, trial, variant, progress, stage=preparation.stage)
            for trial, variant in planned
        ]
        # Short runs may complete where whole ones fail.
        spare = iter(search.others if search is not None else ())
        while all(v.failure or v.left_out for v, _ in ran) and (trial := next(spare, None)):
            variant = _planned(request, trial)
            ran.append(_run_trial(request, trial, variant, progress, stage=preparation.stage))
    variants = (*(variant for variant, _ in ran), *left_out)
    best, front = None, tuple[Variant, ...]()
    if request.suggests:
        assert request.machines is not None
        best = best_of(variants, n_machines=request.machines, by=request.by)
        front = front_of(variants)
    return Forecast(
        job=jobs[0],
        cluster=hosts.cluster.name,
        constants=hosts.constants,
        variants=variants,
        best=best,
        front=front,
        notes=() if search is None else tuple(search.notes),
        timeline=next((timeline for _, timeline in ran if timeline is not None), None),
    )


def seeds_of(first: int, n: int | None, *, suggests: bool) -> tuple[int, ...]:
    """Return the seeds of all runs; of a suggestion more than one, to know what it is worth."""
    if n is None:
        n = N_SEEDS_SUGGESTED if suggests else 1
    return tuple(range(first, first + n))


def _check_by(request: SimulationRequest, job: Job) -> None:
    if request.by not in BY:
        raise JobError(f"--by {request.by}: use {', '.join(BY)}")
    if request.by != "time" and not request.suggests:
        raise JobError(f"--by {request.by} is what a suggestion goes by: add --suggest")
    if request.by == "loss" and (job.stop.seconds is None or has_target(job)):
        raise JobError(
            "--by loss compares losses after the same time: give [stop] seconds, and no accuracy "
            "or loss"
        )


def _check_presets(request: SimulationRequest) -> None:
    if all(axis.key != PRESET for axis in request.axes):
        return
    job = request.job
    if isinstance(job, Path):
        job = tomllib.loads(job.read_text())
    if isinstance(job, Job) or "source" in job:  # as a run has written it
        raise JobError(
            f"--sweep {PRESET}: this job has every key of [algorithm], and a preset sets what a "
            "job does not give: use the job file that you wrote, or tables"
        )


def _job(request: SimulationRequest, settings: Mapping[str, str]) -> Job:
    swept = [f"{key}={value}" for key, value in settings.items() if value != AS_GIVEN]
    job, overrides = request.job, request.overrides
    if isinstance(job, Path):
        return load_job(job, overrides=overrides, swept=swept)
    if isinstance(job, Job) and not (swept or overrides):
        return job
    tables = job.to_tables() if isinstance(job, Job) else job
    return job_of(tables, user="job", overrides=overrides, swept=swept)


def _planned(request: SimulationRequest, trial: Trial) -> Variant:
    # A suggestion skips variants that do not fit; otherwise they are an error.
    if request.suggests:
        return trial.variant(machines=request.machines)
    variant = trial.variant()
    if variant.left_out is not None:
        with_what = f"with {trial.name}: " if trial.settings else ""
        raise JobError(f"{with_what}{variant.left_out}")
    return variant


def _run_trial(
    request: SimulationRequest,
    trial: Trial,
    variant: Variant,
    progress: WaitProgress,
    *,
    stage: Stage,
) -> tuple[Variant, Timeline | None]:
    is_row = bool(trial.settings)
    if variant.left_out is not None:
        for _ in range(len(request.seeds) + is_row):
            progress.end()
        return variant, None
    timeline = None
    if request.suggests:
        variant = trial.completed(variant, seeds=request.seeds, progress=progress)
        if variant.left_out is not None:
            return variant, None
    else:
        outcomes = []
        for index, seed in enumerate(request.seeds):
            keeps_timeline = request.trace is not None and not index
            ended = trial.run(seed=seed, progress=progress, keeps_spans=keeps_timeline)
            timeline = ended.timeline if keeps_timeline else timeline
            outcomes.append(ended.outcome)
        variant = with_outcomes(variant, outcomes)
    limit = None
    if is_row:

        def run_other(other: Trial) -> Outcome:
            seed = request.seeds[0]
            return other.run(seed=seed, progress=progress, keeps_spans=False).outcome

        limit = limit_of(trial, variant.outcomes[0], stage=stage, run=run_other)
    return msgspec.structs.replace(variant, limit=limit), timeline
