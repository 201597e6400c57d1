"""Eight ranks of a matrix factorization, compiled by numba where it is installed: numpy's bits.

Sums are of one order in both, entry by entry. `step` reads each entry twice for eight ranks. Of
fewer ranks the others are 0, and stay 0.

A row of eight numbers is one value in the kernel (`load`, `store`, `added`, `dot`). numba has no
such type, and would compute with one number at a time. What teaches it this one is here, not in a
module of its own: only a change of this file makes numba compile the kernel again.

Without numba the sums are those of scipy.sparse: where a processor adds and multiplies at once, as
on ARM, these may be rounded once less, and differ in the last bits.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from sandblaster.strads.compiled import compiled


Numbers = NDArray[np.float64]
Starts = NDArray[np.int64]
Columns = NDArray[np.int32]

TOGETHER: Final = 8  # ranks
PAIRS: Final = tuple((i, j) for i in range(TOGETHER) for j in range(i, TOGETHER))
"""Which element of a symmetric matrix of eight ranks each of 36 numbers is."""
N_SUMS: Final = TOGETHER + len(PAIRS)
_WIDTH: Final = 6 * TOGETHER  # of these, in whole rows of eight
_AT_ONCE: Final = 4096  # entries: they stay in the cache

Step: TypeAlias = Callable[
    [Starts, Columns, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers],
    Numbers,
]
"""The arguments of `step`."""
Subtract: TypeAlias = Callable[[Starts, Columns, Numbers, Numbers, Numbers, Numbers], None]
"""The arguments of `subtract`."""

_Raw: TypeAlias = Any  # type: ignore[explicit-any] # numba has no types

_ENTRIES: Final = "read(int64, 1), read(int32, 1), float64[::1], read(float64, 1)"


def stepper() -> Step:
    """Return `step` as compiled, or else numpy's."""
    _teach_rows()
    signature = (
        f"float64[:, ::1]({_ENTRIES}, read(float64, 2), read(float64, 2), float64[:, ::1], "
        "read(float64, 2), read(float64, 2), read(float64, 2))"
    )
    return compiled(step, signature, otherwise=step_in_numpy)


def subtracter() -> Subtract:
    """Return `subtract` as compiled, or else numpy's."""
    _teach_rows()
    signature = f"void({_ENTRIES}, read(float64, 2), read(float64, 2))"
    return compiled(subtract, signature, otherwise=subtract_in_numpy)


# --- rows of eight numbers ---


def load(matrix: Numbers, row: int, place: int) -> Numbers:
    """Return the numbers from 8 `place` on."""
    return matrix[row, place * TOGETHER : (place + 1) * TOGETHER]


def store(matrix: Numbers, row: int, place: int, values: Numbers) -> None:
    """Set the numbers from 8 `place` on."""
    matrix[row, place * TOGETHER : (place + 1) * TOGETHER] = values


def added(x: Numbers, factor: float, y: Numbers) -> Numbers:
    """Return x + factor y, rounded twice."""
    return x + factor * y


def dot(x: Numbers, y: Numbers) -> Numbers:
    """Return the sum of products, by halves; of arrays, along the last axis."""
    products = x * y
    fours = products[..., :4] + products[..., 4:]
    twos = fours[..., :2] + fours[..., 2:]
    return np.asarray(twos[..., 0] + twos[..., 1])


