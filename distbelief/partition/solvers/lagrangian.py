"""Lagrangian relaxation: a lower bound by prices on memory, and good choices (Geoffrion, 1974).

If each machine charges for its memory, choices that break the caps become expensive and no cap is
needed. The cost of the best choice, minus the price of exactly the caps, is a bound. Prices rise
where a cap is broken and fall elsewhere (Polyak, 1969). Choices met on the way are repaired until
they fit.

The priced problem is solved by elimination, which is exact, or by messages, which only bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from distbelief.partition.solvers.dynamic_programming import Order, cheapest
from distbelief.partition.solvers.local_search import descend, exchange, independent, repair
from distbelief.partition.solvers.problem import (
    PROOF,
    TOLERANCE,
    Array,
    Choice,
    Deadline,
    Problem,
    first_lowest,
    trivial_bound,
)


# --- messages ---


@final
class Messages:
    """A bound for graphs too dense to eliminate (TRW-S; Kolmogorov, 2006).

    Costs move between nodes and edges without changing the cost of any choice:

        cost(x) = sum_v own_v[x_v] + sum_uv (edge_uv - to_u - to_v)[x_u, x_v]

    with own_v the cost of the node and all messages to it. As no edge is negative, sum_v min own_v
    is a bound. Bounds never fall; on trees one sweep each way finds the optimum.

    Args:
        problem: Its nodes' costs are finite; infinite edges count as very expensive.
    """

    def __init__(self, problem: Problem) -> None:
        self._costs = list(problem.costs)
        self._own = [costs.copy() for costs in problem.costs]
        # Per node: (neighbour, (own, neighbour's) costs) of edges to earlier and to later nodes.
        self._back: list[list[tuple[int, Array]]] = [[] for _ in self._own]
        self._ahead: list[list[tuple[int, Array]]] = [[] for _ in self._own]
        self._sent: dict[tuple[int, int], Array] = {}  # by (receiver, neighbour)
        dear = _dear(problem)
        for (u, v), edge in sorted(problem.edges.items()):
            table = np.where(np.isinf(edge), dear, edge)
            self._ahead[u].append((v, table))
            self._back[v].append((u, np.ascontiguousarray(table.T)))
            self._sent[u, v] = np.zeros(len(table))
            self._sent[v, u] = np.zeros(table.shape[1])
            self._pull(u, v, table)
            self._pull(v, u, table.T)
        self._least = np.array([own.min() for own in self._own])
        self.floors = [np.full(len(own), -np.inf) for own in self._own]

    @property
    def bound(self) -> float:
        # No choice costs less, with the current costs of the nodes.
        return float(self._least.sum())

    def reprice(self, costs: Sequence[Array]) -> None:
        """Change the costs of the nodes; messages stay."""
        for node, (old, new) in enumerate(zip(self._costs, costs, strict=True)):
            self._own[node] += new - old
            self._least[node] = self._own[node].min()
        self._costs = list(costs)
        self.floors = [np.full(len(own), -np.inf) for own in self._own]

    def sweep(self) -> Choice:
        """Pass once forward and once back; return the choice found on the way.

        Sets `floors`: for each candidate, a bound on the cost of choices with it.
        """
        chosen: dict[int, int] = {}
        for node in range(len(self._own)):
            costs = self._own[node].copy()
            for other, table in self._back[node]:
                costs += table[:, chosen[other]] - self._sent[node, other]
            chosen[node] = first_lowest(costs)
            self._visit(node, self._ahead[node])
        for node in reversed(range(len(self._own))):
            self._visit(node, self._back[node])
        return tuple(chosen.values())

    def _visit(self, node: int, onward: list[tuple[int, Array]]) -> None:
        floors = self._own[node] + (self.bound - self._least[node])
        np.maximum(self.floors[node], floors, out=self.floors[node])
        n_chains = max(len(self._ahead[node]), len(self._back[node]))
        if not onward:
            return
        # Each edge gets an equal share, and passes on what is certain at its other end.
        share = self._own[node] / n_chains
        for other, table in onward:
            self._own[node] -= share
            self._sent[node, other] = self._sent[node, other] - share
            self._pull(other, node, table.T)
            self._least[other] = self._own[other].min()
        self._least[node] = self._own[node].min()

    def _pull(self, node: int, other: int, table: Array) -> None:
        # Moves to `node` everything of an edge that is certain there; `table` has its costs (node,
        # other).
        message = (table - self._sent[other, node]).min(axis=1)
        self._own[node] += message - self._sent[node, other]
        self._sent[node, other] = message


def _dear(problem: Problem) -> float:
    # More than the cost of any permitted choice.
    tables = [*problem.costs, *problem.edges.values()]
    return sum(float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) for t in tables)


# --- prices ---

STEPS_MAX: Final = 150
WORK_PER_STEP_MAX: Final = 10_000_000  # entries of elimination: some 20 ms

_PATIENCE: Final = 6  # steps without progress before the step length halves
_REPAIRS_EVERY: Final = 5

_Oracle = Callable[[Sequence[Array]], tuple[float, Choice]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The result of the relaxation."""

    bound: float  # no choice that fits costs less
    choice: Choice | None  # the best that fits; None if none was found
    floors: tuple[Array, ...]  # for each candidate, a bound on choices that fit and have it, (K_v,)


