"""Atomic file writes, temporary directories that survive no crash, and explained I/O errors.

A file is written into a draft directory beside its target, synced to disk, and renamed. A
process that dies in between leaves the old file intact, and a draft directory that the next
write to the same directory removes.
"""

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self, final

from distbelief.core.errors import StorageError


# The process that makes a temporary directory, and others that use it, hold a shared lock on it,
# which the kernel releases when they end, however they end. An unlocked one was left by processes
# that were killed, and the next process removes it (`sweep`). Process ids would not do: they are
# reused, and mean nothing in another container that sees the same files.
_PREFIX: Final = "distbelief-scratch-"
_CLOSED: Final = -1
SIBLINGS_MAX: Final = 10_000  # numbered directories in one


@final
class Scratch:
    """A temporary directory that only this user may enter; created by `make`."""

    def __init__(self, path: Path, *, held: int) -> None:
        self.path = path
        # Descriptor of the lock. A child process that inherits it holds the lock too.
        self.held = held

    @classmethod
    def make(cls, *, root: Path | None = None, name: str | None = None) -> Self:
        """Make a directory, by default in the system's temporary directory, with a new name.

        Directories that killed processes left are removed first.
        """
        root = Path(tempfile.gettempdir()) if root is None else root
        if name is None:
            sweep(f"{_PREFIX}*", root=root)
            name = f"{_PREFIX}{secrets.token_hex(8)}"
        try:
            return cls.in_place(root / name)
        except OSError as error:
            raise StorageError(f"cannot make {root / name}: {error.strerror}") from error

    @classmethod
    def in_place(cls, path: Path) -> Self:
        """Make this directory, or raise OSError."""
        draft, held = path.with_name(f".{path.name}"), _CLOSED
        draft.mkdir(mode=0o700)
        with suppress(OSError):  # some file systems have no locks, and there `sweep` removes none
            held = lock(draft, shared=True)
        draft.rename(path)  # only now can `sweep` find it, and it is locked
        return cls(path, held=held)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.held != _CLOSED:
            os.close(self.held)
            self.held = _CLOSED


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary directory that is removed at the end."""
    made = Scratch.make()
    try:
        yield made.path
    finally:
        made.remove()


def sweep(pattern: str, *, root: Path) -> list[Path]:
    """Remove this user's paths that match and that no process has locked; return them."""
    return sorted(path for path in root.glob(pattern) if remove_if_free(path))


def lock(path: Path, *, shared: bool = False) -> int:
    """Return a descriptor that holds the lock of `path` until it is closed, or raise OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        path.stat()
    except OSError:
        os.close(file)
        raise
    return file


def remove_if_free(path: Path) -> bool:
    """Remove a file or directory of this user, unless a process holds its lock."""
    try:
        held = lock(path)
    except OSError:
        return False
    try:
        is_own = os.fstat(held).st_uid == os.geteuid()
        if is_own and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif is_own:
            path.unlink(missing_ok=True)
    finally:
        os.close(held)
    return not path.exists()


TEMPORARY: Final = ".tmp"  # suffix of files and directories that are being written
_DRAFT: Final = ".distbelief-draft-"
_FIXES: Final = {
    errno.ENOSPC: "there is no space left: free some, then go on with --resume",
    errno.EDQUOT: "your quota is used up: free some space, then go on with --resume",
    errno.EFBIG: "the file would be too large for this disk or its limits (ulimit -f)",
    errno.EACCES: "permission denied: choose another place: --set output.directory=DIR",
    errno.EPERM: "permission denied: choose another place: --set output.directory=DIR",
    errno.EROFS: "read-only disk: choose another place: --set output.directory=DIR",
    errno.ENOTDIR: "a part of this path is a file: choose another directory",
}


def explained(error: OSError, path: Path, *, doing: str) -> StorageError:
    """Return `error` as a message for the user: the path, the reason and the fix."""
    why = _FIXES.get(error.errno or 0) or error.strerror or str(error)
    return StorageError(f"cannot {doing} {path}: {why}")


@contextmanager
def explaining(path: Path, *, doing: str) -> Iterator[None]:
    """Raise an OSError of the block as `explained`."""
    try:
        yield
    except OSError as error:
        raise explained(error, path, doing=doing) from error


@final
class LineFile:
    """Appends lines to a file, which the first line creates.

    A line that cannot be written is dropped, and `tell` is called once; nothing is raised.
    """

    def __init__(self, path: Path, *, tell: Callable[[str], object]) -> None:
        self._path = path
        self._tell = tell
        self._has_reported = False

    def append(self, line: str) -> None:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            with os.fdopen(os.open(self._path, flags, 0o600), "ab", buffering=0) as file:
                file.write(f"{line}\n".encode(errors="backslashreplace"))
        except OSError as error:
            if not self._has_reported:
                self._has_reported = True
                self._tell(str(explained(error, self._path, doing="write")))


def write(path: Path, content: bytes) -> None:
    """Replace the file at `path` atomically."""
    write_by(path, lambda temporary: temporary.write_bytes(content))


def write_by(path: Path, fill: Callable[[Path], object]) -> None:
    """Replace the file at `path` atomically by what `fill` writes to the path it gets."""
    # A device or a pipe (/dev/null) is written directly, never replaced by a file.
    if path.exists() and not (path.is_file() or path.is_dir()):
        with explaining(path, doing="write"):
            fill(path)
        return
    with explaining(path, doing="write"), _draft_beside(path) as draft:
        fill(draft)
        force(draft)
        draft.replace(path)
        force(path.parent)


@contextmanager
def _draft_beside(path: Path) -> Iterator[Path]:
    # The lock is on a directory: `fill` may replace the file, and a lock on it would be lost.
    sweep(f"{_DRAFT}*{TEMPORARY}", root=path.parent)
    draft = Scratch.in_place(path.with_name(f"{_DRAFT}{secrets.token_hex(8)}{TEMPORARY}"))
    try:
        yield draft.path / "content"
    finally:
        draft.remove()


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically; no other user can read it at any time."""

    def fill(draft: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(content)

    write_by(path, fill)


def refuse_special(directory: Path) -> None:
    """Raise StorageError if a directory has a pipe, a socket or a device: opening one may hang."""
    for place, _, names in os.walk(directory, onerror=None):
        for path in (Path(place, name) for name in names):
            with suppress(FileNotFoundError):  # a link to nothing, or removed just now
                if not stat.S_ISREG(path.stat().st_mode):
                    raise StorageError(f"{path} is no regular file: remove it, or restore the file")


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and sync them to disk (or raise OSError).

    Only this user may enter the directory itself; one that exists stays as it is.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in missing:
        force(made.parent)


def make_numbered(parent: Path, prefix: str) -> Path:
    """Make the next free directory PREFIX1, PREFIX2, ... in `parent`, and return it."""
    for number in range(1, SIBLINGS_MAX):
        path = parent / f"{prefix}{number}"
        with suppress(FileExistsError):  # perhaps made just now, by another process
            path.mkdir(mode=0o700)
            return path
    raise StorageError(f"{parent} has {SIBLINGS_MAX} {prefix}*: use another directory")


def force(path: Path) -> None:
    """Sync a file or directory to disk with fsync, or raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
