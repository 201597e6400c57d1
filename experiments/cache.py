"""Arrays of a data set in the user's cache: made once, then mapped by every process.

A folder is filled under another name and renamed when all of it is on disk, so that what is there
is whole. One process makes it, under a lock that the system frees when its owner dies.

    NAME.npy   one for each array
    FACTS      JSON: what the arrays were made from, and the SHA-256 of each
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


WAIT_SECONDS = 1_800.0
POLL_SECONDS = 0.2
LINE_SECONDS = 5.0
Advance = Callable[[int], None]


class CacheError(Exception):
    """A folder of the cache cannot be written, or does not read as it was written."""


def find_cache(name: str, cache: str | os.PathLike[str] | None) -> Path:
    """Return `cache`, or the folder of this name in the user's cache directory."""
    if cache is not None:
        return Path(cache).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "distbelief" / name


# ------------------------------------------------------------------------------- write


def build(folder: Path, fill: Callable[[Path], None], *, n_bytes: int) -> None:
    """Make a folder unless it is there; `fill` writes into another one, then it is renamed."""
    cache = folder.parent
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with hold_lock(cache / f"{folder.name}.lock"):
            if folder.exists():
                return
            _check_free(cache, n_bytes)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                fill(partial)
                for path in partial.iterdir():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        mend = "name another folder with the argument cache or with XDG_CACHE_HOME"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = f"building {folder.name} needs {n_bytes / 1e6:,.0f} MB: make space, or {mend}"
        reason = error.strerror or str(error)
        raise CacheError(f"cannot write {error.filename or cache}: {reason}; {mend}") from error


def _check_free(cache: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(cache).free
    if free < n_bytes:
        raise OSError(errno.ENOSPC, f"only {free / 1e6:,.0f} MB are free", str(cache))


def write_facts(path: Path, facts: Mapping[str, object], *, arrays: Iterable[str]) -> None:
    """Write facts beside the arrays, with the hash of each."""
    hashes = {name: hash_file(path.with_name(f"{name}.npy")) for name in arrays}
    document = json.dumps({**facts, "sha256": hashes}, indent=1) + "\n"
    path.write_text(document, encoding="utf-8")


@contextmanager
def hold_lock(path: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Hold the lock `path`; says so if it has to wait, gives up after a while."""
    deadline, has_spoken = time.monotonic() + wait_seconds, False
    with path.open("a+") as file:
        while not _acquired(file.fileno()):
            owner = f"process {path.read_text() or '?'} (lock {path})"
            if time.monotonic() >= deadline:
                raise CacheError(
                    f"{owner} has been building {path.stem} for more than "
                    f"{wait_seconds:g} s; if it hangs, end it and start again"
                )
            if not has_spoken:
                print(f"waiting for {owner}, which builds it", file=sys.stderr)
                has_spoken = True
            time.sleep(POLL_SECONDS)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _acquired(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextmanager
def show_progress(title: str, *, n_frames: int, unit: str = "frames") -> Iterator[Advance]:
    """Show a bar on a terminal, plain lines elsewhere, on stderr.

    The function that it yields takes the frames made since last time.
    """
    console = Console(stderr=True)
    begun, n_done = time.monotonic(), 0
    next_line = begun + LINE_SECONDS
    rate = TextColumn(f"{{task.fields[rate]:,.0f}} {unit}/s")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), rate)
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task(title, total=n_frames, rate=0.0)

        def advance(frames: int) -> None:
            nonlocal n_done, next_line
            n_done += frames
            now = time.monotonic()
            speed = n_done / max(1e-9, now - begun)
            bar.update(task, advance=frames, rate=speed)
            if console.is_terminal or (now < next_line and n_done < n_frames):
                return
            next_line = now + LINE_SECONDS
            left = max(0.0, (n_frames - n_done) / max(1e-9, speed))
            share = min(1.0, n_done / n_frames)
            line = f"{title}: {share:4.0%}, {speed:,.0f} {unit}/s, {left:.0f} s left"
            console.print(line, highlight=False, soft_wrap=True)

        yield advance


# -------------------------------------------------------------------------------- read


def read_facts(path: Path, needed: Iterable[str]) -> dict[str, Any]:
    """Read facts; a file that is missing, cut short or lacks a key is an error."""
    try:
        facts = dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise _damaged(path, error) from error
    except ValueError as error:
        raise _damaged(path, f"it is no JSON: {error}") from error
    missing = {*needed, "sha256"} - set(facts)
    if missing:
        raise _damaged(path, f"it lacks {', '.join(sorted(missing))}")
    return facts


def map_arrays(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """Map the arrays beside the facts at `path`; one of another shape is an error.

    Copy-on-write: they are never written, but torch wants a writable buffer.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        file = path.with_name(f"{name}.npy")
        try:
            arrays[name] = np.load(file, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise _damaged(file, error) from error
        found = arrays[name].shape
        if found != shape:
            raise _damaged(file, f"its shape is {found}, {path.name} says {shape}")
    return arrays


def verify(folder: Path, facts: Mapping[str, Any]) -> None:
    """Compare every array with the hash taken when it was written."""
    for name, written in facts["sha256"].items():
        path = folder / f"{name}.npy"
        found = hash_file(path)
        if found != written:
            raise _damaged(path, f"its SHA-256 is {found[:12]}…, not {written[:12]}…")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, reason: str | Exception) -> CacheError:
    if isinstance(reason, OSError):
        reason = reason.strerror or str(reason)
        reason = reason[:1].lower() + reason[1:]
    return CacheError(
        f"{path} cannot be used: {reason}. Delete the folder "
        f"{os.fspath(path.parent)} and start again; it will be built anew"
    )
