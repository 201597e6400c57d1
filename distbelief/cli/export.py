"""The command `distbelief export`: a model file of checkpoints."""

from pathlib import Path

import typer

from distbelief.cli import options as o
from distbelief.core.formatting import count, plain


@o.reported
def export(
    directory: Path = o.argument("DIR", "Directory of a parameter server, or of a run."),
    *,
    out: Path = o.option(
        Path("model.safetensors"), "FILE", "File to write, replaced if it is there.", "--out", "-o"
    ),
) -> None:
    """Write the model of a parameter server, or of a run that has not ended.

    [dim]$[/dim] distbelief export runs/server -o net.safetensors

    The values are those of the newest checkpoints, which may be some seconds
    old; server and run may go on meanwhile. A run that has ended has its
    model.safetensors already.
    """
    from distbelief.serve.export import export as write  # noqa: PLC0415 -- torch

    o.look_up_modules_here()
    n = write(directory, out, report=lambda text: typer.echo(plain(text), err=True))
    typer.echo(plain(f"{out}: {count(n)} values of the newest checkpoints in {directory}"))
