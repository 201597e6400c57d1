"""Files of data: dense, sparse, SVMlight's text, tables.

    .npy                         of numpy: memory-mapped
    .npz                         of scipy.sparse
    .svm, .svmlight, .libsvm     text, "target index:value ...", indices from 1: with targets
    .parquet                     columns of numbers: some may be targets

Of `.npy`, and of `.npz` by columns that is not compressed, only those columns are read that are
asked for (`read_columns`).
"""

import struct
import zipfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Final, cast

import numpy as np
from scipy import sparse

from distbelief.core.errors import JobError
from sandblaster.strads import columns
from sandblaster.strads.columns import Ids, Mapped, Matrix
from sandblaster.strads.kernels import Floats


_TEXT: Final = (".svm", ".svmlight", ".libsvm")
_KINDS: Final = (".npy", ".npz", *_TEXT, ".parquet")


def read_matrix(path: str, y: str = "", *, n_features: int | None = None) -> Matrix:
    """Return the matrix of a file, of any format, or raise JobError.

    Args:
        path: The file.
        y: Where its targets are: of a table a column, which is left out.
        n_features: Columns of a text, which does not say how many there are; None: the largest
            index.
    """
    kind = _kind_of(path, _KINDS)
    if n_features is not None and kind not in _TEXT:
        raise JobError(f"{path}: n_features is {n_features}, but the file says it: leave it out")
    match kind:
        case ".npy":
            return cast("Floats", _tried(path, lambda: np.load(path, mmap_mode="r")))
        case ".npz":
            _check_fits(path)
            return cast("Matrix", _tried(path, lambda: _whole(path)))
        case ".parquet":
            kept = [one for name, one in _table(path).items() if name != y]
            return np.stack(kept).T if kept else np.zeros((0, 0))
        case _:
            return _text(path, n_features)[0]


def read_columns(path: str, y: str = "", *, n_features: int | None = None) -> "Matrix | Mapped":
    """Return the same, but of files that can be read in part what reads their columns."""
    is_sparse = Path(path).suffix == ".npz" and n_features is None
    if is_sparse and (mapped := _tried(path, lambda: _mapped(path))) is not None:
        return cast("Mapped", mapped)
    matrix = read_matrix(path, y, n_features=n_features)
    if isinstance(matrix, np.memmap) and matrix.ndim == 2 and matrix.dtype.kind in "biuf":
        return Mapped(matrix.shape, matrix)
    return matrix


def read_targets(x: str, y: str) -> Floats:
    """Return targets, one per sample: of a file .npy, of the text `x`, or of a column of it."""
    if is_text(x) and not y:
        return _text(x, None)[1]
    if Path(x).suffix == ".parquet" and Path(y).suffix != ".npy":
        table = _table(x)
        if y not in table:
            raise JobError(f"{x} has no column {y!r}: it has {', '.join(table)}"[:200])
        return table[y]
    if not y:
        raise JobError(f"{x} has no targets: give y, a .npy file")
    _kind_of(y, (".npy",))
    vector = cast("Floats", _tried(y, lambda: np.load(y, mmap_mode="r")))
    if vector.dtype.kind not in "biuf":
        raise JobError(f"{y} is of {vector.dtype}: save numbers")
    if vector.ndim != 1:
        raise JobError(f"{y} has shape {vector.shape}: save one number per sample, y.ravel()")
    return vector


def read_entries(*paths: str) -> list[Matrix]:
    """Return the matrices of files; those of tables have columns of row, column and value.

    A table does not say how many rows and columns there are: all have as many as any needs.
    """
    triples = {path: _triple(path) for path in paths if Path(path).suffix == ".parquet"}
    ends = [[int(one.max(initial=-1)) + 1 for one in pair] for pair, _ in triples.values()]
    shape = tuple(max(one) for one in zip(*ends, strict=True))
    return [
        cast("Matrix", sparse.coo_array((triples[path][1], triples[path][0]), shape=shape))
        if path in triples
        else read_matrix(path)
        for path in paths
    ]


def _triple(path: str) -> tuple[tuple[Ids, Ids], Floats]:
    table = _table(path)
    if len(table) != 3:
        raise JobError(f"{path} has {len(table)} columns: save three, row, column and value")
    rows, ids, values = table.values()
    for name, one in list(table.items())[:2]:
        if not ((one >= 0) & (one < 2**31) & (one % 1 == 0)).all():
            raise JobError(f"{path}: {name!r} has numbers that are no index: save 0, 1, 2, ...")
    return (rows.astype(np.int64), ids.astype(np.int64)), values


