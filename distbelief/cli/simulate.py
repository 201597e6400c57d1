"""The commands `distbelief simulate` and `distbelief chaos`: jobs in virtual time."""

from pathlib import Path

from distbelief.cli import options as o
from distbelief.core.errors import JobError


@o.reported
def simulate(  # noqa: PLR0913 -- options
    job_file: Path | None = o.JOB,
    *,
    overrides: list[str] | None = o.SET,
    cluster: str | None = o.option(
        None,
        "NAME or FILE",
        "A built-in cluster, or a TOML file with speed, memory and network of its "
        "machines. `here` assumes --machines machines like this host.",
        shown="this host",
    ),
    machines: int | None = o.option(
        None, "N", "Number of machines of the cluster that may be used.", least=1, shown="all"
    ),
    seed: int = o.SEED,
    seeds: int | None = o.option(
        None,
        "K",
        "Run each configuration with K seeds; show median, p10 and p90.",
        least=1,
        shown="1; 3 of those that --suggest ends with",
    ),
    sweep: list[str] | None = o.option(
        None,
        "KEY=V,V,...",
        "Try several values of a job-file key, such as replicas=1,2,4. If repeated, "
        "all combinations are tried.",
    ),
    suggest: bool = o.flag(
        "--suggest",
        "Search for the configuration, within --machines, that reaches the target in "
        "\\[stop] first. Without a target: that computes the most samples per second. "
        "With --sweep only among these values.",
    ),
    by: str = o.option(
        "time",
        "time|loss|price",
        "What the suggested one has least of: time; loss at the end of \\[stop] seconds; price "
        "of the machines, to the target or of a sample.",
    ),
    trace: Path | None = o.option(
        None, "FILE.json", "Write the first run as a Chrome trace: what each role does, and when."
    ),
    counted: bool = o.flag(
        "--counted",
        "Compute the cost of work from its operations and bytes instead of measuring it on "
        "this host.",
    ),
    as_json: bool = o.AS_JSON,
) -> int:
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
    from distbelief.cli import run_simulate  # noqa: PLC0415 -- torch
    from distbelief.simulation.forecast.simulate import SimulationRequest, seeds_of  # noqa: PLC0415 -- start quickly
    from distbelief.simulation.forecast.sweep import axes_of  # noqa: PLC0415 -- start quickly

    request = SimulationRequest(
        job=_named(job_file, "simulate"),
        overrides=tuple(overrides or ()),
        axes=tuple(axes_of(sweep or ())),
        cluster=cluster,
        machines=machines,
        suggests=suggest,
        by=by,
        seeds=seeds_of(seed, seeds, suggests=suggest),
        trace=trace,
        measures=not counted,
    )
    succeeded = run_simulate.simulate(request, as_json=as_json)
    return 0 if succeeded else o.FAILED


@o.reported
def chaos(
    job_file: Path | None = o.JOB,
    *,
    seed: int = o.SEED,
    real: bool = o.flag("--real", "Use real processes on this host instead of simulated ones."),
    overrides: list[str] | None = o.SET,
    as_json: bool = o.AS_JSON,
) -> int:
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
    from distbelief.cli import run_simulate  # noqa: PLC0415 -- torch

    return run_simulate.chaos(
        _named(job_file, "chaos"),
        seed=seed,
        real=real,
        overrides=tuple(overrides or ()),
        as_json=as_json,
    )


def _named(job_file: Path | None, command: str) -> Path:
    if job_file is None:
        raise JobError(
            f"no job for `distbelief {command}`: name a job file, as in "
            f"`distbelief {command} speech.toml`"
        )
    return job_file
