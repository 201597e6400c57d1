"""Four ranks of a matrix factorization, compiled by numba where it is installed: numpy's bits.

Sums are of one order in both, entry by entry. `step` reads each entry twice for four ranks: what
it waits for is memory. Of fewer ranks the others are 0, and stay 0.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sandblaster.strads.compiled import compiled


Numbers = NDArray[np.float64]
Starts = NDArray[np.int64]
Columns = NDArray[np.int32]

TOGETHER: Final = 4  # ranks
PAIRS: Final = tuple((i, j) for i in range(TOGETHER) for j in range(i, TOGETHER))
"""Which element of a symmetric matrix of four ranks each of ten numbers is."""

Step: TypeAlias = Callable[
    [Starts, Columns, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers],
    Numbers,
]
"""The arguments of `step`."""


def stepper() -> Step:
    """Return `step` as compiled, or else numpy's."""
    return compiled(
        step,
        "float64[:, ::1](read(int64, 1), read(int32, 1), float64[::1], read(float64, 1), "
        "read(float64, 2), read(float64, 2), float64[:, ::1], read(float64, 2), "
        "read(float64, 2), read(float64, 1))",
        otherwise=step_in_numpy,
    )


def step(  # noqa: PLR0913, PLR0915, PLR0917 -- numba takes arrays, and is fast with names
    starts: Starts,  # (n_rows + 1,) of rows among the entries
    columns: Columns,  # (n,) of entries
    residuals: Numbers,  # (n,): changed
    weights: Numbers,  # (n,)
    before: Numbers,  # (n_rows, 4) u of other ranks
    moved: Numbers,  # (n_columns, 4) by what their v have changed since
    u: Numbers,  # (n_rows, 4): changed
    v: Numbers,  # (n_columns, 4)
    rest: Numbers,  # (n_rows, 4) added to the numerators
    gram: Numbers,  # (10,) added to the matrix, by PAIRS; infinite: that u stays
) -> Numbers:
    """Minimize over u given v; return what v follows from: (n_columns, 14).

    These are the sums of residuals times u, and of weights times products of u by PAIRS. It checks
    no index. Plain Python, too, so that it can be held against numpy without numba.
    """
    sums = np.zeros((len(v), 14))
    for row in range(len(u)):
        first, end = starts[row], starts[row + 1]
        b0, b1, b2, b3 = before[row, 0], before[row, 1], before[row, 2], before[row, 3]
        n0 = n1 = n2 = n3 = 0.0
        g00 = g01 = g02 = g03 = g11 = g12 = g13 = g22 = g23 = g33 = 0.0
        for place in range(first, end):
            column, weight = columns[place], weights[place]
            m0, m1, m2, m3 = moved[column, 0], moved[column, 1], moved[column, 2], moved[column, 3]
            residual = residuals[place] - ((b0 * m0 + b1 * m1) + (b2 * m2 + b3 * m3)) * weight
            residuals[place] = residual
            v0, v1, v2, v3 = v[column, 0], v[column, 1], v[column, 2], v[column, 3]
            n0 += residual * v0
            n1 += residual * v1
            n2 += residual * v2
            n3 += residual * v3
            w0, w1, w2, w3 = weight * v0, weight * v1, weight * v2, weight * v3
            g00 += w0 * v0
            g01 += w0 * v1
            g02 += w0 * v2
            g03 += w0 * v3
            g11 += w1 * v1
            g12 += w1 * v2
            g13 += w1 * v3
            g22 += w2 * v2
            g23 += w2 * v3
            g33 += w3 * v3
        n0 += rest[row, 0]
        n1 += rest[row, 1]
        n2 += rest[row, 2]
        n3 += rest[row, 3]
        g00, g01, g02, g03 = g00 + gram[0], g01 + gram[1], g02 + gram[2], g03 + gram[3]
        g11, g12, g13 = g11 + gram[4], g12 + gram[5], g13 + gram[6]
        g22, g23, g33 = g22 + gram[7], g23 + gram[8], g33 + gram[9]
        # L D L' without square roots: `_solved`
        l01, l02, l03 = g01 / g00, g02 / g00, g03 / g00
        d1, t12, t13 = g11 - l01 * g01, g12 - l01 * g02, g13 - l01 * g03
        l12, l13 = t12 / d1, t13 / d1
        d2, t23 = g22 - l02 * g02 - l12 * t12, g23 - l02 * g03 - l12 * t13
        l23 = t23 / d2
        d3 = g33 - l03 * g03 - l13 * t13 - l23 * t23
        n1 -= l01 * n0
        n2 = n2 - l02 * n0 - l12 * n1
        n3 = n3 - l03 * n0 - l13 * n1 - l23 * n2
        c3 = n3 / d3
        c2 = n2 / d2 - l23 * c3
        c1 = n1 / d1 - l12 * c2 - l13 * c3
        c0 = n0 / g00 - l01 * c1 - l02 * c2 - l03 * c3
        u0, u1, u2, u3 = u[row, 0] + c0, u[row, 1] + c1, u[row, 2] + c2, u[row, 3] + c3
        u[row, 0], u[row, 1], u[row, 2], u[row, 3] = u0, u1, u2, u3
        p00, p01, p02, p03, p11 = u0 * u0, u0 * u1, u0 * u2, u0 * u3, u1 * u1
        p12, p13, p22, p23, p33 = u1 * u2, u1 * u3, u2 * u2, u2 * u3, u3 * u3
        for place in range(first, end):
            column, weight = columns[place], weights[place]
            v0, v1, v2, v3 = v[column, 0], v[column, 1], v[column, 2], v[column, 3]
            residual = residuals[place] - ((c0 * v0 + c1 * v1) + (c2 * v2 + c3 * v3)) * weight
            residuals[place] = residual
            sums[column, 0] += residual * u0
            sums[column, 1] += residual * u1
            sums[column, 2] += residual * u2
            sums[column, 3] += residual * u3
            sums[column, 4] += weight * p00
            sums[column, 5] += weight * p01
            sums[column, 6] += weight * p02
            sums[column, 7] += weight * p03
            sums[column, 8] += weight * p11
            sums[column, 9] += weight * p12
            sums[column, 10] += weight * p13
            sums[column, 11] += weight * p22
            sums[column, 12] += weight * p23
            sums[column, 13] += weight * p33
    return sums


