"""Folders of files that are complete or absent: on disk here, or behind an interface like it.

Names of files have the form `ROLE/LABEL.safetensors`. A file appears whole, or not at all.
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, final

from distbelief.core import files
from distbelief.errors import LocalProtocolError, StorageError


SUFFIX: Final = ".safetensors"
_PART: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
NAME: Final = re.compile(_PART)  # of a role or a label
FILE: Final = re.compile(rf"{_PART}/{_PART}{re.escape(SUFFIX)}")


class Folder(Protocol):
    """Methods raise StorageError or OSError, and FileNotFoundError if the file does not exist."""

    @property
    def place(self) -> str:
        """The path or URL, for messages."""
        ...

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """Make or replace a file durably; its content is these parts, one after another."""
        ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset; EOFError if the file ends before."""
        ...

    def names(self, role: str) -> list[str]:
        """Return the names of all files in ROLE/, without it; none if there is no such folder."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        ...

    def rename(self, name: str, to: str) -> None: ...


@final
class LocalFolder:
    """A directory of this host, or one that several hosts have mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def place(self) -> str:
        return str(self.path)

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        def fill(draft: Path) -> None:
            with draft.open("wb", buffering=0) as file:
                for part in parts:
                    while part:
                        part = part[file.write(part) :]  # noqa: PLW2901 -- the rest of it

        path = self.prepared(name)
        files.write_by(path, fill)

    def prepared(self, name: str) -> Path:
        """Return the path of a file, whose directory exists from now on."""
        path = self.path / name
        with files.explaining(path.parent, doing="make"):
            files.make_directory(path.parent)
        return path

    def size(self, name: str) -> int:
        with (self.path / name).open("rb") as file:  # a directory is an error
            return os.fstat(file.fileno()).st_size

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        with (self.path / name).open("rb", buffering=0) as file:
            file.seek(offset)
            fill(buffer, file.readinto)

    def names(self, role: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return [path.name for path in (self.path / role).iterdir()]
        return []

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def rename(self, name: str, to: str) -> None:
        path = self.path / name
        with files.explaining(path, doing="rename"):
            path.rename(self.path / to)


def fill(buffer: memoryview, read_into: Callable[[memoryview], int | None]) -> None:
    """Fill the buffer by calls that fill a part of it each; EOFError if one returns nothing."""
    while buffer:
        n_read = read_into(buffer)
        if not n_read:
            raise EOFError(f"{len(buffer)} bytes are missing at its end")
        buffer = buffer[n_read:]


def file_name(role: str, label: str) -> str:
    """Return the name of a checkpoint's file; it cannot lead out of the folder."""
    for name in (role, label):
        if NAME.fullmatch(name) is None:
            raise LocalProtocolError(f"{name!r} cannot name a checkpoint file")
    return f"{role}/{label}{SUFFIX}"


def unreadable(place: str, error: OSError) -> StorageError:
    """Return the error of a file that may be intact."""
    why = error.strerror or str(error)
    return StorageError(f"cannot read {place}: {why}; it may be intact")
