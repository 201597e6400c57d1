"""The commands `distbelief simulate` and `distbelief chaos`: jobs in virtual time."""

from pathlib import Path

import typer

from distbelief.cli.options import (
    FAILED,
    BudgetOption,
    CountedOption,
    JobArgument,
    JsonOption,
    PricedOption,
    RealOption,
    SeedOption,
    SeedsOption,
    SetOption,
    SimulatedClusterOption,
    SuggestOption,
    SweepOption,
    TracebackOption,
    TraceOption,
    reported_errors,
)
from distbelief.errors import JobError


def simulate(  # noqa: PLR0913 -- options
    job_file: JobArgument = None,
    *,
    overrides: SetOption = None,
    cluster: SimulatedClusterOption = None,
    machines: BudgetOption = None,
    seed: SeedOption = 0,
    seeds: SeedsOption = 1,
    sweep: SweepOption = None,
    suggest: SuggestOption = False,
    trace: TraceOption = None,
    counted: CountedOption = False,
    priced: PricedOption = False,
    as_json: JsonOption = False,
    show_traceback: TracebackOption = False,
) -> None:
    """Forecast how a job would run on a cluster that you do not have.

    [dim]$[/dim] distbelief simulate speech.toml --cluster rack-1g

    [dim]$[/dim] distbelief simulate speech.toml --cluster rack-10g
    --sweep replicas=1,2,4,8 --sweep shards=1,2 --seeds 5

    [dim]$[/dim] distbelief simulate speech.toml --cluster rack-1g --suggest
    --machines 8

    The code of all roles runs in one process, in virtual time. Gradients,
    losses and staleness are real, and so is the accuracy at each point in time.
    The cost of the work is measured once on this host, and scaled by the speed
    of the cluster's machines.

    Exit code: 0 done, 1 the job failed, 2 wrong usage, 130 stopped by Ctrl+C.
    """
    with reported_errors(show_traceback=show_traceback):
        from distbelief.cli import run_simulate  # noqa: PLC0415 -- torch
        from distbelief.forecast.api import SimulationRequest  # noqa: PLC0415 -- start quickly
        from distbelief.forecast.sweep import axes_of  # noqa: PLC0415 -- start quickly

        request = SimulationRequest(
            job=_named(job_file, "simulate"),
            overrides=tuple(overrides or ()),
            axes=tuple(axes_of(sweep or ())),
            cluster=cluster,
            machines=machines,
            suggests=suggest,
            seeds=tuple(range(seed, seed + seeds)),
            trace=trace,
            measures=not counted,
            priced=priced,
        )
        succeeded = run_simulate.simulate(request, as_json=as_json)
    raise typer.Exit(0 if succeeded else FAILED)


def chaos(
    job_file: JobArgument = None,
    *,
    seed: SeedOption = 0,
    real: RealOption = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    show_traceback: TracebackOption = False,
) -> None:
    """Inject faults into a job, and report how it recovers.

    [dim]$[/dim] distbelief chaos speech.toml --seed 7

    [dim]$[/dim] distbelief chaos speech.toml --seed 7 --real

    Its processes are killed, paused, slowed down and disconnected, and their
    messages lost or duplicated. The seed decides the schedule of faults. In
    virtual time, the same seed gives the same run, event by event. With --real,
    real processes on this host are killed, paused and slowed by the same
    schedule; faults of links and messages are left out.

    Exit code: 0 the job completed, 1 it failed, 2 wrong usage, 130 stopped by
    Ctrl+C.
    """
    with reported_errors(show_traceback=show_traceback):
        from distbelief.cli import run_simulate  # noqa: PLC0415 -- torch

        exit_code = run_simulate.chaos(
            _named(job_file, "chaos"),
            seed=seed,
            real=real,
            overrides=tuple(overrides or ()),
            as_json=as_json,
        )
    raise typer.Exit(exit_code)


def _named(job_file: Path | None, command: str) -> Path:
    if job_file is None:
        raise JobError(
            f"no job for `distbelief {command}`: name a job file, as in "
            f"`distbelief {command} speech.toml`"
        )
    return job_file
