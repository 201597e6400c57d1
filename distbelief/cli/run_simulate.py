"""What the commands do once their options are read: run, print, say whether it went."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from distbelief.chaos.local_faults import run_local_chaos
from distbelief.chaos.report import ChaosReport, rendered
from distbelief.chaos.simulated import N_RUNS, run_simulated_chaos
from distbelief.config.load import load_job
from distbelief.core.signals import ended_by_signals
from distbelief.display.progress import WaitProgress
from distbelief.forecast.api import Forecast, SimulationRequest, run_request
from distbelief.forecast.prepare import Preparation
from distbelief.forecast.report import (
    as_json as forecast_as_json,
    constants_table,
    details_of,
    remarks_on,
    table_of,
)


WIDTH: Final = 200
"""Of what goes into a pipe; lines end where their text does."""


def simulate(wish: SimulationRequest, *, as_json: bool) -> bool:
    """Do what `distbelief simulate` does; return whether all runs came to their end.

    Raises:
        JobError: something that is wished for cannot be had.
        StorageError: the timeline cannot be written; all else is printed first.
    """
    console = _console()
    aside = Console(stderr=True, highlight=False) if as_json else console
    with ended_by_signals():  # so that temporary files are gone
        forecast = run_request(wish, console=aside)
    if as_json:
        text = forecast_as_json(
            forecast.job,
            forecast.variants,
            cluster=forecast.cluster,
            constants=forecast.constants,
            best=forecast.best,
        )
        console.out(text, highlight=False)
    else:
        _print(forecast, wish, console)
    if forecast.drawn is not None and forecast.drawn.error is not None:
        raise forecast.drawn.error
    return all(
        outcome.error is None for variant in forecast.variants for outcome in variant.outcomes
    )


def _console() -> Console:
    """Return standard output; in a pipe tables are as wide as they like."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def _print(forecast: Forecast, wish: SimulationRequest, console: Console) -> None:
    run = [variant for variant in forecast.variants if variant.outcomes]
    n_seeds = len(wish.seeds)
    seeds = "" if n_seeds == 1 else f", {n_seeds} seeds: median (p10 to p90)"
    title = f"{forecast.job.name} on {forecast.cluster}{seeds}"
    console.print(Text(title, "bold"))
    console.print(table_of(run, best=forecast.best))
    if len(run) == 1:
        console.print(details_of(run[0]), soft_wrap=True)
    if forecast.best is not None:
        chosen = " ".join(f"--set {key}={value}" for key, value in forecast.best.settings.items())
        console.print(f"suggested: {chosen}", soft_wrap=True, markup=False)
    for line in remarks_on(forecast.variants):
        console.print(line, soft_wrap=True, markup=False)
    drawn = forecast.drawn
    if drawn is not None and drawn.error is None:
        where = f"timeline of the first run: {wish.trace}"
        if n_lost := drawn.n_spans_lost:
            where += f"; it ends early: {n_lost:,} more pieces of work did not fit"
        console.print(where, soft_wrap=True, markup=False)
    console.print()
    console.print(constants_table(forecast.constants))


def chaos(job_file: Path, *, seed: int, real: bool, overrides: Sequence[str], as_json: bool) -> int:
    """Do what `distbelief chaos` does; return its exit code.

    Raises:
        JobError: the job cannot be run.
    """
    console = _console()
    aside = Console(stderr=True, highlight=False) if as_json else console
    job = load_job(job_file, overrides=overrides)
    if real:
        story = run_local_chaos(job, seed=seed, console=aside)
    else:
        with (
            ended_by_signals(),
            Preparation() as staging,
            WaitProgress(aside, n_runs=N_RUNS) as waiting,
        ):
            waiting.say("Trying model and data")
            staged = staging.stage(job)
            story = run_simulated_chaos(staged, seed=seed, waiting=waiting)
    _show(story, console, as_json=as_json)
    return story.exit_code


def _show(story: ChaosReport, console: Console, *, as_json: bool) -> None:
    if as_json:
        console.out(msgspec.json.encode(story).decode(), highlight=False)
    else:
        console.print(rendered(story))
