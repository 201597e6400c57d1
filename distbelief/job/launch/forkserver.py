"""Fork server: imports torch once, then forks the process of each role.

    python -m distbelief.job.launch.forkserver PARENT_PID

    stdin    {"type":"Import","modules":["torch._dynamo"]}
             {"type":"Start","program":"role","name":"shard-0","incarnation":1, ...}
             {"type":"Kill","name":"shard-0"}        {"type":"Leave"}
    stdout   {"type":"Begun","name":"shard-0","incarnation":1,"pid":4711}
             {"type":"Ended","name":"shard-0","incarnation":1,"status":0}

One JSON object per line. Children end with this process (Linux), and this process ends with its
parent, with one exception: roles of a job whose supervisor was killed go on for their `patience`.
Meanwhile another supervisor may connect to the socket `DOOR` beside their spec, and is the parent
from then on. The fork server has one thread and never computes, so every fork is clean; if an
import starts a thread or a GPU, the server starts again without it. A command that has imported the
modules already forks the server instead, while it is as clean.

`distbelief.fit` forks it from the user's program, whose objects it holds (`holds`): model and data
need no file. Of that program's threads it has none, and it never starts again.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Final, Literal, NoReturn

import msgspec

from distbelief.core import files
from distbelief.core.signals import ABANDONED
from distbelief.job.launch.children import end_with_parent, run_child, set_death_signal


MODULES: Final = (
    "numpy",
    "torch",
    "safetensors.numpy",
    "safetensors.torch",
    "distbelief.worker.downpour",
    "distbelief.job.launch.preflight",
)  # what roles need, and takes long to import

# What the ranks of a split replica need as well: each captures the model on meta tensors, which
# imports torch's compiler. That is 80 MB and 1.4 s of CPU time (5 s without cached bytecode).
MODULES_OF_RANKS: Final = ("torch._dynamo",)
# The environment in which numpy and torch are imported: roles set torch's own number themselves,
# and a thread that exists before a fork is missing in the child.
ONE_THREAD: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
REQUEST_BYTES_MAX: Final = 1 << 20
SAVE_SECONDS_MAX: Final = 30.0  # for children without a supervisor; normally they take a second
# For children to end by themselves, once they have waited long enough for another supervisor
END_SECONDS_MAX: Final = 400.0
DOOR: Final = ".forkserver"
_COMPUTING: Final = ("replica", "evaluator")  # how the names of processes that compute begin
_REAP_SECONDS: Final = 0.02
_N_SWEEPS: Final = 30
_SWEEP_SECONDS: Final = 0.1

Program = Literal["role", "check", "prepare"]


class Import(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Import these modules before the next fork, if they exist and leave this process clean."""

    modules: tuple[str, ...]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a child that runs one of the programs below."""

    # "role": `role_process.main`; "check" and "prepare": `preflight.check_main` and `prepare_main`
    program: Program
    name: str
    incarnation: int
    ranks: int = 1  # of the role's group
    slot: int = 0  # among the processes here that compute: the fork server numbers them
    spec: str  # file with everything else
    log: str  # file that its output is appended to
    # How long it waits for another supervisor if this one is killed; None: it ends at once.
    patience: float | None = None


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    name: str


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End, because the parent is done. End of input without this means that the parent died.

    The two look the same otherwise: the input of a dying process ends while it is still the parent
    of its children, until its last thread is gone.
    """


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    name: str
    incarnation: int
    pid: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A child has ended, or could not be started."""

    name: str
    incarnation: int
    status: int = 1  # exit status, or minus the signal that ended it
    error: str | None = None  # why it could not be started


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a new parent: the children that the former one has left."""

    children: tuple[Begun, ...]


Request = Import | Start | Kill | Leave
Report = Begun | Ended | Alive


def main(*, holds: bool = False) -> None:
    # A terminal or service manager sends these to every process of a job. Stopping children is the
    # supervisor's task.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ours = {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
    parent = int(sys.argv[1])
    end_with_parent(parent, signal.SIGTERM)  # `serve` treats it as a request to end
    reports = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # an import must not print into the reports
    import_frozen(MODULES)
    unread = os.fsencode(sys.argv[2]) if len(sys.argv) > 2 else b""
    if not ForkServer(requests=0, reports=reports, unread=unread, holds=holds).serve():
        # Imported already in this process; importers of this module do not need it.
        from distbelief.transport.shared_memory import FileMemory  # noqa: PLC0415

        # The kernel signals the end of a thread. The parent's memory is free when the last of its
        # threads has ended, a moment later.
        for _ in range(_N_SWEEPS):
            if any(f"-{parent}-" in path.name for path in FileMemory.sweep()):
                break
            time.sleep(_SWEEP_SECONDS)


