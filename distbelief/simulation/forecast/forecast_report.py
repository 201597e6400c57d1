"""The report of a forecast: tables, JSON, and a timeline as a Chrome trace.

The timeline is for chrome://tracing and ui.perfetto.dev: one process per role, with one row
for each of its executors.
"""

import math
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distbelief.core import files, formatting
from distbelief.core.errors import JobError, StorageError
from distbelief.protocol.role import Address, Executor, Seconds
from distbelief.simulation.forecast.chooser import AS_GIVEN, undecided
from distbelief.simulation.forecast.run import Span, Timeline
from distbelief.simulation.forecast.sweep import Limit, Spread, Variant, has_target, short


Show = Callable[[float | None], str]


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return formatting.DASH
    if seconds >= 10:
        return formatting.duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _share(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _digits(n: int) -> Show:
    return lambda value: formatting.DASH if value is None else f"{value:.{n}g}"


COLUMNS: Final[Mapping[str, tuple[str, Show]]] = {
    "step_seconds": ("step", _milliseconds),
    "samples_per_second": ("samples/s", formatting.rate),
    "target_seconds": ("to target", formatting.duration),
    "training_seconds": ("training", formatting.duration),
    "staleness_mean": ("staleness", _digits(2)),
    "staleness_p95": ("p95", _digits(2)),
    "bytes_in": ("pushed", formatting.size),
    "bytes_out": ("fetched", formatting.size),
    "steps_per_push": ("steps/push", _digits(2)),
    "clock_gap_max": ("gap", _digits(2)),
    "seconds_waited": ("waited", formatting.duration),
    "machine_hours": ("machine-hours", _digits(3)),
    "price": ("price", _digits(3)),
}


# Only some clusters and exchanges have them.
_OF_SOME: Final = {"price", "steps_per_push", "clock_gap_max", "seconds_waited"}


# The first to be left out where lines are short.
_LEFT_OUT: Final = (
    *("steps_per_push", "clock_gap_max", "seconds_waited", "staleness_p95"),
    *("bytes_in", "bytes_out", "training_seconds", "machine_hours", "staleness_mean"),
    *("machines", "price", "one more of it", "busiest"),
)
_GAP: Final = 2


def table_of(
    variants: Sequence[Variant],
    *,
    best: Variant | None = None,
    front: Sequence[Variant] = (),
    width: int = 200,
) -> Table:
    """Return a table with one row per variant, the best one marked, or one column for a single one.

    It has the columns that fit in `width` characters, and names the others.
    """
    columns = _columns(variants)
    if front:
        marks = ("yes" if any(one is each for each in front) else "" for one in variants)
        columns["front"] = ["front", *marks]
    headings = {name: column[0] for name, column in columns.items()}
    if len(variants) == 1:
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=False)
        for column in columns.values():
            table.add_row(*map(Text, column))
        return table
    left = formatting.leave_out(columns, width=width, gap=_GAP, order=_LEFT_OUT)
    caption = f"not shown for want of width: {', '.join(map(headings.__getitem__, left))}"
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, _GAP, 0, 0),
        caption=caption if left else None,
        caption_justify="left",
    )
    for name, column in columns.items():
        words = name in {"busiest", "one more of it"}
        table.add_column(column[0], justify="left" if words else "right")
    for index, variant in enumerate(variants, start=1):
        cells = (Text(column[index]) for column in columns.values())
        table.add_row(*cells, style="bold green" if variant is best else None)
    return table


def _columns(variants: Sequence[Variant]) -> dict[str, list[str]]:
    """Return headings and cells: of settings, figures, limits and the metric."""
    job = variants[0].job
    shown = {
        name: column
        for name, column in COLUMNS.items()
        if (name != "target_seconds" or has_target(job))
        and (name not in _OF_SOME or any(name in variant.spreads for variant in variants))
    }
    metric = next((o.metric_name for v in variants for o in v.outcomes), "metric")
    columns = {
        key: [key.rpartition(".")[2], *(variant.settings[key] for variant in variants)]
        for key in variants[0].settings
    }
    columns["machines"] = ["machines", *(str(variant.n_machines) for variant in variants)]
    for name, (heading, show) in shown.items():
        columns[name] = [heading, *(_spread(variant, name, show) for variant in variants)]
    if any(variant.limit is not None for variant in variants):
        limits = [_limit_cells(variant.limit) for variant in variants]
        for heading, *cells in zip(("busiest", "one more of it"), *limits, strict=True):
            columns[heading] = [heading, *cells]
    show = partial(formatting.metric, name=metric)
    columns["metric"] = [metric, *(_spread(variant, "metric", show) for variant in variants)]
    return columns


