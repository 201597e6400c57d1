"""Directions of L-BFGS within bounds: l <= x <= u, element by element.

After L-BFGS-B (Byrd, Lu, Nocedal & Zhu 1995; the projection is Morales & Nocedal's of 2011), with
what needs no sorted list of all elements. P(z) is the point within the bounds that is nearest to z,
A the set of elements that are fixed, F the rest, B = theta I - W M W' the model of the pairs:

    A: those at a bound out of which -g points; they stay, d_A = 0
    repeat
        d_F = -B_FF^-1 (g_F + B_FA d_A)        the model's minimum
        A gains the elements in which x + d is out of bounds; d ends at the bound there
    until A gains none

Shards do all that is by element, and measure W'W and W'g over F. The coordinator solves systems of
2 m numbers.
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import Final

from distbelief.protocol import vector_commands as vc
from sandblaster.optimizers import line_search as ls
from sandblaster.optimizers.base import Combination, GramMatrix, Steps, perform


N_SETS_MAX: Final = 10
"""Sets A that are tried; after the last one d ends at the bounds anyway."""

_SHIFT = "shift"  # d_A
_MOVE = "move"  # P(x + d) - x
_OUT = "out"  # x + d; then how far that is out of bounds, exactly 0 within them
_ZERO = "zero"
_MOVED = vc.Copy(target=ls.DIRECTION, x=_MOVE)

History = Sequence[tuple[vc.VectorName, vc.VectorName]]
"""The pairs (s, y), the oldest first."""


def form_direction(
    history: History, gram: GramMatrix, accepted: tuple[vc.Command, ...]
) -> Steps[tuple[vc.Command, ...]]:
    """Return commands that form "direction" = P(x + d) - x, after those `accepted`.

    Args:
        history: The pairs; there is one at least.
        gram: Their dot products.
        accepted: What moves to the accepted point.
    """
    names = (*(name for pair in history for name in pair), ls.GRADIENT)
    measure = (
        vc.Gram(rows=names, columns=names, without=ls.BLOCKED),
        vc.Gram(rows=names, columns=(_SHIFT,)),
    )
    measured = yield from perform(*_begin(accepted), *measure)
    for _ in range(N_SETS_MAX):
        free = GramMatrix()
        free.put(names, names, measured[: len(names) ** 2])
        shift = dict(zip(names, measured[len(names) ** 2 :], strict=True))
        out, *rest = yield from perform(
            *_move(minimum(history, gram, free, shift)), *_fix(), *measure
        )
        measured = tuple(rest)
        if out == 0.0:
            break
    return (_MOVED,)


def form_first(accepted: tuple[vc.Command, ...]) -> Steps[tuple[float, tuple[vc.Command, ...]]]:
    """Return the step to try and the commands that form "direction" = P(x - g) - x.

    As in L-BFGS-B, the step is 1 where all elements have both bounds, so that one trial may reach
    all of those; elsewhere it has a length of 1 at most.
    """
    square, lower, upper = yield from perform(
        *_begin(accepted),
        *_move({ls.GRADIENT: -1.0}),
        vc.Dot(x=_MOVE, y=_MOVE),
        vc.Norm(x=ls.LOWER, order="inf"),
        vc.Norm(x=ls.UPPER, order="inf"),
    )
    is_boxed = math.isfinite(lower) and math.isfinite(upper)
    return (1.0 if is_boxed or square <= 1.0 else 1.0 / math.sqrt(square)), (_MOVED,)


def _begin(accepted: tuple[vc.Command, ...]) -> tuple[vc.Command, ...]:
    return (
        *accepted,
        *ls.project(ls.PARAMETERS, ls.GRADIENT),
        vc.Fill(target=_SHIFT, a=0.0),
        vc.Fill(target=_ZERO, a=0.0),
    )


def minimum(
    history: History, gram: GramMatrix, free: GramMatrix, shift: Combination
) -> Combination:
    """Return d_F as a combination of pairs and gradient, whose elements in A do not count.

    Args:
        history: The pairs; there is one at least.
        gram: Their dot products.
        free: The same over F alone, and those with the gradient.
        shift: Their dot products with d_A.
    """
    s, y = history[-1]
    theta, n = gram[y, y] / gram[s, y], len(history)
    # W = (Y, theta S)
    names = [*((y, 1.0) for _, y in history), *((s, theta) for s, _ in history)]
    inverse = [[0.0] * 2 * n for _ in range(2 * n)]  # of M
    for i, (s, y) in enumerate(history):
        inverse[i][i] = -gram[s, y]
        for j, (other, before) in enumerate(history):
            inverse[n + i][n + j] = theta * gram[s, other]
            if j < i:
                inverse[n + i][j] = inverse[j][n + i] = gram[s, before]
    w_w = [[a * b * free[x, z] for z, b in names] for x, a in names]
    rows = zip(inverse, w_w, strict=True)
    reduced = [[one - two / theta for one, two in zip(*row, strict=True)] for row in rows]
    ahead = _solved(inverse, [a * shift[x] for x, a in names])  # g + B d_A = g - W ahead
    w_g = [a * free[x, ls.GRADIENT] for x, a in names]
    pulled = [one - sum(map(mul, row, ahead)) for one, row in zip(w_g, w_w, strict=True)]
    found = _solved(reduced, pulled)
    weights = zip(names, ahead, found, strict=True)
    own = {x: a * (one / theta - two / theta**2) for (x, a), one, two in weights}
    return {ls.GRADIENT: -1.0 / theta, **own}


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return the solution of a linear system by elimination; NaN if it has none.

    In Python, so that the bits are the same on every host.
    """
    rows = [[*row, one] for row, one in zip(matrix, right, strict=True)]
    n = len(rows)
    for k in range(n):
        best = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[best] = rows[best], rows[k]
        pivot = rows[k]
        if not pivot[k]:
            return [math.nan] * n
        for i in range(k + 1, n):
            factor = rows[i][k] / pivot[k]
            rows[i][k:] = [a - factor * b for a, b in zip(rows[i][k:], pivot[k:], strict=True)]
    found = [0.0] * n
    for k in reversed(range(n)):
        known = sum(map(mul, rows[k][k + 1 : n], found[k + 1 :]))
        found[k] = (rows[k][n] - known) / rows[k][k]
    return found