@cache
def _teach_rows() -> None:
    """Teach numba, where it is installed, the functions above on vectors of LLVM."""
    try:
        from llvmlite import ir  # noqa: PLC0415 -- with numba
        from numba import extending, types  # noqa: PLC0415 -- an extra, and slow to import
        from numba.core import cgutils  # noqa: PLC0415 -- as above
    except ImportError:
        return
    index = ir.IntType(32)
    vector = ir.VectorType(ir.DoubleType(), TOGETHER)

    class Eight(types.Type):  # type: ignore[misc] # no types
        def __init__(self) -> None:
            super().__init__(name="Eight")

    class Model(extending.models.PrimitiveModel):  # type: ignore[misc] # no types
        def __init__(self, manager: object, kind: object) -> None:
            super().__init__(manager, kind, vector)

    extending.register_model(Eight)(Model)
    eight, matrix, whole = Eight(), types.Array, types.Integer

    def teach(function: object, returns: object, kinds: Sequence[object], lower: object) -> None:
        extending.type_callable(function)(
            lambda _: lambda a, b, c=None, d=None: returns  # noqa: ARG005 -- numba passes names
        )
        extending.lower_builtin(function, *kinds)(lower)

    def pointer(context: _Raw, builder: _Raw, kinds: _Raw, given: _Raw) -> _Raw:
        array = context.make_array(kinds[0])(context, builder, given[0])
        row, place = (context.cast(builder, given[k], kinds[k], types.intp) for k in (1, 2))
        at = [row, builder.mul(place, place.type(TOGETHER))]
        first = cgutils.get_item_pointer(context, builder, kinds[0], array, at)
        return builder.bitcast(first, vector.as_pointer())

    def lower_load(context: _Raw, builder: _Raw, signature: _Raw, given: _Raw) -> _Raw:
        loaded = builder.load(pointer(context, builder, signature.args, given))
        loaded.align = 8
        return loaded

    def lower_store(context: _Raw, builder: _Raw, signature: _Raw, given: _Raw) -> _Raw:
        at = pointer(context, builder, signature.args, given)
        builder.store(given[3], at).align = 8
        return context.get_dummy_value()

    def lower_added(context: _Raw, builder: _Raw, signature: _Raw, given: _Raw) -> _Raw:
        del context, signature
        x, factor, y = given
        one = builder.insert_element(vector(ir.Undefined), factor, index(0))
        every = builder.shuffle_vector(one, one, ir.VectorType(index, TOGETHER)([0] * TOGETHER))
        return builder.fadd(x, builder.fmul(every, y))

    def lower_dot(context: _Raw, builder: _Raw, signature: _Raw, given: _Raw) -> _Raw:
        del context, signature
        left, n = builder.fmul(*given), TOGETHER
        while n > 1:
            n //= 2
            places = [ir.VectorType(index, n)(list(range(k, k + n))) for k in (0, n)]
            left = builder.fadd(*(builder.shuffle_vector(left, left, one) for one in places))
        return builder.extract_element(left, index(0))

    teach(load, eight, (matrix, whole, whole), lower_load)
    teach(store, types.void, (matrix, whole, whole, Eight), lower_store)
    teach(added, eight, (Eight, types.Float, Eight), lower_added)
    teach(dot, types.float64, (Eight, Eight), lower_dot)


# --- the kernel ---


def step(  # noqa: PLR0913, PLR0917 -- numba takes arrays, and is fast with names
    starts: Starts,  # (n_rows + 1,) of rows among the entries
    columns: Columns,  # (n,) of entries
    residuals: Numbers,  # (n,): changed
    weights: Numbers,  # (n,)
    before: Numbers,  # (n_rows, 8) u of other ranks
    moved: Numbers,  # (n_columns, 8) by what their v have changed since
    u: Numbers,  # (n_rows, 8): changed
    v: Numbers,  # (n_columns, 8)
    rest: Numbers,  # (n_rows, 8) added to the numerators
    gram: Numbers,  # (8, 8) added to the matrix; infinite on the diagonal: that u stays
) -> Numbers:
    """Minimize over u given v; return what v follows from: (n_columns, 48).

    These are the sums of residuals times u, and of weights times products of u by PAIRS; and four
    zeros. It checks no index. Plain Python, too, so that it can be held against numpy without
    numba.
    """
    sums = np.zeros((len(v), _WIDTH))
    zeros = np.zeros((1, TOGETHER))
    products = np.zeros((1, _WIDTH))
    matrix = np.zeros((TOGETHER + 1, TOGETHER))  # the last row: numerators, then the change
    right = matrix[TOGETHER]
    for row in range(len(u)):
        first, end = starts[row], starts[row + 1]
        other = load(before, row, 0)
        n = g0 = g1 = g2 = g3 = g4 = g5 = g6 = g7 = load(zeros, 0, 0)
        for place in range(first, end):
            column, weight = columns[place], weights[place]
            residual = residuals[place] - dot(other, load(moved, column, 0)) * weight
            residuals[place] = residual
            own = load(v, column, 0)
            n = added(n, residual, own)
            g0 = added(g0, weight * v[column, 0], own)
            g1 = added(g1, weight * v[column, 1], own)
            g2 = added(g2, weight * v[column, 2], own)
            g3 = added(g3, weight * v[column, 3], own)
            g4 = added(g4, weight * v[column, 4], own)
            g5 = added(g5, weight * v[column, 5], own)
            g6 = added(g6, weight * v[column, 6], own)
            g7 = added(g7, weight * v[column, 7], own)
        store(matrix, 0, 0, added(g0, 1.0, load(gram, 0, 0)))
        store(matrix, 1, 0, added(g1, 1.0, load(gram, 1, 0)))
        store(matrix, 2, 0, added(g2, 1.0, load(gram, 2, 0)))
        store(matrix, 3, 0, added(g3, 1.0, load(gram, 3, 0)))
        store(matrix, 4, 0, added(g4, 1.0, load(gram, 4, 0)))
        store(matrix, 5, 0, added(g5, 1.0, load(gram, 5, 0)))
        store(matrix, 6, 0, added(g6, 1.0, load(gram, 6, 0)))
        store(matrix, 7, 0, added(g7, 1.0, load(gram, 7, 0)))
        store(matrix, TOGETHER, 0, added(n, 1.0, load(rest, row, 0)))
        # L D L' without square roots: `_solved`
        for i in range(TOGETHER):
            inverse = 1.0 / matrix[i, i]
            for j in range(i + 1, TOGETHER):
                factor = matrix[i, j] * inverse
                for k in range(j, TOGETHER):
                    matrix[j, k] -= factor * matrix[i, k]
                right[j] -= factor * right[i]
            matrix[i, i] = inverse
        for j in range(TOGETHER - 1, -1, -1):
            right[j] *= matrix[j, j]
            for i in range(j):
                right[i] -= matrix[i, j] * right[j]
        change = load(matrix, TOGETHER, 0)
        new = added(load(u, row, 0), 1.0, change)
        store(u, row, 0, new)
        at = 0
        for i in range(TOGETHER):
            for j in range(i, TOGETHER):
                products[0, at] = u[row, i] * u[row, j]
                at += 1
        p0, p1, p2 = load(products, 0, 0), load(products, 0, 1), load(products, 0, 2)
        p3, p4 = load(products, 0, 3), load(products, 0, 4)
        for place in range(first, end):
            column, weight = columns[place], weights[place]
            residual = residuals[place] - dot(change, load(v, column, 0)) * weight
            residuals[place] = residual
            store(sums, column, 0, added(load(sums, column, 0), residual, new))
            store(sums, column, 1, added(load(sums, column, 1), weight, p0))
            store(sums, column, 2, added(load(sums, column, 2), weight, p1))
            store(sums, column, 3, added(load(sums, column, 3), weight, p2))
            store(sums, column, 4, added(load(sums, column, 4), weight, p3))
            store(sums, column, 5, added(load(sums, column, 5), weight, p4))
    return sums


