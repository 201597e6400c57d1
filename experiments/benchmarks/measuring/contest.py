"""One entrant on the course of `peers.course`, watched from outside.

The entrant is a process with all its descendants, perhaps in another Python. The
referee reads the board to know when all workers have begun and when all are done, takes
their processor time and memory at these moments, lets them go, and evaluates afterwards
what worker 0 has recorded.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from experiments.benchmarks.measuring import measurement
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


POLL_SECONDS = 0.01
END_SECONDS_MAX = 20.0
_ROOT = Path(__file__).parents[3]


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """A system in the contest."""

    name: str
    module: str  # of `experiments.benchmarks.peers`
    distribution: str = "torch"  # whose version is told
    install: str = ""  # what to install, if it is not there
    rule: str = "sgd"
    every: int = 1  # steps between fetches, and between pushes, of ours
    python: str = sys.executable

    def version(self) -> str | None:
        """Return the version that its Python has; `None`: it is not installed."""
        code = f"import importlib.metadata as m; print(m.version({self.distribution!r}))"
        try:
            told = subprocess.run(
                [self.python, "-P", "-c", code],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except OSError:
            return None
        return told.stdout.strip().partition("+")[0] or None  # without "+cpu"


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """What one entrant did in one turn."""

    seconds: float | None  # to the target loss; None: never reached
    samples_per_second: float
    cpu_seconds: float  # to the target, of all its processes
    n_bytes: int  # of all its processes, shared pages counted once
    losses: tuple[float, ...]  # held out, as recorded
    at: tuple[float, ...]  # seconds from the beginning, of each loss
    shares: tuple[int, ...]  # gradients of each worker


@final
class EntrantFailedError(Exception):
    """It did not run to the end; the text says why."""


def hold(entry: Entry, course: Course, *, target: float, seconds_max: float) -> Run:
    """Let one entrant train, and measure it.

    Raises:
        EntrantFailedError: it fails, or takes longer than `seconds_max`.
    """
    path = course.write()
    folder = Path(course.run_folder)
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [entry.python, "-P", "-m", f"experiments.benchmarks.peers.{entry.module}", str(path)],
            cwd=folder,
            env=_environment(entry, folder),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            used = _watch(process, course, folder, seconds_max=seconds_max)
        finally:
            _end(process)
    return _judge(course, used, target=target)


@final
@dataclass(frozen=True)
class _Used:
    cpu_seconds: float  # from the beginning to the end
    n_bytes: int


def _environment(entry: Entry, folder: Path) -> dict[str, str]:
    """Return what an entrant finds: `experiments`, and of its own Python all the rest.

    Ours finds the whole checkout. The others do not: one of them has our name.
    """
    root = _ROOT
    if entry.module != "ours":
        root = folder / "path"
        root.mkdir(exist_ok=True)
        (root / "experiments").symlink_to(_ROOT / "experiments")
    return {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _watch(
    process: "subprocess.Popen[bytes]", course: Course, folder: Path, *, seconds_max: float
) -> _Used:
    board = course.board()
    deadline = time.monotonic() + seconds_max

    def wait_for(column: int, what: str) -> None:
        while not bool((board[:-1, column] > 0).all()):
            time.sleep(POLL_SECONDS)
            if process.poll() is not None:
                raise EntrantFailedError(_last_words(folder, process.returncode))
            if time.monotonic() > deadline:
                counts = board[:-1, N_GRADIENTS].int().tolist()
                raise EntrantFailedError(
                    f"not {what} after {seconds_max:g} s, gradients so far {counts}; "
                    + _last_words(folder, None)
                )

    wait_for(READY, "begun")
    before = measurement.cpu_seconds(measurement.family(process.pid))
    wait_for(DONE, "done")
    family = measurement.family(process.pid)
    used = _Used(measurement.cpu_seconds(family) - before, measurement.shared_out_bytes(family))
    board[-1, RELEASED] = 1.0
    return used


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the entrant to leave; end it and all its descendants if it does not."""
    family = measurement.family(process.pid)
    try:
        process.wait(END_SECONDS_MAX if sys.exc_info()[0] is None else 0.1)
    except subprocess.TimeoutExpired:
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _judge(course: Course, used: _Used, *, target: float) -> Run:
    """Evaluate what was recorded, and find when the target was reached."""
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
        n_bytes=used.n_bytes,
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


def _last_words(folder: Path, status: int | None) -> str:
    """Return the most telling line of what an entrant wrote."""
    lines = (folder / "errors").read_text(errors="replace").splitlines()
    telling = [line.strip() for line in lines if "Error" in line and line[:1] != " "]
    # The first error is the cause; later ones are those of who waited for it.
    said = (telling or [line.strip() for line in lines[-1:]] or ["no word"])[0]
    return f"{said[:300]}" if status is None else f"status {status}: {said[:300]}"
