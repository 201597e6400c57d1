"""Commands that begin at once: forked from a process that has imported all they need.

Of a short job most seconds go by while torch is imported, for the command and again for
its fork server. What most tests ask is what comes after; those that ask how a command
starts begin it as a user does (`commands.train(..., fresh=True)`).
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from multiprocessing import forkserver as nursery
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Self

from distbelief.launch import forkserver, local


IMPORTED = (
    *forkserver.MODULES,
    *("distbelief.trainer", "distbelief.cli.main", "pytest", __name__),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@cache
def context() -> ForkServerContext:
    """Start the process that commands are forked from; it ends with this one."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(IMPORTED))
    before = dict(os.environ)
    for name in before:
        if name.startswith("COVERAGE_PROCESS"):
            del os.environ[name]
    os.environ.update(ONE_THREAD)
    nursery.ensure_running()
    os.environ.clear()
    os.environ.update(before)
    return found


class Forked:
    """`distbelief WORDS...` from the nursery: of `subprocess.Popen`, what tests use.

    With `leads`, it is the first of a process group of its own.
    """

    def __init__(self, words: Sequence[str], *, folder: Path, leads: bool = False) -> None:
        self._output = tempfile.NamedTemporaryFile("ab")  # noqa: SIM115 -- as it lives
        self._n_read = 0
        self._process = context().Process(
            target=run,
            args=(list(words), str(folder), dict(os.environ), self._output.name),
            kwargs={"leads": leads},
            daemon=True,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int:
        code = self._process.exitcode
        assert code is not None, "it has not ended"
        return code

    @property
    def said(self) -> str:
        """All that it has written so far."""
        return Path(self._output.name).read_text()

    def communicate(self, timeout: float = 60.0) -> tuple[str, None]:
        """Wait for its end; return what it has written since the last call."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("distbelief", timeout)
        written = self.said[self._n_read :]
        self._n_read += len(written)
        return written, None

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        self._process.join()
        self._output.close()


def run(
    words: list[str], folder: str, environment: dict[str, str], output: str, *, leads: bool
) -> None:
    """Be the command: never return."""
    if leads:
        os.setpgid(0, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    for target, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
        os.dup2(descriptor, target)
    vars(local)["subprocess"] = Subprocesses
    sys.argv = ["distbelief", *words]
    import_module("distbelief.cli.entry").main()  # which exits


class ForkedServer:
    """A fork server that is forked itself: what the launcher uses of a `Popen`."""

    def __init__(self, command: Sequence[str], **_options: object) -> None:
        requests, ours = os.pipe()
        theirs, reports = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(requests, 0)
            os.dup2(reports, 1)
            for descriptor in (requests, ours, theirs, reports):
                os.close(descriptor)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not pytest's
            sys.argv = ["forkserver", command[-1]]
            forkserver.main()
            os._exit(0)
        os.close(requests)
        os.close(reports)
        self.stdin = os.fdopen(ours, "wb", buffering=0)
        self.stdout = os.fdopen(theirs, "rb", buffering=0)

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        deadline = time.monotonic() + (timeout or 1e9)
        while self.pid and os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forkserver", timeout or 0.0)
            time.sleep(0.005)
        self.pid = 0


class Subprocesses:
    """What the launcher uses of the module of this name."""

    Popen = ForkedServer
    PIPE = subprocess.PIPE
    TimeoutExpired = subprocess.TimeoutExpired
