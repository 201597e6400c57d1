"""Folders of files that are complete or absent: on disk here, or behind an interface like it.

Names of files have the form `ROLE/LABEL.safetensors`. A file appears whole, or not at all.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, final

from distbelief.core import files


SUFFIX: Final = ".safetensors"
_PART: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
NAME: Final = re.compile(_PART)  # of a role or a label
FILE: Final = re.compile(rf"{_PART}/{_PART}{re.escape(SUFFIX)}")


class Folder(Protocol):
    """Raises StorageError or OSError, FileNotFoundError for a missing file, EOFError at its end."""

    @property
    def place(self) -> str: ...  # path or URL, for messages
    def write(self, name: str, parts: Sequence[memoryview]) -> None: ...
    def size(self, name: str) -> int: ...
    def read(self, name: str, offset: int, buffer: memoryview) -> None: ...  # fills the buffer
    def names(self, role: str) -> list[str]: ...  # of the files in ROLE/, without it
    def delete(self, name: str) -> None: ...  # if it exists
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
            with draft.open("wb") as file:
                for part in parts:
                    file.write(part)

        files.write_by(self.prepared(name), fill)

    def prepared(self, name: str) -> Path:
        """Return the path of a file, whose directory exists from now on."""
        path = self.path / name
        with files.explaining(path.parent, doing="make"):
            files.make_directory(path.parent)
        return path

    def size(self, name: str) -> int:
        with (self.path / name).open("rb") as file:  # a directory is an error
            return file.seek(0, 2)

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        with (self.path / name).open("rb") as file:
            file.seek(offset)
            if (n_missing := len(buffer) - file.readinto(buffer)) > 0:
                raise EOFError(f"{n_missing} bytes are missing at its end")

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
