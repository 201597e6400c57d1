"""METIS as a planner: what balancing a graph's parts comes to (Karypis and Kumar 1998).

Every group of layers is cut into as many cells as there are machines, as the baseline
`even` cuts it. Cells are vertices, as heavy as they take long; what passes between two
of them is an edge. METIS cuts that graph into equal parts of few bytes between them.
It balances the sum over all layers, knows nothing of when a machine waits for another,
and has to use all machines.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, final

from distbelief.graph.graph import LayerGraph
from distbelief.partition.baselines import even
from distbelief.partition.grouping import groups
from distbelief.program.cluster import Cluster
from distbelief.program.compiler import compile_plan
from distbelief.program.placement import Placement
from distbelief.program.step_cost import Costs


IS_INSTALLED: Final = find_spec("pymetis") is not None

_WEIGHT_MAX: Final = 1 << 20
"""METIS computes with whole numbers, and adds them up in 32 bits."""


@final
@dataclass(frozen=True, slots=True)
class Cells:
    """A graph of cells.

    Attributes:
        placements: Of every layer, as if each cell had a machine of its own.
        seconds: Of each cell.
        n_bytes: Between cells, by both, the lower first.
    """

    placements: Mapping[str, Placement]
    seconds: Sequence[float]
    n_bytes: Mapping[tuple[int, int], int]


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
    """Return the plan that METIS makes.

    Args:
        graph: With its loss, if it is to be trained.
        cluster: Machines, which are taken to be equal.
        batch: Samples of a step.
        costs: Of computing.
    """
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
    """Return the same cells on other machines."""
    combine = placement.combine
    return Placement(
        cuts=placement.cuts,
        machines=tuple(to[machine] for machine in placement.machines),
        combine=None if combine is None else moved(combine, to),
    )
