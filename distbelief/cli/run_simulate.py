"""Runs `distbelief simulate` and `distbelief chaos` and prints their results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from distbelief.cli.options import wide_console
from distbelief.config.load import load_job
from distbelief.core.signals import ended_by_signals
from distbelief.job.display.progress import WaitProgress
from distbelief.simulation.chaos.chaos_report import rendered
from distbelief.simulation.chaos.local_faults import run_local_chaos
from distbelief.simulation.chaos.simulated import N_RUNS, run_simulated_chaos
from distbelief.simulation.forecast import forecast_report as reports
from distbelief.simulation.forecast.prepare import Preparation
from distbelief.simulation.forecast.simulate import Forecast, SimulationRequest, run_request


WIDTH: Final = 200  # columns of a table in a pipe or file without COLUMNS


def simulate(request: SimulationRequest, *, as_json: bool) -> bool:
    """Simulate, print the results, and return whether all runs ended without an error."""
    console = wide_console(WIDTH)
    aside = Console(stderr=True, highlight=False) if as_json else console
    with ended_by_signals():  # so that temporary files are removed
        forecast = run_request(request, console=aside)
    if as_json:
        console.out(msgspec.json.encode(forecast.plain()).decode(), highlight=False)
    else:
        _print(forecast, console, n_seeds=len(request.seeds), by=request.by)
    if forecast.timeline is not None and request.trace is not None:
        # Last: its error must not cost the results.
        reports.write_trace(request.trace, forecast.timeline)
        where = f"timeline of the first run: {request.trace}"
        if n_lost := forecast.timeline.n_lost:
            where += f"; it ends early: {n_lost:,} more spans did not fit"
        aside.print(where, soft_wrap=True, markup=False)
    return all(
        outcome.error is None for variant in forecast.variants for outcome in variant.outcomes
    )


def _print(forecast: Forecast, console: Console, *, n_seeds: int, by: str) -> None:
    run = [variant for variant in forecast.variants if variant.outcomes]
    seeds = "" if n_seeds == 1 else f", {n_seeds} seeds: median (p10 to p90)"
    title = f"{forecast.job.name} on {forecast.cluster}{seeds}"
    console.print(Text(title, "bold"))
    console.print(
        reports.table_of(run, best=forecast.best, front=forecast.front, width=console.width)
    )
    unbroken = not console.is_terminal  # in a pipe a sentence is one line
    if len(run) == 1:
        console.print(reports.details_of(run[0]), soft_wrap=unbroken)
    if forecast.best is not None:
        for line in reports.suggestion(forecast.best, run, front=forecast.front, by=by):
            is_command = line.startswith("--set")  # which a shell takes in one piece
            console.print(line, soft_wrap=unbroken or is_command, markup=False)
    for line in (*reports.remarks_on(forecast.variants), *forecast.notes):
        console.print(line, soft_wrap=unbroken, markup=False)
    console.print()
    console.print(reports.constants_table(forecast.constants))


def chaos(job_file: Path, *, seed: int, real: bool, overrides: Sequence[str], as_json: bool) -> int:
    """Run a job under faults, print the report, and return the exit code."""
    console = wide_console(WIDTH)
    aside = Console(stderr=True, highlight=False) if as_json else console
    job = load_job(job_file, overrides=overrides)
    job.cluster.check_formed()
    if real:
        report = run_local_chaos(job, seed=seed, console=aside)
    else:
        with (
            ended_by_signals(),
            Preparation() as preparation,
            WaitProgress(aside, n_runs=N_RUNS) as progress,
        ):
            progress.say("Trying model and data")
            prepared = preparation.stage(job)
            report = run_simulated_chaos(prepared, seed=seed, progress=progress)
    if as_json:
        console.out(msgspec.json.encode(report).decode(), highlight=False)
    else:
        console.print(rendered(report))
    return report.exit_code
