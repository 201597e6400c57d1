"""Commands that begin at once: forked from a process that has imported all they need.

Of a short job most seconds go by while torch is imported, for the command and again for
its fork server. What most tests ask is what comes after; those that ask how a command
starts begin it as a user does (`commands.train(..., fresh=True)`).

    python -m tests.processes.nursery SOCKET

    request   {"words": ["train", ...], "folder": ..., "environment": {...}}, and a
              file for all that it writes
    answers   {"pid": 4711}, and later {"pid": 4711, "status": 0}
"""

import atexit
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, cast

from distbelief.launch import forkserver, local
from distbelief.run.metrics_file import import_for_drawing


MESSAGE_BYTES_MAX = 1 << 16
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

# ----------------------------------------------------------------------- for the tests


class Nursery:
    """The process that commands are forked from; it ends with this one."""

    def __init__(self) -> None:
        self._link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._statuses: dict[int, int] = {}
        unmeasured = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("COVERAGE_PROCESS")
        }
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(end.fileno())],
                env=unmeasured | ONE_THREAD,
                pass_fds=[end.fileno()],
            )
        atexit.register(self._process.kill)

    def start(self, words: Sequence[str], *, folder: Path, output: IO[bytes]) -> int:
        """Start `distbelief WORDS...` in this folder; return its process's number."""
        request = {"words": list(words), "folder": str(folder), "environment": dict(os.environ)}
        socket.send_fds(self._link, [json.dumps(request).encode()], [output.fileno()])
        while True:
            answer = self._answer(300.0)
            if "status" not in answer:
                self._statuses.pop(answer["pid"], None)  # of an earlier one
                return answer["pid"]

    def status(self, pid: int, *, seconds: float) -> int | None:
        """Return the exit status of this process once it has ended, within a time."""
        deadline = time.monotonic() + seconds
        while pid not in self._statuses:
            try:
                self._answer(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, BlockingIOError):
                return None
        return self._statuses[pid]

    def _answer(self, seconds: float) -> dict[str, int]:
        self._link.settimeout(seconds)
        text = self._link.recv(MESSAGE_BYTES_MAX)
        assert text, "the nursery is gone"
        answer = cast("dict[str, int]", json.loads(text))
        if "status" in answer:
            self._statuses[answer["pid"]] = answer["status"]
        return answer


@cache
def nursery() -> Nursery:
    return Nursery()


class Forked:
    """A command from the nursery: of `subprocess.Popen`, what tests use."""

    def __init__(self, words: Sequence[str], *, folder: Path) -> None:
        self._output = tempfile.NamedTemporaryFile("ab")  # noqa: SIM115 -- as it lives
        self._n_read = 0
        self.pid = nursery().start(words, folder=folder, output=self._output)
        self.returncode = 0  # as soon as it has ended

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end; return what it has written since the last call."""
        seconds = 60.0 if timeout is None else timeout
        status = nursery().status(self.pid, seconds=seconds)
        if status is None:
            raise subprocess.TimeoutExpired("distbelief", seconds)
        self.returncode = status
        written = Path(self._output.name).read_text()[self._n_read :]
        self._n_read += len(written)
        return written, None

    def send_signal(self, number: int) -> None:
        if nursery().status(self.pid, seconds=0.0) is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self._output.close()


# ------------------------------------------------------------------------ the process


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


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    commands = ("distbelief.trainer", "distbelief.cli.main")
    for module in (*forkserver.MODULES, *commands):
        import_module(module)
    import_for_drawing()
    gc.collect()
    gc.freeze()
    vars(local)["subprocess"] = Subprocesses
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is link:
                    text, files, *_ = socket.recv_fds(link, MESSAGE_BYTES_MAX, 1)
                    if not text:
                        return
                    pid = os.fork()
                    if pid == 0:
                        selector.close()
                        link.close()
                        run(json.loads(text), output=files[0])
                    os.close(files[0])
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                    link.send(json.dumps({"pid": pid}).encode())
                else:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(key.data, 0)
                    code = os.waitstatus_to_exitcode(status)
                    link.send(json.dumps({"pid": key.data, "status": code}).encode())


def run(request: dict[str, object], *, output: int) -> None:
    """Be the command: never return."""
    os.chdir(cast("str", request["folder"]))
    os.environ.clear()
    os.environ.update(cast("dict[str, str]", request["environment"]))
    null = os.open(os.devnull, os.O_RDONLY)
    for target, descriptor in enumerate((null, output, output)):
        os.dup2(descriptor, target)
    sys.argv = ["distbelief", *cast("list[str]", request["words"])]
    import_module("distbelief.cli.entry").main()  # which exits


if __name__ == "__main__":
    main()
