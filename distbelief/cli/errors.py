"""What the command line answers to a mistake: one message, and an exit code."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from distbelief.errors import DistBeliefError, JobError


FAILED: Final = 1
MISTAKEN: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells say it


@contextmanager
def told(*, show_traceback: bool) -> Iterator[None]:
    """Turn what goes wrong into one message and an exit code."""
    try:
        yield
    except DistBeliefError as error:
        if show_traceback:
            traceback.print_exc()
        typer.echo(str(error), err=True)
        code = MISTAKEN if isinstance(error, JobError) else FAILED
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):  # typer knows what to do
        raise
    except Exception as error:
        if show_traceback:
            raise
        typer.echo(_output_refused(error) or _pointer(error), err=True)
        raise typer.Exit(FAILED) from None


def _output_refused(error: Exception) -> str | None:
    """Return that standard output takes nothing, if that is what went wrong.

    What could not be written waits there still, and is refused again. It is dropped
    then: else Python would complain once more when the process ends.
    """
    if not isinstance(error, OSError):
        return None
    try:
        sys.stdout.flush()
    except OSError as refused:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        why = refused.strerror or str(refused)
        return f"cannot write to standard output: {why}"
    return None


def _pointer(error: Exception) -> str:
    """Return where an unexpected error arose, in two lines."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (
        f"{type(error).__name__}: {error}{where}\n"
        "This was not foreseen. The same command with --traceback shows all of it."
    )