@final
class _Search:
    # The best choice that fits so far.

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self.problem = problem
        self.deadline = deadline
        self.choice: Choice | None = None
        self.cost = np.inf

    def try_(self, choice: Choice, *, mend: bool) -> None:
        fits = self.problem.overrun(choice) <= 1 + TOLERANCE
        if not fits:
            if not mend:
                return
            mended = repair(self.problem, choice, limit=1.0, deadline=self.deadline)
            if mended is None:
                return
            choice = mended
        choice = descend(self.problem, choice)
        cost = self.problem.cost(choice)
        if cost < self.cost:
            self.choice, self.cost = choice, cost

    def polish(self) -> None:
        # Changes of two nodes at once.
        if self.choice is not None:
            choice = exchange(self.problem, self.choice, deadline=self.deadline)
            self.try_(choice, mend=False)


def relax(problem: Problem, order: Order, *, deadline: Deadline) -> Relaxation:
    """Return a bound, and the best choice that fits found on the way.

    Args:
        problem: No node has an infinite cost.
        order: Of elimination; used if it is cheap enough to repeat.
        deadline: When to return the best so far.
    """
    search = _Search(problem, deadline)
    search.try_(independent(problem), mend=True)
    exact = order.fits and order.work <= WORK_PER_STEP_MAX
    oracle = _by_elimination(problem, order) if exact else _by_messages(problem)
    bound, prices = _raise_prices(search, oracle)
    # Floors need messages that have converged at the best prices.
    messages = Messages(problem)
    messages.reprice(_priced(problem, prices))
    for _ in range(20):
        search.try_(messages.sweep(), mend=False)
        if deadline.passed:
            break
    search.polish()
    paid = float(prices.sum())
    return Relaxation(
        bound=max(bound, messages.bound - paid),
        choice=search.choice,
        floors=tuple(floors - paid for floors in messages.floors),
    )


def _raise_prices(search: _Search, oracle: _Oracle) -> tuple[float, Array]:
    problem = search.problem
    prices = best_prices = np.zeros_like(problem.used(independent(problem)))
    best, scale, stalled = trivial_bound(problem), 1.0, 0
    for step in range(STEPS_MAX):
        value, choice = oracle(_priced(problem, prices))
        bound = value - float(prices.sum())
        progress = bound > best + PROOF * abs(best)
        search.try_(choice, mend=progress or step % _REPAIRS_EVERY == 0)
        if bound > best:
            best, best_prices = bound, prices
        stalled = 0 if progress else stalled + 1
        if stalled >= _PATIENCE:
            scale, stalled = scale / 2, 0
        done = best >= search.cost - PROOF * abs(search.cost) or scale < 0.01
        if done or search.deadline.passed:
            break
        excess = problem.used(choice) - 1
        # Prices stay 0 or above.
        excess[(prices <= 0) & (excess < 0)] = 0
        norm = float(excess @ excess)
        if norm:
            # Polyak step: towards the best known cost.
            target = search.cost if search.cost < np.inf else best + 0.1 * abs(best)
            length = scale * max(target - bound, PROOF * abs(target)) / norm
            prices = np.maximum(0, prices + length * excess)
    return best, best_prices


def _priced(problem: Problem, prices: Array) -> list[Array]:
    if problem.shares is None:
        return list(problem.costs)
    pairs = zip(problem.costs, problem.shares, strict=True)
    return [costs + shares @ prices for costs, shares in pairs]


def _by_elimination(problem: Problem, order: Order) -> _Oracle:
    def solve(costs: Sequence[Array]) -> tuple[float, Choice]:
        choice = cheapest(problem, costs, order)
        edges = sum(table[choice[u], choice[v]] for (u, v), table in problem.edges.items())
        own = sum(values[index] for values, index in zip(costs, choice, strict=True))
        return float(own + edges), choice

    return solve


def _by_messages(problem: Problem) -> _Oracle:
    messages = Messages(problem)

    def solve(costs: Sequence[Array]) -> tuple[float, Choice]:
        messages.reprice(costs)
        messages.sweep()
        choice = messages.sweep()
        return messages.bound, choice

    return solve
