"""The command `distbelief join`, and the options of `train` that let other hosts join."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.options import TracebackOption, reported_errors


ListenOption = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="tcp://HOST:PORT",
        help="Let other hosts join the job at this address (see: distbelief join). "
        "0.0.0.0 listens on all interfaces.",
        show_default=False,
    ),
]
TrainKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="Directory with this host's keys and allow-list (see: distbelief keys). "
        "Needed to listen on a network.",
        show_default=False,
    ),
]
HostsOption = Annotated[
    int,
    typer.Option(
        "--hosts", metavar="N", min=0, max=1024, help="Start training when N hosts have joined."
    ),
]
HostsSecondsOption = Annotated[
    float,
    typer.Option(
        "--hosts-seconds",
        metavar="S",
        min=0.0,
        help="Wait at most S seconds for --hosts, then start with the hosts that have joined.",
    ),
]
HereOption = Annotated[
    int | None,
    typer.Option(
        "--cores",
        metavar="N",
        min=0,
        max=4096,
        help="With --listen: cores of this host that replicas may use. Default: all.",
        show_default=False,
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ray",
        help="Let a Ray cluster start and restart the hosts, as many as --hosts says.",
        show_default=False,
    ),
]
AddressArgument = Annotated[
    str,
    typer.Argument(
        metavar="tcp://HOST:PORT?key=...",
        help="The job's address, as `distbelief train --listen` prints it.",
    ),
]
CoresOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=4096,
        help="Cores that the job may use on this host. Default: all.",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help='Memory that the job may use on this host, such as "4 GiB". Default: all.',
        show_default=False,
    ),
]
DeviceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="D",
        help="A GPU that the job may use: cuda. Repeat it for each GPU. Default: none.",
        show_default=False,
    ),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-import",
        metavar="MODULE",
        help="A module or package whose functions the job may call on this host. "
        "May be repeated. Default: none.",
        show_default=False,
    ),
]
JoinKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="Directory with this host's keys (see: distbelief keys). Not needed if the "
        "address has a secret.",
        show_default=False,
    ),
]
DirectoryOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Where to write the logs of the roles that run here.")
]
StayOption = Annotated[
    bool, typer.Option("--stay", metavar=" ", help="When a job has ended, wait for the next one.")
]
WaitOption = Annotated[
    float,
    typer.Option(
        "--wait", metavar="S", min=1.0, help="Wait at most S seconds for a job to accept this host."
    ),
]


def join(  # noqa: PLR0913 -- options
    address: AddressArgument,
    *,
    keys: JoinKeysOption = None,
    cores: CoresOption = None,
    memory: MemoryOption = None,
    devices: DeviceOption = None,
    allow_import: AllowOption = None,
    directory: DirectoryOption = Path("runs/joined"),
    stay: StayOption = False,
    wait: WaitOption = 600.0,
    show_traceback: TracebackOption = False,
) -> None:
    """Let a job on another host use this host too.

    [dim]$[/dim] distbelief join "tcp://10.0.0.1:7700?key=5f0c..."
    --keys ~/.distbelief/keys --allow-import nets

    Start it before or after the job. Model and data of the job are looked up in
    the current directory. The job can call only functions of modules that you
    allow. Ctrl+C moves the roles that run here to other hosts, then ends; a
    second Ctrl+C ends at once.

    Exit code: 0 the job has ended, 1 failed or rejected, 2 wrong usage, 130
    stopped by Ctrl+C.
    """
    with reported_errors(show_traceback=show_traceback):
        from distbelief.cluster import agent, join as join_module  # noqa: PLC0415 -- torch
        from distbelief.core import units  # noqa: PLC0415 -- start quickly

        options = agent.JoinOptions(
            address=address,
            keys=keys,
            cores=cores,
            memory_bytes=None if memory is None else int(units.parse(memory, "bytes")),
            devices=tuple(devices or ()),
            allowed=tuple(allow_import or ()),
            directory=directory,
            stays=stay,
            wait_seconds=wait,
        )
        exit_code = join_module.join(options, tell=_print_line)
    raise typer.Exit(exit_code)


def _print_line(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
