"""Coordinate descent over columns, compiled by numba where it is installed: numpy's bits.

    minimize over w    |r - X w|^2 / 2 + threshold |w|_1        one w_j after the other

X has centred columns where there is an intercept, but is never centred: with `sums` the sums of
its columns and `shift` the mean of r, a centred column times r is x.r - shift sum(x).

The loop is plain Python, so that it can be held against numpy without numba. It checks no index:
`Columns` makes legal ones. A sparse column is multiplied entry by entry, a dense one by eight
interleaved sums.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sandblaster.strads.compiled import compiled


Floats = NDArray[np.float64]
Indices = NDArray[np.int32] | NDArray[np.int64]
Result = tuple[int, float, float]
"""Passes made, `shift` after them, the largest |x|^2 |change of w_j| of the last one."""

Kernel: TypeAlias = Callable[
    [
        Indices, Indices, Floats, Floats, Floats, NDArray[np.int64], Floats, Floats,
        float, float, int, float,
    ],
    Result,
]  # fmt: skip

_LANES: Final = 8


def best() -> Kernel:
    """Return what makes the passes: the loop as numba compiles it, or numpy."""
    entries = "read(float64, 1), read(float64, 1), read(float64, 1), read(int64, 1)"
    changed = "float64[::1], float64[::1], float64, float64, int64, float64"
    signatures = [
        f"Tuple((int64, float64, float64))(read({one}, 1), read({one}, 1), {entries}, {changed})"
        for one in ("int32", "int64")
    ]
    return compiled(loop, *signatures, otherwise=in_numpy)


def loop(  # noqa: C901, PLR0912, PLR0913, PLR0917 -- numba takes arrays, and two kinds of columns
    starts: Indices,  # (n_columns + 1,) of columns in `rows` and `data`
    rows: Indices,  # of entries; empty: all columns are dense
    data: Floats,
    norms: Floats,  # (n_columns,) |x|^2, centred; 0: the column is never used
    sums: Floats,  # (n_columns,)
    order: NDArray[np.int64],  # (n,) columns
    values: Floats,  # (n,) their w: changed
    residual: Floats,  # (n_rows,): changed
    shift: float,
    threshold: float,
    n_passes: int,
    enough: float,
) -> Result:
    """Make passes over columns, in order, until no change is above `enough`."""
    largest, done = 0.0, 0
    n_rows, dense = len(residual), len(rows) == 0
    while done < n_passes:
        done += 1
        largest = 0.0
        for place in range(len(order)):
            column = order[place]
            norm = norms[column]
            if norm == 0.0:
                continue
            x = data[starts[column] : starts[column + 1]]
            dot = 0.0
            if dense:
                whole = n_rows - n_rows % 8
                s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
                for row in range(0, whole, 8):
                    s0 += x[row] * residual[row]
                    s1 += x[row + 1] * residual[row + 1]
                    s2 += x[row + 2] * residual[row + 2]
                    s3 += x[row + 3] * residual[row + 3]
                    s4 += x[row + 4] * residual[row + 4]
                    s5 += x[row + 5] * residual[row + 5]
                    s6 += x[row + 6] * residual[row + 6]
                    s7 += x[row + 7] * residual[row + 7]
                dot = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7
                for row in range(whole, n_rows):
                    dot += x[row] * residual[row]
            else:
                for entry in range(starts[column], starts[column + 1]):
                    dot += data[entry] * residual[rows[entry]]
            old = values[place]
            target = old * norm + (dot - shift * sums[column])
            new = 0.0
            if target > threshold:
                new = (target - threshold) / norm
            elif target < -threshold:
                new = (target + threshold) / norm
            change = new - old
            if change != 0.0:
                values[place] = new
                if dense:
                    for row in range(n_rows):
                        residual[row] -= change * x[row]
                else:
                    for entry in range(starts[column], starts[column + 1]):
                        residual[rows[entry]] -= change * data[entry]
                shift -= change * (sums[column] / n_rows)
                largest = max(largest, norm * abs(change))
        if largest <= enough:
            break
    return done, shift, largest


def in_numpy(  # noqa: PLR0913, PLR0917 -- of `loop`
    starts: Indices,
    rows: Indices,
    data: Floats,
    norms: Floats,
    sums: Floats,
    order: NDArray[np.int64],
    values: Floats,
    residual: Floats,
    shift: float,
    threshold: float,
    n_passes: int,
    enough: float,
) -> Result:
    """Do what `loop` does: some 10 microseconds for a short column."""
    largest, done = 0.0, 0
    dense = len(rows) == 0
    while done < n_passes:
        done += 1
        largest = 0.0
        for place, column in enumerate(order.tolist()):
            norm = float(norms[column])
            if norm == 0.0:
                continue
            part = slice(int(starts[column]), int(starts[column + 1]))
            which: Indices | slice[None, None, None] = slice(None) if dense else rows[part]
            products = data[part] * residual[which]
            dot = _sum_in_lanes(products) if dense else float(np.add.accumulate(products)[-1])
            old = float(values[place])
            target = old * norm + (dot - shift * float(sums[column]))
            new = 0.0
            if abs(target) > threshold:
                new = (target - threshold if target > 0.0 else target + threshold) / norm
            change = new - old
            if change != 0.0:
                values[place] = new
                residual[which] -= change * data[part]
                shift -= change * (float(sums[column]) / len(residual))
                largest = max(largest, norm * abs(change))
        if largest <= enough:
            break
    return done, shift, largest


def _sum_in_lanes(products: Floats) -> float:
    whole = len(products) - len(products) % _LANES
    total = 0.0
    for one in (
        *products[:whole].reshape(-1, _LANES).sum(axis=0).tolist(),
        *products[whole:].tolist(),
    ):
        total += one
    return total
