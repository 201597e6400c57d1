"""Local search: changes of one or two nodes, and repair of choices that break caps."""

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np

from distbelief.partition.solvers.problem import (
    TIE,
    TOLERANCE,
    Array,
    Choice,
    Deadline,
    Problem,
    first_lowest,
)


SWEEPS_MAX: Final = 20
ROUNDS_MAX: Final = 10
MOVES_PER_NODE_MAX: Final = 4

_FEW: Final = 24  # nodes
_LOOK_EVERY: Final = 12  # moves


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
    for _ in range(SWEEPS_MAX):
        changed = False
        for node, old in enumerate(chosen):
            costs = around(problem, node, chosen)
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


def repair(
    problem: Problem, choice: Sequence[int], *, limit: float, deadline: Deadline
) -> Choice | None:
    """Return a choice that fits, by moves that free most memory for their cost.

    Returns:
        None if the moves do not lead to a choice that fits.
    """
    chosen = list(choice)
    deltas = [_deltas(problem, node, chosen) for node in range(len(chosen))]
    nodes: list[int] = []
    for step in range(MOVES_PER_NODE_MAX * len(chosen)):
        used = problem.used(chosen)
        if (used <= limit * (1 + TOLERANCE)).all():
            return tuple(chosen)
        if deadline.passed:
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


def exchange(problem: Problem, choice: Sequence[int], *, deadline: Deadline) -> Choice:
    """Change two nodes at once, one making room for the other, while that helps."""
    chosen = list(choice)
    beside = [around(problem, node, chosen) for node in range(len(chosen))]
    quiet = 0  # pairs since the last change
    pairs = list(combinations(range(len(chosen)), 2))
    pairs.sort(key=lambda pair: pair[1] - pair[0])
    for u, v in pairs * ROUNDS_MAX:
        quiet += 1
        if quiet > len(pairs) or deadline.passed:
            break
        better = _better_pair(problem, (u, v), chosen, beside)
        if better is None:
            continue
        quiet = 0
        chosen[u], chosen[v] = better
        stale = {w for node in (u, v) for w, _ in problem.neighbours[node]} | {u, v}
        for node in stale:
            beside[node] = around(problem, node, chosen)
    return tuple(chosen)


def _better_pair(
    problem: Problem, pair: tuple[int, int], chosen: Sequence[int], beside: list[Array]
) -> tuple[int, int] | None:
    # The cheapest change of two nodes that fits; None if none is cheaper.
    u, v = pair
    own, others = beside[u], beside[v]
    edge = problem.edges.get(pair)
    if edge is None:
        costs = own[:, None] + others
    else:
        # `around` has counted the edge with the present choice: leave it out, add it once.
        costs = around(problem, u, chosen, leave=v)[:, None] + edge
        costs += around(problem, v, chosen, leave=u)
    present = costs[chosen[u], chosen[v]]
    rows, columns = np.nonzero(costs < present - TIE * abs(present))
    if problem.shares is not None and len(rows):
        shares_u, shares_v = problem.shares[u], problem.shares[v]
        rest = problem.used(chosen) - shares_u[chosen[u]] - shares_v[chosen[v]]
        fits = shares_u[rows] + shares_v[columns] + rest <= 1 + TOLERANCE
        fits = fits.all(axis=1)
        rows, columns = rows[fits], columns[fits]
    if not len(rows):
        return None
    best = first_lowest(costs[rows, columns])
    return int(rows[best]), int(columns[best])


def around(problem: Problem, node: int, chosen: Sequence[int], *, leave: int = -1) -> Array:
    """Return the cost of each candidate of a node, given the choices of its neighbours."""
    costs = problem.costs[node].copy()
    for other, table in problem.neighbours[node]:
        if other != leave:
            costs += table[:, chosen[other]]
    return costs


def _deltas(problem: Problem, node: int, chosen: Sequence[int]) -> Array:
    costs = around(problem, node, chosen)
    return np.asarray(costs - costs[chosen[node]])
