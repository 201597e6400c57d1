"""A folder for a while, that outlives its process for no longer than until the next.

Who makes one holds a lock on it, which ends with the process, however it ends. What
nobody holds was left by one that had no time to remove it, and whoever makes the next
folder does so instead. The lock is the kernel's: process ids are used again.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from distbelief.errors import StorageError


_PREFIX: Final = "distbelief-scratch-"


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder that only this user may enter; it is gone at the end.

    Raises:
        StorageError: it cannot be made.
    """
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{_PREFIX}*"):
        remove_if_free(left)
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    folder, draft = root / name, root / f".{name}"
    try:
        draft.mkdir(mode=0o700)
        held = lock(draft)
        draft.rename(folder)  # it has its name once it is locked
    except OSError as error:
        raise StorageError(f"cannot make {folder}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


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
