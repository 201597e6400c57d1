"""Solves a placement problem: tries the solvers in order of cost, and proves the choice if it can.

elimination        small tables, and the choice fits the caps       -> exact
  else repair      moves until it fits; the cheapest without caps is a bound
  milp             few enough variables                             -> exact in time
  else             the best known and the bound
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from distbelief.plans.planner.solvers.dynamic_programming import eliminate, elimination_order
from distbelief.plans.planner.solvers.milp import milp, n_variables
from distbelief.plans.planner.solvers.problem import (
    TIE,
    TOLERANCE,
    Array,
    Choice,
    Left,
    Problem,
    Solution,
    first_lowest,
    time_left,
    trivial_bound,
)


VARIABLES_MAX: Final = 200_000  # of a mixed integer program: seconds to minutes
# Where elimination's tables would be too large: HiGHS looks at the clock too seldom, and took 70
# seconds in place of 10 for DenseNet-121 on 4 machines (94,000 variables).
DENSE_VARIABLES_MAX: Final = 30_000

_BISECTIONS: Final = 12
_SWEEPS_MAX: Final = 20
_MOVES_PER_NODE_MAX: Final = 4
_FEW: Final = 24  # nodes
_LOOK_EVERY: Final = 12  # moves


def solve(
    problem: Problem,
    *,
    known: Sequence[Choice] = (),
    seconds: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Solution:
    """Return the cheapest choice that fits the caps, or the best found in time.

    If none fits, the cheapest of those that overrun the caps least. A local search begins from
    `known` choices, too. The time is approximate: elimination alone takes some.
    """
    left = time_left(seconds, clock)
    order = elimination_order(problem)
    if order.fits:
        free = eliminate(problem, order)
        if free.exact:
            return free
        start, bound, n_max = free.choice, free.bound, VARIABLES_MAX
    else:
        start, bound = _descended(problem, known), trivial_bound(problem)
        n_max = DENSE_VARIABLES_MAX
    start = _fitted(problem, start, left)
    if not left() or n_variables(problem) > n_max:
        fits = problem.fits(start)  # else a lower overrun may be possible
        return problem.solution(start, bound=bound, solver="repair", proven=fits)
    found = milp(problem, seconds=left(), start=start)
    return problem.solution(
        found.choice, bound=max(bound, found.bound), solver=found.solver, proven=found.exact
    )


def _descended(problem: Problem, known: Sequence[Choice]) -> Choice:
    # The best of local searches from these, from each node by itself, and from all nodes alike.
    starts = [tuple(min(k, n - 1) for n in problem.sizes) for k in range(max(problem.sizes))]
    ends = [descend(problem, start) for start in (independent(problem), *starts, *known)]
    return min(ends, key=problem.badness)


def _fitted(problem: Problem, start: Choice, left: Left) -> Choice:
    # A choice that fits the caps or, by bisection over what repairs reach, overruns them little.
    best, low, high = start, 1.0, problem.overrun(start)
    limit = low
    for _ in range(_BISECTIONS):
        if high <= 1 + TOLERANCE:
            break
        found = repair(problem, best, limit=limit, left=left)
        if found is None:
            low = limit
        else:
            best, high = found, problem.overrun(found)
        limit = (low + high) / 2
    return descend(problem, best, limit=max(1.0, problem.overrun(best)))


def independent(problem: Problem) -> Choice:
    # The cheapest candidate of each node by itself.
    return tuple(first_lowest(costs) for costs in problem.costs)


def descend(problem: Problem, choice: Sequence[int], *, limit: float = 1.0) -> Choice:
    """Give each node in turn its best candidate beside its neighbours (Besag, 1986).

    A machine that `choice` overruns may stay so, but must not use more.
    """
    chosen = list(choice)
    used = problem.used(chosen)
    allowed = np.maximum(limit * (1 + TOLERANCE), used)
    for _ in range(_SWEEPS_MAX):
        changed = False
        for node, old in enumerate(chosen):
            costs = problem.around(node, chosen)
            if problem.shares is not None:
                shares = problem.shares[node]
                fits = (used - shares[old] + shares <= allowed).all(axis=1)
                fits[old] = True
                costs = np.where(fits, costs, np.inf)
            new = first_lowest(costs)
            if costs[new] + TIE * abs(costs[new]) < costs[old]:
                chosen[node] = new
                changed = True
                if problem.shares is not None:
                    used = problem.used(chosen)
        if not changed:
            break
    return tuple(chosen)


def repair(problem: Problem, choice: Sequence[int], *, limit: float, left: Left) -> Choice | None:
    """Return a choice that fits, by moves that free most memory for their cost, or None."""
    chosen = list(choice)
    deltas = [_deltas(problem, node, chosen) for node in range(len(chosen))]
    nodes: list[int] = []
    for step in range(_MOVES_PER_NODE_MAX * len(chosen)):
        used = problem.used(chosen)
        if (used <= limit * (1 + TOLERANCE)).all():
            return tuple(chosen)
        if not left():
            return None
        # Pricing all nodes is slow; the best ones stay good for some moves.
        prices = _prices(problem, chosen, deltas, nodes, limit=limit)
        lowest = np.array([values.min() for values in prices])
        if step % _LOOK_EVERY == 0 or not np.isfinite(lowest).any():
            nodes = list(range(len(chosen)))
            prices = _prices(problem, chosen, deltas, nodes, limit=limit)
            lowest = np.array([values.min() for values in prices])
        if not np.isfinite(lowest).any():
            return None
        place = first_lowest(lowest)
        node = nodes[place]
        chosen[node] = first_lowest(prices[place])
        for other in [node, *(v for v, _ in problem.neighbours[node])]:
            deltas[other] = _deltas(problem, other, chosen)
        nodes = [nodes[index] for index in np.argsort(lowest, kind="stable")[:_FEW]]
    return None


def _prices(
    problem: Problem,
    chosen: Sequence[int],
    deltas: Sequence[Array],
    nodes: Sequence[int],
    *,
    limit: float,
) -> list[Array]:
    # Cost per share of memory freed, of each candidate of the nodes; infinite if it frees none.
    # Moves that cost nothing come first, those that free most before others.
    assert problem.shares is not None
    over = problem.used(chosen) - limit
    excess = float(np.maximum(over, 0).sum())
    prices = []
    for node in nodes:
        shares = problem.shares[node]
        after = over - shares[chosen[node]] + shares  # (K, n_machines)
        freed = excess - np.maximum(after, 0, out=after).sum(axis=1)
        costs = deltas[node]
        helps = freed > TOLERANCE * excess
        price = np.full(len(costs), np.inf)
        np.divide(costs, freed, out=price, where=helps)
        price[helps & (costs <= 0)] = -freed[helps & (costs <= 0)]
        prices.append(price)
    return prices


def _deltas(problem: Problem, node: int, chosen: Sequence[int]) -> Array:
    costs = problem.around(node, chosen)
    return np.asarray(costs - costs[chosen[node]])