class ForkServer:
    """The children, and the file descriptors of the connection to the parent."""

    def __init__(
        self, *, requests: int, reports: int, unread: bytes = b"", holds: bool = False
    ) -> None:
        self._requests = requests
        self._reports = reports
        self._children: dict[int, Start] = {}
        self._held: int | None = None  # lock of the directory of the spec, which children share
        self._unread = unread
        self._holds = holds
        self._may_leave = False
        self._decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)

    def serve(self) -> bool:
        """Handle requests until the parent is done or gone for good; then end every child.

        Return whether the parent sent `Leave`.
        """
        bell, ringer = socket.socketpair()
        bell.settimeout(0)
        ringer.settimeout(0)
        signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _ignore)
        try:
            while True:
                with suppress(ConnectionError):  # the parent is gone
                    self._serve_parent(bell)
                if self._may_leave or not self._await_parent(bell):
                    return self._may_leave
                alive = tuple(self._begun(*child) for child in self._children.items())
                with suppress(ConnectionError):
                    self._report(Alive(children=alive))
        finally:
            self._end_all()
            if self._held is not None:
                os.close(self._held)
            signal.set_wakeup_fd(-1)  # before the socket is closed, or Python warns

    def _serve_parent(self, bell: socket.socket) -> None:
        # A SIGTERM counts only if the parent is gone (the kernel sends it then): else it was sent
        # to all processes of the job.
        parent = os.getppid()
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_READ)
            selector.register(bell, selectors.EVENT_READ)
            self._handle_lines()
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if bell.fileno() in ready:
                    if signal.SIGTERM in bell.recv(4096) and os.getppid() != parent:
                        return
                    self._reap()
                if self._requests in ready and not self._read():
                    return

    def _read(self) -> bool:
        part = os.read(self._requests, 65536)
        if not part or len(self._unread) > REQUEST_BYTES_MAX:
            return False
        self._unread += part
        self._handle_lines()
        return not self._may_leave

    def _await_parent(self, bell: socket.socket) -> bool:
        """Keep the roles of a supervisor that was killed; return whether another has come."""
        roles = [start for start in self._children.values() if start.patience is not None]
        if not roles or self._held is None:
            return False
        for pid, start in self._children.items():
            if start.patience is None:
                os.kill(pid, signal.SIGKILL)
        set_death_signal(0)
        with suppress(BlockingIOError):
            bell.recv(4096)  # from here on, SIGTERM comes from a user
        null = os.open(os.devnull, os.O_RDWR)
        for own in (self._requests, self._reports, 2):  # a terminal or a pipe of the supervisor
            os.dup2(null, own)
        os.close(null)
        self._unread = b""
        deadline = time.monotonic() + max(start.patience or 0.0 for start in roles)
        deadline += END_SECONDS_MAX
        path = door_in(self._held)
        with socket.socket(socket.AF_UNIX) as door, selectors.DefaultSelector() as selector:
            Path(path).unlink(missing_ok=True)
            door.bind(path)
            door.listen(1)
            selector.register(door, selectors.EVENT_READ)
            selector.register(bell, selectors.EVENT_READ)
            self._reap()
            while self._children and time.monotonic() < deadline:
                ready = {key.fd for key, _ in selector.select(deadline - time.monotonic())}
                if bell.fileno() in ready:
                    if signal.SIGTERM in bell.recv(4096):
                        return False
                    self._reap()
                if door.fileno() in ready:
                    with door.accept()[0] as link:
                        os.dup2(link.fileno(), self._requests)
                        os.dup2(link.fileno(), self._reports)
                    return True
        return False

    def _begun(self, pid: int, start: Start) -> Begun:
        return Begun(name=start.name, incarnation=start.incarnation, pid=pid)

    def _handle_lines(self) -> None:
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            match self._decoder.decode(line):
                case Import(modules=modules) if not self._children:
                    with _silenced():
                        import_frozen(modules)
                    if not (self._holds or is_clean()):
                        self._start_again()
                case Import():
                    pass  # each child imports for itself
                case Start() as start:
                    self._start(start)
                case Kill(name=name):
                    self._kill(name)
                case Leave():
                    self._may_leave = True

    def _start_again(self) -> NoReturn:
        signal.set_wakeup_fd(-1)
        os.dup2(self._reports, 1)
        own = [sys.executable, "-P", "-m", "distbelief.job.launch.forkserver", str(os.getppid())]
        os.execv(sys.executable, [*own, os.fsdecode(self._unread)])  # noqa: S606 -- ourselves

    def _start(self, start: Start) -> None:
        parent = os.getpid()
        start = in_a_slot(start, self._children.values())
        if start.patience is not None and self._held is None:
            self._held = files.lock(Path(start.spec).parent, shared=True)
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory
            why = error.strerror
            self._report(Ended(name=start.name, incarnation=start.incarnation, error=why))
            return
        if pid == 0:
            os.close(self._reports)  # its end must be seen although children live
            _run(start, parent=parent)
        self._children[pid] = start
        self._report(self._begun(pid, start))

    def _kill(self, name: str) -> None:
        for pid, start in self._children.items():
            if start.name == name:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still valid

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            start = self._children.pop(pid, None)
            if start is not None:
                code = os.waitstatus_to_exitcode(status)
                self._report(Ended(name=start.name, incarnation=start.incarnation, status=code))

    def _end_all(self) -> None:
        if not self._may_leave:
            self._let_save()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    # Without a supervisor, shards save their state before they end.
    def _let_save(self) -> None:
        for pid in self._children:
            os.kill(pid, ABANDONED)
        deadline = time.monotonic() + SAVE_SECONDS_MAX
        while self._children and time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(_REAP_SECONDS)
            self._children.pop(pid, None)

    def _report(self, report: Report) -> None:
        line = msgspec.json.encode(report) + b"\n"
        while line:
            line = line[os.write(self._reports, line) :]


