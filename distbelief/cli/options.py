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
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return (
        f"{type(error).__name__}: {error}{where}\n"
        "This is an unexpected error. Run the command again with --traceback to see all of it."
    )


JobArgument = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one value of the job file, such as algorithm.n_push=5. May be repeated.",
        show_default=False,
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR",
        help="Resume an earlier run from its newest checkpoints.",
        show_default=False,
    ),
]
FromScratchOption = Annotated[
    bool,
    typer.Option(
        "--from-scratch",
        metavar=" ",
        help="Start again in a directory that already has checkpoints. They are kept, in "
        "its subdirectory aside-1.",
    ),
]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_DIR",
        help="A run directory. Default: the newest running one in runs/.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", metavar=" ", help="Print JSON instead of text.")
]
TracebackOption = Annotated[
    bool, typer.Option("--traceback", metavar=" ", help="Print the traceback of an error.")
]

TrainedArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")]
PredictInputArgument = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT",
        help="Inputs, the first dimension being samples: a .npy file, or a .safetensors "
        "file with one tensor.",
    ),
]
PredictOutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Where to write the outputs: a .npy or .safetensors file.",
        show_default="INPUT.outputs.npy",
    ),
]
WholeOption = Annotated[
    bool,
    typer.Option(
        "--whole",
        metavar=" ",
        help="Compute in one process, even if the run split its model over machines.",
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="The function that makes the model; it takes no arguments.",
        show_default=False,
    ),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="Shape of an input without the batch dimension: 3x200x200. For integers add "
        "how many values there are: 128:30000. Repeat it for each input.",
        show_default=False,
    ),
]
BatchOption = Annotated[int, typer.Option(metavar="N", min=1, help="Samples in one step.")]
LossOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="torch's name of the loss function, or one_vs_all. Without it, the step starts "
        "from given gradients of the outputs.",
        show_default=False,
    ),
]
MachinesOption = Annotated[
    str, typer.Option(metavar="N,N,...", help="Numbers of machines, one row for each.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME or FILE",
        help="A built-in cluster, or a TOML file with speed, memory and network of its "
        "machines. `here` measures this host and assumes machines like it.",
        show_default="rack-10g",
    ),
]
ProfileOption = Annotated[
    bool,
    typer.Option(
        "--profile",
        metavar=" ",
        help="Measure the layers on this host (at most a minute), and correct the "
        "computed times of the cluster's machines by the result.",
    ),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="LAYER=SPLIT",
        help="Fix the split of a layer: conv1=grid:3x3, fc=units:8, fc=inputs:4, "
        "loss=whole@0. May be repeated.",
        show_default=False,
    ),
]
ExactlyOption = Annotated[
    bool, typer.Option("--exactly", metavar=" ", help="Use all machines, even if fewer are faster.")
]
ExplainOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYER",
        help="List every split of a layer, its cost, and why it was not chosen. May be repeated.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the plan as JSON.", show_default=False)
]
PictureOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png",
        help="Draw which machine holds which part of each layer.",
        show_default=False,
    ),
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Write one step as a Chrome trace: what each machine does, and when.",
        show_default=False,
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify",
        metavar=" ",
        help="Run the plan with the most machines in processes on this host. Compare "
        "outputs, gradients, bytes and times with one process and with the prediction.",
    ),
]
DiffOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Show where two plan files differ.", show_default=False),
]
SimulatedClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME or FILE",
        help="A built-in cluster, or a TOML file with speed, memory and network of its "
        "machines. `here` assumes --machines machines like this host.",
        show_default="this host",
    ),
]
SeedOption = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of all random numbers.")]
SeedsOption = Annotated[
    int,
    typer.Option(
        metavar="K", min=1, help="Run each configuration with K seeds; show median, p10 and p90."
    ),
]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=V,V,...",
        help="Try several values of a job-file key, such as replicas=1,2,4. If repeated, "
        "all combinations are tried.",
        show_default=False,
    ),
]
SuggestOption = Annotated[
    bool,
    typer.Option(
        "--suggest",
        metavar=" ",
        help="Search for the configuration, within --machines, that reaches the target in "
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
    typer.Option(
        "--trace",
        metavar="FILE.json",
        help="Write the first run as a Chrome trace: what each role does, and when.",
        show_default=False,
    ),
]
CountedOption = Annotated[
    bool,
    typer.Option(
        "--counted",
        metavar=" ",
        help="Compute the cost of work from its operations and bytes instead of measuring "
        "it on this host.",
    ),
]
PricedOption = Annotated[
    bool,
    typer.Option(
        "--priced",
        metavar=" ",
        help="Simulate times and bytes only, without running the model. For clusters of "
        "thousands of machines.",
    ),
]
RealOption = Annotated[
    bool,
    typer.Option(
        "--real", metavar=" ", help="Use real processes on this host instead of simulated ones."
    ),
]
