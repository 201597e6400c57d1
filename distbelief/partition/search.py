"""Local search on simulated time, from where the solver of the simpler model ends.

The solver's model lets phases follow each other; a real step overlaps them. So moves
that the model thinks cheap, one node at a time, are priced by the event simulation, and
kept if they help. No chance and no clock: equal problems end in equal plans.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from distbelief.partition.solvers.problem import Choice, Problem


TRIES_MAX: Final = 300
"""Moves priced at the most."""

_MOVES_PER_NODE: Final = 6


def improve(
    problem: Problem,
    choice: Choice,
    seconds_of: Callable[[Choice], float],
    *,
    tries: int = TRIES_MAX,
) -> tuple[Choice, float]:
    """Return a choice that is not slower in simulation, and its seconds.

    Args:
        problem: Whose candidates are tried.
        choice: To begin with.
        seconds_of: Prices a choice; called `tries` + 1 times at the most. Infinite for
            what does not fit.
        tries: Few, where a price takes long.
    """
    best, best_seconds = choice, seconds_of(choice)
    tried = {choice}
    while True:
        moved = False
        for node, candidate in _moves(problem, best):
            other = (*best[:node], candidate, *best[node + 1 :])
            if other in tried:
                continue
            if len(tried) > tries:
                return best, best_seconds
            tried.add(other)
            seconds = seconds_of(other)
            if seconds < best_seconds * (1 - 1e-9):
                best, best_seconds, moved = other, seconds, True
        if not moved:
            return best, best_seconds


def _moves(problem: Problem, choice: Choice) -> list[tuple[int, int]]:
    """Return changes of one node, those first that cost the model least."""
    found: list[tuple[float, int, int]] = []
    for node, costs in enumerate(problem.costs):
        if len(costs) == 1:
            continue
        totals = np.array(costs)
        for neighbour, table in problem.neighbours[node]:
            totals = totals + table[:, choice[neighbour]]
        deltas = totals - totals[choice[node]]
        order = np.argsort(deltas, kind="stable")
        cheapest = [int(k) for k in order if k != choice[node]][:_MOVES_PER_NODE]
        found += [(float(deltas[k]), node, k) for k in cheapest]
    found.sort()
    return [(node, k) for delta, node, k in found if np.isfinite(delta)]
