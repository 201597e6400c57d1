"""One builder at a time: a file lock that the system frees when its owner dies."""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.speech.errors import CorpusError


WAIT_SECONDS = 1_800.0
POLL_SECONDS = 0.2


@contextmanager
def hold_lock(path: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Hold the lock `path`; says so if it has to wait, gives up after a while."""
    with path.open("a+") as file:
        _acquire(file.fileno(), path=path, wait_seconds=wait_seconds)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _acquire(descriptor: int, *, path: Path, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    has_spoken = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = f"process {path.read_text() or '?'} (lock {path})"
            if time.monotonic() >= deadline:
                raise CorpusError(
                    f"{owner} has been building {path.stem} for more than "
                    f"{wait_seconds:g} s; if it hangs, end it and start again"
                ) from None
            if not has_spoken:
                print(f"waiting for {owner}, which builds it", file=sys.stderr)
                has_spoken = True
            time.sleep(POLL_SECONDS)
        else:
            return
