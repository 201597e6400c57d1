"""The command `distbelief serve`: a parameter server that runs without a job."""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from distbelief.cli import options as o
from distbelief.cli.options import FAILED, reported_errors
from distbelief.errors import JobError


RULES: Final = ("sgd", "momentum", "adagrad", "rmsprop", "adam")

RuleOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"Update rule of the shards: {', '.join(RULES)}.")
]
RateOption = Annotated[
    float, typer.Option("--learning-rate", metavar="R", help="Learning rate of the rule.")
]
OptionOption = Annotated[
    list[str] | None,
    o.option(
        "--set",
        metavar="KEY=VALUE",
        text="Another setting of the rule, such as momentum=0.9. May be repeated.",
    ),
]
BindOption = Annotated[
    str | None,
    o.option(
        metavar="tcp://HOST:PORT",
        text="Address to listen on. 0.0.0.0 means all interfaces, port 0 any free port. "
        "Default: only your own processes on this host can connect.",
    ),
]
ServeKeysOption = Annotated[
    Path | None,
    o.option(
        "--keys",
        metavar="DIR",
        text="Directory with this host's keys and allow-list (see: distbelief keys). "
        "Needed to listen on a network.",
    ),
]
InsecureOption = Annotated[
    bool,
    o.flag(
        "--insecure", "Listen on a network without key files. Anyone with the address can connect."
    ),
]
DirectoryOption = Annotated[
    Path,
    typer.Option(
        metavar="DIR", help="For checkpoints and logs. The same directory continues from them."
    ),
]
ShardsOption = Annotated[
    int, typer.Option(metavar="N", min=1, max=4096, help="Number of parameter-server shards.")
]
CopiesOption = Annotated[
    int,
    typer.Option(
        "--shard-copies",
        metavar="N",
        min=1,
        max=2,
        help="Processes per shard; 2 adds a backup that takes over if the primary fails.",
    ),
]
SnapshotOption = Annotated[
    float,
    typer.Option(
        "--snapshot-every", metavar="S", min=0.1, help="Seconds between two checkpoints of a shard."
    ),
]


def serve(  # noqa: PLR0913 -- options
    model: o.ModelArgument = None,
    *,
    rule: RuleOption = "sgd",
    learning_rate: RateOption = 0.01,
    options: OptionOption = None,
    shards: ShardsOption = 1,
    shard_copies: CopiesOption = 1,
    bind: BindOption = None,
    keys: ServeKeysOption = None,
    insecure: InsecureOption = False,
    directory: DirectoryOption = Path("runs/server"),
    from_scratch: o.FromScratchOption = False,
    snapshot_every: SnapshotOption = 30.0,
    seed: o.SeedOption = 0,
    show_traceback: o.TracebackOption = False,
) -> None:
    """Run a parameter server for training loops that use DownpourSGD.

    [dim]$[/dim] distbelief serve nets:make --rule adagrad --learning-rate 0.02

    [dim]$[/dim] distbelief serve nets:make --bind tcp://0.0.0.0:7700
    --keys ~/.distbelief/keys

    It prints an address to use as DownpourSGD(server=...). Training loops can
    connect and leave at any time, on this host and, with keys, on others.
    Ctrl+C saves the parameters and ends; the same command continues from there.

    Exit code: 0 ended and saved, 1 failed, 2 wrong usage.
    """
    with reported_errors(show_traceback=show_traceback):
        if model is None:
            raise JobError(
                "no model to serve: name the function that makes it, as in "
                "`distbelief serve nets:make --rule adagrad --learning-rate 0.02`"
            )
        from distbelief.serve import options as options_module  # noqa: PLC0415 -- torch
        from distbelief.serve.address import parameter_specs  # noqa: PLC0415 -- torch
        from distbelief.serve.server_process import ServerRequest, run_server  # noqa: PLC0415 -- torch

        here = str(Path.cwd())  # nets:make is looked up in the current directory
        sys.path[:0] = [] if here in sys.path else [here]
        parameters = list(options_module.model(model, seed=seed).parameters())
        request = ServerRequest(
            tensors=parameter_specs(parameters),
            rule=options_module.rule(rule, learning_rate, options or ()),
            n_shards=shards,
            shard_copies=shard_copies,
            snapshot_every=snapshot_every,
            reach=options_module.listen_config(bind, keys=keys, insecure=insecure),
        )
        error = run_server(
            request, parameters, directory, tell=_print_line, from_scratch=from_scratch
        )
        if error is not None:
            typer.echo(error, err=True)
            raise typer.Exit(FAILED)


def _print_line(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
