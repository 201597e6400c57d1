"""summary.json, and the final table: measured values only."""

import platform
from importlib import metadata
from typing import Self, cast

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from distbelief.config.job import Job
from distbelief.core import formatting
from distbelief.errors import StorageError
from distbelief.run.directory import RunDirectory
from distbelief.supervisor.view import HostView, JobView


_GAP = 2  # columns between two values
_PACKAGES = ("distbelief", "torch", "numpy", "pyzmq", "msgspec", "safetensors")


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Size and identity of one data set."""

    n_samples: int  # its length
    fingerprint: str | None = None  # hash of its content, if it has an attribute of that name

    @classmethod
    def of(cls, dataset: object) -> Self:
        fingerprint: object = getattr(dataset, "fingerprint", None)
        if callable(fingerprint):
            fingerprint = fingerprint()
        return cls(
            n_samples=len(cast("list[object]", dataset)),
            fingerprint=None if fingerprint is None else str(fingerprint),
        )


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of model and data; None where unknown."""

    n_parameters: int | None = None
    n_machines: int | None = None  # ranks of each replica; None if replicas are not split
    train: DataFacts | None = None
    test: DataFacts | None = None  # the held-out data, if there are any


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Final values of one run; what was not measured is null.

    Attributes:
        name: Of the job.
        directory: The run directory.
        rule: Update rule ("adagrad"), if the algorithm has one.
        shard_copies: Processes that keep each shard.
        n_machines: Ranks of each replica; None if replicas are not split.
        stop_reason: Why the job ended.
        error: Why it failed, if it did.
        model_error: Why no model was written, if none was; the file of an earlier session may still
            exist.
        seconds: How long it ran, over all sessions.
        start_seconds: The part of them before the training of each session.
        training_seconds: The rest.
        step: Steps of all replicas together.
        samples: Samples trained on.
        samples_per_second: Mean over the training time.
        loss: Of training, last.
        held_out_loss: At the end, over all held-out samples.
        metric: At the end, over all held-out samples.
        best_metric: Best of all evaluations; those before the last may be of a subset.
        best_metric_seconds: When that was measured.
        staleness_mean: In pushes; so are the other two.
        pushes_applied: In the values of every shard; one, however many shards.
        pushes_refused: Lower bound: too late, or of an earlier incarnation of a replica.
        pushes_lost: Lower bound: acknowledged, then lost with a shard. None if unknown, because the
            status file of an earlier session was damaged.
        restarts: Of all roles together.
        bytes_in: Received by all shards.
        bytes_out: Sent by all shards.
        figures: What else the algorithm counts, by name.
        seeds: By table of the job file.
        versions: Of Python and the main packages.
        machine: Processor architecture and operating system.
        hosts: Other hosts that have joined.
    """

    name: str
    directory: str
    algorithm: str
    rule: str | None
    n_replicas: int
    n_shards: int
    shard_copies: int = 1
    n_machines: int | None = None
    stop_reason: str | None
    error: str | None = None
    model_error: str | None = None
    seconds: float
    start_seconds: float | None = None
    training_seconds: float | None = None
    step: int
    samples: int
    samples_per_second: float | None
    loss: float | None
    held_out_loss: float | None
    metric_name: str
    metric: float | None
    best_metric: float | None
    best_metric_seconds: float | None
    staleness_mean: float | None
    staleness_p95: float | None
    staleness_max: float | None
    pushes_applied: int
    pushes_refused: int
    pushes_lost: int | None
    restarts: int
    bytes_in: int
    bytes_out: int
    figures: dict[str, float] = {}
    n_parameters: int | None = None
    train: DataFacts | None = None
    test: DataFacts | None = None
    seeds: dict[str, int] = {}
    versions: dict[str, str] = {}
    machine: str = ""
    hosts: tuple[HostView, ...] = ()


def summarise(
    job: Job,
    view: JobView,
    *,
    directory: str,
    task: TaskFacts,
    error: str | None = None,
    model_error: str | None = None,
) -> Summary:
    """Return the summary of a job from its last view.

    Args:
        job: The job.
        view: The last one.
        directory: The run directory.
        task: Sizes of model and data.
        error: Why the job failed, if it did.
        model_error: Why no model was written, if none was.
    """
    seconds = view.training_seconds or view.seconds
    seeds = {"model": job.model.seed, "evaluation": job.evaluation.seed}
    seed: object = getattr(job.algorithm, "seed", None)
    if isinstance(seed, int):
        seeds["algorithm"] = seed
    rule: object = getattr(getattr(job.algorithm, "rule", None), "name", None)
    return Summary(
        name=job.name,
        directory=directory,
        algorithm=job.algorithm_name,
        rule=None if rule is None else str(rule),
        n_replicas=job.cluster.replicas,
        n_shards=job.cluster.shards,
        shard_copies=job.cluster.shard_copies,
        n_machines=task.n_machines,
        stop_reason=view.stop_reason,
        error=error,
        model_error=model_error,
        seconds=round(view.seconds, 3),
        start_seconds=_start_seconds(view),
        training_seconds=round(view.training_seconds, 3) or None,
        step=view.step,
        samples=view.samples,
        samples_per_second=view.samples / seconds if seconds and view.samples else None,
        loss=view.loss,
        held_out_loss=view.held_out_loss,
        metric_name=view.metric_name,
        metric=view.metric,
        best_metric=view.best_metric,
        best_metric_seconds=view.best_metric_seconds,
        staleness_mean=view.staleness_mean,
        staleness_p95=view.staleness_p95,
        staleness_max=view.staleness_max,
        pushes_applied=view.pushes_applied,
        pushes_refused=view.pushes_refused,
        pushes_lost=view.pushes_lost,
        restarts=sum(role.restarts for role in view.roles),
        bytes_in=view.bytes_in,
        bytes_out=view.bytes_out,
        figures=view.figures,
        n_parameters=task.n_parameters,
        train=task.train,
        test=task.test,
        seeds=seeds,
        versions=_versions(),
        machine=f"{platform.machine()}, {platform.system()} {platform.release()}",
        hosts=view.hosts,
    )


def summary_text(summary: Summary) -> str:
    return msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"


def write_summary(run: RunDirectory, summary: Summary) -> None:
    run.write(run.summary_file, summary_text(summary))


def read_summary(run: RunDirectory) -> Summary | None:
    """Return the summary of a run that has ended, or None.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        return msgspec.json.decode(run.summary_file.read_bytes(), type=Summary)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(f"{run.summary_file} cannot be read: {error}") from None


