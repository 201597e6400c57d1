"""The placement problem in numbers: one candidate per node, at the least cost.

    minimise    sum_v costs[v][x_v]  +  sum_uv edges[u, v][x_u, x_v]
    subject to  sum_v memory[v][x_v, q] <= caps[q]            for every machine q

Caps hold up to one part in 1e9, so that rounding decides nothing. Each solution carries a proven
bound.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from distbelief.graph.graph import GraphError


Left = Callable[[], float]  # seconds until a search returns the best so far


def time_left(seconds: float, clock: Callable[[], float] = time.monotonic) -> Left:
    """Return a function that counts down, and stays at 0."""
    end = clock() + seconds
    return lambda: max(0.0, end - clock())


# --- problem ---

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Choice = tuple[int, ...]

TOLERANCE: Final = 1e-9  # relative, of caps
TIE: Final = 1e-12  # relative; costs that differ by less are equal
PROOF: Final = 1e-6  # relative; HiGHS is no more exact than this


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    costs: tuple[Array, ...]  # seconds, each (K_v,)
    edges: Mapping[tuple[int, int], Array]  # seconds, each (K_u, K_v), by (u, v), u < v
    memory: tuple[Array, ...] | None = None  # bytes, each (K_v, n_machines)
    caps: Array | None = None  # bytes, (n_machines,); infinite: no limit

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(costs) for costs in self.costs)

    @cached_property
    def neighbours(self) -> tuple[tuple[tuple[int, Array], ...], ...]:
        # Per node: its neighbours, and the edges as (own, neighbour's) matrices.
        found: list[list[tuple[int, Array]]] = [[] for _ in self.costs]
        for (u, v), table in self.edges.items():
            found[u].append((v, table))
            found[v].append((u, table.T))
        return tuple(tuple(sorted(pairs, key=lambda pair: pair[0])) for pairs in found)

    @cached_property
    def shares(self) -> tuple[Array, ...] | None:
        # Memory as shares of the caps.
        if self.memory is None or self.caps is None or np.isinf(self.caps).all():
            return None
        caps = self.caps
        return tuple(memory / caps for memory in self.memory)

    def cost(self, choice: Sequence[int]) -> float:
        """Return the cost of a choice in seconds, independent of the order of summation."""
        nodes = [costs[index] for costs, index in zip(self.costs, choice, strict=True)]
        pairs = [table[choice[u], choice[v]] for (u, v), table in self.edges.items()]
        return math.fsum([*nodes, *pairs])

    def around(self, node: int, choice: Sequence[int]) -> Array:
        """Return the cost of each candidate of a node, given the choices of its neighbours."""
        costs = self.costs[node].copy()
        for other, table in self.neighbours[node]:
            costs += table[:, choice[other]]
        return costs

    def used(self, choice: Sequence[int]) -> Array:
        """Return the share of its cap that each machine uses, (n_machines,)."""
        if self.shares is None:
            return np.zeros(0)
        rows = zip(self.shares, choice, strict=True)
        return np.asarray(np.sum([shares[index] for shares, index in rows], axis=0))

    def overrun(self, choice: Sequence[int]) -> float:
        """Return the largest share of its cap that any machine uses; 0 without caps."""
        return float(self.used(choice).max(initial=0.0))

    def fits(self, choice: Sequence[int]) -> bool:
        return self.overrun(choice) <= 1 + TOLERANCE

    def badness(self, choice: Sequence[int]) -> tuple[float, float]:
        """Return what a solver minimises: the overrun of choices that do not fit, then the cost."""
        return (0.0 if self.fits(choice) else self.overrun(choice), self.cost(choice))

    def solution(
        self, choice: Sequence[int], *, bound: float, solver: str, proven: bool = True
    ) -> "Solution":
        """Return the solution with this choice.

        No choice that overruns its caps no more than this one costs less than `bound`. Without
        `proven`, choices that overrun the caps less may exist.
        """
        cost = self.cost(choice)
        return Solution(
            choice=tuple(int(index) for index in choice),
            cost=cost,
            bound=min(bound, cost),
            solver=solver,
            exact=proven and bound >= cost - PROOF * abs(cost),
            overrun=self.overrun(choice),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A choice and what is proven about it."""

    choice: Choice  # index of the candidate of each node
    cost: float  # seconds
    bound: float  # of choices that fit or, if this one does not, that overrun the caps no more
    solver: str
    exact: bool  # proven best: cheapest that fits or, if none does, cheapest of least overrun
    overrun: float = 0.0  # largest share of its cap that any machine uses; 0 without caps


def first_lowest(values: Array) -> int:
    """Return the first index, in C order, of the values that tie for the lowest."""
    lowest = float(values.min())
    return int(np.argmax(values <= lowest + TIE * abs(lowest)))


def trivial_bound(problem: Problem) -> float:
    lowest = [float(costs.min()) for costs in problem.costs]
    return math.fsum([*lowest, *(float(edge.min()) for edge in problem.edges.values())])


def _check(problem: Problem) -> None:
    costs, sizes, memory, caps = problem.costs, problem.sizes, problem.memory, problem.caps
    if not costs or any(not _valid(values, (len(values),)) or not len(values) for values in costs):
        raise GraphError("give each node costs: one finite number per candidate")
    for (u, v), table in problem.edges.items():
        if not (0 <= u < v < len(costs) and _valid(table, (sizes[u], sizes[v]))):
            raise GraphError(
                f"edge {u, v}: give two nodes in ascending order, and finite costs of all pairs"
            )
    if (memory is None) != (caps is None):
        raise GraphError("memory or caps is missing: give both, or neither")
    if memory is not None and caps is not None:
        if caps.ndim != 1 or not (caps > 0).all() or len(memory) != len(costs):
            raise GraphError(f"caps are {caps}: give numbers above 0, and memory of each node")
        for node, values in enumerate(memory):
            fits = _valid(values, (sizes[node], len(caps)))
            if not fits or (values < 0).any():
                raise GraphError(f"node {node}: give finite memory >= 0 per candidate and machine")


def _valid(table: Array, shape: tuple[int, ...]) -> bool:
    return table.shape == shape and bool(np.isfinite(table).all())
