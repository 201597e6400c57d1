"""The command `distbelief serve`: a parameter server that runs without a job."""

from pathlib import Path
from typing import Annotated, Final

import typer

from distbelief.cli import options as o
from distbelief.errors import JobError


RULES: Final = ("sgd", "momentum", "adagrad", "rmsprop", "adam")


@o.reported
def serve(  # noqa: PLR0913 -- options
    model: o.ModelArgument = None,
    *,
    rule: Annotated[
        str, o.option("NAME", f"Update rule of the shards: {', '.join(RULES)}.")
    ] = "sgd",
    learning_rate: Annotated[float, o.option("R", "Learning rate of the rule.")] = 0.01,
    options: Annotated[
        list[str] | None,
        o.option(
            "KEY=VALUE",
            "Another setting of the rule, such as momentum=0.9. May be repeated.",
            "--set",
        ),
    ] = None,
    shards: Annotated[
        int, o.option("N", "Number of parameter-server shards.", least=1, most=4096)
    ] = 1,
    shard_copies: Annotated[
        int,
        o.option(
            "N",
            "Processes per shard; 2 adds a backup that takes over if the primary fails.",
            least=1,
            most=2,
        ),
    ] = 1,
    bind: Annotated[
        str | None,
        o.option(
            "tcp://HOST:PORT",
            "Address to listen on. 0.0.0.0 means all interfaces, port 0 any free port. "
            "Default: only your own processes on this host can connect.",
        ),
    ] = None,
    keys: o.KeysOption = None,
    insecure: o.InsecureOption = False,
    directory: Annotated[
        Path, o.option("DIR", "For checkpoints and logs. The same directory continues from them.")
    ] = Path("runs/server"),
    from_scratch: o.FromScratchOption = False,
    snapshot_every: Annotated[
        float, o.option("S", "Seconds between two checkpoints of a shard.", least=0.1)
    ] = 30.0,
    seed: o.SeedOption = 0,
) -> int:
    """Run a parameter server for training loops that use DownpourSGD.

    [dim]$[/dim] distbelief serve nets:make --rule adagrad --learning-rate 0.02

    [dim]$[/dim] distbelief serve nets:make --bind tcp://0.0.0.0:7700
    --keys ~/.distbelief/keys

    It prints an address to use as DownpourSGD(server=...). Training loops can
    connect and leave at any time, on this host and, with keys, on others.
    Ctrl+C saves the parameters and ends; the same command continues from there.

    Exit code: 0 ended and saved, 1 failed, 2 wrong usage.
    """
    if model is None:
        raise JobError(
            "no model to serve: name the function that makes it, as in "
            "`distbelief serve nets:make --rule adagrad --learning-rate 0.02`"
        )
    from distbelief.serve import options as options_module  # noqa: PLC0415 -- torch
    from distbelief.serve.address import parameter_specs  # noqa: PLC0415 -- torch
    from distbelief.serve.server_process import ServerRequest, run_server  # noqa: PLC0415 -- torch

    o.look_up_modules_here()
    parameters = list(options_module.model(model, seed=seed).parameters())
    request = ServerRequest(
        tensors=parameter_specs(parameters),
        rule=options_module.rule(rule, learning_rate, options or ()),
        n_shards=shards,
        shard_copies=shard_copies,
        snapshot_every=snapshot_every,
        reach=options_module.listen_config(bind, keys=keys, insecure=insecure),
    )
    error = run_server(request, parameters, directory, tell=typer.echo, from_scratch=from_scratch)
    if error is not None:
        typer.echo(error, err=True)
        return o.FAILED
    return 0
