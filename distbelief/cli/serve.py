"""The command `distbelief serve`: a parameter server that runs without a job."""

from pathlib import Path
from typing import Final

import typer

from distbelief.cli import options as o
from distbelief.core.errors import JobError


RULES: Final = ("sgd", "momentum", "delayed_nesterov", "adagrad", "rmsprop", "adam")


@o.reported
def serve(  # noqa: PLR0913 -- options
    model: str | None = o.MODEL,
    *,
    preset: str | None = o.option(
        None,
        "NAME",
        "How workers exchange, and the rule: distbelief presets lists them. Default: each push of "
        "gradients is applied by itself.",
    ),
    rule: str | None = o.option(
        None,
        "NAME",
        f"Update rule: {', '.join(RULES)}, or a class of torch.optim. "
        "Default: sgd, or the preset's.",
    ),
    learning_rate: float | None = o.option(
        None, "R", "Learning rate of the rule. Default: 0.01, or the preset's."
    ),
    options: list[str] | None = o.option(
        None,
        "KEY=VALUE",
        "Another setting of the rule, such as momentum=0.9. May be repeated.",
        "--set",
    ),
    shards: int = o.option(1, "N", "Number of parameter-server shards.", least=1, most=4096),
    shard_copies: int = o.option(
        1,
        "N",
        "Processes per shard; 2 adds a backup that takes over if the primary fails.",
        least=1,
        most=2,
    ),
    bind: str | None = o.option(
        None,
        "tcp://HOST:PORT",
        "Address to listen on. 0.0.0.0 means all interfaces, port 0 any free port. "
        "Default: only your own processes on this host can connect.",
    ),
    keys: Path | None = o.KEYS,
    insecure: bool = o.INSECURE,
    directory: Path = o.option(
        Path("runs/server"),
        "DIR",
        "For checkpoints and logs. The same directory continues from them.",
    ),
    from_scratch: bool = o.FROM_SCRATCH,
    snapshot_every: float = o.option(
        30.0, "S", "Seconds between two checkpoints of a shard.", least=0.1
    ),
    seed: int = o.SEED,
) -> int:
    """Run a parameter server for training loops that use DownpourSGD or Exchange.

    [dim]$[/dim] distbelief serve nets:make --rule adagrad --learning-rate 0.02

    [dim]$[/dim] distbelief serve nets:make --preset local --bind tcp://0.0.0.0:7700
    --keys ~/.distbelief/keys

    It prints an address to use as DownpourSGD(server=...), or Exchange(...) with
    a preset of local steps. Training loops can connect and leave at any time, on
    this host and, with keys, on others.
    Ctrl+C saves the parameters and ends; the same command continues from there.

    Exit code: 0 ended and saved, 1 failed, 2 wrong usage.
    """
    if model is None:
        raise JobError(
            "no model to serve: name the function that makes it, as in "
            "`distbelief serve nets:make --rule adagrad --learning-rate 0.02`"
        )
    from distbelief.serve import options as options_module  # noqa: PLC0415 -- torch
    from distbelief.serve.address import exchange_policy, parameter_specs, saved_buffers  # noqa: PLC0415 -- torch
    from distbelief.serve.server_process import ServerRequest, run_server  # noqa: PLC0415 -- torch

    o.look_up_modules_here()
    module = options_module.model(model, seed=seed)
    named, buffers = dict(module.named_parameters()), dict(saved_buffers(module))
    request = ServerRequest(
        tensors=parameter_specs(named.values(), buffers=buffers.values()),
        names=(*named, *buffers),
        rule=options_module.rule(
            rule, learning_rate, options or (), preset=preset, names=list(named)
        ),
        exchange=exchange_policy("--preset", {}, preset),
        preset=preset or "",
        n_shards=shards,
        shard_copies=shard_copies,
        snapshot_every=snapshot_every,
        reach=options_module.listen_config(bind, keys=keys, insecure=insecure),
    )
    tensors = [*named.values(), *buffers.values()]
    error = run_server(request, tensors, directory, tell=typer.echo, from_scratch=from_scratch)
    if error is not None:
        typer.echo(error, err=True)
        return o.FAILED
    return 0
