"""Groups of columns of a matrix: dense in either order, in a file, or scipy.sparse.

A block holds its columns as they are when that is column by column in float64, and else a copy.
"""

import sys
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from distbelief.core.errors import SettingError
from sandblaster.strads import kernels
from sandblaster.strads.kernels import Floats


Csc: TypeAlias = "sparse.csc_array[np.float64]"
Matrix: TypeAlias = "Floats | Csc"
Ids = NDArray[np.int64]
Labels: TypeAlias = NDArray[np.float64 | np.int64 | np.bool_ | np.str_ | np.object_]
Given = TypeVar("Given", bound=Exception)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """A matrix in a file, of which blocks read their columns. `Columns.of` checks these."""

    shape: tuple[int, int]
    values: NDArray[np.float64]  # of any numbers, (n_rows, n_columns); or (n_entries,)
    rows: Ids | None = None  # (n_entries,), if it is sparse
    starts: Ids | None = None  # (n_columns + 1,)

    @property
    def arrays(self) -> list[object]:
        return [one for one in (self.values, self.rows, self.starts) if one is not None]


_PRECISE: Final = 1e-9  # of |x|^2 that must be left when a column is centred: the rest is rounding


def columns_of(matrix: "Matrix | Mapped", which: "range | Ids") -> Matrix:
    """Return some columns; of a file as float64, in memory."""
    some = slice(which.start, which.stop) if isinstance(which, range) else which
    if not isinstance(matrix, Mapped):
        return cast("Floats", matrix)[:, some]  # both kinds take such indices
    if matrix.rows is None or matrix.starts is None:
        # Fancy indices of a map read column by column, a slice of it row by row.
        return np.asarray(matrix.values[:, some], dtype=np.float64)
    ids = np.asarray(which, dtype=np.int64)
    lengths = matrix.starts[ids + 1] - matrix.starts[ids]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    places: Ids | slice[int, int, None]
    if isinstance(which, range):
        places = slice(int(matrix.starts[which.start]), int(matrix.starts[which.stop]))
    else:
        places = np.arange(ends[-1]) + np.repeat(matrix.starts[ids] - ends[:-1], lengths)
    entries = np.array(matrix.values[places]), np.array(matrix.rows[places])
    n_rows = matrix.shape[0]
    if entries[1].size and not 0 <= entries[1].min() <= entries[1].max() < n_rows:
        raise SettingError(f"X has entries outside its {n_rows} rows: the file is broken; save it")
    columns: Csc = sparse.csc_array((*entries, ends), shape=(n_rows, len(ids)))
    columns.sum_duplicates()
    return columns


def n_entries(matrix: "Matrix | Mapped", which: Ids) -> int:
    """Return the entries of some columns: all elements of dense ones."""
    if isinstance(matrix, np.ndarray) or (isinstance(matrix, Mapped) and matrix.starts is None):
        return len(which) * int(matrix.shape[0])
    starts = cast("Ids", matrix.starts if isinstance(matrix, Mapped) else matrix.indptr)
    return int(np.sum(starts[which + 1] - starts[which]))


def check_memory(matrix: "Matrix | Mapped", share: float, *, user: str) -> None:
    """Refuse a matrix of which blocks copy a share that does not fit into this host's memory.

    Raises:
        SettingError: it does not; nothing is refused where the free memory is not known.
    """
    if not isinstance(matrix, np.ndarray | Mapped):
        return  # it is in memory, and stays there
    if isinstance(matrix, np.ndarray) and matrix.flags.f_contiguous:
        return
    n_bytes = share * 8 * n_entries(matrix, np.arange(matrix.shape[1]))
    _check_free(n_bytes, f"{user}: blocks of X, {matrix.shape[0]:,} x {matrix.shape[1]:,}, take")


def _check_free(n_bytes: float, what: str) -> None:
    """Raise SettingError if so much memory is not free."""
    free = free_bytes()
    if free is not None and n_bytes > free:
        raise SettingError(
            f"{what} {n_bytes / 1e9:,.1f} GB here, and {free / 1e9:,.1f} GB of memory are free: "
            "use more hosts, or a sparse X"
        )


def check_copy(dense: Floats, *, user: str) -> None:
    """Raise SettingError if a copy of it in float64 does not fit."""
    rows, columns = dense.shape
    _check_free(8.0 * dense.size, f"{user}: X, {rows:,} x {columns:,}, takes")


