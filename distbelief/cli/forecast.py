"""The command `distbelief forecast`: when a job will reach its target."""

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from distbelief.cli.options import AS_JSON, argument, reported
from distbelief.core import formatting
from distbelief.core.errors import JobError


if TYPE_CHECKING:
    from distbelief.dashboard.outlook import Interval, Outlook


WIDTH: Final = 80  # of a line, in characters


@reported
def forecast(
    run_directory: Path = argument("RUN_DIR", "A run directory."), *, as_json: bool = AS_JSON
) -> None:
    """Forecast when a job will reach its target, and what two more machines would change.

    [dim]$[/dim] distbelief forecast runs/speech

    A curve is fitted to the held-out loss so far; intervals are of 90 %. It says
    that it cannot tell where there are few points, no fall, or no bend yet. What
    more replicas would bring follows from the time that those of the run spend
    with the shards.
    """
    import msgspec  # noqa: PLC0415 -- start quickly

    from distbelief.config.load import load_job  # noqa: PLC0415 -- start quickly
    from distbelief.dashboard.outlook import outlook  # noqa: PLC0415 -- start quickly
    from distbelief.dashboard.reader import watched  # noqa: PLC0415 -- start quickly
    from distbelief.job.run.directory import RunDirectory  # noqa: PLC0415 -- torch
    from distbelief.job.run.metrics_file import read_metrics  # noqa: PLC0415 -- torch

    run = RunDirectory.open(run_directory, write=False)
    status = run.read_status()
    if status is None:
        raise JobError(f"{run.path}: it has written no status yet: wait until it trains")
    writer = run.writer_pid()  # of a run that is being resumed, the status is still the former one
    ended = writer is None or (status.ended and writer == status.pid)
    rows = read_metrics(run.metrics_file)
    found = outlook(load_job(run.job_file), status.view, rows, ended=ended)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    lines, why = _lines(found), watched(run).why
    if why is not None:
        lines.append(formatting.plain(why.text))
    for line in lines:
        typer.echo(textwrap.fill(line, WIDTH, subsequent_indent="  "))


def _lines(found: "Outlook") -> list[str]:
    speed = f"{found.samples:,} samples, {formatting.rate(found.rate)}/s"
    noun = "measurement" if found.n_points == 1 else "measurements"
    loss = "held-out loss" if found.held_out else "training loss"
    lines = [f"{speed}; {found.n_points} {noun} of the {loss}"]
    if found.not_told:
        lines.append(found.not_told)
    if found.loss_at_end is not None:
        lines.append(f"{loss} at the end: {_between(found.loss_at_end, formatting.figure)}")
    if not found.target:
        lines.append("[stop] has no accuracy and no loss: there is no target to reach")
    elif found.met is not None:
        lines.append(f"{found.target}: reached after {formatting.duration(found.met)}")
    elif found.ended:
        lines.append(f"{found.target}: not reached, and the run has ended")
    if found.seconds is not None:
        resumed = "with --resume" + (" and a later end in the job file" if found.done else "")
        lines.append(f"{resumed if found.ended else found.target}: {_until(found)}")
        if found.left is not None and found.left < found.seconds[1]:
            lines.append(f"[stop] ends the run before that, in {formatting.duration(found.left)}")
    if found.two_more is not None:
        low, high = found.two_more
        at_most, if_busy = "", ""
        if found.seconds is not None and 0.0 < found.seconds[1] < math.inf:
            soon, late = (formatting.duration(found.seconds[1] / gain) for gain in (high, low))
            at_most, if_busy = f", so {found.target} in {soon} or later", f" ({late})"
        busy = "how busy shards are is not known"
        if found.busy is not None:
            busy = f"the busiest shard works {formatting.percent(found.busy)} of it"
        lines.append(
            "two more replicas, each on a machine like theirs: at most "
            f"{100 * (high - 1.0):+.0f} % samples/s{at_most}{found.parts and f'; {found.parts}'}. "
            f"{100 * (low - 1.0):+.0f} %{if_busy} if what the {found.n_replicas} there are wait "
            "for is busy, and less if links of shards are, which nothing counts. These replicas "
            f"spend {formatting.percent(found.exchange or 0.0)} of their time with the shards or "
            f"waiting for samples; {busy}"
        )
    if found.more_not_told:
        lines.append(
            f"two more replicas: {found.more_not_told}. To try it: distbelief simulate JOB --sweep "
            f"replicas={found.n_replicas},{found.n_replicas + 2}"
        )
    return lines


def _until(found: "Outlook") -> str:
    from distbelief.dashboard.outlook import AHEAD_MAX  # noqa: PLC0415 -- start quickly

    assert found.seconds is not None
    first, middle, last = found.seconds
    if math.isinf(first):
        text = "not soon"
    elif math.isinf(middle):
        text = f"in {formatting.duration(first)} at the earliest"
    elif math.isinf(last):
        text = f"in {formatting.duration(middle)} ({formatting.duration(first)} or more)"
    else:
        text = f"in {_between(found.seconds, formatting.duration)}"
    if found.reached is not None and found.reached < 1.0:
        share = formatting.percent(1.0 - found.reached)
        text += f"; {share} of the curves need more than {AHEAD_MAX:g} times the samples so far"
    return text


def _between(interval: "Interval", show: Callable[[float], str]) -> str:
    low, middle, high = map(show, interval)
    return f"{middle} ({low} to {high})"
