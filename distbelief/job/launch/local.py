"""Starts and ends the processes of roles on this host, through the fork server.

The launcher runs in the supervisor's process and never waits: the end of a process arrives as
`PeerLost`, once. If the fork server dies, all its children are lost; the next start makes a new
one.
"""

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import Final, Self, final

import msgspec

from distbelief.core.errors import StorageError
from distbelief.job.launch import forkserver
from distbelief.protocol.role import Address, Event, PeerJoined, PeerLost


# For the imports of the fork server, on a loaded machine
IMPORT_SECONDS_MAX: Final = 1800.0
CLOSE_SECONDS_MAX: Final = 5.0  # for the fork server to end its children
# The preflight process of a joining host: can the run's roles be built here?
PREPARE: Final = Address("prepare")


@final
class _Server:
    """A fork server that this process has not spawned; as `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: RawIOBase, stdout: RawIOBase) -> None:
        self._pid, self.stdin, self.stdout = pid, stdin, stdout

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with suppress(ConnectionError):
            while True:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                if not select.select([self.stdout], [], [], left)[0]:
                    raise subprocess.TimeoutExpired(forkserver.__name__, timeout or 0.0)
                if not self.stdout.read(65536):
                    break
        with suppress(ChildProcessError):  # of a supervisor that was killed
            os.waitpid(self._pid, 0)


def _adopted(link: socket.socket) -> _Server:
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    ends = link.makefile("wb", buffering=0), link.makefile("rb", buffering=0)
    return _Server(struct.unpack("3i", peer)[0], *ends)


@contextmanager
def _held_signals() -> Iterator[None]:
    """Keep signals pending: Ctrl+C must not reach the server before it ignores it."""
    ours = {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _spawned() -> subprocess.Popen[bytes]:
    # `-P`: a user's queue.py must not replace Python's own.
    command = [sys.executable, "-P", "-m", forkserver.__name__, str(os.getpid())]
    environment = {**os.environ, **forkserver.ONE_THREAD}
    try:
        with _held_signals():
            return subprocess.Popen(  # noqa: S603 -- ourselves
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
            )
    except OSError as error:
        raise StorageError(f"cannot start {sys.executable}: {error.strerror}") from error


def _forked(*, holds: bool = False) -> _Server:
    """Fork it from this process, which must be clean: so nothing is imported twice.

    If it `holds` the objects of a user's program, that need not be clean.
    """
    requests, ours = os.pipe()
    theirs, reports = os.pipe()
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()

    def fork() -> int:
        with _held_signals():
            pid = os.fork()
            if pid == 0:
                try:
                    os.dup2(requests, 0)
                    os.dup2(reports, 1)
                    if holds:
                        forkserver.leave_program()
                    else:
                        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # locks, our own ends of pipes
                    sys.argv[1:] = [str(parent)]
                    forkserver.main(holds=holds)
                finally:
                    os._exit(0)  # the stack and the exit handlers are the parent's
        return pid

    try:
        pid = _in_new_thread(fork) if holds else fork()
    except OSError as error:
        raise StorageError(f"cannot start the fork server: {error.strerror}") from error
    os.close(requests)
    os.close(reports)
    return _Server(pid, os.fdopen(ours, "wb", buffering=0), os.fdopen(theirs, "rb", buffering=0))


def _in_new_thread(fork: Callable[[], int]) -> int:
    """Fork from a thread that has computed nothing.

    It is the child's only thread, and must not believe that it has OpenMP's threads, which the
    child lacks: it would wait for them for ever.
    """
    found: Future[int] = Future()

    def run() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
                pid = fork()
        except OSError as error:
            found.set_exception(error)
            return
        found.set_result(pid)
        # For the kernel the child's parent is this thread, whose end it would be told.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=run, daemon=True).start()
    return found.result()


@final
class LocalLauncher:
    """The processes of one run: `start` (may import torch early), `serve`, `close` (ends all).

    `events` tells of each process that it has begun (`PeerJoined`), once the imports are done.
    `forks`: this process has imported what roles need, and nothing of the user's, so that the fork
    server may be forked from it as long as it has one thread.
    `holds`: roles need the objects of this process, so the server is forked from it anyway. They
    end with this process: another one would not have these objects.
    """

    def __init__(
        self,
        *,
        spec: Path = Path(),
        log_of: Callable[[str], Path] = Path,
        forks: bool = False,
        holds: bool = False,
    ) -> None:
        self._spec = spec
        self._log_of = log_of
        self._forks = forks
        self._holds = holds
        self._modules: tuple[str, ...] = ()
        self._patience: float | None = None
        self._n_adopted = 0
        self._server: subprocess.Popen[bytes] | _Server | None = None
        self._unread = b""
        self._alive: dict[Address, int] = {}  # newest incarnation of each
        self._pids: dict[Address, int] = {}
        self._events: deque[Event] = deque()
        self._decoder: msgspec.json.Decoder[forkserver.Report]
        self._decoder = msgspec.json.Decoder(forkserver.Report)
        self.n_ended = 0
        # Readable while `events` has something that did not come through the server's pipe.
        self._pipe: tuple[int, ...] = os.pipe()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pid(self, name: str) -> int | None:
        return self._pids.get(Address(name))

    def start(self) -> None:
        """Start the fork server, unless it runs; it imports modules in the background."""
        if self._server is not None:
            return
        if self._holds:
            self._use(_forked(holds=True))
        else:
            self._use(_forked() if self._forks and forkserver.is_clean() else _spawned())
        self._ask(forkserver.Import(modules=self._modules))

    def adopt(self, directory: Path) -> dict[Address, int] | None:
        """Use the fork server of a supervisor that was killed; None if none waits here.

        Return the incarnations of its roles; the spec that they have read is in this directory.
        """
        with ExitStack() as stack:
            link = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
            try:
                held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, held)
                link.connect(forkserver.door_in(held))
            except OSError:
                return None
            self._end_server()
            self._use(_adopted(link))
        n_before, deadline = self._n_adopted, time.monotonic() + CLOSE_SECONDS_MAX
        while self._server is not None and self._n_adopted == n_before:
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([self.fileno()], [], [], left)[0]:
                self._server.kill()
            self._read()
        return {**self._alive} if self._n_adopted > n_before else None

    def _use(self, server: subprocess.Popen[bytes] | _Server) -> None:
        self._server, self._unread = server, b""

    def serve(
        self,
        *,
        spec: Path,
        log_of: Callable[[str], Path],
        has_ranks: bool = False,
        modules: Sequence[str] = (),
        patience: float | None = None,
    ) -> None:
        """Set the run whose processes are started from now on.

        Ranks of split replicas need more modules; the server imports all of them once. `patience`:
        how long they wait for another supervisor if this one is killed; None: they end at once.
        """
        self._spec, self._log_of = spec, log_of
        self._patience = None if self._holds else patience
        self._modules = (*modules, *(forkserver.MODULES_OF_RANKS if has_ranks else ()))
        self._ask(forkserver.Import(modules=self._modules))

    def close(self) -> None:
        self._read()  # children that have started by now
        self._end_server()
        ends, self._pipe = self._pipe, ()
        for end in ends:
            os.close(end)

    def launch(self, name: Address, incarnation: int, ranks: int = 1) -> None:
        program: forkserver.Program = "prepare" if name == PREPARE else "role"
        self._start(program, name, incarnation, self._spec, ranks)

    def check(self, name: Address, question: Path) -> None:
        self._start("check", name, 1, question)

    def terminate(self, name: Address) -> None:
        """Kill the role; nothing happens if it is gone already."""
        if name in self._alive:
            self._ask(forkserver.Kill(name=name))

    def fileno(self) -> int:
        """Return a descriptor that is readable while `events` has something."""
        if self._server is None or self._server.stdout is None or self._events:
            return self._pipe[0]
        return self._server.stdout.fileno()

    def events(self) -> Sequence[Event]:
        self._read()
        events = list(self._events)
        self._events.clear()
        return events

    def _start(
        self,
        program: forkserver.Program,
        name: Address,
        incarnation: int,
        spec: Path,
        ranks: int = 1,
    ) -> None:
        if self._server is None:
            self.start()
        self._alive[name] = incarnation
        start = forkserver.Start(
            program=program,
            name=name,
            incarnation=incarnation,
            ranks=ranks,
            spec=str(spec),
            log=str(self._log_of(name).absolute()),
            patience=self._patience if program == "role" else None,
        )
        self._ask(start)

    def _ask(self, request: forkserver.Request) -> None:
        server = self._server
        if server is None or server.stdin is None:
            return
        try:
            server.stdin.write(msgspec.json.encode(request) + b"\n")
        except ConnectionError:
            self._server_died()

    def _read(self) -> None:
        server = self._server
        if server is None or server.stdout is None:
            return
        while select.select([server.stdout], [], [], 0.0)[0]:
            part = b""
            with suppress(ConnectionError):
                part = os.read(server.stdout.fileno(), 65536)
            if not part:
                self._server_died()
                return
            *lines, self._unread = (self._unread + part).split(b"\n")
            for line in lines:
                self._note(self._decoder.decode(line))

    def _note(self, report: forkserver.Report) -> None:
        if isinstance(report, forkserver.Alive):
            self._n_adopted += 1
            self._alive = {Address(c.name): c.incarnation for c in report.children}
            self._pids = {Address(c.name): c.pid for c in report.children}
            return
        name = Address(report.name)
        match report:
            case forkserver.Begun():
                self._pids[name] = report.pid
                self._events.append(PeerJoined(peer=name, incarnation=report.incarnation))
            case forkserver.Ended():
                self.n_ended += 1
                if self._alive.get(name) == report.incarnation:
                    del self._alive[name]
                    self._pids.pop(name, None)
                lost = PeerLost(peer=name, incarnation=report.incarnation, reason=self._why(report))
                self._events.append(lost)

    def _why(self, ended: forkserver.Ended) -> str:
        log = self._log_of(ended.name)
        if ended.error is not None:
            return f"could not be started: {ended.error}"
        if ended.status >= 0:
            return f"ended with status {ended.status} (see {log})"
        number = -ended.status
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        names = {n.value: n.name for n in signal.Signals}
        return f"was ended by signal {names.get(number, number)}{hint}"

    def _server_died(self) -> None:
        self._end_server()
        alive, self._alive = self._alive, {}
        self._pids.clear()
        for name, incarnation in alive.items():
            self.n_ended += 1
            why = "ended with the process that started it"
            self._events.append(PeerLost(peer=name, incarnation=incarnation, reason=why))
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
            # It has no children, and may be busy with its imports. It would not read the
            # request before they are done.
            server.kill()
        try:
            server.wait(CLOSE_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            server.kill()  # its children end with it
            server.wait()
        server.stdout.close()
