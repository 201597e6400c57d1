"""Where checkpoints are: a directory, or a folder in a store that fsspec reaches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from distbelief.core.errors import StorageError
from distbelief.core.folders import Folder, LocalFolder


BLOCK: Final = 1 << 24  # bytes that are sent or fetched at a time
_LOCAL: Final = "file://"
# Others of fsspec read the address as a program: they chain, and render templates.
PROTOCOLS = ("s3", "gs", "abfs")


def folder_at(place: str) -> Folder:
    """Return the folder at a path or URL, which need not exist; StorageError if it cannot be."""
    place = place.removeprefix(_LOCAL)
    protocol, is_url, rest = place.partition("://")
    if not is_url:
        return LocalFolder(Path(place))
    if protocol not in PROTOCOLS or "::" in rest:
        names = ", ".join(PROTOCOLS[:-1])
        raise StorageError(
            f"cannot use {place:.200}: use a directory, or a URL of {names} or {PROTOCOLS[-1]}"
        )
    return UrlFolder(place)


def absolute(place: str) -> str:
    """Return the place in a form for processes with another current directory."""
    place = place.removeprefix(_LOCAL)
    return place if "://" in place else str(Path(place).absolute())


@final
class UrlFolder:
    """A folder at a URL, such as s3://BUCKET/PREFIX. A file is replaced in one step, at its end."""

    def __init__(self, url: str) -> None:
        import fsspec  # noqa: PLC0415 -- only runs with a URL need it

        self.place = url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self.place)
        except (ImportError, ValueError) as error:  # no driver; no such URL
            raise StorageError(f"cannot use {url}: {error}") from None
        self._root = str(root).rstrip("/")

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        path = f"{self._root}/{name}"
        with self._explaining("write", name):
            try:
                self._write(path, parts)
            except FileNotFoundError:  # stores with directories need them made
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._write(path, parts)

    def _write(self, path: str, parts: Sequence[memoryview]) -> None:
        # What was sent of a failed transaction is discarded.
        with self._files.transaction, self._files.open(path, "wb", block_size=BLOCK) as file:
            for part in parts:
                for at in range(0, len(part), BLOCK):
                    file.write(part[at : at + BLOCK])

    def size(self, name: str) -> int:
        with self._explaining("read", name):
            self._files.invalidate_cache()  # of listings: other hosts write here
            return int(self._files.info(f"{self._root}/{name}")["size"])

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._explaining("read", name):
            for at in range(0, len(buffer), BLOCK):
                part = buffer[at : at + BLOCK]
                begin = offset + at
                content: bytes = self._files.cat_file(
                    f"{self._root}/{name}", start=begin, end=begin + len(part)
                )
                if len(content) < len(part):
                    raise EOFError(f"{len(part) - len(content)} bytes are missing at its end")
                part[:] = content

    def names(self, role: str) -> list[str]:
        with self._explaining("list", role), suppress(FileNotFoundError, NotADirectoryError):
            self._files.invalidate_cache()
            paths = self._files.ls(f"{self._root}/{role}", detail=False)
            return [str(path).rpartition("/")[2] for path in paths]
        return []

    def delete(self, name: str) -> None:
        with self._explaining("delete", name), suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def rename(self, name: str, to: str) -> None:
        with self._explaining("rename", name):
            self._files.mv(f"{self._root}/{name}", f"{self._root}/{to}")

    @contextmanager
    def _explaining(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, EOFError):
            raise
        except Exception as error:  # each driver has errors of its own
            raise StorageError(
                f"cannot {doing} {self.place}/{name}: {type(error).__name__}: {error}"
            ) from error
