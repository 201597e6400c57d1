"""What the command line answers to a mistake: one message, and an exit code."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from distbelief.errors import DistBeliefError, JobError


FAILED: Final = 1
MISTAKEN: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells say it

_PRINTERS: Final = frozenset({"click", "rich", "typer"})


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
    """Return that the output takes nothing, if those who print met this error."""
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    frames = [*traceback.walk_tb(error.__traceback__)]
    last = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    if last.partition(".")[0] not in _PRINTERS:
        return None
    return f"cannot write to standard output: {error.strerror or error}"


def _pointer(error: Exception) -> str:
    """Return where an unexpected error arose, in two lines."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (
        f"{type(error).__name__}: {error}{where}\n"
        "This was not foreseen. The same command with --traceback shows all of it."
    )
