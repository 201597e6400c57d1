"""The command `distbelief status`: the state of each role of a job."""

import datetime as dt
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from distbelief.cli.options import AS_JSON, argument, flag, reported, say
from distbelief.core.errors import JobError
from distbelief.core.formatting import plain


if TYPE_CHECKING:
    from distbelief.job.run.directory import RunDirectory, Status


# A running job writes its status every second; older than this, something is wrong.
STALE_SECONDS: Final = 5.0

RUNS: Final = Path("runs")


@reported
def status(
    run_directory: Path | None = argument(
        "RUN_DIR", "A run directory. Default: the newest running one in runs/.", None
    ),
    *,
    why: bool = flag(
        "--why",
        "Name the role that holds the job back, and the cause. Of a running job it watches a few "
        "seconds.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Show the state of each role of a job.

    [dim]$[/dim] distbelief status

    [dim]$[/dim] distbelief status runs/speech --json

    [dim]$[/dim] distbelief status runs/speech --why

    A running job updates its status every second. For a job that has ended, the
    last status is shown.
    """
    from distbelief.job.run.directory import RunDirectory  # noqa: PLC0415 -- torch

    run = RunDirectory.open(run_directory, write=False) if run_directory else _newest_run()
    if why:
        _show_why(run, as_json=as_json)
        return
    now = dt.datetime.now(tz=dt.UTC).timestamp()
    _show_status(run, pid=run.writer_pid(), now=now, as_json=as_json)


def _show_why(run: "RunDirectory", *, as_json: bool) -> None:
    import msgspec  # noqa: PLC0415 -- start quickly

    from distbelief.dashboard.reader import watched  # noqa: PLC0415 -- start quickly

    found = watched(run).why
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    elif found is None:
        say(f"{run.path}: its replicas have not trained for long enough to tell")
    else:
        say(f"{found.text}\n{found.help}".rstrip())


def _newest_run() -> "RunDirectory":
    # A running one is preferred.
    from distbelief.job.run.directory import RunDirectory  # noqa: PLC0415 -- torch

    files = sorted(RUNS.glob("*/job.toml"), key=lambda file: file.stat().st_mtime)
    runs = [RunDirectory(file.parent, lock=None) for file in reversed(files)]
    running = (run for run in runs if run.writer_pid() is not None)
    run = next(running, runs[0] if runs else None)
    if run is None:
        raise JobError(
            f"no run found in {RUNS.resolve()}: name a run directory, as in "
            "`distbelief status path/to/run`"
        )
    return RunDirectory.open(run.path, write=False)


def _show_status(run: "RunDirectory", *, pid: int | None, now: float, as_json: bool) -> None:
    import msgspec  # noqa: PLC0415 -- start quickly
    from rich.console import Console  # noqa: PLC0415 -- start quickly
    from rich.text import Text  # noqa: PLC0415 -- start quickly

    from distbelief.job.display.screen import Screen  # noqa: PLC0415 -- start quickly

    last = run.read_status()
    if last is not None and pid is not None and last.pid != pid:
        last = None  # written before the run was resumed; this process has written none yet
    age = None if last is None else max(0.0, now - last.written)
    if as_json:
        content = {
            "directory": str(run.path),
            "running": pid is not None,
            "without_supervisor": pid is None and run.live_memory() is not None,
            "age_seconds": age,
            "status": last,
        }
        typer.echo(msgspec.json.encode(content).decode())
        return
    console = Console(highlight=False)
    if last is not None:
        is_past = pid is None and not last.ended
        screen = Screen(last.view, name=last.name, whole=True, is_past=is_past)
        console.print(screen)
    remark, style = _remark(run, last, pid=pid, age=age)
    # Commands in the remark must stay on one line, so that they can be copied.
    console.print(Text(plain(remark), style), soft_wrap=True)


def _remark(
    run: "RunDirectory", last: "Status | None", *, pid: int | None, age: float | None
) -> tuple[str, str]:
    # A sentence on how current the status is, and its style.
    from distbelief.core import formatting  # noqa: PLC0415 -- start quickly

    old = "" if age is None else formatting.duration(age)
    if last is not None and last.ended:
        if last.error:
            return f"{run.path}: failed: {last.error}, {old} ago", "red"
        how = "interrupted" if last.view.phase == "interrupted" else "ended"
        return f"{run.path}: {how}, {old} ago", "dim"
    if pid is None:
        seen = "" if last is None else f"; last status {old} ago"
        what, fix = "not running, and did not end properly", "resume"
        if run.live_memory() is not None:
            what, fix = "its supervisor was killed, and its roles train on for a while", "take over"
        text = f"{run.path}: {what}{seen}"
        return f"{text}. To {fix}: distbelief train --resume {shlex.quote(str(run.path))}", "yellow"
    if age is None:
        return f"{run.path}: starting (process {pid}), no status yet", "dim"
    if age > STALE_SECONDS:
        text = f"{run.path}: this status is {old} old: process {pid} runs but does not update it"
        return f"{text}. It may be stopped or out of memory", "yellow"
    return f"{run.path}: process {pid}, {old} old", "dim"