def import_frozen(modules: Sequence[str]) -> None:
    """Import these modules, if they exist, for this process and the children that it forks."""
    gc.disable()  # it finds nothing, and takes an eighth of the time in which torch is imported
    try:
        for module in modules:
            with suppress(Exception, SystemExit):  # the child that needs it reports the error
                importlib.import_module(module)
    finally:
        gc.enable()
    # Objects that exist now stay shared with the children: the collector must not touch them.
    gc.collect()
    gc.freeze()


@contextmanager
def _silenced() -> Iterator[None]:
    # The terminal belongs to the job's screen, not to the warnings of a library.
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def is_clean() -> bool:
    """Whether this process may fork.

    A child has none of its parent's threads, and cannot use a GPU that its parent has opened.
    """
    return len(list(Path("/proc/self/task").iterdir())) == 1 and not has_gpu()


def has_gpu() -> bool:
    """Whether this process has opened a GPU."""
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return any(file.startswith("/dev/nvidia") for file in files)


def leave_program() -> None:
    """Make a fork of a user's program, with all its objects, a process of its own.

    Its threads are gone. What it had opened would be shared with it, positions in files included:
    whatever reads or writes there fails from now on.
    """
    gc.freeze()  # garbage of the program is the program's to end
    null = os.open(os.devnull, os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- numbers
        if int(name) > 2:
            os.dup2(null, int(name))
    # The program may have replaced them, as notebooks do.
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in enumerate(("r", "w", "w"))
    )
    os.environ.update(ONE_THREAD)


def in_a_slot(start: Start, alive: Iterable[Start]) -> Start:
    """Return the request with the lowest number that no process here that computes has."""
    if not start.name.startswith(_COMPUTING):
        return start
    taken = {other.slot for other in alive if other.name.startswith(_COMPUTING)}
    return msgspec.structs.replace(start, slot=next(n for n in count() if n not in taken))


def door_in(directory: int) -> str:
    """Return where a fork server without parent listens; `directory` is a descriptor."""
    return f"/proc/self/fd/{directory}/{DOOR}"  # the path of a socket has 107 bytes at most


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    # Only its byte in the wake-up descriptor matters.
    ...


def _run(start: Start, *, parent: int) -> NoReturn:
    def program() -> int:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_with_parent(parent, signal.SIGKILL)
        _redirect(start.log)
        return _program(start)(start.name, start.incarnation, start.spec)

    run_child(program)


def _program(start: Start) -> Callable[[str, int, str], int]:
    from distbelief.job.launch import preflight, role_process  # noqa: PLC0415 -- imported long ago

    if start.program == "role":
        return partial(role_process.main, ranks=start.ranks, slot=start.slot)
    return preflight.check_main if start.program == "check" else preflight.prepare_main


def _redirect(log: str) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        file = os.open(Path(log), flags, 0o600)
    except OSError:
        file = null
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    main()
