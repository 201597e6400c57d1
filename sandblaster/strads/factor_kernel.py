"""One rank of a matrix factorization, compiled by numba where it is installed: numpy's bits.

Sums are of one order in both, entry by entry. `step` reads each entry once, numpy eight times.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sandblaster.strads.compiled import compiled


Numbers = NDArray[np.float64]
Starts = NDArray[np.int64]
Columns = NDArray[np.int32]

Step: TypeAlias = Callable[
    [Starts, Columns, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers, float], Numbers
]
"""The arguments of `step`."""


def stepper() -> Step:
    """Return `step` as compiled, or else numpy's."""
    return compiled(
        step,
        "float64[:, ::1](read(int64, 1), read(int32, 1), float64[::1], read(float64, 1), "
        "read(float64, 1), read(float64, 1), float64[::1], read(float64, 1), read(float64, 1), "
        "float64)",
        otherwise=step_in_numpy,
    )


def step(  # noqa: PLR0913, PLR0917 -- numba takes arrays, not objects
    starts: Starts,  # (n_rows + 1,) of rows among the entries
    columns: Columns,  # (n,) of entries
    residuals: Numbers,  # (n,): changed
    weights: Numbers,  # (n,)
    before: Numbers,  # (n_rows,) u of another rank
    moved: Numbers,  # (n_columns,) by what its v has changed since
    u: Numbers,  # (n_rows,): changed
    v: Numbers,  # (n_columns,)
    rest: Numbers,  # (n_rows,) added to the numerators
    divisor: float,  # added to the divisors; infinite: u stays
) -> Numbers:
    """Update u given v; return what v follows from: (n_columns, 2), numerators and divisors.

    It checks no index. Plain Python, too, so that it can be held against numpy without numba.
    """
    sums = np.zeros((len(v), 2))
    for row in range(len(u)):
        first, end = starts[row], starts[row + 1]
        numerator, own = 0.0, 0.0
        for place in range(first, end):
            column = columns[place]
            weight = weights[place]
            residuals[place] -= before[row] * moved[column] * weight
            numerator += residuals[place] * v[column]
            own += v[column] * v[column] * weight
        change = 0.0
        if divisor < np.inf:
            change = (numerator + u[row] * own + rest[row]) / (own + divisor) - u[row]
            u[row] += change
        square = u[row] * u[row]
        for place in range(first, end):
            column = columns[place]
            residuals[place] -= change * v[column] * weights[place]
            sums[column, 0] += residuals[place] * u[row]
            sums[column, 1] += square * weights[place]
    for column in range(len(v)):
        sums[column, 0] += v[column] * sums[column, 1]
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
    divisor: float,
) -> Numbers:
    """Do as `step`, in several times as long."""
    sizes = np.diff(starts)
    rows = np.repeat(np.arange(len(u)), sizes)
    subtract(starts, columns, residuals, weights, before, moved)
    of_entries = v[columns]
    if divisor < np.inf:
        own = np.bincount(rows, of_entries * of_entries * weights, len(u))
        numerators = np.bincount(rows, residuals * of_entries, len(u))
        change = (numerators + u * own + rest) / (own + divisor) - u
        u += change
        subtract(starts, columns, residuals, weights, change, v)
    of_rows = np.repeat(u, sizes)
    divisors = np.bincount(columns, of_rows * of_rows * weights, len(v))
    numerators = np.bincount(columns, residuals * of_rows, len(v))
    return np.stack([numerators + v * divisors, divisors], axis=1)


def subtract(
    starts: Starts, columns: Columns, residuals: Numbers, weights: Numbers, u: Numbers, v: Numbers
) -> None:
    """Take a product of factors from the residuals."""
    products = np.repeat(u, np.diff(starts))
    products *= v[columns]
    products *= weights
    residuals -= products
