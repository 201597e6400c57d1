"""Arguments and options shared by commands, exit codes, and the report of errors."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from distbelief.errors import DistBeliefError, JobError


FAILED: Final = 1
MISTAKEN: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

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
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    frames = [*traceback.walk_tb(error.__traceback__)]
    last = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    if last.partition(".")[0] not in _PRINTERS:
        return None
    return f"cannot write to standard output: {error.strerror or error}"


def _pointer(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} at {frame.filename}:{frame.lineno}\n"
        "This is an unexpected error. Run the command again with --traceback to see all of it."
    )


def flag(name: str, text: str) -> object:
    """Return an option without a value."""
    return typer.Option(name, metavar=" ", help=text)


def option(*names: str, metavar: str, text: str, default: str | bool = False) -> object:
    """Return an option with a value; `default` is what its help shows."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=default)


def number(*names: str, metavar: str = "N", least: int = 1, text: str) -> object:
    return typer.Option(*names, metavar=metavar, min=least, help=text)


def argument(metavar: str, text: str) -> object:
    return typer.Argument(metavar=metavar, help=text, show_default=False)


JobArgument = Annotated[Path | None, argument("JOB.toml", "The job file.")]
SetOption = Annotated[
    list[str] | None,
    option(
        "--set",
        metavar="KEY=VALUE",
        text="Replace one value of the job file, such as algorithm.n_push=5. May be repeated.",
    ),
]
ResumeOption = Annotated[
    Path | None,
    option(metavar="RUN_DIR", text="Resume an earlier run from its newest checkpoints."),
]
FromScratchOption = Annotated[
    bool,
    flag(
        "--from-scratch",
        "Start again in a directory that already has checkpoints. They are kept, in its "
        "subdirectory aside-1.",
    ),
]
RunArgument = Annotated[
    Path | None, argument("RUN_DIR", "A run directory. Default: the newest running one in runs/.")
]
JsonOption = Annotated[bool, flag("--json", "Print JSON instead of text.")]
TracebackOption = Annotated[bool, flag("--traceback", "Print the traceback of an error.")]

TrainedArgument = Annotated[Path, argument("RUN_DIR", "The directory of a run.")]
PredictInputArgument = Annotated[
    Path,
    argument(
        "INPUT",
        "Inputs, the first dimension being samples: a .npy file, or a .safetensors file with one "
        "tensor.",
    ),
]
PredictOutOption = Annotated[
    Path | None,
    option(
        "--out",
        metavar="FILE",
        text="Where to write the outputs: a .npy or .safetensors file.",
        default="INPUT.outputs.npy",
    ),
]
WholeOption = Annotated[
    bool, flag("--whole", "Compute in one process, even if the run split its model over machines.")
]
ModelArgument = Annotated[
    str | None,
    argument("MODULE:FUNCTION", "The function that makes the model; it takes no arguments."),
]
InputOption = Annotated[
    list[str] | None,
    option(
        "--input",
        metavar="SHAPE",
        text="Shape of an input without the batch dimension: 3x200x200. For integers add "
        "how many values there are: 128:30000. Repeat it for each input.",
    ),
]
BatchOption = Annotated[int, number(text="Samples in one step.")]
LossOption = Annotated[
    str,
    option(
        metavar="NAME",
        text="torch's name of the loss function, or one_vs_all. Without it, the step starts "
        "from given gradients of the outputs.",
    ),
]
MachinesOption = Annotated[
    str, option(metavar="N,N,...", text="Numbers of machines, one row for each.", default=True)
]
ClusterOption = Annotated[
    str | None,
    option(
        metavar="NAME or FILE",
        text="A built-in cluster, or a TOML file with speed, memory and network of its "
        "machines. `here` measures this host and assumes machines like it.",
        default="rack-10g",
    ),
]
ProfileOption = Annotated[
    bool,
    flag(
        "--profile",
        "Measure the layers on this host (at most a minute), and correct the computed times of "
        "the cluster's machines by the result.",
    ),
]
PinOption = Annotated[
    list[str] | None,
    option(
        "--pin",
        metavar="LAYER=SPLIT",
        text="Fix the split of a layer: conv1=grid:3x3, fc=units:8, fc=inputs:4, "
        "loss=whole@0. May be repeated.",
    ),
]
ExactlyOption = Annotated[bool, flag("--exactly", "Use all machines, even if fewer are faster.")]
ExplainOption = Annotated[
    list[str] | None,
    option(
        metavar="LAYER",
        text="List every split of a layer, its cost, and why it was not chosen. May be repeated.",
    ),
]
OutOption = Annotated[Path | None, option(metavar="FILE", text="Write the plan as JSON.")]
PictureOption = Annotated[
    Path | None,
    option(metavar="FILE.png", text="Draw which machine holds which part of each layer."),
]
TimelineOption = Annotated[
    Path | None,
    option(
        metavar="FILE.json",
        text="Write one step as a Chrome trace: what each machine does, and when.",
    ),
]
VerifyOption = Annotated[
    bool,
    flag(
        "--verify",
        "Run the plan with the most machines in processes on this host. Compare outputs, "
        "gradients, bytes and times with one process and with the prediction.",
    ),
]
DiffOption = Annotated[
    tuple[Path, Path] | None, option(metavar="A B", text="Show where two plan files differ.")
]
SimulatedClusterOption = Annotated[
    str | None,
    option(
        "--cluster",
        metavar="NAME or FILE",
        text="A built-in cluster, or a TOML file with speed, memory and network of its "
        "machines. `here` assumes --machines machines like this host.",
        default="this host",
    ),
]
SeedOption = Annotated[int, number(least=0, text="Seed of all random numbers.")]
SeedsOption = Annotated[
    int, number(metavar="K", text="Run each configuration with K seeds; show median, p10 and p90.")
]
SweepOption = Annotated[
    list[str] | None,
    option(
        "--sweep",
        metavar="KEY=V,V,...",
        text="Try several values of a job-file key, such as replicas=1,2,4. If repeated, "
        "all combinations are tried.",
    ),
]
SuggestOption = Annotated[
    bool,
    flag(
        "--suggest",
        "Search for the configuration, within --machines, that reaches the target in "
        "\\[stop] first. Without a target: that computes the most samples per second.",
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        "--machines",
        metavar="N",
        min=1,
        help="Number of machines of the cluster that may be used.",
        show_default="all",
    ),
]
TraceOption = Annotated[
    Path | None,
    option(
        "--trace",
        metavar="FILE.json",
        text="Write the first run as a Chrome trace: what each role does, and when.",
    ),
]
CountedOption = Annotated[
    bool,
    flag(
        "--counted",
        "Compute the cost of work from its operations and bytes instead of measuring it on this "
        "host.",
    ),
]
PricedOption = Annotated[
    bool,
    flag(
        "--priced",
        "Simulate times and bytes only, without running the model. For clusters of thousands of "
        "machines.",
    ),
]
RealOption = Annotated[
    bool, flag("--real", "Use real processes on this host instead of simulated ones.")
]
