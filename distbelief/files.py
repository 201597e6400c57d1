"""Writing files so that nobody ever reads half of one; what the disk says, explained.

A file is written into a directory of its own beside its place, forced to the disk, and
renamed into its place. A process that dies half-way leaves the old file as it was, and
its directory, which the next write beside it removes.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from safetensors import SafetensorError

from distbelief import scratch
from distbelief.errors import StorageError


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
        scratch.remove_if_free(left)
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
            return folder, scratch.lock(folder)
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
