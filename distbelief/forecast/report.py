"""A forecast as a table for people, and as JSON for programs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distbelief.forecast.outcome import Spread, has_target
from distbelief.forecast.sweeping import Variant
from distbelief.job.configuration.sections import Job
from distbelief.job.display import words


Show = Callable[[float | None], str]


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return words.DASH
    if seconds >= 10:
        return words.duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _share(value: float | None) -> str:
    return words.DASH if value is None else f"{value:.0%}".replace("%", " %")


def _small(value: float | None) -> str:
    return words.DASH if value is None else f"{value:.2g}"


def _hours(value: float | None) -> str:
    return words.DASH if value is None else f"{value:.3g}"


COLUMNS: Final[Mapping[str, tuple[str, Show]]] = {
    "step_seconds": ("step", _milliseconds),
    "samples_per_second": ("samples/s", words.rate),
    "target_seconds": ("to target", words.duration),
    "training_seconds": ("training", words.duration),
    "staleness_mean": ("staleness", _small),
    "staleness_p95": ("p95", _small),
    "pushed_bytes": ("pushed", words.size),
    "fetched_bytes": ("fetched", words.size),
    "machine_hours": ("machine-hours", _hours),
}


def table_of(variants: Sequence[Variant], *, best: Variant | None = None) -> Table:
    """Return one row per variant; the best one is marked."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    keys = list(variants[0].settings)
    for key in keys:
        table.add_column(key.rpartition(".")[2], justify="right", no_wrap=True)
    table.add_column("machines", justify="right", no_wrap=True)
    job = variants[0].job
    shown = {
        name: column
        for name, column in COLUMNS.items()
        if name != "target_seconds" or has_target(job)
    }
    for heading, _ in shown.values():
        table.add_column(heading, justify="right", no_wrap=True)
    metric = next((o.metric_name for v in variants for o in v.outcomes), "metric")
    table.add_column(metric, justify="right", no_wrap=True)
    for variant in variants:
        found, n_runs = variant.spreads, len(variant.outcomes)
        cells = [variant.settings[key] for key in keys]
        cells.append(str(variant.n_machines))
        cells += [
            spread_text(found.get(name), show, n_runs=n_runs) for name, (_, show) in shown.items()
        ]
        accuracy = partial(words.metric, name=metric)
        cells.append(spread_text(found.get("metric"), accuracy, n_runs=n_runs))
        style = "bold green" if variant is best else None
        table.add_row(*cells, style=style)
    return table


def spread_text(spread: Spread | None, show: Show, *, n_runs: int) -> str:
    """Return "12 (10 to 15)": the median, and between what most runs lie.

    Args:
        spread: Of the runs that have this figure; None if none has.
        show: How the figure is written.
        n_runs: How many runs there were; how many have it is told if not all do.
    """
    if spread is None:
        return words.DASH
    text = show(spread.p50)
    low, high = show(spread.p10), show(spread.p90)
    if spread.n > 1 and low != high:
        text += f" ({low} to {high})"
    if spread.n < n_runs:
        text += f", {spread.n} of {n_runs} runs"
    return text


def details_of(variant: Variant) -> RenderableType:
    """Return what a single configuration is told of besides: traffic, utilisation."""
    outcome = variant.outcomes[0]
    lines = [Text(f"ended: {outcome.error or outcome.ended}")]
    if outcome.utilisation:
        busy = ", ".join(f"{kind} {_share(share)}" for kind, share in outcome.utilisation.items())
        lines.append(Text(f"at work: {busy}"))
    if outcome.traffic:
        sent = ", ".join(
            f"{ends} {words.size(n_bytes)}" for ends, n_bytes in outcome.traffic.items()
        )
        lines.append(Text(f"messages: {sent}"))
    notes = []
    if outcome.pushes_lost:
        notes.append(f"{outcome.pushes_lost:,} pushes lost")
    if outcome.restarts:
        notes.append(f"{outcome.restarts} restarts")
    notes += words.named(outcome.figures)
    if notes:
        lines.append(Text("; ".join(notes)))
    lines.append(
        Text(
            f"seed {outcome.seed}, trace {outcome.digest[:16]}, {outcome.n_messages:,} messages",
            "dim",
        )
    )
    return Group(*lines)


def remarks_on(variants: Sequence[Variant]) -> list[str]:
    """Return in words which runs failed, and what was not run, each reason once."""
    lines = [
        f"{_settings_of(variant)}seed {run.seed} failed: {run.error}"
        for variant in variants
        for run in variant.outcomes
        if run.error is not None
    ]
    reasons = Counter(v.left_out for v in variants if v.left_out is not None)
    lines += [
        f"{n} configuration{'s' if n > 1 else ''} left out: {reason}"
        for reason, n in reasons.items()
    ]
    return lines


def _settings_of(variant: Variant) -> str:
    return "".join(f"{key.rpartition('.')[2]} {value}, " for key, value in variant.settings.items())


def constants_table(constants: Sequence[tuple[str, str, str]]) -> Table:
    """Return every constant with its value and where it is from."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("constant", "value", "origin"):
        table.add_column(heading, overflow="fold")
    for row in constants:
        table.add_row(*row, style="dim")
    return table


def as_json(
    job: Job,
    variants: Sequence[Variant],
    *,
    cluster: str,
    constants: Sequence[tuple[str, str, str]],
    best: Variant | None = None,
) -> str:
    """Return all of it as JSON."""
    content = {
        "job": job.name,
        "cluster": cluster,
        "constants": [
            {"name": name, "value": value, "origin": origin} for name, value, origin in constants
        ],
        "variants": [_plain(variant) for variant in variants],
        "suggested": None if best is None else dict(best.settings),
    }
    return msgspec.json.encode(content).decode()


def _plain(variant: Variant) -> dict[str, object]:
    return {
        "settings": dict(variant.settings),
        "n_machines": variant.n_machines,
        "spreads": variant.spreads,
        "outcomes": variant.outcomes,
        "left_out": variant.left_out,
    }
