"""An .npy file that grows by rows, so that a corpus need not fit in memory.

numpy pads the header of an .npy file so that its first dimension can grow in place
(`numpy.lib.format`, GROWTH_AXIS_MAX_DIGITS); the header is written again at the end.
"""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.lib.format as npy
from numpy.typing import DTypeLike, NDArray


class Tape:
    """Rows of one shape and type; use it in a `with` statement."""

    def __init__(self, path: Path, *, row_shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._path = path
        self._row_shape = row_shape
        self._dtype: np.dtype[np.generic] = np.dtype(dtype)
        self._n_rows = 0

    @property
    def n_rows(self) -> int:
        return self._n_rows

    def __enter__(self) -> Self:
        self._file = self._path.open("w+b")
        self._write_header()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()

    def copy(self, source: Path) -> None:
        """Append every row of another .npy file of the same row shape and type."""
        rows = np.load(source, mmap_mode="r", allow_pickle=False)
        assert rows.shape[1:] == self._row_shape
        assert rows.dtype == self._dtype
        with source.open("rb") as file:
            file.seek(rows.offset)
            shutil.copyfileobj(file, self._file, 1 << 22)
        self._n_rows += len(rows)

    def append(self, rows: NDArray[np.generic]) -> None:
        """Append `rows`, (n, *row_shape)."""
        assert rows.shape[1:] == self._row_shape
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self._n_rows += len(rows)

    def _write_header(self) -> None:
        npy.write_array_header_1_0(
            self._file,
            {
                "descr": npy.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self._n_rows, *self._row_shape),
            },
        )
