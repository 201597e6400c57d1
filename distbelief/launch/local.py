"""Starts and ends the processes of roles on this machine, by way of the fork server.

The launcher lives in the supervisor's process. It never waits: what becomes of a
process arrives as `PeerLost`, once. If the fork server itself dies, all its children
are lost, and the next start makes a new one.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

import msgspec

from distbelief.errors import StorageError
from distbelief.launch import forkserver
from distbelief.roles.role import Address, Event, PeerLost


CLOSE_SECONDS_MAX: Final = 5.0
"""How long the fork server may take to end its children."""

THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Of libraries: how many threads each begins with."""


@final
class LocalLauncher:
    """Of one run: `start`, then `serve` the run; `close` leaves no process.

    Starting early, before there is a run, lets the server import torch meanwhile.

    Args:
        spec: See `serve`.
        log_of: See `serve`.
    """

    def __init__(self, *, spec: Path = Path(), log_of: Callable[[str], Path] = Path) -> None:
        self._spec = spec
        self._log_of = log_of
        self._modules: tuple[str, ...] = ()
        self._server: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._alive: dict[Address, int] = {}  # incarnation of the newest life
        self._pids: dict[Address, int] = {}
        self._events: deque[Event] = deque()
        self._decoder: msgspec.json.Decoder[forkserver.Report] = msgspec.json.Decoder(
            forkserver.Report
        )
        self._n_ended = 0
        # Readable while `events` has something of our own; the server's pipe else.
        self._pipe: tuple[int, ...] = os.pipe()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def n_ended(self) -> int:
        """How many processes have ended so far."""
        return self._n_ended

    def pid(self, name: str) -> int | None:
        """Return the process of this role, as far as one is known to run."""
        return self._pids.get(Address(name))

    def start(self) -> None:
        """Start the fork server, unless it runs; it imports what roles need meanwhile.

        Raises:
            StorageError: the system has no room for another process.
        """
        if self._server is not None:
            return
        # One thread for each library: roles set torch's own number themselves, and a
        # thread that exists before a fork is missing in the child.
        environment = {**os.environ} | dict.fromkeys(THREAD_VARIABLES, "1")
        # `-P`: a file queue.py of the user's must not be taken for Python's own.
        command = [sys.executable, "-P", "-m", forkserver.__name__, str(os.getpid())]
        # Ctrl+C must not reach it before it can ignore that; here it waits.
        ours = {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        try:
            self._server = subprocess.Popen(  # noqa: S603 -- ourselves
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
            )
        except OSError as error:
            raise StorageError(f"cannot start {sys.executable}: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._unread = b""
        self._import()

    def serve(
        self, *, spec: Path, log_of: Callable[[str], Path], has_machines: bool = False
    ) -> None:
        """From now on start the processes of this run.

        Args:
            spec: File that tells them all but their names (`process.Spec`).
            log_of: Where the log of a role is.
            has_machines: Whether replicas are split over machines, all of which import
                more: the fork server does it for them, once.
        """
        self._spec, self._log_of = spec, log_of
        self._modules = forkserver.MODULES_OF_MACHINES if has_machines else ()
        self._import()

    def close(self) -> None:
        """End every process, and wait until it is gone."""
        with suppress(BlockingIOError):
            self._read()  # who has begun by now
        self._end_server()
        ends, self._pipe = self._pipe, ()
        for end in ends:
            os.close(end)

    # ---------------------------------------------------------- for the supervisor

    def launch(self, name: Address, incarnation: int) -> None:
        """Start the process of a role."""
        self._start("role", name, incarnation, self._spec)

    def check(self, name: Address, question: Path) -> None:
        """Start the process that tries the job out (`checking`)."""
        self._start("check", name, 1, question)

    def prepare(self, name: Address, incarnation: int) -> None:
        """Start the process that tries out whether roles can be built here."""
        self._start("prepare", name, incarnation, self._spec)

    def terminate(self, name: Address) -> None:
        """End the role by force; nothing happens if it is gone already."""
        if name in self._alive:
            self._ask(forkserver.Kill(name=name))

    def fileno(self) -> int:
        """Return a descriptor that is readable while `events` has something."""
        if self._server is None or self._server.stdout is None or self._events:
            return self._pipe[0]
        return self._server.stdout.fileno()

    def events(self) -> Sequence[Event]:
        """Return what happened since the last call."""
        with suppress(BlockingIOError):
            self._read()
        events = list(self._events)
        self._events.clear()
        return events

    # --------------------------------------------------------------------- inside

    def _start(
        self, program: forkserver.Program, name: Address, incarnation: int, spec: Path
    ) -> None:
        if self._server is None:
            self.start()
        self._alive[name] = incarnation
        start = forkserver.Start(
            program=program,
            name=name,
            incarnation=incarnation,
            spec=str(spec),
            log=str(self._log_of(name).absolute()),
        )
        self._ask(start)

    def _import(self) -> None:
        """Have the server import what this run needs beside the usual."""
        if self._modules:
            self._ask(forkserver.Import(modules=self._modules))

    def _ask(self, request: forkserver.Request) -> None:
        server = self._server
        if server is None or server.stdin is None:
            return
        try:
            server.stdin.write(msgspec.json.encode(request) + b"\n")
        except BrokenPipeError:
            self._server_died()

    def _read(self) -> None:
        server = self._server
        if server is None or server.stdout is None:
            return
        while True:
            part = os.read(server.stdout.fileno(), 65536)
            if not part:
                self._server_died()
                return
            *lines, self._unread = (self._unread + part).split(b"\n")
            for line in lines:
                self._note(self._decoder.decode(line))

    def _note(self, report: forkserver.Report) -> None:
        name = Address(report.name)
        match report:
            case forkserver.Begun():
                self._pids[name] = report.pid
            case forkserver.Ended():
                self._n_ended += 1
                if self._alive.get(name) == report.incarnation:
                    del self._alive[name]
                    self._pids.pop(name, None)
                self._lost(name, report.incarnation, self._why(report))

    def _lost(self, name: Address, incarnation: int, reason: str) -> None:
        self._events.append(PeerLost(peer=name, incarnation=incarnation, reason=reason))

    def _why(self, ended: forkserver.Ended) -> str:
        log = self._log_of(ended.name)
        if ended.error is not None:
            return f"could not be started: {ended.error}"
        if ended.status >= 0:
            return f"ended with status {ended.status} (see {log})"
        number = -ended.status
        with suppress(ValueError):
            name = signal.Signals(number).name
            mend = " (out of memory?)" if number == signal.SIGKILL else ""
            return f"was ended by signal {name}{mend}"
        return f"was ended by signal {number}"

    def _server_died(self) -> None:
        """All its children are gone with it; tell so."""
        self._end_server()
        alive, self._alive = self._alive, {}
        self._pids.clear()
        for name, incarnation in alive.items():
            self._n_ended += 1
            self._lost(name, incarnation, "ended with the process that started it")
        if self._pipe:
            os.write(self._pipe[1], b"\0")

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        assert server.stdin is not None
        assert server.stdout is not None
        with suppress(OSError):
            server.stdin.write(msgspec.json.encode(forkserver.Leave()) + b"\n")
        with suppress(OSError):
            server.stdin.close()
        if not self._pids:
            # It has no children. It may be busy with its imports, and hear of nothing
            # before they are done, of whom it was asked to start neither.
            server.kill()
        try:
            server.wait(CLOSE_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            server.kill()  # its children end with it
            server.wait()
        server.stdout.close()
