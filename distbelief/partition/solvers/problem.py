"""Candidates that need no look: forbidden, too large, or never better than another.

Each function returns, per node, the indices of the candidates to keep, ascending.
Nothing that is dropped could make the best choice cheaper, whatever else is chosen.
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


# How long a search may go on.


@final
class Deadline:
    """A moment after which a search returns the best it has.

    Args:
        seconds: From now.
        clock: Monotonic, seconds; tests pass their own.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left, 0 at least."""
        return max(0.0, self._end - self._clock())

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self.left <= 0


# The choice to be made, in numbers only: one candidate per node, at the least cost.
#
#     minimise    sum_v costs[v][x_v]  +  sum_uv edges[u, v][x_u, x_v]
#     subject to  sum_v memory[v][x_v, q] <= caps[q]            for every machine q
#
# Costs may be infinite, which forbids (a pin forbids all candidates but one). Caps are
# met up to one part in 1e9, so that rounding decides nothing. Whatever a solver returns
# carries a bound: proof of how good it is at most possible to be.

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Choice = tuple[int, ...]

TOLERANCE: Final = 1e-9  # relative, of caps
TIE: Final = 1e-12  # relative; costs that differ by less are equal
PROOF: Final = 1e-6  # relative; HiGHS is no more exact than this


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Nodes, their candidates, and what each choice costs.

    Attributes:
        costs: Of every candidate of every node, seconds, each (K_v,).
        edges: Of every pair of candidates, seconds, each (K_u, K_v), by (u, v), u < v.
        memory: Bytes per candidate and machine, each (K_v, n_machines).
        caps: Bytes that each machine has, (n_machines,); infinite if it has enough.
    """

    costs: tuple[Array, ...]
    edges: Mapping[tuple[int, int], Array]
    memory: tuple[Array, ...] | None = None
    caps: Array | None = None

    def __post_init__(self) -> None:
        _check_costs(self)
        _check_memory(self)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many candidates each node has."""
        return tuple(len(costs) for costs in self.costs)

    @cached_property
    def neighbours(self) -> tuple[tuple[tuple[int, Array], ...], ...]:
        """Of each node, every neighbour and the edge as (own, neighbour's) matrix."""
        found: list[list[tuple[int, Array]]] = [[] for _ in self.costs]
        for (u, v), table in self.edges.items():
            found[u].append((v, table))
            found[v].append((u, table.T))
        return tuple(tuple(sorted(pairs, key=lambda pair: pair[0])) for pairs in found)

    @cached_property
    def shares(self) -> tuple[Array, ...] | None:
        """Memory as shares of the caps, each (K_v, n_machines); None without caps."""
        if self.memory is None or self.caps is None or np.isinf(self.caps).all():
            return None
        caps = self.caps
        return tuple(memory / caps for memory in self.memory)

    def cost(self, choice: Sequence[int]) -> float:
        """Return what a choice costs, seconds, the same in whatever order summed."""
        nodes = [costs[index] for costs, index in zip(self.costs, choice, strict=True)]
        pairs = [table[choice[u], choice[v]] for (u, v), table in self.edges.items()]
        return math.fsum([*nodes, *pairs])

    def used(self, choice: Sequence[int]) -> Array:
        """Return the share of its cap that each machine uses, (n_machines,)."""
        if self.shares is None:
            return np.zeros(0)
        rows = zip(self.shares, choice, strict=True)
        return np.asarray(np.sum([shares[index] for shares, index in rows], axis=0))

    def overrun(self, choice: Sequence[int]) -> float:
        """Return the largest share of its cap that any machine uses; 0 without caps."""
        return float(self.used(choice).max(initial=0.0))

    def restricted(self, kept: Sequence[Indices]) -> "Problem":
        """Return the problem with these candidates of each node only."""
        return Problem(
            costs=tuple(costs[rows] for costs, rows in zip(self.costs, kept, strict=True)),
            edges={(u, v): table[np.ix_(kept[u], kept[v])] for (u, v), table in self.edges.items()},
            memory=None
            if self.memory is None
            else tuple(m[rows] for m, rows in zip(self.memory, kept, strict=True)),
            caps=self.caps,
        )

    def solution(
        self, choice: Sequence[int], *, bound: float, solver: str, proven: bool = True
    ) -> "Solution":
        """Return the choice with its own figures.

        Args:
            choice: A candidate of each node.
            bound: No choice that overruns its caps no more than this costs less.
            solver: Who found it.
            proven: False if choices that overrun the caps less may exist.
        """
        cost = self.cost(choice)
        if math.isinf(cost):
            raise no_choice()
        used = self.used(choice)
        return Solution(
            choice=tuple(int(index) for index in choice),
            cost=cost,
            bound=min(bound, cost),
            solver=solver,
            exact=proven and bound >= cost - PROOF * abs(cost),
            overrun=float(used.max(initial=0.0)),
            offending=tuple(map(int, np.flatnonzero(used > 1 + TOLERANCE))),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A choice and what is known of it.

    Attributes:
        choice: Index of the candidate of each node.
        cost: Seconds.
        bound: No choice that fits the caps costs less; nor, if this one does not fit,
            any that overruns them no more than it does.
        solver: Who found it.
        exact: Whether it is proven best: the cheapest that fits or, if none does,
            the cheapest of those that overrun least.
        overrun: The largest share of its cap that any machine uses; 0 without caps.
        offending: Machines whose caps are broken.
    """

    choice: Choice
    cost: float
    bound: float
    solver: str
    exact: bool
    overrun: float = 0.0
    offending: tuple[int, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether every cap is met."""
        return not self.offending

    @property
    def gap(self) -> float:
        """By what share of its cost it may exceed the best."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


def first_lowest(values: Array) -> int:
    """Return the first index, in C order, of the values that tie for the lowest."""
    lowest = float(values.min())
    return int(np.argmax(values <= lowest + TIE * abs(lowest)))


def trivial_bound(problem: Problem) -> float:
    """Return the sum of all that is cheapest."""
    lowest = [float(costs.min()) for costs in problem.costs]
    return math.fsum([*lowest, *(float(edge.min()) for edge in problem.edges.values())])


def no_choice() -> GraphError:
    """Return the error for a problem that forbids everything."""
    return GraphError(
        "no choice of candidates has a finite cost: pins contradict each other, or "
        "leave a layer nothing; drop one"
    )


def _check_costs(problem: Problem) -> None:
    if not problem.costs:
        raise GraphError("a problem needs one node at least")
    for node, costs in enumerate(problem.costs):
        if costs.ndim != 1 or not costs.size or not (costs > -math.inf).all():
            raise GraphError(
                f"node {node} has costs of shape {costs.shape}, lowest "
                f"{costs.min(initial=math.inf)}; use numbers, one per candidate"
            )
    for (u, v), table in problem.edges.items():
        if not 0 <= u < v < len(problem.costs):
            raise GraphError(
                f"edge {u, v} joins nodes that are not two of {len(problem.costs)}, "
                "in ascending order"
            )
        expected = (problem.sizes[u], problem.sizes[v])
        if table.shape != expected or not (table > -math.inf).all():
            raise GraphError(
                f"edge {u, v} has costs of shape {table.shape}, lowest {table.min()}; "
                f"use numbers, of shape {expected}"
            )


def _check_memory(problem: Problem) -> None:
    if (problem.memory is None) != (problem.caps is None):
        raise GraphError("give memory and caps, or neither")
    if problem.memory is None or problem.caps is None:
        return
    if problem.caps.ndim != 1 or not (problem.caps > 0).all():
        raise GraphError(f"caps are {problem.caps}; use numbers above 0, in one row")
    if len(problem.memory) != len(problem.costs):
        raise GraphError(f"{len(problem.memory)} nodes have memory, {len(problem.costs)} costs")
    for node, memory in enumerate(problem.memory):
        expected = (problem.sizes[node], len(problem.caps))
        valid = memory.shape == expected and (memory >= 0).all()
        if not valid or np.isinf(memory).any():
            raise GraphError(
                f"node {node} has memory of shape {memory.shape}; use finite numbers, "
                f"0 or more, of shape {expected}"
            )


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
