"""The command `distbelief serve`: a standing parameter server."""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from distbelief.cli.options import (
    FAILED,
    FromScratchOption,
    ModelArgument,
    SeedOption,
    TracebackOption,
    reported_errors,
)
from distbelief.errors import JobError


RULES: Final = ("sgd", "momentum", "adagrad", "rmsprop", "adam")

RuleOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"How a push is applied: {', '.join(RULES)}.")
]
RateOption = Annotated[float, typer.Option("--learning-rate", metavar="R", help="Of that rule.")]
OptionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another value of the rule, such as momentum=0.9. May be given several times.",
        show_default=False,
    ),
]
BindOption = Annotated[
    str | None,
    typer.Option(
        metavar="tcp://HOST:PORT",
        help="Where to listen; 0.0.0.0: at all interfaces; port 0: any. By default "
        "only your own processes on this machine reach it.",
        show_default=False,
    ),
]
ServeKeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="This machine's keys and allow-list (distbelief keys); needed to listen "
        "beyond this machine.",
        show_default=False,
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        metavar=" ",
        help="Listen beyond this machine without key files: whoever has the address is let in.",
    ),
]
DirectoryOption = Annotated[
    Path, typer.Option(metavar="DIR", help="For snapshots and logs; to go on from.")
]
ShardsOption = Annotated[
    int, typer.Option(metavar="N", min=1, max=4096, help="Slices of the parameters.")
]
CopiesOption = Annotated[
    int, typer.Option("--shard-copies", metavar="N", min=1, max=2, help="Of each.")
]
SnapshotOption = Annotated[
    float, typer.Option("--snapshot-every", metavar="S", min=0.1, help="Seconds.")
]


def serve(  # noqa: PLR0913 -- options
    model: ModelArgument = None,
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
    from_scratch: FromScratchOption = False,
    snapshot_every: SnapshotOption = 30.0,
    seed: SeedOption = 0,
    show_traceback: TracebackOption = False,
) -> None:
    """Keep a model's parameters for training loops that use DownpourSGD.

    [dim]$[/dim] distbelief serve nets:make --rule adagrad --learning-rate 0.02

    [dim]$[/dim] distbelief serve nets:make --bind tcp://0.0.0.0:7700
    --keys ~/.distbelief/keys

    It prints the line that a loop gives to DownpourSGD(server=...). Loops come and go,
    one after another or together, on this machine and, with keys, on others. Ctrl+C
    saves and ends it; the same command goes on from there.

    Exit code: 0 ended and saved, 1 failed, 2 a mistake in what you gave.
    """
    with reported_errors(show_traceback=show_traceback):
        if model is None:
            raise JobError(
                "there is no model to serve: name the function that makes it, as in "
                "`distbelief serve nets:make --rule adagrad --learning-rate 0.02`"
            )
        from distbelief.serve import options as serving_options, standalone  # noqa: PLC0415 -- torch

        here = str(Path.cwd())  # where a function beside the user is found
        sys.path[:0] = [] if here in sys.path else [here]
        wanted = standalone.ServeOptions(
            model=serving_options.model(model, seed=seed),
            rule=serving_options.rule(rule, learning_rate, options or ()),
            shards=shards,
            shard_copies=shard_copies,
            shared_memory=True,
            snapshot_every=snapshot_every,
            reach=serving_options.reach(bind, keys=keys, insecure=insecure),
        )
        error = standalone.run_server(wanted, directory, tell=_say, from_scratch=from_scratch)
        if error is not None:
            typer.echo(error, err=True)
            raise typer.Exit(FAILED)


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
