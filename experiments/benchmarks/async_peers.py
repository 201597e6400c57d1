"""Seconds to a fixed held-out loss: `DownpourSGD` beside other systems.

    python experiments/benchmarks/async_peers.py [--rounds 5] [--peer-python NAME=PATH]
        [--small]

All train the same net (784-512-512-10) from the same weights on 60,000 samples that a random net
classified, in batches of 64 by plain SGD at one rate, by two workers of one thread, and at most one
server. The target is the held-out loss of one plain process after 1.25 epochs. Then the same with a
worker slowed 5 times: it sleeps 4 step-times of the plain process after each step.

    single               one process, torch.optim.SGD (the origin of the target)
    ours                 DownpourSGD loops, ParameterServer of one shard
    ours_adagrad         the same with Adagrad, which nobody else of these has
    ours_every_5         the same, fetching and pushing as seldom as pytorch_distbelief
    torch_rpc            a parameter server over torch's RPC
    ddp                  DistributedDataParallel over gloo: synchronous
    pytorch_distbelief   its DownpourSGD; it pushes and pulls every 5 steps, as advised

Seconds count from when all workers have begun. All take turns. Held-out loss is evaluated after a
run, from what worker 0 recorded (`peers.course`). A system that does not run keeps its row, with
version and error. Ctrl+C ends the turn under way, and reports what there is.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread, Usage
from experiments.benchmarks.measuring.workers import Program, Workers
from experiments.benchmarks.peers.course import (
    BEGUN,
    DONE,
    N_GRADIENTS,
    N_RECORDS,
    READY,
    RELEASED,
    Course,
    load,
)


EPOCHS_TO_TARGET = 1.25
MARGIN = 1.4  # gradients that may be used, over those of the plain process
SLOWED = "_slowed"
POLL_SECONDS = 0.01
_ROOT = Path(__file__).parents[2]
ADAGRAD_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    module: str  # of `experiments.benchmarks.peers`
    distribution: str = "torch"  # whose version is shown
    install: str = ""  # what to install, if it is not there
    rule: str = "sgd"
    every: int = 1  # steps between fetches, and between pushes, of ours
    python: str = sys.executable

    def version(self) -> str | None:
        """Return the version that its Python has; `None`: it is not installed."""
        code = f"import importlib.metadata as m; print(m.version({self.distribution!r}))"
        try:
            done = subprocess.run(
                [self.python, "-P", "-c", code],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except OSError:
            return None
        return done.stdout.strip().partition("+")[0] or None  # without "+cpu"


@dataclass(frozen=True, kw_only=True)
class Run:
    seconds: float | None  # to the target loss; None: never reached
    samples_per_second: float
    cpu_seconds: float  # to the target, of all its processes
    n_bytes: int  # of all its processes, shared pages counted once
    losses: tuple[float, ...]  # held out, as recorded
    at: tuple[float, ...]  # seconds from the beginning, of each loss
    shares: tuple[int, ...]  # gradients of each worker


class EntrantFailedError(Exception):
    """It did not run to the end; the text says why."""


ENTRIES = (
    Entry(name="ours", module="ours", distribution="distbelief"),
    Entry(name="ours_adagrad", module="ours", distribution="distbelief", rule="adagrad"),
    Entry(name="ours_every_5", module="ours", distribution="distbelief", every=5),
    Entry(name="torch_rpc", module="torch_rpc", install="torch"),
    Entry(name="ddp", module="ddp", install="torch"),
    Entry(
        name="pytorch_distbelief",
        module="pytorch_distbelief",
        distribution="pytorch-distbelief",
        install="pytorch-distbelief==0.1.0, in a Python of its own",
    ),
)
SINGLE = Entry(name="single", module="single")
SMALL = {
    "rounds": 1,
    "samples": 1_280,
    "held_out": 128,
    "hidden": 16,
    "learning_rate": 0.1,
    "record_every": 2,
    "target": 2.5,  # which nets have before any training: every turn gets there
}
OURS = ("ours", "ours_adagrad", "ours_every_5")


@dataclass(slots=True)
class Row:
    entry: Entry
    version: str
    error: str = ""
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [run.seconds for run in self.runs if run.seconds is not None]

    @property
    def ranks(self) -> bool:
        return bool(self.runs) and len(self.seconds) == len(self.runs)

    def cells(self) -> dict[str, str]:
        if not self.runs:
            return {"version": self.version, "seconds": "did not run"}
        best = min(loss for run in self.runs for loss in run.losses)
        runs, n = self.runs, len(self.seconds)
        missed = f"not reached ({n} of {len(runs)}), best {best:.3f}"
        return {
            "version": self.version,
            "seconds": Spread.of(self.seconds).show(2) if self.ranks else missed,
            "CPU s": f"{median(run.cpu_seconds for run in runs):.1f}",
            "MiB": f"{median(run.n_bytes for run in runs) / 2**20:,.0f}",
            "samples/s": f"{median(run.samples_per_second for run in runs):,.0f}",
            "gradients": "+".join(str(count) for count in runs[-1].shares),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    entries = _entries(options)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends entrants on the way
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(prefix="peers-", dir=in_memory) as folder:
        course = _course(options, Path(folder))
        course.generate()
        plain, target, step_seconds = _plain(course, Path(folder), options)
        print(
            f"target: held-out loss {target:.4f}, after {EPOCHS_TO_TARGET} epochs of "
            f"one process; its step takes {1000 * step_seconds:.2f} ms; load of the "
            f"machine {measurement.load():.1f}, {os.cpu_count()} processors",
            flush=True,
        )
        course = replace(course, pause_seconds=(options.slowdown - 1) * step_seconds)
        rows = _rows(entries, options)
        try:
            _hold_all(rows, course, options, target=target)
        except KeyboardInterrupt:
            print("interrupted: this is what there is", flush=True)
    _report(plain, rows, target=target, step_seconds=step_seconds)


def hold(entry: Entry, course: Course, *, target: float, seconds_max: float) -> Run:
    """Let one entrant train, and measure it, descendants included.

    It reads the board to know when all workers have begun and when all are done, lets them go, and
    evaluates afterwards what worker 0 has recorded.
    """
    path, folder = course.write(), Path(course.run_folder)
    program = Program(
        command=[entry.python, "-P", "-m", "experiments.benchmarks.peers", entry.module, str(path)],
        folder=folder,
        environment=_environment(entry, folder),
    )
    with Workers("entrant", [program], folder, serve=False) as entrant:
        try:
            used, n_bytes = _watch(entrant, course, seconds_max=seconds_max)
        except BaseException:
            entrant.signal(signal.SIGKILL)
            raise
    return _judge(course, used, n_bytes=n_bytes, target=target)


def _watch(entrant: Workers, course: Course, *, seconds_max: float) -> tuple[Usage, int]:
    board = course.board()
    deadline = time.monotonic() + seconds_max

    def wait_for(column: int, what: str) -> None:
        while not bool((board[:-1, column] > 0).all()):
            time.sleep(POLL_SECONDS)
            if entrant.status is not None:
                raise EntrantFailedError(f"status {entrant.status}: {_error_in(entrant.log)}")
            if time.monotonic() > deadline:
                counts = board[:-1, N_GRADIENTS].int().tolist()
                raise EntrantFailedError(
                    f"not {what} after {seconds_max:g} s, gradients so far {counts}; "
                    + _error_in(entrant.log)
                )

    wait_for(READY, "begun")
    with measurement.usage(entrant.cpu_seconds) as used:
        wait_for(DONE, "done")
    n_bytes = entrant.n_bytes
    board[-1, RELEASED] = 1.0
    return used, n_bytes


def _error_in(log: Path) -> str:
    """Return the first error: it is the cause, later ones are of those who waited for it."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.strip() for line in lines if "Error" in line and line[:1] != " "]
    return (errors or lines[-1:] or ["nothing was printed"])[0][:300]


