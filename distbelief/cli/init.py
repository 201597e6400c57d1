"""The command `distbelief init`: a first job file."""

import re
from pathlib import Path

import typer

from distbelief.cli import options as o
from distbelief.core.errors import JobError


@o.reported
def init(
    model: str = o.argument("MODEL", "MODULE:FUNCTION or MODULE:CLASS that makes the model."),
    train: str = o.argument("DATA", "MODULE:FUNCTION that returns the training data."),
    *,
    test: str | None = o.option(
        None,
        "MODULE:FUNCTION",
        "Held-out data.",
        shown="where DATA is named train: test beside it, if there",
    ),
    loss: str | None = o.option(
        None,
        "NAME",
        "torch's name of the loss, MODULE:FUNCTION, or model for the loss that the model returns.",
        shown="what outputs and targets tell",
    ),
    out: Path = o.option(Path("job.toml"), "JOB.toml", "File to write.", "--out", "-o"),
) -> None:
    """Write a job file for a model and data, each key with a comment.

    [dim]$[/dim] distbelief init nets:Net data:train -o job.toml

    [dim]$[/dim] distbelief train job.toml

    It builds the model, reads some samples and tries one step, so the job runs
    at once. What it cannot tell, such as the loss, it asks for.
    """
    from distbelief.job.first_job import first_job, write_first_job  # noqa: PLC0415 -- torch

    if out.suffix != ".toml":
        raise JobError(f"{out}: use a file .toml")
    o.look_up_modules_here()
    name = re.sub(r"[^\w-]", "-", out.stem)
    write_first_job(first_job(model, train, test=test, loss=loss, name=name), out)
    typer.echo(f"{out} is written. Train it: distbelief train {out}")
