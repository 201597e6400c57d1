"""The run directory: every file that a job leaves behind, and its lock.

    job.toml, plan.json, plan.png     the job as it ran; plan of split replicas (plan-N.json: of
                                      those of N ranks, if others have more)
    status.json, metrics.jsonl        the latest view (once a second); the curve
    snapshots/ROLE/, logs/ROLE.log    checkpoints of shards; log of each role
    snapshots/place                   where checkpoints are instead, with [cluster] checkpoints
    model.safetensors, summary.json, curve.png
    ema.safetensors                   their running average, with `ema` of the rule
    best.safetensors                  the values of the best evaluation, with [output] keep = "best"
    aside-N/                          earlier files of a run that used --from-scratch
    address                           job address with its secret, readable by its user only
    memory                            while it runs: where its roles share memory

Nothing is overwritten: a new run takes the next free name (runs/demo, runs/demo.2, ...). Only its
user may enter it. One process at a time writes: it holds a lock on the file `lock`, which the
system releases at its end.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self, final

import msgspec

from distbelief.core import files, formatting
from distbelief.core.errors import JobError, StorageError
from distbelief.supervisor.view import JobView


GONE_MAX: Final = 3
STATUS_BYTES_MAX: Final = 1 << 22


class Status(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of the job
    pid: int  # process of the supervisor
    written: float  # seconds since 1970 (UTC)
    view: JobView
    ended: bool = False  # whether the run is over; `view` is then the last one
    error: str | None = None  # why it failed, if it did


@final
class RunDirectory:
    """Files of one run. Made by `create` or `open`; `with` releases the lock."""

    def __init__(self, path: Path, *, lock: int | None) -> None:
        self.path = path  # as the user would write it
        self._lock = lock
        self.job_file = path / "job.toml"
        self.plan_file = path / "plan.json"
        self.status_file = path / "status.json"
        self.metrics_file = path / "metrics.jsonl"
        self.curve_file = path / "curve.png"
        self.address_file = path / "address"
        self.summary_file = path / "summary.json"
        self.model_file = path / "model.safetensors"
        self.best_file = path / "best.safetensors"
        self.ema_file = path / "ema.safetensors"
        self.memory_file = path / "memory"
        self.snapshots = path / "snapshots"
        self.place_file = self.snapshots / "place"
        self.logs = path / "logs"

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Make a new run directory at `path`, or beside it if that is taken."""
        first = Path(path)
        for number in range(1, files.SIBLINGS_MAX):
            suffix = "" if number == 1 else f".{number}"
            run = cls._taken(first.with_name(f"{first.name}{suffix}"))
            if run is not None:
                return run
        raise StorageError(
            f"{first} and {files.SIBLINGS_MAX} siblings exist: name another directory"
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, write: bool = True) -> Self:
        """Open the directory of an earlier run, to resume it (`write`) or only to read.

        JobError if there is no run directory at `path`; StorageError if another process runs this
        job now, it cannot be written, or has other than files and directories.
        """
        run = cls(Path(path), lock=None)
        if not run.path.is_dir():
            what = "it is a file, not a" if run.path.exists() else "there is no such"
            raise JobError(f"{path}: {what} directory")
        files.refuse_special(run.path)
        if not run.job_file.is_file():
            raise JobError(
                f"{path} is not a run directory (no {run.job_file.name}): use one that "
                "`distbelief train` made, such as runs/demo"
            )
        return cls(run.path, lock=_lock(run.path)) if write else run

    @classmethod
    def take(cls, path: Path) -> Self:
        """Lock this directory, whatever files it contains."""
        files.refuse_special(path)
        return cls(path, lock=_lock(path))

    @property
    def held(self) -> int:
        """Descriptor of the lock; a child process that inherits it holds the lock too."""
        assert self._lock is not None
        return self._lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; files may still be read."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def plan_kept(self) -> Iterator[None]:
        """Restore plans and picture if the block raises: the run still predicts with them."""
        before = {f: f.read_bytes() for f in self.path.glob("plan*") if f.is_file()}
        try:
            yield
        except BaseException:
            for file in {*before, *self.path.glob("plan*")}:
                if file not in before:
                    file.unlink(missing_ok=True)
                elif not file.is_file() or file.read_bytes() != before[file]:
                    files.write(file, before[file])
            raise

    def log_file(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def write(self, file: Path, content: str | bytes) -> None:
        """Replace a file of this directory atomically."""
        files.write(file, content.encode() if isinstance(content, str) else content)

    def put_aside(self, *paths: Path) -> Path:
        """Move these files, if they exist, into a new directory `aside-N`; return it."""
        with files.explaining(self.path, doing="move files in"):
            place = files.make_numbered(self.path, "aside-")
            for path in paths:
                if path.exists():
                    path.rename(place / path.name)
            self.snapshots.mkdir(mode=0o700, exist_ok=True)
            files.force(place)
            files.force(self.path)
        return place

    def check(self) -> None:
        """Raise StorageError if the locked directory is no longer at its path."""
        assert self._lock is not None
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._lock), (self.path / "lock").stat()):
                return
        raise StorageError(
            f"{self.path} was moved or removed while its job ran: logs and metrics went with it, "
            "model and summary are written there anew"
        )

    def write_status(self, status: Status) -> None:
        """Replace status.json atomically, without syncing: after a power loss it has no use."""
        temporary = self.status_file.with_suffix(files.TEMPORARY)
        with files.explaining(self.status_file, doing="write"):
            temporary.write_bytes(msgspec.json.encode(status))
            temporary.replace(self.status_file)

    def read_status(self) -> Status | None:
        try:
            with self.status_file.open("rb") as file:
                content = file.read(STATUS_BYTES_MAX)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise files.explained(error, self.status_file, doing="read") from error
        return status_in(content, self.status_file)

    def writer_pid(self) -> int | None:
        """Return the process that holds the lock now, if any does."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _pid(descriptor)
        else:
            return None
        finally:
            os.close(descriptor)

    def live_memory(self) -> Path | None:
        """Return the memory of roles on this host that live, with a supervisor or without."""
        with suppress(OSError, ValueError):
            memory = Path(self.memory_file.read_text())
            try:
                os.close(files.lock(memory))
            except BlockingIOError:
                return memory
        return None

    @classmethod
    def _taken(cls, path: Path) -> Self | None:
        for n_left in range(GONE_MAX, -1, -1):
            try:
                return cls._take(path)
            except StorageError as error:  # another process may have removed the directory
                if not (n_left and isinstance(error.__cause__, FileNotFoundError)):
                    raise
        return None

    @classmethod
    def _take(cls, path: Path) -> Self | None:
        try:
            files.make_directory(path)
            if any(path.iterdir()):
                return None
        except FileExistsError:
            return None  # it is a file
        except OSError as error:
            raise files.explained(error, path, doing="make") from error
        try:
            lock = _lock(path, fresh=True)
        except StorageError:
            if path.is_dir() and any(path.iterdir()):
                return None  # another process took it first
            raise
        run = cls(path, lock=lock)
        try:
            run.snapshots.mkdir(mode=0o700)
            run.logs.mkdir(mode=0o700)
            files.force(path)
        except OSError as error:
            run.close()
            raise files.explained(error, path, doing="write to") from error
        return run


def status_in(content: bytes, file: Path) -> Status:
    """Decode the content of status.json; `file` is for messages."""
    try:
        return msgspec.convert(formatting.plain_in(msgspec.json.decode(content)), type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(
            f"{file} is damaged ({error}): it was written by another version, or by another program"
        ) from None


def _lock(path: Path, *, fresh: bool = False) -> int:
    file = path / "lock"
    flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if fresh else 0)
    with files.explaining(path, doing="write to"):
        descriptor = os.open(file, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except BlockingIOError:
        holder = _pid(descriptor)
        os.close(descriptor)
        raise StorageError(
            f"{path} is still running (process {holder}): wait for its end, "
            f"or stop it: kill -INT {holder}"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise files.explained(error, file, doing="lock") from error
    return descriptor


def _pid(descriptor: int) -> int:
    with suppress(ValueError, OSError):
        return int(os.pread(descriptor, 20, 0))
    return 0
