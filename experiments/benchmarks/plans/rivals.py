"""What the planner's plans are measured by: a long random search, and METIS.

The search knows nothing of how the planner searches, and half of its moves change neighbours
together, to splits that are called alike, which the planner's own moves do not.

METIS (Karypis and Kumar 1998) balances a graph's parts. Every group of layers is cut into as many
cells as there are machines, as the baseline `even` cuts it. Cells are vertices, as heavy as they
take long; what passes between two of them is an edge. METIS cuts that graph into equal parts of few
bytes between them. It balances the sum over all layers, ignores when a machine waits for another,
and has to use all machines.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np

from distbelief.graph.graph import LayerGraph
from distbelief.partition.baselines import even
from distbelief.partition.grouping import groups
from distbelief.partition.solvers.problem import Choice, Problem
from distbelief.program.cluster import Cluster
from distbelief.program.compiler import compile_plan
from distbelief.program.placement import Placement
from distbelief.program.step_cost import Costs


SecondsOf = Callable[[Choice], float]

_N_DRAWN: Final = 3
_PATIENCE: Final = 40  # moves in a row without a gain, after which it begins elsewhere


def search(
    problem: Problem,
    words: Sequence[Sequence[str]],
    seconds_of: SecondsOf,
    starts: Sequence[Choice],
    *,
    tries: int,
    seed: int,
) -> float:
    draws = _Draws(problem, words, seed=seed)
    waiting = list(starts)
    best = now = np.inf
    choice: Choice | None = None
    failed = 0
    for _ in range(tries):
        if choice is None or failed >= _PATIENCE:
            choice = waiting.pop(0) if waiting else draws.start()
            now, failed = seconds_of(choice), 0
        else:
            other = draws.move(choice)
            seconds = seconds_of(other)
            failed = 0 if seconds < now else failed + 1
            if seconds <= now:
                choice, now = other, seconds
        best = min(best, now)
    return float(best)


class _Draws:
    """Random choices and moves."""

    def __init__(self, problem: Problem, words: Sequence[Sequence[str]], *, seed: int) -> None:
        self._problem = problem
        self._places = [{word: index for index, word in enumerate(row)} for row in words]
        self._words = words
        self._rng = np.random.default_rng(seed)

    def start(self) -> Choice:
        """Return a choice of few words: every run of nodes is split alike."""
        choice = tuple(int(self._rng.integers(n)) for n in self._problem.sizes)
        node = 0
        while node < len(choice):
            choice = self._alike(choice, node, until=self._end(node))
            node = self._end(node)
        return choice

    def move(self, choice: Choice) -> Choice:
        node = int(self._rng.integers(len(choice)))
        changed = (*choice[:node], self._drawn(choice, node), *choice[node + 1 :])
        if self._rng.random() < 0.5:
            return changed
        return self._alike(changed, node, until=self._end(node))

    def _end(self, node: int) -> int:
        return node + 1 + int(self._rng.geometric(0.25))

    def _drawn(self, choice: Choice, node: int) -> int:
        """Return, of a few candidates, the one that the solver's model likes best."""
        totals = self._problem.costs[node]
        for neighbour, table in self._problem.neighbours[node]:
            totals = totals + table[:, choice[neighbour]]
        drawn = self._rng.integers(len(totals), size=_N_DRAWN)
        return int(min(drawn, key=lambda index: totals[index]))

    def _alike(self, choice: Choice, node: int, *, until: int) -> Choice:
        word = self._words[node][choice[node]]
        changed = list(choice)
        for other in range(node + 1, min(until, len(choice))):
            changed[other] = self._places[other].get(word, changed[other])
        return tuple(changed)


IS_INSTALLED: Final = find_spec("pymetis") is not None

_WEIGHT_MAX: Final = 1 << 20  # METIS computes with whole numbers, and adds them up in 32 bits


@dataclass(frozen=True, slots=True)
class Cells:
    """A graph of cells."""

    placements: Mapping[str, Placement]  # of every layer, as if each cell had a machine of its own
    seconds: Sequence[float]  # of each cell
    n_bytes: Mapping[tuple[int, int], int]  # between cells, by both, the lower first


def cells_of(graph: LayerGraph, cluster: Cluster, *, batch: int, costs: Costs) -> Cells:
    """Return the graph that METIS is to cut for these machines, which are equal."""
    placements: dict[str, Placement] = {}
    n_cells = 0
    cut = even(graph, cluster)
    for group in groups(graph):
        here = {m: n_cells + m for m in range(len(cluster))}
        placements |= group.placements(moved(cut[group.root.name], here))
        n_cells += len(cluster)
    compiled = compile_plan(graph, placements, batch=batch, n_machines=n_cells)
    seconds = [0.0] * n_cells
    for task in compiled.tasks:
        if task.phase != "combine":
            back = task.phase in {"backward", "partial_backward"}
            layer = graph[task.layer]
            passes = costs.passes(layer, task.region, 0, partial=task.is_partial)
            seconds[task.machine] += passes.backward if back else passes.forward
    n_bytes: dict[tuple[int, int], int] = {}
    for way in compiled.traffic:
        pairs = zip(way.senders.tolist(), way.receivers.tolist(), strict=True)
        for (sender, receiver), each in zip(pairs, way.n_bytes.tolist(), strict=True):
            ends = (min(sender, receiver), max(sender, receiver))
            n_bytes[ends] = n_bytes.get(ends, 0) + each
    return Cells(placements, seconds, n_bytes)


def metis(graph: LayerGraph, cluster: Cluster, *, batch: int, costs: Costs) -> dict[str, Placement]:
    import pymetis  # noqa: PLC0415 -- of an extra

    cells = cells_of(graph, cluster, batch=batch, costs=costs)
    beside: list[dict[int, int]] = [{} for _ in cells.seconds]
    largest = max(cells.n_bytes.values(), default=1)
    for (one, other), n_bytes in cells.n_bytes.items():
        weight = math.ceil(_WEIGHT_MAX * n_bytes / largest)
        beside[one][other] = beside[other][one] = weight
    starts = [0]
    for row in beside:
        starts.append(starts[-1] + len(row))
    slowest = max(cells.seconds)
    _, parts = pymetis.part_graph(
        len(cluster),
        pymetis.CSRAdjacency(starts, [other for row in beside for other in row]),
        vweights=[round(_WEIGHT_MAX * each / slowest) for each in cells.seconds],
        eweights=[weight for row in beside for weight in row.values()],
    )
    machine_of = dict(enumerate(parts))
    return {name: moved(p, machine_of) for name, p in cells.placements.items()}


def moved(placement: Placement, to: Mapping[int, int]) -> Placement:
    combine = placement.combine
    return Placement(
        cuts=placement.cuts,
        machines=tuple(to[machine] for machine in placement.machines),
        combine=None if combine is None else moved(combine, to),
    )