def _spread(variant: Variant, name: str, show: Show) -> str:
    return spread_text(variant.spreads.get(name), show, n_runs=len(variant.outcomes))


def _limit_cells(limit: Limit | None) -> tuple[str, str]:
    if limit is None:
        return formatting.DASH, formatting.DASH
    gain = limit.why_not or formatting.DASH
    if limit.gain is not None:
        gain = f"{round(100 * limit.gain):+d} % by {limit.more}"
    return f"{limit.resource} {_share(limit.share)}", gain


def spread_text(spread: Spread | None, show: Show, *, n_runs: int) -> str:
    """Return "12 (10 to 15)": median, p10 and p90; with ", 3 of 5 runs" if some lack it."""
    if spread is None:
        return formatting.DASH
    text = show(spread.p50)
    low, high = show(spread.p10), show(spread.p90)
    if spread.n > 1 and low != high:
        text += f" ({low} to {high})"
    if spread.n < n_runs:
        text += f", {spread.n} of {n_runs} runs"
    return text


def details_of(variant: Variant) -> RenderableType:
    """Return details of a single variant: why it ended, utilization, traffic, counters."""
    outcome = variant.outcomes[0]
    lines = [Text(f"ended: {outcome.error or outcome.stop_reason}")]
    if outcome.utilisation:
        busy = ", ".join(f"{kind} {_share(share)}" for kind, share in outcome.utilisation.items())
        lines.append(Text(f"utilization: {busy}"))
    busiest = {one.kind: one for one in reversed(outcome.resources)}
    if busiest:
        found = sorted(busiest.values(), key=lambda one: -one.share)
        shown = (f"{one.kind} {one.name} {_share(one.share)}" for one in found)
        lines.append(Text(f"busiest: {', '.join(shown)}"))
    if outcome.traffic:
        sent = ", ".join(
            f"{ends} {formatting.size(n_bytes)}" for ends, n_bytes in outcome.traffic.items()
        )
        lines.append(Text(f"messages: {sent}"))
    lines += [
        Text(f"{formatting.role(name)} on machines {', '.join(map(str, machines))}")
        for name, machines in variant.replicas.items()
    ]
    notes = []
    if outcome.pushes_lost:
        notes.append(f"{outcome.pushes_lost:,} pushes lost")
    if outcome.restarts:
        notes.append(f"{outcome.restarts} restarts")
    notes += formatting.named(outcome.figures)
    if notes:
        lines.append(Text("; ".join(notes)))
    lines.append(
        Text(
            f"seed {outcome.seed}, trace {outcome.digest[:16]}, {outcome.n_messages:,} messages",
            "dim",
        )
    )
    return Group(*lines)


def suggestion(
    best: Variant, ran: Sequence[Variant], *, front: Sequence[Variant], by: str
) -> list[str]:
    """Return the options of the best variant, what is as good by these seeds, and the front."""
    chosen = " ".join(
        f"--set {shlex.quote(f'{key}={value}')}"
        for key, value in best.settings.items()
        if value != AS_GIVEN
    )
    lines = [f"suggested, by {by}:", chosen]
    others = undecided(best, ran, by=by)
    if others and len(best.outcomes) > 1:
        names = "; ".join(short(one.settings) for one in others)
        lines.append(f"{len(best.outcomes)} seeds do not tell it from: {names}")
    if len(front) > 1:
        lines.append("front: no other row is both faster and cheaper")
    return lines