def _environment(entry: Entry, folder: Path) -> dict[str, str]:
    # Ours finds the whole checkout; the others only `experiments`: one of them has our name.
    root = _ROOT
    if entry.module != "ours":
        root = folder / "path"
        root.mkdir(exist_ok=True)
        (root / "experiments").symlink_to(_ROOT / "experiments")
    return {"PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}


def _judge(course: Course, used: Usage, *, n_bytes: int, target: float) -> Run:
    board = course.board()
    n = int(board[0, N_RECORDS])
    begun = float(board[:-1, BEGUN].min())
    at = [float(second) - begun for second in course.times()[:n]]
    net, losses = course.net(), []
    for values in course.recorded()[:n]:
        load(net, values)
        losses.append(course.held_out_loss(net))
    seconds = crossing(at, losses, target=target)
    length = float(board[:-1, DONE].max()) - begun
    shares = [int(count) for count in board[:-1, N_GRADIENTS]]
    return Run(
        seconds=seconds,
        samples_per_second=sum(shares) * course.batch_size / length,
        cpu_seconds=used.cpu_seconds * (length if seconds is None else seconds) / length,
        n_bytes=n_bytes,
        losses=tuple(losses),
        at=tuple(at),
        shares=tuple(shares),
    )


def crossing(at: list[float], losses: list[float], *, target: float) -> float | None:
    """Return when the loss first was `target`: linearly between two records."""
    for index, loss in enumerate(losses):
        if loss <= target:
            if index == 0:
                return at[0]
            share = (losses[index - 1] - target) / (losses[index - 1] - loss)
            return at[index - 1] + share * (at[index] - at[index - 1])
    return None


def _course(options: argparse.Namespace, folder: Path) -> Course:
    batches = options.samples / 64
    return Course(
        data_folder=str(folder / "data"),
        run_folder=str(folder / "plain"),
        sizes=(784, options.hidden, options.hidden, 10),
        n_train=options.samples,
        n_held_out=options.held_out,
        n_workers=2,
        n_gradients=max(2, int(EPOCHS_TO_TARGET * MARGIN * batches)),
        learning_rate=options.learning_rate,
        record_every=options.record_every,
    )


def _plain(course: Course, folder: Path, options: argparse.Namespace) -> tuple[Row, float, float]:
    """Train plainly; return the row, the target, and the seconds of one step."""
    row = Row(entry=SINGLE, version=SINGLE.version() or "")
    n_gradients = max(1, int(EPOCHS_TO_TARGET * course.n_train / course.batch_size))
    target, step_seconds = options.target or 0.0, []
    for turn in range(min(options.rounds, 3)):
        alone = replace(
            course, run_folder=str(folder / f"plain-{turn}"), n_workers=1, n_gradients=n_gradients
        )
        run = hold(SINGLE, alone, target=target, seconds_max=options.seconds_max)
        # Every run of one process computes the same losses; the target is the last.
        target = options.target or run.losses[-1]
        seconds = crossing(list(run.at), list(run.losses), target=target)
        row.runs.append(replace(run, seconds=seconds))
        step_seconds.append(course.batch_size / run.samples_per_second)
    return row, target, median(step_seconds)


def _entries(options: argparse.Namespace) -> list[Entry]:
    pythons = dict(text.split("=", 1) for text in options.peer_python)
    unknown = sorted(set(pythons) - {entry.name for entry in ENTRIES})
    if unknown:
        names = ", ".join(entry.name for entry in ENTRIES)
        sys.exit(f"--peer-python: no peer is called {unknown[0]!r}; use one of {names}")
    return [
        replace(entry, python=pythons.get(entry.name, entry.python))
        for entry in ENTRIES
        if not options.only or entry.name in options.only
    ]


def _rows(entries: list[Entry], options: argparse.Namespace) -> dict[str, Row]:
    rows = {}
    for entry in entries:
        version = entry.version()
        error = "" if version else f"not installed: pip install {entry.install}"
        for suffix in ("", SLOWED) if options.slowdown > 1 else ("",):
            name = entry.name + suffix
            rows[name] = Row(entry=entry, version=version or "-", error=error)
    return rows


def _hold_all(
    rows: dict[str, Row], course: Course, options: argparse.Namespace, *, target: float
) -> None:
    for turn, name in enumerate(measurement.turns(list(rows), n_rounds=options.rounds)):
        row = rows[name]
        if row.error:
            continue
        adaptive = row.entry.rule == "adagrad"
        turned = replace(
            course,
            run_folder=str(Path(course.run_folder).with_name(f"turn-{turn}")),
            rule=row.entry.rule,
            every=row.entry.every,
            learning_rate=ADAGRAD_RATE if adaptive else course.learning_rate,
            pause_seconds=course.pause_seconds if name.endswith(SLOWED) else 0.0,
        )
        try:
            run = hold(row.entry, turned, target=target, seconds_max=options.seconds_max)
        except EntrantFailedError as error:
            row.error = str(error)
            row.runs.clear()
            print(f"{name}: {error}", flush=True)
            continue
        row.runs.append(run)
        text = "target not reached" if run.seconds is None else f"{run.seconds:.2f} s"
        print(
            f"{name}: {text}, {run.samples_per_second:,.0f} samples/s, last loss "
            f"{run.losses[-1]:.3f}, load {measurement.load():.1f}",
            flush=True,
        )


def _report(plain: Row, rows: dict[str, Row], *, target: float, step_seconds: float) -> None:
    figures = {"target_loss": target, "step_ms": 1000 * step_seconds}
    for suffix, title in (("", "all equally fast"), (SLOWED, "one worker slowed")):
        chosen = {
            name.removesuffix(SLOWED): row
            for name, row in rows.items()
            if name.endswith(SLOWED) == bool(suffix)
        }
        shown = {"single": plain, **chosen} if not suffix else chosen
        if not shown:
            continue
        cells = {name: row.cells() for name, row in shown.items()}
        measurement.show(f"seconds to held-out loss {target:.3f}, {title}", cells)
        for name, row in shown.items():
            if row.error:
                print(f"{name} {row.version}: {row.error}")
            if row.ranks:
                figures[f"{name}_seconds{suffix}"] = median(row.seconds)
                cpu_seconds = median(run.cpu_seconds for run in row.runs)
                figures[f"{name}_cpu_seconds{suffix}"] = cpu_seconds
        seconds = {name: median(row.seconds) for name, row in chosen.items() if row.ranks}
        if {"ours_every_5", "pytorch_distbelief"} <= seconds.keys():
            ratio = seconds["ours_every_5"] / seconds["pytorch_distbelief"]
            figures[f"every_5_over_pytorch_distbelief{suffix}"] = ratio
        peers = [taken for name, taken in seconds.items() if name not in OURS]
        if "ours" in seconds and peers:
            figures[f"ours_over_best_peer{suffix}"] = seconds["ours"] / min(peers)
    measurement.conclude("async_peers", figures)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="turns of each system")
    add("--only", nargs="*", default=[], metavar="NAME", help="these systems")
    python = "the Python in which a peer is installed; by default this one"
    add("--peer-python", action="append", default=[], metavar="NAME=PATH", help=python)
    add("--samples", type=int, default=60_000, help="of the training set")
    add("--held-out", type=int, default=2_000, help="samples of the held-out set")
    add("--hidden", type=int, default=512, help="units of each of two hidden layers")
    add("--learning-rate", type=float, default=0.01, help="of plain SGD")
    add("--slowdown", type=float, default=5.0, help="of one worker; 1: only without")
    add("--record-every", type=int, default=25, help="gradients of worker 0")
    add("--target", type=float, help="held-out loss, instead of the plain process's")
    add("--seconds-max", type=float, default=180.0, help="of one turn")
    return measurement.options_of(parser, arguments, small=SMALL)


if __name__ == "__main__":
    main()
