"""Commands that begin at once: forked from a process that has imported all they need.

Of a short job most seconds go by while torch is imported, for the command and again for
its fork server. What most tests ask is what comes after; those that ask how a command
starts begin it as a user does (`commands.train(..., fresh=True)`).
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from multiprocessing import forkserver as nursery
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Final, Self
from unittest.mock import patch

from distbelief.job.launch import forkserver, local


IMPORTED = (
    *forkserver.MODULES,
    *forkserver.MODULES_OF_RANKS,
    *("distbelief.job.trainer", "distbelief.serve.server", "distbelief.serve.server_process"),
    "distbelief.cli.main",
    "pytest",
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
)


ITS_ADDRESS: Final[list[str]] = []  # known in what it has forked


@cache
def context() -> ForkServerContext:
    """Start the process that commands are forked from; it ends with this one.

    What was forked from it uses it, too.
    """
    found = multiprocessing.get_context("forkserver")
    if ITS_ADDRESS:
        vars(nursery._forkserver).update(
            _forkserver_address=ITS_ADDRESS[0], ensure_running=lambda: None
        )
        return found
    found.set_forkserver_preload(["tests.processes.frozen"])
    before = dict(os.environ)
    for name in before:
        if name.startswith("COVERAGE_PROCESS"):
            del os.environ[name]
    os.environ.update(forkserver.ONE_THREAD)
    nursery.ensure_running()
    os.environ.clear()
    os.environ.update(before)
    return found


class Forked:
    """`distbelief WORDS...`, or `python FILE.py`: of `subprocess.Popen`, what tests use.

    With `leads`, it is the first of a process group of its own. Its output and its errors are one
    text, unless `errors` is a file for these.
    """

    def __init__(
        self, words: Sequence[str], *, folder: Path, leads: bool = False, errors: Path | None = None
    ) -> None:
        self._output = tempfile.NamedTemporaryFile("ab")  # noqa: SIM115 -- as it lives
        self._n_read = 0
        place = context()
        self._process = place.Process(
            target=run,
            args=(list(words), str(folder), dict(os.environ), self._output.name),
            kwargs={
                "leads": leads,
                "errors": errors or self._output.name,
                "address": vars(nursery._forkserver)["_forkserver_address"],
            },
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
    words: list[str],
    folder: str,
    environment: dict[str, str],
    output: str,
    *,
    leads: bool,
    errors: str | Path,
    address: str,
) -> None:
    """Be the command: never return."""
    if leads:
        os.setpgid(0, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    writes = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    files = (os.devnull, os.O_RDONLY), (output, writes), (errors, writes)
    for target, descriptor in enumerate([os.open(*file) for file in files]):
        os.dup2(descriptor, target)
    vars(local)["_spawned"] = spawned
    vars(import_module("distbelief.job.trainer"))["draw_curve"] = undrawn
    ITS_ADDRESS.append(address)
    vars(import_module("distbelief.serve.server"))["subprocess"] = Services
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # it may have children
    if words[0].endswith(".py"):
        sys.argv = words
        sys.path.insert(0, folder)
        runpy.run_path(words[0], run_name="__main__")
        atexit._run_exitfuncs()  # multiprocessing does without
        return
    sys.argv = ["distbelief", *words]
    import_module("distbelief.cli.entry").main()  # which exits


def undrawn(*_: object, **__: object) -> None:
    """Draw no curve: that takes as long as a short job trains."""


class ForkedService:
    """The process of a `ParameterServer`: what that uses of a `Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        **_pipes: int,
    ) -> None:
        request, ours = os.pipe()
        theirs, reply = os.pipe()
        (held,) = pass_fds
        ends = Connection(request), Connection(reply), Connection(os.dup(held))
        self._process = context().Process(
            target=serve, args=(command[-1], dict(env), *ends), daemon=True
        )
        # A script in `__main__` would run again there.
        with patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
            self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin = os.fdopen(ours, "wb", buffering=0)
        self.stdout = os.fdopen(theirs, "rb")

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("server_process", timeout or 0.0)


def serve(
    path: str,
    environment: dict[str, str],
    request: Connection,
    reply: Connection,
    _held: Connection,  # the lock of the directory
) -> None:
    """Be the process of a parameter server."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(request.fileno(), 0)
    os.dup2(reply.fileno(), 1)
    request.close()
    reply.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.exit(import_module("distbelief.serve.server_process").main(path))


def spawned() -> local._Server:
    """Fork a fork server from this process, in place of one that imports torch again."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not pytest's
    try:
        return local._forked()
    finally:
        sys.stdout, sys.stderr = streams


class Services:
    """What `ParameterServer` uses of `subprocess`."""

    Popen = ForkedService
    PIPE = subprocess.PIPE
    TimeoutExpired = subprocess.TimeoutExpired