def step_in_numpy(  # noqa: PLR0913, PLR0917 -- as above
    starts: Starts,
    columns: Columns,
    residuals: Numbers,
    weights: Numbers,
    before: Numbers,
    moved: Numbers,
    u: Numbers,
    v: Numbers,
    rest: Numbers,
    gram: Numbers,
) -> Numbers:
    """Do as `step`, in several times as long."""
    rows = np.repeat(np.arange(len(u)), np.diff(starts))
    subtract(starts, columns, residuals, weights, before, moved)
    of_entries = v[columns]
    numerators = np.stack([np.bincount(rows, residuals * one, len(u)) for one in of_entries.T])
    matrix = np.stack(
        [np.bincount(rows, weights * of_entries[:, i] * of_entries[:, j], len(u)) for i, j in PAIRS]
    )
    change = _solved(matrix + gram[:, None], numerators + rest.T)
    u += change.T
    subtract(starts, columns, residuals, weights, np.ascontiguousarray(change.T), v)
    of_rows = u[rows]
    return np.stack(
        [np.bincount(columns, residuals * one, len(v)) for one in of_rows.T]
        + [np.bincount(columns, weights * (u[:, i] * u[:, j])[rows], len(v)) for i, j in PAIRS],
        axis=1,
    )


def _solved(matrix: Numbers, right: Numbers) -> Numbers:
    """Solve symmetric systems, (10, n) by PAIRS, for (4, n): L D L', with the sums of `step`."""
    g00, g01, g02, g03, g11, g12, g13, g22, g23, g33 = matrix
    n0, n1, n2, n3 = right
    l01, l02, l03 = g01 / g00, g02 / g00, g03 / g00
    d1, t12, t13 = g11 - l01 * g01, g12 - l01 * g02, g13 - l01 * g03
    l12, l13 = t12 / d1, t13 / d1
    d2, t23 = g22 - l02 * g02 - l12 * t12, g23 - l02 * g03 - l12 * t13
    l23 = t23 / d2
    d3 = g33 - l03 * g03 - l13 * t13 - l23 * t23
    n1 = n1 - l01 * n0
    n2 = n2 - l02 * n0 - l12 * n1
    n3 = n3 - l03 * n0 - l13 * n1 - l23 * n2
    c3 = n3 / d3
    c2 = n2 / d2 - l23 * c3
    c1 = n1 / d1 - l12 * c2 - l13 * c3
    return np.stack([n0 / g00 - l01 * c1 - l02 * c2 - l03 * c3, c1, c2, c3])


def subtract(
    starts: Starts, columns: Columns, residuals: Numbers, weights: Numbers, u: Numbers, v: Numbers
) -> None:
    """Take products of factors of four ranks, (n_rows, 4) and (n_columns, 4), from residuals."""
    rows = np.repeat(np.arange(len(u)), np.diff(starts))
    p0, p1, p2, p3 = u[rows].T * v[columns].T
    residuals -= ((p0 + p1) + (p2 + p3)) * weights
