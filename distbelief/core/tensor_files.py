"""Safetensors files, written from arrays and read by ranges, in any `Folder`.

8 bytes   length of the header
header    JSON: type, shape and offsets of each tensor, and facts
data      tensor after tensor, row-major, little-endian
"""

import math
import struct
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from distbelief.core.errors import StorageError
from distbelief.core.folders import Folder, LocalFolder
from distbelief.core.vectors import Vector


_ALIGNMENT: Final = 8  # of the data
_FIRST_BYTES: Final = 1 << 16  # read at once: most headers are shorter
_HEADER_BYTES_MAX: Final = 100_000_000  # as in the format's own library
_FACTS: Final = "__metadata__"
# By the format's word for the type
_NUMPY: Final[Mapping[str, str]] = {
    **{f"F{8 * n}": f"<f{n}" for n in (2, 4, 8)},
    **{f"I{8 * n}": f"<i{n}" for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": f"<u{n}" for n in (1, 2, 4, 8)},
    "BOOL": "|b1",
}
_WORDS: Final = {np.dtype(text): word for word, text in _NUMPY.items()}
_Offset = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True):
    """Where a tensor lies in the data."""

    dtype: str  # the format's word
    shape: tuple[_Offset, ...]
    data_offsets: tuple[_Offset, _Offset]


class DamagedError(StorageError):
    """The content of a file is not what was saved."""


def header_of(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], facts: Mapping[str, str]
) -> bytes:
    """Return the begin of a file with these tensors: name, word of the type, shape and bytes."""
    header: dict[str, object] = {_FACTS: dict(facts)}
    end = 0
    for name, word, shape, n_bytes in tensors:
        begin, end = end, end + n_bytes
        header[name] = Entry(word, shape, (begin, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def encoded(arrays: Mapping[str, Vector], facts: Mapping[str, str]) -> list[memoryview]:
    """Return the content of a file with these contiguous arrays, which it shares."""
    # Larger elements first, so that each tensor begins at a multiple of its own.
    order = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header = header_of(((n, _WORDS[a.dtype], a.shape, a.nbytes) for n, a in order), facts)
    return [memoryview(header), *(array.reshape(-1).view(np.uint8).data for _, array in order)]


@final
class TensorFile:
    """A file of which each method reads only what it needs.

    FileNotFoundError if it does not exist; DamagedError if it is not a safetensors file.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name

    @classmethod
    def at(cls, path: Path) -> "TensorFile":
        return cls(LocalFolder(path.parent), path.name)

    @property
    def place(self) -> str:
        return f"{self._folder.place}/{self._name}"

    @property
    def facts(self) -> dict[str, str]:
        return dict(self._header[0])

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors; complex numbers are pairs of floats: (..., 2)."""
        return {
            name: Entry("F32", (*e.shape, 2), e.data_offsets) if e.dtype == "C64" else e
            for name, e in self._header[1].items()
        }

    def array(self, name: str, start: int = 0, stop: int | None = None) -> Vector:
        """Return elements [start, stop) of a tensor, or the whole one in its shape."""
        entry = self.entries[name]
        raw = self.raw(name, start, math.prod(entry.shape) if stop is None else stop)
        try:
            part: Vector = raw.view(_NUMPY[entry.dtype])
            return part.reshape(entry.shape if stop is None else -1)
        except (KeyError, ValueError):
            raise DamagedError(f"its header is wrong about {name!r}") from None

    def raw(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of these elements."""
        begin, end = self.entries[name].data_offsets
        size = (end - begin) // max(1, math.prod(self.entries[name].shape))
        if not 0 <= start * size <= stop * size <= end - begin:
            raise DamagedError(f"its header is wrong about {name!r}")
        content = np.empty((stop - start) * size, np.uint8)
        if size:
            self._read(self._header[2] + begin + start * size, content.data)
        return content

    @cached_property
    def _header(self) -> tuple[dict[str, str], dict[str, Entry], int]:
        n_bytes = self._folder.size(self._name)
        begin = bytearray(min(n_bytes, _FIRST_BYTES))
        self._read(0, memoryview(begin))
        n_header = int.from_bytes(begin[:8], "little")
        data = 8 + n_header
        if data > n_bytes or n_header > _HEADER_BYTES_MAX:
            raise DamagedError("it ends within its header")
        if data > len(begin):
            begin = bytearray(data)
            self._read(0, memoryview(begin))
        try:
            parts = msgspec.json.decode(begin[8:data], type=dict[str, msgspec.Raw])
            facts = msgspec.json.decode(parts.pop(_FACTS, b"{}"), type=dict[str, str])
            entries = {n: msgspec.json.decode(part, type=Entry) for n, part in parts.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedError(f"its header cannot be read: {error}") from None
        end = data + max((entry.data_offsets[1] for entry in entries.values()), default=0)
        if end != n_bytes:
            raise DamagedError(f"it has {n_bytes} bytes, not {end}")
        return facts, entries, data

    def _read(self, offset: int, buffer: memoryview) -> None:
        try:
            self._folder.read(self._name, offset, buffer)
        except EOFError as error:
            raise DamagedError(str(error)) from None
