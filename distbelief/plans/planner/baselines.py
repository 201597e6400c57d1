"""Baseline plans, made without a search; the planner is compared with them.

even           every layer over all machines: images in a grid, neurons in parts
whole layers   runs of whole layers on one machine after the other: a pipeline
"""

import itertools
import math
from collections.abc import Sequence

from distbelief.graph.graph import Layer, LayerGraph
from distbelief.plans.cluster import Cluster
from distbelief.plans.placement import Placement
from distbelief.plans.planner.candidates import cuts_of, partial_sums, split, summed_dims, whole
from distbelief.plans.planner.grouping import Group, groups
from distbelief.plans.step_cost import Costs


def even(graph: LayerGraph, cluster: Cluster) -> dict[str, Placement]:
    """Return each layer cut into as many parts as there are machines, if possible.

    Images are cut into the grid nearest to squares, other layers along the first dimension that has
    room for all parts, or for most.
    """
    placed: dict[str, Placement] = {}
    for group in groups(graph):
        placed |= group.placements(_even(group.root, cluster))
    return placed


def whole_layers(
    graph: LayerGraph, cluster: Cluster, *, costs: Costs, machines: Sequence[int] | None = None
) -> dict[str, Placement]:
    """Return runs of whole layers, one per machine; the longest run is as short as possible.

    Layers keep their order in the graph; followers stay with their leader. Only these machines are
    used, in this order; by default all.
    """
    machines = machines or range(len(cluster))
    found = groups(graph)

    def seconds_of(group: Group, machine: int) -> float:
        passes = [costs.passes(layer, layer.region, machine) for layer in group.members]
        return math.fsum(itertools.chain(*passes))

    seconds = [[seconds_of(group, machine) for group in found] for machine in machines]
    placed: dict[str, Placement] = {}
    for group, place in zip(found, _balanced(seconds), strict=True):
        placed |= group.placements(whole(group.root, machines[place]).placement)
    return placed


def _even(layer: Layer, cluster: Cluster) -> Placement:
    n_machines, n_dims = len(cluster), len(layer.shape)
    most = {cut.dim: layer.shape[cut.dim] // cut.unit for cut in cuts_of(layer)}
    if n_dims >= 3 and {n_dims - 2, n_dims - 1} <= set(most):
        rows, columns = layer.shape[-2:]
        pairs = [
            (a, b)
            for a in range(1, min(rows, n_machines) + 1)
            for b in [min(columns, n_machines // a)]
        ]
        # As many cells as possible; of these the squarest.
        a, b = max(
            pairs, key=lambda ab: (ab[0] * ab[1], -abs(math.log(rows * ab[1] / columns / ab[0])))
        )
        most = {n_dims - 2: a, n_dims - 1: b}
        parts = [most.get(dim, 1) for dim in range(n_dims)]
    else:
        dim = max(most, key=lambda d: (min(n_machines, most[d]), -d), default=-1)
        parts = [min(n_machines, most[dim]) if other == dim else 1 for other in range(n_dims)]
    found = split(layer, cluster, parts)
    if math.prod(parts) == 1 and summed_dims(layer):
        dim = summed_dims(layer)[0]
        n_parts = min(n_machines, layer.input_shapes[0][dim])
        found = partial_sums(layer, cluster, n_parts, dim=dim) or found
    return (found or whole(layer, 0)).placement


def _balanced(seconds: Sequence[Sequence[float]]) -> list[int]:
    # The machine of each item, so that the busiest has least to do; `seconds` is by machine, then
    # item. Items and machines keep their order. Optimal: bisection over the busiest machine's time.
    low, high = 0.0, math.fsum(seconds[0]) * (1 + 1e-9)  # room for rounding
    best = _filled(seconds, high)
    assert best is not None
    for _ in range(50):
        middle = (low + high) / 2
        found = _filled(seconds, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _filled(seconds: Sequence[Sequence[float]], limit: float) -> list[int] | None:
    # The machine of each item if no machine takes longer than `limit`; None if impossible.
    chosen: list[int] = []
    machine, busy = 0, 0.0
    for item in range(len(seconds[0])):
        while busy + seconds[machine][item] > limit:
            machine, busy = machine + 1, 0.0
            if machine == len(seconds):
                return None
        chosen.append(machine)
        busy += seconds[machine][item]
    return chosen
