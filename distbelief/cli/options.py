"""Arguments and options of the command line, as typer has them: types with a help."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from distbelief.errors import DistBeliefError, JobError


# What the command line answers to a mistake: one message, and an exit code.

FAILED: Final = 1
MISTAKEN: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells say it

_PRINTERS: Final = frozenset({"click", "rich", "typer"})


@contextmanager
def reported_errors(*, show_traceback: bool) -> Iterator[None]:
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


JobArgument = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one value of the job file, such as algorithm.n_push=5. "
        "May be given several times.",
        show_default=False,
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR",
        help="Go on with an earlier run, from its newest snapshots.",
        show_default=False,
    ),
]
FromScratchOption = Annotated[
    bool,
    typer.Option(
        "--from-scratch",
        metavar=" ",
        help="Begin anew in a directory that holds something already; what was saved "
        "is kept there, in aside-1.",
    ),
]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_DIR",
        help="A run directory; by default the newest one in runs/ that is running.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", metavar=" ", help="Print JSON, for other programs.")
]
TracebackOption = Annotated[
    bool, typer.Option("--traceback", metavar=" ", help="Show where in the program an error arose.")
]

TrainedArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run.")]
PredictInputArgument = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT", help="Inputs, samples first: a .npy file, or .safetensors with one tensor."
    ),
]
PredictOutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Where to write the outputs: .npy or .safetensors.",
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
        help="What makes the model, without arguments.",
        show_default=False,
    ),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="Of an input, without the batch: 3x200x200; whole numbers with their "
        "count: 128:30000. Once per input.",
        show_default=False,
    ),
]
BatchOption = Annotated[int, typer.Option(metavar="N", min=1, help="Samples of one step.")]
LossOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="torch's name of the loss, or one_vs_all; without it, the outputs' own gradients.",
        show_default=False,
    ),
]
MachinesOption = Annotated[
    str, typer.Option(metavar="N,N,...", help="Numbers of machines, a row for each.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME or FILE",
        help="A ready-made cluster, or a TOML file: speed, memory and network of the "
        "machines. Or `here`: machines like this one, which is measured.",
        show_default="rack-10g",
    ),
]
ProfileOption = Annotated[
    bool,
    typer.Option(
        "--profile",
        metavar=" ",
        help="Measure the layers on this machine, a minute at most: what they take "
        "longer than by arithmetic, they do on the cluster's machines too.",
    ),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="LAYER=SPLIT",
        help="Split a layer so: conv1=grid:3x3, fc=units:8, fc=inputs:4, loss=whole@0. "
        "May be given several times.",
        show_default=False,
    ),
]
ExactlyOption = Annotated[
    bool,
    typer.Option("--exactly", metavar=" ", help="Use all machines, even if fewer were faster."),
]
ExplainOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYER",
        help="List every split of a layer, its cost, and why it lost. May be given several times.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write plan.json.", show_default=False)
]
PictureOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png",
        help="Draw which machine has which part of which layer.",
        show_default=False,
    ),
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="Write a step as a Chrome trace: what every machine does when.",
        show_default=False,
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify",
        metavar=" ",
        help="Run the plan for the most machines on processes of this one: outputs, "
        "gradients, bytes and times beside those of one process and the prediction.",
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
        help="A ready-made cluster, or a TOML file: speed, memory and network of the "
        "machines. Or `here`: as many machines like this one as --machines says.",
        show_default="this host",
    ),
]
SeedOption = Annotated[
    int, typer.Option(metavar="N", min=0, help="Of all chance; the same seed, the same run.")
]
SeedsOption = Annotated[
    int, typer.Option(metavar="K", min=1, help="Runs of each configuration: p10 to p90 is shown.")
]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=V,V,...",
        help="Try several values: replicas=1,2,4, or any key of the job file. Given "
        "several times, all combinations are tried.",
        show_default=False,
    ),
]
SuggestOption = Annotated[
    bool,
    typer.Option(
        "--suggest",
        metavar=" ",
        help="Look for the configuration that reaches the target of \\[stop] first, or "
        "else computes the most samples per second, within --machines.",
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        "--machines",
        metavar="N",
        min=1,
        help="Machines of the cluster that may be used.",
        show_default="all",
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE.json",
        help="Write the first run as a Chrome trace: what every role does when.",
        show_default=False,
    ),
]
CountedOption = Annotated[
    bool,
    typer.Option(
        "--counted",
        metavar=" ",
        help="Take what work costs from counting its operations and bytes, instead of "
        "measuring it on this machine.",
    ),
]
PricedOption = Annotated[
    bool,
    typer.Option(
        "--priced",
        metavar=" ",
        help="Compute nothing of the model: times and bytes only, of thousands of machines.",
    ),
]
RealOption = Annotated[
    bool,
    typer.Option(
        "--real", metavar=" ", help="Break processes of this machine, instead of simulated ones."
    ),
]
