"""The command `distbelief join`, and the options of `train` that let machines join."""

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
        help="Let other machines join here (distbelief join); 0.0.0.0: at all interfaces.",
        show_default=False,
    ),
]
TrainKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="This machine's keys and allow-list (distbelief keys); needed to listen "
        "beyond this machine.",
        show_default=False,
    ),
]
HostsOption = Annotated[
    int,
    typer.Option("--hosts", metavar="N", min=0, max=1024, help="Begin when so many have joined."),
]
HostsSecondsOption = Annotated[
    float,
    typer.Option(
        "--hosts-seconds",
        metavar="S",
        min=0.0,
        help="For them; then it begins with those that are there.",
    ),
]
HereOption = Annotated[
    int | None,
    typer.Option(
        "--cores",
        metavar="N",
        min=0,
        max=4096,
        help="Of this machine, for replicas, where others may join; all by default.",
        show_default=False,
    ),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ray",
        help="Let a Ray cluster start and restart the machines: as many as --hosts.",
        show_default=False,
    ),
]
AddressArgument = Annotated[
    str, typer.Argument(metavar="tcp://HOST:PORT?key=...", help="Of the job.")
]
CoresOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=4096,
        help="That the job may use; all by default.",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help='Likewise, such as "4 GiB"; all by default.', show_default=False
    ),
]
DeviceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="D",
        help="A GPU that the job may use: cuda. Once for each; none by default.",
        show_default=False,
    ),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-import",
        metavar="MODULE",
        help="A module or package whose functions a job may call here. May be given "
        "several times; none by default.",
        show_default=False,
    ),
]
JoinKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="This machine's keys (distbelief keys), unless the address has a secret.",
        show_default=False,
    ),
]
DirectoryOption = Annotated[
    Path, typer.Option(metavar="DIR", help="For the logs of what runs here.")
]
StayOption = Annotated[
    bool, typer.Option("--stay", metavar=" ", help="When a job is over, wait for the next one.")
]
WaitOption = Annotated[
    float,
    typer.Option("--wait", metavar="S", min=1.0, help="Seconds for a job to take this machine."),
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
    """Let a job that runs, or will run, on another machine use this one.

    [dim]$[/dim] distbelief join "tcp://10.0.0.1:7700?key=5f0c..."
    --keys ~/.distbelief/keys --allow-import nets

    The job's model and data are looked for here, from the current directory. It calls
    functions of the modules that you allow, and no others. Ctrl+C: what runs here is
    moved, then it ends; twice: at once.

    Exit code: 0 the job is over, 1 failed or sent away, 2 a mistake in what you gave,
    130 stopped by Ctrl+C.
    """
    with reported_errors(show_traceback=show_traceback):
        from distbelief.cluster import join as join_module  # noqa: PLC0415 -- torch
        from distbelief.core import units  # noqa: PLC0415 -- start quickly

        wanted = join_module.JoinOptions(
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
        exit_code = join_module.join(wanted, tell=_say)
    raise typer.Exit(exit_code)


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
