"""Candidates that need no look: forbidden, too large, or never better than another.

Each function returns, per node, the indices of the candidates to keep, ascending.
Nothing that is dropped could make the best choice cheaper, whatever else is chosen.
"""

import numpy as np

from distbelief.partition.solvers.problem import TOLERANCE, Array, Indices, Problem, no_choice


def permitted(problem: Problem) -> list[Indices]:
    """Keep what has a finite cost, beside some candidate of every neighbour.

    Raises:
        GraphError: some node keeps nothing.
    """
    alive = [np.isfinite(costs) for costs in problem.costs]
    changed = True
    while changed:
        changed = False
        for node, pairs in enumerate(problem.neighbours):
            for other, table in pairs:
                possible = np.isfinite(table[:, alive[other]]).any(axis=1)
                if (alive[node] & ~possible).any():
                    alive[node] &= possible
                    changed = True
    if not all(mask.any() for mask in alive):
        raise no_choice()
    return [np.flatnonzero(mask) for mask in alive]


def fitting(problem: Problem, *, limit: float = 1.0) -> list[Indices] | None:
    """Keep what fits the caps beside the least that all other nodes can take.

    Args:
        problem: What is to be chosen.
        limit: Share of its cap that a machine may use.

    Returns:
        What to keep, or None if some node keeps nothing: then no choice fits.
    """
    kept: list[Indices] = [np.arange(size) for size in problem.sizes]
    if problem.shares is None:
        return kept
    changed = True
    while changed:
        changed = False
        least = [s[rows].min(axis=0) for s, rows in zip(problem.shares, kept, strict=True)]
        room = limit * (1 + TOLERANCE) - np.sum(least, axis=0)
        for node, shares in enumerate(problem.shares):
            fits = (shares[kept[node]] - least[node] <= room).all(axis=1)
            if not fits.all():
                kept[node] = kept[node][fits]
                changed = True
            if not kept[node].size:
                return None
    return kept


def undominated(problem: Problem) -> list[Indices]:
    """Keep what no other candidate of its node beats, whatever the neighbours choose.

    One beats another if changing to it frees money even with the neighbours that it
    suits least (Goldstein, 1994), and takes no memory. Two of equal edges compare by
    their own costs alone. Of equals the first is kept.
    """
    kept: list[Indices] = [np.arange(size) for size in problem.sizes]
    for node, pairs in enumerate(problem.neighbours):
        costs = problem.costs[node]
        worst = _change(costs[:, None], costs[None])  # of changing from the column to the row
        for other, table in pairs:
            rest = table[:, kept[other]]
            with np.errstate(invalid="ignore"):
                worst += _change(rest[:, None], rest[None]).max(axis=2)
        beats = worst <= 0  # false for NaN: a candidate forbidden beside another
        if problem.shares is not None:
            shares = problem.shares[node]
            beats &= (shares[:, None] <= shares[None, :]).all(axis=2)
        alive = np.ones(len(costs), np.bool_)
        for index in reversed(range(len(costs))):
            alive[index] = False
            alive[index] = not (alive & beats[:, index]).any()
        kept[node] = np.flatnonzero(alive)
    return kept


def _change(new: Array, old: Array) -> Array:
    """What is paid more after the change; what was forbidden gets cheaper."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(old), -np.inf, new - old)
