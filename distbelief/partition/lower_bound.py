"""No plan takes less: what all layers cost together, and what must follow each other.

Communication, waiting and jitter are left out, and machines are credited with splitting
everything that can be split without loss. So no overlap of phases, however clever, can
take less; how far a plan lies above it is not how far it can be improved.
"""

from distbelief.graph.kind import kind_of
from distbelief.graph.layer import INPUT, Layer, LayerGraph
from distbelief.program.cluster import Cluster
from distbelief.program.gradients import with_gradient
from distbelief.program.pricing import Costs


def lower_bound(graph: LayerGraph, cluster: Cluster, costs: Costs) -> float:
    """Return seconds that every plan takes at the least.

    Args:
        graph: With its loss.
        cluster: The machines that a plan may use, fastest first.
        costs: Of computing. The bound holds if a layer in parts costs no less, summed
            over the parts, than whole: so it is by arithmetic; measured slices may be
            more efficient.
    """
    fastest = cluster.machines[0]
    ratios = [
        max(m.flops / fastest.flops, m.memory_rate / fastest.memory_rate)
        for m in cluster.machines
    ]
    together = sum(ratios) / max(ratios)
    best = ratios.index(max(ratios))
    gradients = with_gradient(graph)
    total = 0.0
    chain: dict[str, float] = {}
    for layer in graph.layers:
        if layer.kind == INPUT:
            chain[layer.name] = 0.0
            continue
        seconds = costs.forward(layer, layer.region, best)
        if layer.name in gradients:
            seconds += costs.backward(layer, layer.region, best)
        total += seconds
        alone = seconds / (together if _splits(layer) else 1.0)
        before = max((chain[name] for name in layer.inputs), default=0.0)
        chain[layer.name] = before + alone
    return max(total / together, *chain.values())


def _splits(layer: Layer) -> bool:
    kind = kind_of(layer)
    return bool(kind.cuts(layer)) or kind.partial is not None
