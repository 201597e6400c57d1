"""The command `distbelief join`."""

import sys
from pathlib import Path

import typer

from distbelief.cli.options import argument, flag, option, reported


@reported
def join(  # noqa: PLR0913 -- options
    address: str = argument(
        "tcp://HOST:PORT?key=...",
        "The job's address, as `distbelief train --listen` prints it. -: read it from standard "
        "input, and leave when that ends.",
    ),
    *,
    keys: Path | None = option(
        None,
        "DIR",
        "Directory with this host's keys (see: distbelief keys). Not needed if the "
        "address has a secret.",
    ),
    cores: int | None = option(
        None, "N", "Cores that the job may use on this host. Default: all.", least=1, most=4096
    ),
    memory: str | None = option(
        None, "SIZE", 'Memory that the job may use on this host, such as "4 GiB". Default: all.'
    ),
    devices: list[str] | None = option(
        None,
        "D",
        "A GPU that the job may use: cuda. Repeat it for each GPU. Default: none.",
        "--device",
    ),
    allow_import: list[str] | None = option(
        None,
        "MODULE",
        "A module or package whose functions the job may call on this host. "
        "May be repeated. Default: none.",
    ),
    allow_checkpoints: list[str] | None = option(
        None,
        "PLACE",
        "A folder or URL below which shards on this host may save, where the job names one in "
        "[cluster] checkpoints. May be repeated. Default: only on the host of the job.",
    ),
    domain: str = option(
        "",
        "NAME",
        "What fails together with this host, such as a rack. The two copies of a shard are put "
        "on hosts of different domains.",
    ),
    directory: Path = option(
        Path("runs/joined"), "DIR", "Where to write the logs of the roles that run here."
    ),
    stay: bool = flag("--stay", "When a job has ended, wait for the next one."),
    wait: float = option(
        600.0, "S", "Wait at most S seconds for a job to accept this host.", least=1.0
    ),
) -> int:
    """Let a job on another host use this host too.

    [dim]$[/dim] distbelief join "tcp://10.0.0.1:7700?key=5f0c..."
    --keys ~/.distbelief/keys --allow-import nets

    Start it before or after the job. Model and data of the job are looked up in
    the current directory. The job can call only functions of modules that you
    allow, and save only where you allow. Ctrl+C moves the roles that run here
    to other hosts, then ends; a second Ctrl+C ends at once.

    Exit code: 0 the job has ended, 1 failed or rejected, 2 wrong usage, 130
    stopped by Ctrl+C.
    """
    from distbelief.core import units  # noqa: PLC0415 -- start quickly
    from distbelief.job.hosts import agent, join as join_module  # noqa: PLC0415 -- torch

    is_held = address == "-"
    options = agent.JoinOptions(
        address=sys.stdin.readline().strip() if is_held else address,
        is_held=is_held,
        keys=keys,
        cores=cores,
        memory_bytes=None if memory is None else int(units.parse(memory, "bytes")),
        devices=tuple(devices or ()),
        allowed=tuple(allow_import or ()),
        places=tuple(allow_checkpoints or ()),
        domain=domain,
        directory=directory,
        stays=stay,
        wait_seconds=wait,
    )
    return join_module.join(options, tell=typer.echo)