def subtract(
    starts: Starts, columns: Columns, residuals: Numbers, weights: Numbers, u: Numbers, v: Numbers
) -> None:
    """Take products of factors of eight ranks, (n_rows, 8) and (n_columns, 8), from residuals."""
    for row in range(len(u)):
        own = load(u, row, 0)
        for place in range(starts[row], starts[row + 1]):
            residuals[place] -= dot(own, load(v, columns[place], 0)) * weights[place]


# --- the same in numpy ---


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
    """Do as `step`, in a few times as long."""
    n_rows, n_columns = shape = len(u), len(v)
    subtract_in_numpy(starts, columns, residuals, weights, before, moved)
    given = sparse.csr_array((weights, columns, starts), shape=shape)
    some = sparse.csr_array((residuals, given.indices, given.indptr), shape=shape)
    right = (some @ v + rest).T.copy()
    matrix = np.zeros((TOGETHER, TOGETHER, n_rows))
    for i in range(TOGETHER):
        some.data = weights * v[columns, i]
        matrix[i, i:] = (some @ v[:, i:]).T + gram[i, i:, None]
    change = np.ascontiguousarray(_solved(matrix, right).T)
    u += change
    subtract_in_numpy(starts, columns, residuals, weights, change, v)
    some.data = residuals
    products = np.stack([u[:, i] * u[:, j] for i, j in PAIRS], axis=1)
    sums = np.zeros((n_columns, _WIDTH))
    sums[:, :TOGETHER] = cast("Numbers", some.T @ u)
    sums[:, TOGETHER:N_SUMS] = cast("Numbers", given.T @ products)
    return sums


def _solved(matrix: Numbers, right: Numbers) -> Numbers:
    """Solve symmetric systems, (8, 8, n), for (8, n): L D L', with the sums of `step`."""
    for i in range(TOGETHER):
        matrix[i, i] = 1.0 / matrix[i, i]
        factors = matrix[i, i + 1 :] * matrix[i, i]
        matrix[i + 1 :, i + 1 :] -= factors[:, None] * matrix[i, i + 1 :]
        right[i + 1 :] -= factors * right[i]
    for j in range(TOGETHER - 1, -1, -1):
        right[j] *= matrix[j, j]
        right[:j] -= matrix[:j, j] * right[j]
    return right


def subtract_in_numpy(
    starts: Starts, columns: Columns, residuals: Numbers, weights: Numbers, u: Numbers, v: Numbers
) -> None:
    """Do as `subtract`."""
    rows = np.repeat(np.arange(len(u)), np.diff(starts))
    for first in range(0, len(rows), _AT_ONCE):
        those = slice(first, first + _AT_ONCE)
        residuals[those] -= dot(u[rows[those]], v[columns[those]]) * weights[those]