def check_columns(x: str, y: str, other: str, other_y: str) -> None:
    """Raise JobError if the tables have other columns: those of one would be taken for others."""
    if x != other and {Path(one).suffix for one in (x, other)} == {".parquet"}:
        tables = {x: y, other: other_y}.items()
        own, names = ([one for one in _names(path) if one != of_y] for path, of_y in tables)
        for one, name in zip_longest(own, names):
            if one != name:
                raise JobError(
                    f"{other} has the column {name!r} where {x} has {one!r}: save both with the "
                    "same columns, in one order"
                )


def is_text(path: str) -> bool:
    return Path(path).suffix in _TEXT


def _kind_of(path: str, kinds: tuple[str, ...]) -> str:
    kind = Path(path).suffix
    if kind not in kinds:
        raise JobError(f"{path}: give a file of numpy or scipy.sparse, {' or '.join(kinds)}")
    return kind


def _tried(path: str, read: Callable[[], object]) -> object:
    try:
        return read()
    except (OSError, ValueError, KeyError, EOFError, OverflowError, zipfile.BadZipFile) as error:
        raise JobError(f"{path} cannot be read: {error}") from None


def _whole(path: str) -> object:
    matrix = sparse.load_npz(path)
    if isinstance(
        matrix, sparse.csr_array | sparse.csc_array | sparse.csr_matrix | sparse.csc_matrix
    ):
        matrix.check_format(full_check=True)  # or numbers beside its arrays are read
    return matrix


def _check_fits(path: str) -> None:
    with zipfile.ZipFile(path) if zipfile.is_zipfile(path) else nullcontext() as parts:
        n_bytes = 0 if parts is None else sum(part.file_size for part in parts.infolist())
    free = columns.free_bytes()
    if free is not None and n_bytes > free:
        raise JobError(
            f"{path} takes {n_bytes:,} bytes of memory, and {free:,} are free: each process reads "
            "all of it: use a host with more"
        )


def _text(path: str, n_features: int | None) -> tuple[Matrix, Floats]:
    try:
        from sklearn.datasets import load_svmlight_file  # noqa: PLC0415 -- an extra, slow to import
    except ImportError:
        raise JobError(
            f"{path} is read by scikit-learn: install distbelief[sklearn], or save it as .npz"
        ) from None
    # Never guessed: two files would be shifted against each other without a word.
    found = _tried(path, lambda: load_svmlight_file(path, zero_based=False, n_features=n_features))
    return cast("tuple[Matrix, Floats]", found)


def _parquet(path: str) -> ModuleType:
    try:
        from pyarrow import parquet  # noqa: PLC0415 -- an extra, slow to import
    except ImportError:
        raise JobError(
            f"{path} is read by pyarrow: install distbelief[parquet], or save it as .npy"
        ) from None
    return cast("ModuleType", parquet)


def _names(path: str) -> list[str]:
    reader = _parquet(path)
    return cast("list[str]", _tried(path, lambda: reader.read_schema(path).names))


def _table(path: str) -> Mapping[str, Floats]:
    reader = _parquet(path)
    table = _tried(path, lambda: reader.read_table(path))
    found: dict[str, Floats] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):  # type: ignore[attr-defined] # no types
        values = column.to_numpy()
        if values.dtype.kind not in "biuf":
            raise JobError(f"{path}: column {name!r} is of {column.type}: save numbers, or drop it")
        found[name] = values.astype(np.float64)
    return found


# --- files read in part ---


def _mapped(path: str) -> Mapped | None:
    """Return the columns of a .npz file; None if it is compressed, or not by columns of float64."""
    with zipfile.ZipFile(path) as archive, Path(path).open("rb") as file:
        members = {info.filename: info for info in archive.infolist()}
        if any(one.compress_type != zipfile.ZIP_STORED for one in members.values()):
            return None
        with np.load(path) as small:
            if "format" not in small or small["format"].item() != b"csc":
                return None
        arrays = [_map(file, members[f"{name}.npy"]) for name in ("data", "indices")]
    values, rows = cast("tuple[Floats | None, Ids | None]", tuple(arrays))
    with np.load(path) as small:
        if values is None or rows is None or values.dtype != np.float64:
            return None
        n_rows, n_columns = small["shape"].tolist()
        return Mapped((n_rows, n_columns), values, rows, small["indptr"].astype(np.int64))


def _map(file: BinaryIO, member: zipfile.ZipInfo) -> "Floats | Ids | None":
    """Return an array that is stored as it is; None if it is empty, which cannot be mapped."""
    file.seek(member.header_offset + 26)
    n_name, n_extra = struct.unpack("<HH", file.read(4))  # of the local header, APPNOTE 4.3.7
    file.seek(n_name + n_extra, 1)
    if np.lib.format.read_magic(file) != (1, 0):  # what numpy writes for plain numbers
        return None
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if 0 in shape:
        return None
    return np.memmap(file, dtype, "r", file.tell(), shape)