def final_table(summary: Summary) -> Group:
    """Return the table that a job ends with, for `rich`."""
    top = Table.grid(expand=True, padding=(0, 2, 0, 0), pad_edge=False)
    top.add_column(overflow="fold")
    top.add_column(justify="right", overflow="fold")
    top.add_row(Text(_what(summary), "bold"), Text(_data(summary), "dim"))
    return Group(Text(), top, _ValueTable(summary), Text(_end(summary)))


class _ValueTable:
    """The values side by side, or below each other if that is too wide."""

    def __init__(self, summary: Summary) -> None:
        self._label = _label(summary)
        self._values = _values(summary)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True)
        widths = [max(len(head), len(value)) + _GAP for head, value in self._values]
        if len(self._label) + sum(widths) > options.max_width:
            table.add_column(justify="right", no_wrap=True)
            for head, value in self._values:
                table.add_row(Text(head, "dim"), value)
        else:
            for _ in self._values:
                table.add_column(justify="right", no_wrap=True)
            table.add_row("", *(Text(head, "dim") for head, _ in self._values))
            table.add_row(Text(self._label, "bold"), *(value for _, value in self._values))
        yield table


def _what(summary: Summary) -> str:
    replicas = _number(summary.n_replicas, "replica")
    if summary.n_machines is not None:
        replicas += f" of {_number(summary.n_machines, 'rank')}"
    shards = _number(summary.n_shards, "shard")
    if summary.shard_copies > 1:
        shards += f" in {summary.shard_copies} copies"
    parts = [summary.algorithm.capitalize(), f"{replicas} x {shards}"]
    return ", ".join(parts + ([summary.rule.capitalize()] if summary.rule else []))


def _label(summary: Summary) -> str:
    parts = [summary.algorithm, summary.rule]
    return " + ".join(part.capitalize() for part in parts if part)


def _data(summary: Summary) -> str:
    parts = [summary.name]
    if summary.train is not None:
        parts.append(f"{summary.train.n_samples:,} samples")
    if summary.test is not None:
        parts.append(f"{summary.test.n_samples:,} held out")
    return ", ".join(parts)


def _values(summary: Summary) -> list[tuple[str, str]]:
    metric = formatting.metric(summary.metric, summary.metric_name)
    figures = [
        ("time", formatting.duration(summary.seconds)),
        ("samples", formatting.count(summary.samples)),
        ("samples/s", formatting.rate(summary.samples_per_second)),
        (f"held-out {summary.metric_name}", metric),
        ("held-out loss", formatting.figure(summary.held_out_loss)),
        ("training loss", formatting.figure(summary.loss)),
    ]
    return [(head, figure) for head, figure in figures if figure != formatting.DASH]


def _start_seconds(view: JobView) -> float | None:
    if not view.training_seconds:
        return None
    return round(max(view.seconds - view.training_seconds, 0.0), 3)


def _took(summary: Summary) -> list[str]:
    if not (summary.start_seconds and summary.training_seconds):
        return []
    training = formatting.duration(summary.training_seconds)
    return [f"{training} of training, {formatting.duration(summary.start_seconds)} before"]


def _end(summary: Summary) -> str:
    parts: list[str] = []
    if summary.error:
        parts.append(f"failed: {summary.error}")
    elif summary.stop_reason:
        parts.append(f"ended: {summary.stop_reason}")
    parts += _took(summary)
    if summary.model_error and summary.model_error != summary.error:
        parts.append(summary.model_error)
    if summary.staleness_mean is not None:
        staleness = formatting.staleness(summary.staleness_mean, summary.staleness_p95)
        parts.append(f"staleness {staleness}")
    parts += formatting.named(summary.figures)
    driven = bool(summary.figures)  # a coordinator repeats lost pushes
    if summary.pushes_lost is None and not driven:
        parts.append("pushes lost: unknown")
    elif (summary.pushes_applied or summary.pushes_lost) and not driven:
        least = "at least " if summary.pushes_lost else ""
        parts.append(f"{least}{summary.pushes_lost:,} pushes lost")
    if summary.pushes_refused:
        parts.append(f"{summary.pushes_refused:,} refused")
    parts += _incidents(summary)
    parts.append(f"everything in {summary.directory}")
    return "; ".join(parts)


def _incidents(summary: Summary) -> list[str]:
    parts = [_number(summary.restarts, "restart")] if summary.restarts else []
    if summary.hosts:
        parts.append(f"{_number(len(summary.hosts), 'host')} joined")
    return parts


def _number(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # not installed, run from a checkout
            continue
    return versions