def free_bytes() -> int | None:
    """Return the memory that programs of this host may still take; None: not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(one.split()[1]) << 10 for one in lines if one.startswith("MemAvail")), None)


def checked_matrix(x: object, *, user: str) -> Matrix:
    """Return data as float64, sparse ones by columns; refuse what cannot be computed with.

    Raises:
        SettingError: not two-dimensional, no rows or columns, not of numbers, NaN or infinite.
    """
    given = checked_table(x, user=user)
    if not isinstance(given, np.ndarray):
        # First of all float64: sums of entries that are small integers would overflow.
        columns: Csc = sparse.csc_array(given.astype(np.float64, copy=False))
        if not columns.has_canonical_format:
            columns = columns.copy()
            columns.sum_duplicates()
        if not columns.data.flags.c_contiguous:
            parts = np.ascontiguousarray(columns.data), columns.indices, columns.indptr
            columns = sparse.csc_array(parts, columns.shape)
        matrix: Matrix = columns
        values: Floats = columns.data
    else:
        matrix = values = given.astype(np.float64, copy=False)
    # The sum is NaN or infinite where an element is, and needs no memory; it may overflow alone.
    with np.errstate(all="ignore"):
        looks_finite = np.isfinite(values.sum())
    if not looks_finite and not np.isfinite(values).all():
        raise SettingError(f"{user}: X contains NaN or infinity; replace or drop these samples")
    return matrix


def checked_table(x: object, *, user: str) -> "Floats | Csc":
    """Return rows and columns of numbers of any type, dense or sparse of any format.

    Raises:
        SettingError: not two-dimensional, no rows or columns, not of numbers.
    """
    if isinstance(x, (sparse.sparray, sparse.spmatrix)):
        given = cast("Floats | Csc", x)  # all have what is asked for here
    else:
        array: Labels = np.asarray(x)
        if array.dtype == object:
            array = _as_numbers(array, "X", user)
        given = cast("Floats", array)
    _check_kind(given, "X", user)
    if given.ndim != 2:
        raise SettingError(
            f"{user}: X has {given.ndim} dimensions, not 2. Reshape your data: "
            "X.reshape(-1, 1) is one column, X.reshape(1, -1) one sample"
        )
    for name, n in zip(("sample", "feature"), given.shape, strict=True):
        if not n:
            raise SettingError(
                f"{user}: X has 0 {name}(s) (shape={given.shape}) while a minimum of 1 is required."
            )
    return given


def check_width(n: int, n_features: int, user: str, *, use: str = "") -> None:
    """Raise SettingError if data have another number of columns than those that were fitted."""
    if n != n_features:
        raise SettingError(
            f"X has {n} features, but {user} is expecting {n_features} features as input{use}"
        )


def checked_targets(y: object, n_samples: int, *, user: str) -> Floats:
    """Return targets as float64, one per sample.

    Raises:
        SettingError: another number, not of numbers, NaN or infinite.
    """
    targets = checked_labels(y, n_samples, user=user)
    if targets.dtype.kind in "OUS":
        targets = _as_numbers(targets, "y", user)
    _check_kind(targets, "y", user)
    return targets.astype(np.float64, copy=False)


def checked_labels(y: object, n_samples: int, *, user: str) -> Labels:
    """Return targets of any type, one per sample."""
    if y is None:
        raise SettingError(
            f"{user} requires y to be passed, but the target y is None: give one per sample"
        )
    targets = np.asarray(y)
    if targets.shape == (n_samples, 1):
        warnings.warn(
            "A column-vector y was passed when a 1d array was expected: use y.ravel()",
            of_sklearn("DataConversionWarning", UserWarning),
            stacklevel=4,
        )
        targets = targets.ravel()
    if targets.shape != (n_samples,):
        raise SettingError(
            f"{user}: y has shape {targets.shape}; give one target per sample, ({n_samples},)"
        )
    _check_kind(targets, "y", user, kinds="biufOUS")
    if targets.dtype.kind == "f" and not np.isfinite(targets).all():
        raise SettingError(f"{user}: y contains NaN or infinity; drop these samples")
    return targets


def of_sklearn(name: str, other: type[Given]) -> type[Given]:
    """Return scikit-learn's exception of that name if it is loaded, so that its users catch it."""
    found = getattr(sys.modules.get("sklearn.exceptions"), name, other)
    return cast("type[Given]", found)


def _as_numbers(values: Labels, name: str, user: str) -> Floats:
    try:
        return values.astype(np.float64)
    except TypeError as error:
        raise TypeError(f"{user}: {name} is not of numbers: {error}") from None
    except (ValueError, OverflowError) as error:
        raise SettingError(f"{user}: {name} is not of numbers: {error}") from None


def _check_kind(values: "Labels | Csc", name: str, user: str, kinds: str = "biuf") -> None:
    if values.dtype.kind == "c":
        raise SettingError(f"{user}: {name} is complex. Complex data not supported: use its parts")
    if values.dtype.kind not in kinds:
        raise SettingError(f"{user}: {name} is of {values.dtype}; use numbers")


