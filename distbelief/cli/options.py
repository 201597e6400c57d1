"""Arguments and options shared by commands, exit codes, and the report of errors."""

import inspect
import os
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar, cast

import typer

from distbelief.core.errors import DistBeliefError, JobError, raised_by
from distbelief.core.formatting import plain


if TYPE_CHECKING:
    from rich.console import Console


FAILED: Final = 1
MISTAKEN: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

_P = ParamSpec("_P")
_T = TypeVar("_T")

# An OSError without a file name that was raised inside these came from standard output.
_PRINTERS: Final = frozenset({"click", "rich", "typer"})


@contextmanager
def reported_errors(*, show_traceback: bool) -> Iterator[None]:
    """Turn an exception into one message on standard error and an exit code."""
    try:
        yield
    except DistBeliefError as error:
        if show_traceback:
            traceback.print_exc()
        say(str(error), err=True)
        code = MISTAKEN if isinstance(error, JobError) else FAILED
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):  # typer knows what to do
        raise
    except Exception as error:
        if show_traceback:
            raise
        refused = _output_refused(error)
        if refused is not None:  # Python would try it again at its end, and complain itself
            with Path(os.devnull).open("wb") as null:
                os.dup2(null.fileno(), sys.stdout.fileno())
        say(refused or _pointer(error), err=True)
        raise typer.Exit(FAILED) from None


def say(text: str, *, err: bool = False) -> None:
    """Print a message; a terminal breaks no word of it."""
    text = plain(text)
    if (sys.stderr if err else sys.stdout).isatty():
        width = shutil.get_terminal_size().columns
        fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(fill(line, width) for line in text.split("\n"))
    typer.echo(text, err=err)


def _output_refused(error: Exception) -> str | None:
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    frames = [*traceback.walk_tb(error.__traceback__)]
    last = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    if last.partition(".")[0] not in _PRINTERS:
        return None
    return f"cannot write to standard output: {error.strerror or error}"


def _pointer(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    user, again = raised_by(error), "Run the command again with --traceback to see all of it."
    what = f"{type(error).__name__}: {error} at {frame.filename}:{frame.lineno}\n"
    return f"{user} raised {what}{again}" if user else f"{what}This is an unexpected error. {again}"


def reported(command: Callable[_P, int | None]) -> Callable[_P, None]:
    """Give a command the option --traceback, messages for its errors, and its exit code."""

    @wraps(command)
    def run(*args: _P.args, **options: _P.kwargs) -> None:
        with reported_errors(show_traceback=bool(options.pop(added.name))):
            code = command(*args, **options)
        raise typer.Exit(code or 0)

    signature = inspect.signature(command)
    shown = flag("--traceback", "Print the traceback of an error.")
    added = inspect.Parameter(
        "show_traceback", inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=bool
    )
    parameters = [*signature.parameters.values(), added]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = "\n\n".join(map(_example, (inspect.getdoc(command) or "").split("\n\n")))
    return run


def _example(paragraph: str) -> str:
    # An example of several lines must not be filled, and is one command for a shell, too.
    lines = paragraph.split("\n")
    if len(lines) == 1 or not lines[0].startswith("[dim]$[/dim]"):
        return paragraph
    return "\b\n" + " \\\n".join([lines[0], *(f"    {line}" for line in lines[1:])])


def flag(name: str, text: str) -> bool:
    return option(False, " ", text, name)  # noqa: FBT003 -- of typer


def option(
    default: _T,
    metavar: str,
    text: str,
    *names: str,
    least: float | None = None,
    most: float | None = None,
    shown: str | bool = True,
) -> _T:
    """Return an option with a value; `shown` is what its help shows instead of the default."""
    made: object = typer.Option(
        default, *names, metavar=metavar, help=text, min=least, max=most, show_default=shown
    )
    return cast("_T", made)


def argument(
    metavar: str,
    text: str,
    default: "_T | EllipsisType" = ...,
    *,
    completed: Callable[[str], list[str]] | None = None,  # by the shell's tab key; else files
) -> _T:
    made: object = typer.Argument(
        default, metavar=metavar, help=text, show_default=False, autocompletion=completed
    )
    return cast("_T", made)


def wide_console(width: int, *, stderr: bool = False) -> "Console":
    """Return a console for tables: in a pipe of this width, unless COLUMNS says another."""
    from rich.console import Console  # noqa: PLC0415 -- start quickly

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width
    return console


def how_to_go_on(run_directory: Path) -> str:
    """Return the line that ends what Ctrl+C has stopped; a shell takes the command as it is."""
    return f"go on: distbelief train --resume {shlex.quote(str(run_directory))}"


def look_up_modules_here() -> None:
    """Find modules of the user, such as nets of nets:make, in the current directory."""
    here = str(Path.cwd())
    sys.path[:0] = [] if here in sys.path else [here]


JOB: Path | None = argument("JOB.toml", "The job file.", None)
MODEL: str | None = argument(
    "MODULE:FUNCTION", "The function that makes the model; it takes no arguments.", None
)
SET: list[str] | None = option(
    None,
    "KEY=VALUE",
    "Replace one value of the job file, such as algorithm.n_push=5. May be repeated.",
    "--set",
)
FROM_SCRATCH = flag(
    "--from-scratch",
    "Start again in a directory that already has checkpoints. They are kept, in its "
    "subdirectory aside-1.",
)
KEYS: Path | None = option(
    None,
    "DIR",
    "Directory with this host's keys and allow-list (see: distbelief keys). "
    "Needed to listen on a network.",
)
INSECURE = flag(
    "--insecure", "Listen on a network without key files. Anyone with the address can connect."
)
SEED = option(0, "N", "Seed of all random numbers.", least=0)
AS_JSON = flag("--json", "Print JSON instead of text.")
