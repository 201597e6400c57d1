"""Writing files so that nobody ever reads half of one; what the disk says, explained.

A file is written beside its place, forced to the disk, and renamed into it. A process
that dies half-way leaves the old file as it was, and at most one temporary file.
"""

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from safetensors import SafetensorError

from distbelief.errors import StorageError


TEMPORARY: Final = ".tmp"
"""End of the names of files that are being written."""

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
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        fill(temporary)
        force(temporary)
        temporary.replace(path)
        force(path.parent)
    except OSError as error:
        raise explained(error, path, doing="write") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that nobody else may read, not even for a moment.

    Raises:
        StorageError: it cannot be; the old file is as it was.
    """

    def fill(temporary: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        temporary.unlink(missing_ok=True)  # of a process that was killed
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(content)

    write_by(path, fill)


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