def remarks_on(variants: Sequence[Variant]) -> list[str]:
    """Return a line for each failed run, and for each reason to leave out variants."""
    lines = [
        f"{_settings_of(variant)}seed {run.seed} failed: {run.error}"
        for variant in variants
        for run in variant.outcomes
        if run.error is not None
    ]
    reasons = Counter(v.left_out for v in variants if v.left_out is not None)
    warned: dict[str, list[Variant]] = {}
    for variant in variants:
        for text in variant.warnings:
            warned.setdefault(text, []).append(variant)
    for text, rows in warned.items():
        of = _settings_of(rows[0]) if len(rows) == 1 else f"{_configurations(len(rows))}, "
        lines.append(f"{of}warning: {text}")
    lines += [f"{_configurations(n)} left out: {reason}" for reason, n in reasons.items()]
    return lines


def _configurations(n: int) -> str:
    return f"{n} configuration{'s' * (n > 1)}"


def _settings_of(variant: Variant) -> str:
    return f"{short(variant.settings)}, " if variant.settings else ""


def constants_table(constants: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("constant", "value"):
        table.add_column(heading, overflow="fold")
    for row in constants:
        table.add_row(*row, style="dim")
    return table


TraceEvent = dict[str, str | int | float | dict[str, str]]

N_BYTES_TRIED: Final = 1 << 16  # written as a test whether the disk has space

_ROWS: Final = {Executor.COMPUTE: 0, Executor.DATA: 1}


def chrome_trace(timeline: Timeline) -> list[TraceEvent]:
    """Return the work of a run in the Chrome trace event format."""
    roles: dict[Address, int] = {}
    for span in timeline.spans:
        roles.setdefault(span.role, len(roles))
    trace: list[TraceEvent] = []
    for role, number in roles.items():
        trace.append(_name("process_name", number, 0, role))
        trace += [
            _name("thread_name", number, row, executor.value) for executor, row in _ROWS.items()
        ]
    trace += [
        {
            "ph": "X",
            "pid": roles[span.role],
            "tid": _ROWS[span.executor],
            "name": span.name,
            "cat": span.name.partition(":")[2] or span.name,
            "ts": (end - span.seconds) * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"role": span.role},
        }
        for span, end in zip(timeline.spans, ends_of(timeline.spans), strict=True)
    ]
    return trace


def ends_of(spans: Sequence[Span]) -> list[Seconds]:
    """Return an upper bound for the time at which each piece of work ended."""
    # `Span.ends` is when the process handled the result. The executor may have ended earlier:
    # it does one piece at a time, so each ended before the next one began.
    begins: dict[tuple[Address, Executor], Seconds] = {}
    ends = []
    for span in reversed(spans):
        executor = span.role, span.executor
        end = min(span.ends, begins.get(executor, math.inf))
        begins[executor] = end - span.seconds
        ends.append(end)
    return ends[::-1]


def check_place(path: Path) -> None:
    """Check, before a long run, that a timeline can be written to `path`.

    JobError if the path is not writable; StorageError if the disk has no space now.
    """
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise JobError(
            f"--trace {path} cannot be written: name a file in an existing directory "
            "that you may write to"
        )
    if path.exists() and not path.is_file():
        return  # a test write to a device or a pipe would be visible there
    try:
        with tempfile.NamedTemporaryFile(
            dir=folder, prefix=f"{path.name}.", suffix=files.TEMPORARY
        ) as file:
            file.write(bytes(N_BYTES_TRIED))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _refused(path, error) from error


def write_trace(path: Path, timeline: Timeline) -> None:
    """Write the timeline of a run as a Chrome trace; StorageError if the file cannot be written."""
    content = msgspec.json.encode({"traceEvents": chrome_trace(timeline)})
    try:
        files.write(path, content)
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            raise _refused(path, error.__cause__) from error
        raise


def _refused(path: Path, error: OSError) -> StorageError:
    # Not `files.explained`: its hint to use --resume is wrong here, there is no run.
    return StorageError(
        f"--trace {path}: cannot write the timeline: {error.strerror or error}: fix that, "
        "or name another file"
    )


def _name(what: str, process: int, row: int, text: str) -> TraceEvent:
    return {"ph": "M", "pid": process, "tid": row, "name": what, "args": {"name": text}}
