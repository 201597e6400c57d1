"""No plan takes less: what all layers cost together, and what must follow each other.

Communication and waiting are left out, and machines are credited with splitting
everything that can be split without loss. So no overlap of phases, however clever, can
take less; how far a plan lies above it is not how far it can be improved.

Machine p alone takes t[v, p] for layer v, beyond an overhead o[p]; for a share x of it
at least x t[v, p]. So with any weights w >= 0 that sum to 1 (of machines' busy times)

    step >= sum_v ( min_p w[p] t[v, p]  +  min_p w[p] o[p] )

and a layer by itself takes at least 1 / sum_p 1 / t[v, p].
"""

import numpy as np
from numpy.typing import NDArray

from distbelief.graph.kind import kind_of
from distbelief.graph.layer import INPUT, Layer, LayerGraph
from distbelief.program.cluster import Cluster
from distbelief.program.gradients import with_gradient
from distbelief.program.pricing import Costs


Floats = NDArray[np.float64]


def lower_bound(graph: LayerGraph, cluster: Cluster, costs: Costs) -> float:
    """Return seconds that every plan takes at the least.

    Args:
        graph: With its loss.
        cluster: The machines that a plan may use.
        costs: Of computing. The bound holds if a layer in parts costs no less, summed
            over the parts, than whole: so it is by arithmetic; measured slices may be
            more efficient.
    """
    gradients = with_gradient(graph)
    layers = [layer for layer in graph.layers if layer.kind != INPUT]
    overheads = np.array([machine.overhead for machine in cluster.machines])
    passes = {layer.name: 1 + (layer.name in gradients) for layer in layers}
    whole = {layer.name: _seconds(layer, cluster, costs, passes[layer.name]) for layer in layers}
    # Beyond the overhead; rounding must not lift it.
    beyond = {
        name: np.maximum(seconds - passes[name] * overheads, 0.0) * (1 - 1e-12)
        for name, seconds in whole.items()
    }
    chain = {layer.name: 0.0 for layer in graph.layers}
    for layer in layers:
        before = max((chain[name] for name in layer.inputs), default=0.0)
        alone = float(whole[layer.name].min())
        if _splits(layer):
            alone = passes[layer.name] * float(overheads.min())
            alone += _together(beyond[layer.name])
        chain[layer.name] = before + alone * (1 - 1e-12)
    return max(_busy(beyond, passes, overheads), *chain.values())


def _seconds(layer: Layer, cluster: Cluster, costs: Costs, passes: int) -> Floats:
    """Return what each machine takes for all of a layer: (n_machines,)."""
    known: dict[object, float] = {}
    for index, machine in enumerate(cluster.machines):
        if machine not in known:
            known[machine] = costs.forward(layer, layer.region, index)
            if passes > 1:
                known[machine] += costs.backward(layer, layer.region, index)
    return np.array([known[machine] for machine in cluster.machines])


def _together(seconds: Floats) -> float:
    """Return what all machines take for what each alone takes these seconds for."""
    if not seconds.all():
        return 0.0
    return float(1.0 / np.sum(1.0 / seconds))


def _busy(beyond: dict[str, Floats], passes: dict[str, int], overheads: Floats) -> float:
    """Return the bound by what machines do altogether, whatever follows what."""
    totals: Floats = np.sum(list(beyond.values()), axis=0)
    # The faster, the more a second of it counts.
    weights = 1.0 / np.maximum(totals, 1e-300)
    weights /= weights.sum()
    work = sum(float((weights * seconds).min()) for seconds in beyond.values())
    return work + sum(passes.values()) * float((weights * overheads).min())


def _splits(layer: Layer) -> bool:
    kind = kind_of(layer)
    return bool(kind.cuts(layer)) or kind.partial is not None
