"""The command `distbelief demo`: half a minute of training, and its live page."""

import os
import webbrowser
from functools import partial
from typing import Final

import typer

from distbelief.cli import options as o
from distbelief.core.formatting import plain
from distbelief.core.signals import EXIT_CODES


HERE: Final = "distbelief.cli.demo_task"
JOB: Final[dict[str, dict[str, object]]] = {
    "model": {"factory": f"{HERE}:net"},
    "data": {
        "train": {"factory": f"{HERE}:digits", "arguments": {"n_samples": 20_000, "seed": 1}},
        "test": {"factory": f"{HERE}:digits", "arguments": {"n_samples": 2_000, "seed": 2}},
    },
    "algorithm": {
        "name": "downpour",
        "loss": "cross_entropy",
        "batch_size": 32,
        "warm_start_steps": 50,
        "rule": {"name": "adam", "learning_rate": 1e-3},
    },
    "cluster": {"replicas": 2, "shards": 2},
    "evaluation": {"every": "2 s"},
    "stop": {"seconds": "25 s"},
    "output": {"directory": "runs/demo"},
}


@o.reported
def demo(
    *, page: bool = o.flag("--dashboard", "Show the run on a live page in the browser.")
) -> int:
    """Train for half a minute: two replicas learn to read digits in noise.

    [dim]$[/dim] distbelief demo

    Everything is in this package, data too. Files go to runs/demo in this
    directory, or the next free name. Ctrl+C ends it in order.
    """
    from distbelief.dashboard import beside, server  # noqa: PLC0415 -- start quickly
    from distbelief.job.trainer import run_job  # noqa: PLC0415 -- torch

    shows = None
    if page:
        listening = server.listen(None)
        url = server.url(listening)
        typer.echo(f"page: {url}")
        shows = partial(beside.page_beside, listening=listening)
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            webbrowser.open(url)  # it is served as soon as the run has a directory
    run = run_job(JOB, beside=shows)
    typer.echo(f"the page of this run: distbelief dashboard {run.directory}")
    if run.exit_code in EXIT_CODES.values():
        typer.echo(plain(o.how_to_go_on(run.directory)), err=True)
    return run.exit_code
