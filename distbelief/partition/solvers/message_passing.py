"""A bound for graphs too entangled to eliminate (TRW-S; Kolmogorov, 2006).

Costs are moved between nodes and edges without changing what any choice costs:

    cost(x) = sum_v own_v[x_v] + sum_uv (edge_uv - to_u - to_v)[x_u, x_v]

with own_v the node's cost and all messages to it. Then sum_v min own_v is a bound, for
no edge is negative. A sweep visits the nodes in order; each hands what it holds to the
edges ahead of it, in equal shares, and each edge hands on to its far end all that is
certain there. Bounds never fall; on trees one sweep each way finds the optimum.
"""

from collections.abc import Sequence
from typing import final

import numpy as np

from distbelief.partition.solvers.problem import Array, Choice, Problem, first_lowest


@final
class Messages:
    """How costs are distributed among nodes at present.

    Args:
        problem: Its nodes' costs are finite; infinite edges count as very dear.
    """

    def __init__(self, problem: Problem) -> None:
        self._costs = list(problem.costs)
        self._own = [costs.copy() for costs in problem.costs]
        # Per node: (neighbour, (own, neighbour's) costs) of the edges before, behind.
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
        """No choice costs less, by the costs given last."""
        return float(self._least.sum())

    def reprice(self, costs: Sequence[Array]) -> None:
        """Change the costs of the nodes; messages stay."""
        for node, (old, new) in enumerate(zip(self._costs, costs, strict=True)):
            self._own[node] += new - old
            self._least[node] = self._own[node].min()
        self._costs = list(costs)
        self.floors = [np.full(len(own), -np.inf) for own in self._own]

    def sweep(self) -> Choice:
        """Pass once forward and once back; return the choice met on the way.

        Sets `floors`: of each candidate a bound on the cost of choices with it.
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
        share = self._own[node] / n_chains
        for other, table in onward:
            self._own[node] -= share
            self._sent[node, other] = self._sent[node, other] - share
            self._pull(other, node, table.T)
            self._least[other] = self._own[other].min()
        self._least[node] = self._own[node].min()

    def _pull(self, node: int, other: int, table: Array) -> None:
        """Move to the node all of an edge that is certain there.

        Args:
            node: Who receives.
            other: The edge's other end.
            table: Costs, (node's, other's).
        """
        message = (table - self._sent[other, node]).min(axis=1)
        self._own[node] += message - self._sent[node, other]
        self._sent[node, other] = message


def _dear(problem: Problem) -> float:
    """More than any choice costs that is not forbidden."""
    tables = [*problem.costs, *problem.edges.values()]
    return sum(float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) for t in tables)
