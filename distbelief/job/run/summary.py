"""summary.json, and the final table: measured values only."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from typing import Final, Self, cast

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from distbelief.config.algorithms import facts_of
from distbelief.config.job import Job
from distbelief.core import formatting
from distbelief.supervisor.view import HostView, JobView, Point, Totals, filled
from distbelief.task.data import ENDLESS, DataSource
from distbelief.worker.evaluator import Kept


_GAP = 2  # columns between two values
_PACKAGES = ("distbelief", "torch", "numpy", "pyzmq", "msgspec", "safetensors")


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    n_samples: int  # its length
    fingerprint: str | None = None  # hash of its content, if it has an attribute of that name
    # Of some training samples (`marks_of`), if known; kept with checkpoints
    marks: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET
    # In which samples are read, unless shuffled
    order: str | msgspec.UnsetType = msgspec.UNSET
    # Whether the function makes a part of the data for each replica
    has_parts: bool | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, dataset: object) -> Self:
        fingerprint: object = getattr(dataset, "fingerprint", None)
        if callable(fingerprint):
            fingerprint = fingerprint()
        source = dataset if isinstance(dataset, DataSource) else None
        return cls(
            n_samples=len(cast("list[object]", dataset)),
            fingerprint=None if fingerprint is None else str(fingerprint),
            order=source.of_order if source and source.order else msgspec.UNSET,
        )

    @property
    def has_length(self) -> bool:
        """Whether it is no stream."""
        return self.n_samples != ENDLESS


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of model and data; None where unknown."""

    n_parameters: int | None = None
    # Ranks of each replica, or of each in turn; None if replicas are not split
    n_machines: int | tuple[int, ...] | None = None
    train: DataFacts | None = None
    test: DataFacts | None = None  # the held-out data, if there are any


class Summary(Totals, frozen=True, kw_only=True):
    """Final values of one run, most of them those of the last `JobView`; null if not measured.

    `samples_per_second` is a mean over the training time. `loss` is that of the last tenth of the
    samples, or of a whole batch.
    """

    name: str  # of the job
    directory: str  # path of the run directory
    algorithm: str  # "downpour", "sandblaster"
    rule: str | None  # the name of the update rule; None for a batch method
    n_replicas: int  # as the job asked for
    n_shards: int  # shards of the parameters
    shard_copies: int = 1  # copies of each shard
    # Ranks of each replica, or of each in turn; None if replicas are not split
    n_machines: int | tuple[int, ...] | None = None
    # What was measured of the values in best.safetensors, with [output] keep = "best"
    kept: Kept | None = None
    # why no model was written, if none was; the file of an earlier session may still exist
    model_error: str | None = None
    unwritten: str | None = None  # why the directory lacks some other file, if it does
    start_seconds: float | None = None  # the part of `seconds` before training began
    training_seconds: float | None = None  # the part of `seconds` since then
    restarts: int  # of all roles
    n_parameters: int | None = None  # elements of all parameters; None if unknown
    train: DataFacts | None = None  # the training data: n_samples, fingerprint
    test: DataFacts | None = None  # the held-out data, if there are any
    # Of the model, of evaluations and of the algorithm
    seeds: dict[str, int] = msgspec.field(default_factory=dict)
    # Of Python and packages, by name
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    machine: str = ""  # processor and system
    hosts: tuple[HostView, ...] = ()  # that joined, those that are gone included


def summarise(
    job: Job,
    view: JobView,
    *,
    directory: str,
    task: TaskFacts,
    kept: Kept | None = None,
    error: str | None = None,
    model_error: str | None = None,
    unwritten: str | None = None,
) -> Summary:
    seconds = view.training_seconds or view.seconds
    facts = facts_of(job)
    seeds = {"model": job.model.seed, "evaluation": job.evaluation.seed, "algorithm": facts.seed}
    rule = None if facts.rule is None else facts.rule.name
    before = view.seconds - view.training_seconds
    own: dict[str, object] = {
        "name": job.name,
        "directory": directory,
        "algorithm": job.algorithm_name,
        "rule": rule,
        # A coordinator reports the loss of the whole batch.
        "loss": view.loss if rule is None else _training_loss(view),
        "n_replicas": job.cluster.n_replicas,
        "n_shards": job.cluster.shards,
        "shard_copies": job.cluster.shard_copies,
        "kept": kept,
        "error": error,
        "model_error": model_error,
        "unwritten": unwritten,
        "seconds": round(view.seconds, 3),
        "start_seconds": round(max(before, 0.0), 3) if view.training_seconds else None,
        "training_seconds": round(view.training_seconds, 3) or None,
        "samples_per_second": view.samples / seconds if seconds and view.samples else None,
        "restarts": sum(role.restarts for role in view.roles),
        "seeds": seeds,
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
    }
    train = task.train and msgspec.structs.replace(task.train, marks=msgspec.UNSET)
    return filled(Summary, own, view, msgspec.structs.replace(task, train=train))


