"""Temporary directories that do not outlive their process for long.

The process that makes one holds a lock on it, which the kernel drops when the process
ends, however it ends. What nobody holds was left by a process that had no time to
remove it, and the next process removes it instead (`sweep`). Process ids would do less:
they are used again, and mean nothing in another container that sees the same files.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self, final

from distbelief.errors import StorageError


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
