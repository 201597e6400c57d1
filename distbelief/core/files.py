"""Writing files so that nobody ever reads half of one; what the disk says, explained.

A file is written into a directory of its own beside its place, forced to the disk, and
renamed into its place. A process that dies half-way leaves the old file as it was, and
its directory, which the next write beside it removes.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self, final

from safetensors import SafetensorError

from distbelief.errors import StorageError


# Temporary directories that do not outlive their process for long.
#
# The process that makes one holds a lock on it, which the kernel drops when the process
# ends, however it ends. What nobody holds was left by a process that had no time to
# remove it, and the next process removes it instead (`sweep`). Process ids would do less:
# they are used again, and mean nothing in another container that sees the same files.

_PREFIX: Final = "distbelief-scratch-"


@final
class Scratch:
    """A new directory that only this user may enter; made by `make`.

    Attributes:
        path: Where it is.
        held: Descriptor of its lock. A child process that inherits it holds the
            directory as well.
    """

    def __init__(self, path: Path, *, held: int) -> None:
        self.path = path
        self.held = held

    @classmethod
    def make(cls, *, root: Path | None = None, name: str | None = None) -> Self:
        """Make one, after those that killed processes left are removed.

        Args:
            root: Where to; by default the directory for temporary files.
            name: Its name; by default one of its own.

        Raises:
            StorageError: it cannot be made.
        """
        root = Path(tempfile.gettempdir()) if root is None else root
        if name is None:
            sweep(f"{_PREFIX}*", root=root)
            name = f"{_PREFIX}{secrets.token_hex(8)}"
        path, draft = root / name, root / f".{name}"
        try:
            draft.mkdir(mode=0o700)
            held = lock(draft)
            draft.rename(path)  # it has its name once it is locked
        except OSError as error:
            raise StorageError(f"cannot make {path}: {error.strerror}") from error
        return cls(path, held=held)

    def remove(self) -> None:
        """Remove it with all that is in it; nothing happens the second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.held >= 0:
            os.close(self.held)
            self.held = -1


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new directory that only this user may enter; it is gone at the end.

    Raises:
        StorageError: it cannot be made.
    """
    made = Scratch.make()
    try:
        yield made.path
    finally:
        made.remove()


def sweep(pattern: str, *, root: Path) -> list[Path]:
    """Remove what this user has of such names, and no living process holds.

    Returns:
        What was removed.
    """
    return sorted(path for path in root.glob(pattern) if remove_if_free(path))


def lock(path: Path) -> int:
    """Return a descriptor that holds the lock of `path` until it is closed.

    Raises:
        OSError: the path is gone, or somebody else holds it.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()
    except OSError:
        os.close(file)
        raise
    return file


def remove_if_free(path: Path) -> bool:
    """Remove a file or directory of this user, unless a living process holds it."""
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


TEMPORARY: Final = ".tmp"
"""End of the names of directories, and of files, that are being written."""

_DRAFT: Final = ".distbelief-draft-"

_MENDS: Final = {
    errno.ENOSPC: "there is no space left: free some, then go on with --resume",
    errno.EDQUOT: "your quota is used up: free some space, then go on with --resume",
    errno.EFBIG: "the file would be too large for this disk or its limits (ulimit -f)",
    errno.EACCES: "permission denied: choose another place: --set output.directory=DIR",
    errno.EPERM: "permission denied: choose another place: --set output.directory=DIR",
    errno.EROFS: "read-only disk: choose another place: --set output.directory=DIR",
    errno.ENOTDIR: "a part of this path is a file: choose another directory",
}


def explained(error: OSError, path: Path, *, doing: str) -> StorageError:
    """Return `error` as what the user should read: the path, why, and the mend."""
    why = _MENDS.get(error.errno or 0) or error.strerror or str(error)
    return StorageError(f"cannot {doing} {path}: {why}")


@final
class LineFile:
    """Lines at the end of a file. What cannot be written is dropped, never raised.

    Args:
        path: The file, made when first needed.
        tell: Told once, in a sentence, that it cannot be written.
    """

    def __init__(self, path: Path, *, tell: Callable[[str], object]) -> None:
        self._path = path
        self._tell = tell
        self._told = False

    def append(self, line: str) -> None:
        """Add a line to the file, and hand it to the operating system."""
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{line}\n".encode(errors="backslashreplace"))
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(str(explained(error, self._path, doing="write")))


def write(path: Path, content: bytes) -> None:
    """Replace the file at `path`, whole or not at all.

    Raises:
        StorageError: it cannot be; the old file is as it was.
    """
    write_by(path, lambda temporary: temporary.write_bytes(content))


def write_by(path: Path, fill: Callable[[Path], object]) -> None:
    """Replace the file at `path` by what `fill` writes to the path it is given.

    A device or a pipe (/dev/null) is written to as it is: a file in its place would be
    found by every other program.

    Raises:
        StorageError: it cannot be; the old file is as it was.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        try:
            fill(path)
        except OSError as error:
            raise explained(error, path, doing="write") from error
        return
    try:
        with _draft_beside(path) as draft:
            fill(draft)
            force(draft)
            draft.replace(path)
            force(path.parent)
    except OSError as error:
        raise explained(error, path, doing="write") from error


@contextmanager
def _draft_beside(path: Path) -> Iterator[Path]:
    """Yield where to write what will be renamed to `path`.

    In a directory, which can be locked: what fills the file may replace it.
    """
    for left in path.parent.glob(f"{_DRAFT}*{TEMPORARY}"):
        remove_if_free(left)
    folder, held = _locked_draft(path.parent)
    try:
        yield folder / "content"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


def _locked_draft(parent: Path) -> tuple[Path, int | None]:
    """Make a directory, and lock it; there are disks on which nothing can be locked."""
    while True:
        folder = parent / f"{_DRAFT}{secrets.token_hex(8)}{TEMPORARY}"
        folder.mkdir(mode=0o700)
        try:
            return folder, lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # swept before it was locked
        except OSError:
            return folder, None


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that nobody else may read, not even for a moment.

    Raises:
        StorageError: it cannot be; the old file is as it was.
    """

    def fill(draft: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(content)

    write_by(path, fill)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing, for good.

    Raises:
        OSError: it cannot be made.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        force(made.parent)


def of_safetensors(error: SafetensorError) -> OSError:
    """Return the disk's error, of which safetensors tells in words only."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]) if number else errno.EIO, str(error))


def force(path: Path) -> None:
    """Have the disk hold what the operating system holds for this file or directory.

    Raises:
        OSError: it cannot.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