_RECENT: Final = 0.1  # share of the samples


def _training_loss(view: JobView) -> float | None:
    """Return the mean over the last samples: one interval of the curve may be a few steps."""
    total, n_samples = 0.0, 0
    start = Point(seconds=0.0, samples=0)
    for before, point in reversed([*pairwise((start, *view.history))]):
        if point.loss is not None:
            weight = max(1, point.samples - before.samples)
            total, n_samples = total + weight * point.loss, n_samples + weight
        if n_samples >= _RECENT * view.samples:
            break
    return total / n_samples if n_samples else view.loss


def summary_text(summary: Summary) -> str:
    return msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"


def final_table(summary: Summary) -> Group:
    """Return the table that a job ends with, for `rich`."""
    top = Table.grid(expand=True, padding=(0, 2, 0, 0), pad_edge=False)
    top.add_column(overflow="fold")
    top.add_column(justify="right", overflow="fold")
    top.add_row(Text(_what(summary), "bold"), Text(_data(summary), "dim"))
    label = " + ".join(_title(p) for p in (summary.algorithm, summary.rule) if p)
    return Group(Text(), top, _ValueTable(label, _values(summary)), Text(_end(summary)))


class _ValueTable:
    """The values side by side, or below each other if that is too wide."""

    def __init__(self, label: str, values: Sequence[tuple[str, str]]) -> None:
        self._label = label
        self._values = values

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
    n_ranks = summary.n_machines
    if isinstance(n_ranks, tuple):
        replicas += f" of {', '.join(map(str, n_ranks))} ranks"
    elif n_ranks is not None:
        replicas += f" of {_number(n_ranks, 'rank')}"
    shards = _number(summary.n_shards, "shard")
    if summary.shard_copies > 1:
        shards += f" in {summary.shard_copies} copies"
    rule = f", {_title(summary.rule)}" if summary.rule else ""
    return f"{_title(summary.algorithm)}, {replicas} x {shards}{rule}"


def _title(name: str) -> str:
    if name == "sgd":
        return "SGD"
    # A class of torch has its own capitals.
    return name.replace("_", " ").capitalize() if name.islower() else name


def _data(summary: Summary) -> str:
    parts = [summary.name]
    if summary.train is not None:
        parts.append(
            f"{summary.train.n_samples:,} samples" if summary.train.has_length else "a stream"
        )
    if summary.test is not None:
        parts.append(f"{summary.test.n_samples:,} held out")
    return ", ".join(parts)


def _values(summary: Summary) -> list[tuple[str, str]]:
    name, loss = summary.metric_name, summary.held_out_loss
    figures = [
        ("time", formatting.duration(summary.seconds)),
        ("samples", formatting.count(summary.samples)),
        ("samples/s", formatting.rate(summary.samples_per_second)),
        (f"held-out {name}", formatting.metric(summary.metric, name)),
        *((f"held-out {n}", formatting.metric(v, n)) for n, v in summary.others.items()),
        ("held-out loss", formatting.figure(None if formatting.is_loss(name) else loss)),
        ("training loss", formatting.figure(summary.loss)),
    ]
    return [(head, figure) for head, figure in figures if figure != formatting.DASH]


def _end(summary: Summary) -> str:
    kept = summary.kept
    driven = summary.rule is None  # by a coordinator, which repeats lost pushes
    lost, mean = summary.pushes_lost, summary.staleness_mean
    took = f"{formatting.duration(summary.training_seconds)} of training, "
    took += f"{formatting.duration(summary.start_seconds)} before"
    unsaved = summary.model_error if summary.model_error != summary.error else None
    parts = [
        summary.error and f"failed: {summary.error}",
        not summary.error and summary.stop_reason and f"ended: {summary.stop_reason}",
        summary.start_seconds and summary.training_seconds and took,
        unsaved,
        kept and f"{formatting.metric(kept.metric, summary.metric_name)} in best.safetensors",
        mean is not None and f"staleness {formatting.staleness(mean, summary.staleness_p95)}",
        *formatting.named(summary.figures),
        not driven and lost is None and "pushes lost: unknown",
        not driven and lost == 0 and summary.pushes_applied and "0 pushes lost",
        not driven and lost and f"at least {lost:,} pushes lost",
        summary.pushes_refused and f"{summary.pushes_refused:,} refused",
        summary.restarts and _number(summary.restarts, "restart"),
        summary.hosts and f"{_number(len(summary.hosts), 'host')} joined",
        f"not everything is in {summary.directory}: {summary.unwritten}"
        if summary.unwritten
        else f"everything in {summary.directory}",
    ]
    return formatting.joined("; ", parts)


def _number(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # not installed, run from a checkout
            yield package, metadata.version(package)