def cut(n_columns: int, n_blocks: int) -> list[range]:
    """Return the columns of each block: neighbours, as many as in any other, or one more."""
    ends = [n_columns * block // n_blocks for block in range(n_blocks + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns of one block, and what each pass over them needs."""

    first: int  # index of the first one
    matrix: Matrix  # (n_rows, n), sparse; or (n, n_rows), dense
    norms: Floats  # (n,) |x|^2, centred; 0 where a column is empty, or constant and centred
    sums: Floats  # (n,); zeros if nothing is centred

    @classmethod
    def of(cls, matrix: "Matrix | Mapped", which: range, *, centred: bool) -> "Columns":
        """Cut these columns out of a matrix.

        Raises:
            SettingError: a column has NaN or infinity, or varies so little about its mean that
                float64 loses it.
        """
        n_rows, first = matrix.shape[0], which.start
        if isinstance(matrix, Mapped):
            matrix, which = columns_of(matrix, which), range(len(which))
        ones = np.ones(n_rows)
        if isinstance(matrix, np.ndarray):
            rows = np.ascontiguousarray(matrix[:, which.start : which.stop].T)
            sums = rows @ ones
            squares = np.einsum("ij,ij->i", rows, rows)
            own: Matrix = rows
        else:
            own = _slice(matrix, which)
            sums = np.asarray(own.T @ ones)
            squares = sparse.csc_array((own.data**2, own.indices, own.indptr), own.shape).T @ ones
        with np.errstate(all="ignore"):
            norms = squares - sums * sums / n_rows if centred else squares
        norms[_constant(own, squares, norms, first=first, centred=centred)] = 0.0
        return cls(first, own, norms, sums if centred else np.zeros(len(which)))

    def products(self, vector: Floats) -> Floats:
        """Return each column times a vector that has no mean, if columns are centred."""
        product = self.matrix if isinstance(self.matrix, np.ndarray) else self.matrix.T
        return cast("Floats", product @ vector)

    def descend(
        self,
        places: Ids,
        values: Floats,
        residual: Floats,
        shift: float,
        *,
        threshold: float,
        n_passes: int,
        enough: float,
    ) -> kernels.Result:
        """Make passes over columns at these places: `values` and `residual` change."""
        own = self.matrix
        starts: kernels.Indices
        rows: kernels.Indices
        if isinstance(own, np.ndarray):
            starts = np.arange(0, own.size + 1, own.shape[1])
            rows, data = np.zeros(0, np.int64), own.reshape(-1)
        else:
            starts, rows, data = own.indptr, own.indices, own.data
        return kernels.best()(
            starts, rows, data, self.norms, self.sums, places, values, residual,
            shift, threshold, n_passes, enough,
        )  # fmt: skip

    def some(self, places: Ids) -> "Columns":
        """Return a copy of some columns, sparse."""
        own = self.matrix
        taken = own[places].T if isinstance(own, np.ndarray) else own[:, places]
        return Columns(self.first, sparse.csc_array(taken), self.norms[places], self.sums[places])


def _constant(own: Matrix, squares: Floats, norms: Floats, *, first: int, centred: bool) -> Ids:
    """Return the columns that say nothing; refuse those that are lost by rounding.

    Raises:
        SettingError: a column varies too little about its mean, or its squares leave float64.
    """
    is_odd = (squares == 0.0) | ~np.isfinite(squares)
    if centred:
        is_odd |= norms < _PRECISE * squares
    odd = np.flatnonzero(is_odd)
    if isinstance(own, np.ndarray):
        least, most = own[odd].min(axis=1), own[odd].max(axis=1)
    else:
        some = own[:, odd]
        least, most = (cast("Csc", one).toarray().ravel() for one in (some.min(0), some.max(0)))
    says_nothing = (least == most) & np.isfinite(most) & (centred | (most == 0.0))
    for place in np.flatnonzero(~says_nothing)[:1]:
        column = odd[place]
        why = "has numbers so small or large that their squares are lost: scale it"
        if not np.isfinite([least[place], most[place]]).all():
            why = "contains NaN or infinity: replace or drop these samples"
        elif 0.0 < squares[column] < np.inf:
            why = "varies by less than 1 in 30,000 of its mean: subtract the mean from it first"
        raise SettingError(f"column {first + column} of X {why}")
    return cast("Ids", odd[says_nothing])


def _slice(matrix: Csc, which: range) -> Csc:
    """Return neighbouring columns, which share their memory with the matrix."""
    starts = matrix.indptr[which.start : which.stop + 1]
    part = slice(int(starts[0]), int(starts[-1]))
    entries = (matrix.data[part], matrix.indices[part], starts - starts[0])
    own = sparse.csc_array(entries, (matrix.shape[0], len(which)), copy=False)
    own.has_canonical_format = True
    return own
