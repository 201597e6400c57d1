"""The commands of the program: train, predict and partition; the others are registered here.

* An error is one message on standard error, without a traceback.
* Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl+C.
* Heavy modules are imported inside the commands: `--help` and `status` must not load torch.
* `--json` prints JSON, and nothing else, to standard output.
"""

import os
import sys
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path

import typer

from distbelief.cli import options as o
from distbelief.cli.dashboard import dashboard
from distbelief.cli.demo import demo
from distbelief.cli.export import export
from distbelief.cli.forecast import forecast
from distbelief.cli.init import init
from distbelief.cli.join import join
from distbelief.cli.keys import keys
from distbelief.cli.options import FAILED
from distbelief.cli.serve import serve
from distbelief.cli.simulate import chaos, simulate
from distbelief.cli.slurm import slurm
from distbelief.cli.status import status
from distbelief.core.errors import JobError
from distbelief.core.formatting import plain
from distbelief.core.signals import EXIT_CODES


app = typer.Typer(
    name="distbelief",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 -- typer calls it so
    if wanted:
        typer.echo(f"distbelief {version('distbelief')}")
        raise typer.Exit


@app.callback()
def distbelief(
    *,
    _version: bool = typer.Option(
        False,  # noqa: FBT003 -- positional in typer
        "--version",
        metavar=" ",
        callback=_print_version,
        is_eager=True,
        help="Print the version.",
    ),
) -> None:
    """Train neural networks on many processes that may be slow, unequal or fail.

    [dim]$[/dim] distbelief train digits.toml

    [dim]$[/dim] distbelief status

    [dim]$[/dim] distbelief partition nets:make --input 784

    Here digits.toml is your job file, and nets:make is the function make() in
    your file nets.py in this directory. It returns a torch model.
    """


@app.command()
@o.reported
def train(  # noqa: PLR0913 -- options
    job_file: Path | None = o.JOB,
    *,
    overrides: list[str] | None = o.SET,
    resume: Path | None = o.option(
        None, "RUN_DIR", "Resume an earlier run from its newest checkpoints."
    ),
    from_scratch: bool = o.FROM_SCRATCH,
    listen: str | None = o.option(
        None,
        "tcp://HOST:PORT",
        "Let other hosts join the job at this address (see: distbelief join). "
        "0.0.0.0 listens on all interfaces.",
    ),
    keys: Path | None = o.KEYS,
    insecure: bool = o.INSECURE,
    hosts: int = o.option(0, "N", "Start training when N hosts have joined.", least=0, most=1024),
    hosts_seconds: float = o.option(
        600.0,
        "S",
        "Wait at most S seconds for --hosts, then start with the hosts that have joined.",
        least=0.0,
    ),
    cores: int | None = o.option(
        None,
        "N",
        "With --listen: cores of this host that replicas may use. Default: all.",
        least=0,
        most=4096,
    ),
    on: str | None = o.option(
        None,
        "LAUNCHER",
        "What starts the hosts, and starts lost ones again. ray, spark: such a cluster, as many as "
        "--hosts says. ssh:HOST1,HOST2: distbelief join on each of these, by ssh.",
    ),
    remote: str | None = o.option(
        None,
        "COMMAND",
        "With --on ssh: shell words that run distbelief on the hosts, such as "
        '"cd /srv/job && .venv/bin/distbelief".',
        shown="cd to the same directory, run distbelief",
    ),
    page: bool = o.flag(
        "--dashboard",
        "Show the run on a live page in the browser, until its end (see: distbelief dashboard).",
    ),
    as_json: bool = o.AS_JSON,
) -> int:
    """Train a model on this host, and on other hosts that join the job.

    [dim]$[/dim] distbelief train speech.toml

    [dim]$[/dim] distbelief train speech.toml --set cluster.replicas=4

    [dim]$[/dim] distbelief train --resume runs/speech

    [dim]$[/dim] distbelief train speech.toml --listen tcp://0.0.0.0:7700
    --keys ~/.distbelief/keys --hosts 2

    Ctrl+C ends the job cleanly: gradients are pushed, checkpoints saved, and
    the model is written. All files go to the run directory that the job file
    names, or to the next free name if it exists (runs/speech.2).

    Exit code: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl+C.
    """
    from distbelief.job.launch import forkserver  # noqa: PLC0415 -- start quickly

    # The fork server is forked from this process, so that torch is imported once. Until then there
    # is one thread only: libraries start none, and the line on the screen needs none.
    os.environ.update(forkserver.ONE_THREAD)
    from rich.console import Console  # noqa: PLC0415 -- start quickly
    from rich.live import Live  # noqa: PLC0415 -- start quickly

    shown = Console(quiet=as_json)
    with Live("Importing torch ...", console=shown, auto_refresh=False, transient=True):
        job_file = _job_file(job_file, resume)
        from distbelief.config.load import load_job  # noqa: PLC0415 -- numpy

        job = load_job(job_file, overrides=overrides or ())
        forkserver.import_frozen((*forkserver.MODULES, "distbelief.job.trainer"))
    from distbelief.job import trainer  # noqa: PLC0415 -- torch
    from distbelief.job.launch.local import LocalLauncher  # noqa: PLC0415 -- numpy

    with LocalLauncher(forks=True) as launcher:
        hosting = None
        if listen is not None or on is not None:
            # Only jobs that other hosts may join need it.
            from distbelief.serve.options import ANY_PORT, join_server  # noqa: PLC0415 -- start quickly

            hosting = join_server(
                listen or ANY_PORT,
                keys=keys,
                insecure=insecure,
                n_hosts=hosts,
                hosts_seconds=hosts_seconds,
                cores=cores,
                on=on,
                remote=remote,
            )
        elif keys is not None or insecure or hosts or cores is not None or remote is not None:
            raise JobError(
                "--keys, --insecure, --hosts, --cores and --remote need an address where hosts "
                "can join: add for example --listen tcp://0.0.0.0:7700"
            )
        beside = None
        if page:
            from distbelief.dashboard import beside as pages, server  # noqa: PLC0415 -- start quickly

            listening = server.listen(None)
            typer.echo(f"page: {server.url(listening)}", err=as_json)
            beside = partial(pages.page_beside, listening=listening)
        run = trainer.run_job(
            job,
            resume=resume,
            from_scratch=from_scratch,
            show=not as_json,
            json=as_json,
            launcher=launcher,
            hosting=hosting,
            beside=beside,
        )
    if run.exit_code in EXIT_CODES.values():
        typer.echo(plain(o.how_to_go_on(run.directory)), err=True)
    if run.exit_code == FAILED and not sys.stdout.isatty():
        # On a terminal the screen shows the failure; a file or pipe needs this line.
        why = run.summary.error or "see its log"
        text = f"{job.name} failed: {why}; its logs are in {run.directory / 'logs'}"
        typer.echo(plain(text), err=True)
    return run.exit_code


app.command()(demo)
app.command()(init)
app.command()(status)
app.command()(forecast)
app.command()(dashboard)
app.command()(export)


@app.command()
@o.reported
def predict(
    run_directory: Path = o.argument("RUN_DIR", "The directory of a run."),
    inputs: Path = o.argument(
        "INPUT",
        "Inputs, the first dimension being samples: a .npy file, or a .safetensors file with "
        "one tensor.",
    ),
    *,
    out: Path | None = o.option(
        None,
        "FILE",
        "Where to write the outputs: a .npy or .safetensors file.",
        shown="INPUT.outputs.npy",
    ),
    whole: bool = o.flag(
        "--whole", "Compute in one process, even if the run split its model over machines."
    ),
    as_json: bool = o.AS_JSON,
) -> None:
    """Compute the outputs of a trained model for a file of inputs.

    [dim]$[/dim] distbelief predict runs/digits scans.npy

    A run that split its model over several machines predicts with the same
    plan: one process per machine, each of which reads only its part of the
    model.
    """
    from distbelief.job import predict as predict_module  # noqa: PLC0415 -- torch

    done = predict_module.predict(
        run_directory, inputs, out=out, whole=whole, tell=lambda text: typer.echo(text, err=True)
    )
    typer.echo(predict_module.as_json(done) if as_json else predict_module.text(done))


@app.command()
@o.reported
def partition(  # noqa: PLR0913 -- options
    model: str | None = o.MODEL,
    *,
    inputs: list[str] | None = o.option(
        None,
        "SHAPE",
        "Shape of an input without the batch dimension: 3x200x200. For integers add "
        "how many values there are: 128:30000. Repeat it for each input; by keyword: "
        "ids=128:30000, mask=128:bool.",
        "--input",
    ),
    batch: int = o.option(32, "N", "Samples in one step.", least=1),
    loss: str = o.option(
        "",
        "NAME",
        "torch's name of the loss function, or one_vs_all; model for the loss that the model "
        "returns. Without it, the step starts from given gradients of the outputs.",
        shown=False,
    ),
    machines: str = o.option("1,2,4,8", "N,N,...", "Numbers of machines, one row for each."),
    cluster: str | None = o.option(
        None,
        "NAME or FILE",
        "A built-in cluster, or a TOML file with speed, memory and network of its "
        "machines. `here` measures this host and assumes machines like it.",
        shown="rack-10g",
    ),
    profile: bool = o.flag(
        "--profile",
        "Measure the layers on this host (at most a minute), and correct the computed times "
        "of the cluster's machines by the result.",
    ),
    pins: list[str] | None = o.option(
        None,
        "LAYER=SPLIT",
        "Fix the split of a layer: conv1=grid:3x3, fc=units:8, fc=inputs:4, "
        "loss=whole@0. May be repeated.",
        "--pin",
    ),
    exactly: bool = o.flag("--exactly", "Use all machines, even if fewer are faster."),
    explain: list[str] | None = o.option(
        None,
        "LAYER",
        "List every split of a layer, its cost, and why it was not chosen. May be repeated.",
    ),
    out: Path | None = o.option(None, "FILE", "Write the plan as JSON."),
    picture: Path | None = o.option(
        None, "FILE.png", "Draw which machine holds which part of each layer."
    ),
    timeline: Path | None = o.option(
        None, "FILE.json", "Write one step as a Chrome trace: what each machine does, and when."
    ),
    verify: bool = o.flag(
        "--verify",
        "Run the plan with the most machines in processes on this host. Compare outputs, "
        "gradients, bytes and times with one process and with the prediction.",
    ),
    as_json: bool = o.AS_JSON,
) -> int:
    """Split a model over machines, and predict the time of a training step.

    [dim]$[/dim] distbelief partition nets:make --input 784 --loss cross_entropy
    --machines 1,2,8 --cluster commodity-2012

    [dim]$[/dim] distbelief partition nets:make --input 784 --loss cross_entropy
    --cluster here --verify

    nets:make is the function make() in the file nets.py in this directory, such
    as:

      from torch import nn
      def make():
        return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))

    The table has one row per number of machines: the time of a training step
    and its parts, the memory, and how far the plan may be from the best one.
    --out, --picture, --timeline and --explain use the plan of the last row.
    Layers can be split inside too. The parameters are not allocated, so the
    model may be larger than this host.

    Exit code: 0 done, 1 the plan does not fit the machines' memory, 2 wrong
    usage.
    """
    if model is None or not inputs:
        raise JobError(
            "no model to partition: name the function that makes it and the shape of "
            "its input, as in `distbelief partition nets:make --input 784`"
        )
    from distbelief.job.launch.local import LocalLauncher  # noqa: PLC0415 -- numpy

    with closing(LocalLauncher()) as launcher:
        if verify:
            launcher.start()  # it imports torch while the plan is made
        from distbelief.cli import run_partition  # noqa: PLC0415 -- torch
        from distbelief.plans.planner import planner, planning_result  # noqa: PLC0415 -- torch

        o.look_up_modules_here()
        asked = planner.Request(
            model=model,
            inputs=run_partition.input_specs(inputs),
            batch=batch,
            loss=loss,
            counts=run_partition.counts(machines),
            cluster=cluster or "rack-10g",
            pins=planning_result.pins(pins or ()),
            exactly=exactly,
            profile=profile,
        )
        fits = run_partition.run(
            asked,
            explain=explain or (),
            out=out,
            picture=picture,
            timeline=timeline,
            as_json=as_json,
            launcher=launcher if verify else None,
        )
        return 0 if fits else FAILED


def _preset_names(begun: str) -> list[str]:
    from distbelief.config.presets import PRESETS  # noqa: PLC0415 -- start quickly

    return [name for name in PRESETS if name.startswith(begun)]


@app.command()
@o.reported
def presets(
    name: str | None = o.argument(
        "NAME", "Print this preset as a table of a job file.", None, completed=_preset_names
    ),
) -> None:
    """List the presets: ways in which replicas exchange what they learn.

    A job file names one in its table algorithm, as in preset = "local", and may
    replace any key of it.
    """
    from distbelief.config import presets as known, toml  # noqa: PLC0415

    if name is not None:
        typer.echo(toml.write({"algorithm": known.expand({"name": "downpour", "preset": name})}))
        return
    typer.echo(known.table())


app.command()(simulate)
app.command()(chaos)
app.command()(serve)
app.command()(join)
app.command()(slurm)
app.add_typer(keys, name="keys")


def _job_file(job_file: Path | None, resume: Path | None) -> Path:
    if job_file is not None:
        return job_file
    if resume is None:
        raise JobError(
            "no job to train: name a job file, as in `distbelief train speech.toml`, or a "
            "run to resume, as in `--resume runs/speech`"
        )
    from distbelief.job.run.directory import RunDirectory  # noqa: PLC0415 -- torch

    return RunDirectory.open(resume, write=False).job_file
