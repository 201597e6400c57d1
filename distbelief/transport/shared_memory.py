"""Shared memory of the roles of one host: files that every role maps.

All regions of a run lie in one directory that only its user may enter, in `/dev/shm` where it
exists. A region's pages are allocated on creation: a host without room gets an error then, not
a SIGBUS in the middle of a step. The maker of a region holds a file lock on it, which ends with the
process, as do the supervisor and the fork server of a directory; what is not locked may be removed
(`sweep`, `remove_orphans`). A shard offers regions to clients of the same host, and blocks to all
others (`parameter_server.sessions`); so does a rank of a split replica to other ranks
(`worker.outboxes`).
`multiprocessing.shared_memory` does not fit: under Python 3.11 a process that only attached
unlinks the region when it exits.
"""

import fcntl
import mmap
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Self

import numpy as np

from distbelief.core.errors import LocalProtocolError, MemoryGoneError, StorageError
from distbelief.core.files import Scratch, remove_if_free, sweep
from distbelief.core.memory import Region
from distbelief.core.vectors import Vector


_PREFIX = "distbelief-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=~-]{0,199}")  # one file name, no path
_HOST_CHARACTERS_MAX = 60
# MAP_POPULATE fills the page tables at once: no page faults later.
_MAP_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE


class FileMemory:
    """The regions of a run in `directory`, which the process of the job makes and removes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._regions: dict[str, Region] = {}
        # File descriptors of the regions created here. A process id would not do: it is reused,
        # and means nothing in another container with the same /dev/shm.
        self._locks: dict[str, int] = {}
        self._made: Scratch | None = None

    @classmethod
    def make(cls, *, root: Path | None = None) -> Self:
        """Make the directory of a new run, by default in `/dev/shm`; lock it until `remove_all`."""
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        made = Scratch.make(root=root or _default_root(), name=name)
        memory = cls(made.path)
        memory._made = made
        return memory

    @classmethod
    def adopt(cls, directory: Path) -> Self:
        """Return the memory of a run that goes on without the process that made it."""
        memory, held = cls(directory), os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH)  # others try for an instant whether it is free
        memory._made = Scratch(directory, held=held)
        return memory

    @property
    def host(self) -> str:
        """A name that is equal for all roles that see this directory."""
        node = os.uname().nodename[:_HOST_CHARACTERS_MAX]
        return f"{node}:{self.directory.name[-_HOST_CHARACTERS_MAX:]}"

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new zeroed region with all its pages allocated, or raise StorageError."""
        if not _NAME.fullmatch(name):
            raise LocalProtocolError(
                f"invalid region name {name!r}: use at most 200 letters, digits and . _ : @ + = ~ -"
            )
        path = self.directory / name
        draft = path.with_name(f".{secrets.token_hex(8)}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(draft, flags, 0o600)
        except OSError as error:
            raise StorageError(f"cannot create {path}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if n_bytes:
                os.posix_fallocate(file, 0, n_bytes)
            region = _map(file, n_bytes)
            # The name appears only now: nobody attaches a region that is not locked and complete.
            path.hardlink_to(draft)
        except OSError as error:
            os.close(file)
            if isinstance(error, FileExistsError):
                raise LocalProtocolError(f"region {name!r} exists already") from None
            raise StorageError(self._no_room(n_bytes, error)) from None
        finally:
            draft.unlink()
        self._regions[name], self._locks[name] = region, file
        return region

    def attach(self, name: str) -> Region:
        """Return a region that another role or this one created, or raise MemoryGoneError."""
        known = self._regions.get(name)
        if known is not None:
            return known
        if not _NAME.fullmatch(name):  # the name may come from a peer
            raise MemoryGoneError(f"invalid region name {name!r:.80}")
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(self.directory / name, flags)
            try:
                region = _map(file, os.fstat(file).st_size)
            finally:
                os.close(file)
        except OSError as error:
            raise MemoryGoneError(
                f"no region {name!r} in {self.directory}: {error.strerror}"
            ) from None
        self._regions[name] = region
        return region

    def release(self, name: str) -> None:
        """Release a region; its memory is freed with the last array on it."""
        self._regions.pop(name, None)
        lock = self._locks.pop(name, None)
        if lock is not None:
            (self.directory / name).unlink(missing_ok=True)
            os.close(lock)

    def disown(self, name: str) -> None:
        """Forget a region; as for `release`, a mapping outlives its name."""
        self.release(name)

    def retire(self, values: Vector) -> None:
        pass

    def close(self) -> None:
        """Release every region created or attached here."""
        for name in list(self._regions):
            self.release(name)

    def remove_orphans(self) -> list[str]:
        """Remove regions whose owner has ended, as after a restart; return their names."""
        return sorted(
            path.name
            for path in self.directory.glob("[!.]*")
            if path.name not in self._locks and remove_if_free(path)
        )

    def remove_all(self) -> None:
        """Remove the run's directory with its content, even if another process made it."""
        self.close()
        if self._made is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            self._made.remove()

    @staticmethod
    def sweep(*, root: Path | None = None) -> list[Path]:
        """Remove this user's directories that crashed runs left; return their paths."""
        return sweep(f"{_PREFIX}[0-9]*-*", root=root or _default_root())

    def _no_room(self, n_bytes: int, error: OSError) -> str:
        status = os.statvfs(self.directory)
        free = status.f_bavail * status.f_frsize
        return (
            f"no room for shared memory in {self.directory.parent} ({error.strerror}): {n_bytes:,} "
            f"bytes needed, {free:,} free: free some, or enlarge it (docker run --shm-size=…)"
        )


def this_machine() -> str:
    """Return a text that is equal for processes of one machine and one network; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return ""


def _default_root() -> Path:
    in_memory = Path("/dev/shm")  # noqa: S108 -- only private directories are made in it
    if in_memory.is_dir() and os.access(in_memory, os.W_OK | os.X_OK):
        return in_memory
    return Path(tempfile.gettempdir())


def _map(file: int, n_bytes: int) -> Region:
    if n_bytes == 0:
        return np.zeros(0, np.uint8)  # mmap rejects empty files
    mapped = mmap.mmap(file, n_bytes, flags=_MAP_FLAGS)
    return np.frombuffer(mapped, np.uint8)  # keeps the mapping; aligned to a page