def _move(combination: Combination) -> tuple[vc.Command, ...]:
    terms = tuple(vc.Term(a, name) for name, a in combination.items())
    return (
        vc.LinearCombination(target=ls.DIRECTION, terms=terms),
        vc.Pointwise(target=ls.DIRECTION, function="unless", x=ls.DIRECTION, y=ls.BLOCKED),
        vc.Axpy(target=ls.DIRECTION, a=1.0, x=_SHIFT),
        ls.point_at(1.0),
        vc.Copy(target=_OUT, x=ls.TRIAL),
        *ls.within(ls.TRIAL),
        ls.difference(_MOVE, ls.TRIAL, ls.PARAMETERS),
    )


def _fix() -> tuple[vc.Command, ...]:
    """Fix the elements that are out of bounds; measure how far the farthest is."""
    return (
        ls.difference(_OUT, _OUT, ls.TRIAL),
        vc.Pointwise(target=_OUT, function="unless", x=_OUT, y=ls.BLOCKED),
        vc.Norm(x=_OUT, order="inf"),
        vc.Pointwise(target=_OUT, function="only", x=_ZERO, y=_OUT),
        vc.Axpy(target=ls.BLOCKED, a=1.0, x=_OUT),
        vc.Pointwise(target=_SHIFT, function="unless", x=_MOVE, y=ls.BLOCKED),
        ls.difference(_SHIFT, _MOVE, _SHIFT),
    )
