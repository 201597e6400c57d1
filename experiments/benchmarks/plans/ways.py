"""Ways to split a net over two machines: good ones, usual ones, and bad ones.

one             everything on one machine
units           every layer's outputs cut in two: neurons, maps
rows, columns   images cut in two, other layers by outputs
inputs          every layer that is a sum over its inputs cut along these
in turn         by outputs, then by inputs (Shoeybi et al. 2019), and so on
uneven          as `units` or `rows`, three quarters to the first machine
layers          runs of whole layers, the batch in 1, 2 or 4 parts
to and fro      each layer on the other machine
even            the planner's baseline
planner         the planner's choice, for two machines at most
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from distbelief.graph.graph import Layer, LayerGraph
from distbelief.partition.baselines import even, whole_layers
from distbelief.partition.candidates import partial_sums, split, summed_dims, whole
from distbelief.partition.grouping import groups
from distbelief.partition.planner import plan
from distbelief.partition.search import PlanningRequest
from distbelief.program.cluster import Cluster
from distbelief.program.placement import Placement


N_MACHINES: Final = 2
PLACES: Final = {"rows": 1, "columns": 2}  # dimensions of images, channels being the first

Choose = Callable[[Layer, int], Placement]  # choose(layer, its place in the net) -> where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to split a net."""

    placements: Mapping[str, Placement]  # of each layer
    micro_batches: int = 1  # parts of a batch


def ways(order: PlanningRequest) -> dict[str, Way]:
    graph, cluster = order.graph, order.cluster.first(N_MACHINES)
    layers = whole_layers(graph, cluster, costs=order.costs)
    done = plan(order, [N_MACHINES])[-1].best
    found = {
        "one": on_one_machine(graph),
        "planner": Way(placements=done.placements, micro_batches=done.cost.micro_batches),
        **dict(_cut(graph, cluster)),
        "layers": Way(placements=layers),
        "layers, 2 parts": Way(placements=layers, micro_batches=2),
        "layers, 4 parts": Way(placements=layers, micro_batches=4),
        "to and fro": _placed(
            graph, lambda layer, index: whole(layer, index % N_MACHINES).placement
        ),
        "even": Way(placements=even(graph, cluster)),
    }
    distinct: dict[str, Way] = {}
    for name, way in found.items():
        if way not in distinct.values():
            distinct[name] = way
    return distinct


def on_one_machine(graph: LayerGraph) -> Way:
    return _placed(graph, lambda layer, _: whole(layer, 0).placement)


def by_places(order: PlanningRequest) -> dict[str, Way]:
    graph, cluster = order.graph, order.cluster.first(N_MACHINES)
    return {name: _images(graph, cluster, dim=dim) for name, dim in PLACES.items()}


def by_units(graph: LayerGraph, cluster: Cluster) -> Way:
    return _placed(graph, lambda layer, _: _split(layer, cluster, dim=0))


def _cut(graph: LayerGraph, cluster: Cluster) -> Iterator[tuple[str, Way]]:
    fast = cluster.machines[0]
    slow = msgspec.structs.replace(fast, flops=fast.flops / 3)
    uneven = msgspec.structs.replace(cluster, machines=(fast, slow))
    yield "units", by_units(graph, cluster)
    yield "units, uneven", by_units(graph, uneven)
    if any(len(layer.shape) == 3 for layer in graph.layers):
        for name, dim in PLACES.items():
            for word, machines in (("", cluster), (", uneven", uneven)):
                yield name + word, _images(graph, machines, dim=dim)
    yield "inputs", _placed(graph, lambda layer, _: _summed(layer, cluster))
    yield (
        "in turn",
        _placed(
            graph,
            lambda layer, index: (
                _summed(layer, cluster) if index % 2 else _split(layer, cluster, dim=0)
            ),
        ),
    )


def _images(graph: LayerGraph, cluster: Cluster, *, dim: int) -> Way:
    def choose(layer: Layer, _: int) -> Placement:
        is_image = len(layer.shape) > dim
        return _split(layer, cluster, dim=dim if is_image else 0)

    return _placed(graph, choose)


def _placed(graph: LayerGraph, choose: Choose) -> Way:
    placements: dict[str, Placement] = {}
    for index, group in enumerate(groups(graph)):
        placements |= group.placements(choose(group.root, index))
    return Way(placements=placements)


def _split(layer: Layer, cluster: Cluster, *, dim: int) -> Placement:
    parts = [N_MACHINES if other == dim else 1 for other in range(len(layer.shape))]
    found = split(layer, cluster, parts)
    return (found or whole(layer, 0)).placement


def _summed(layer: Layer, cluster: Cluster) -> Placement:
    dims = summed_dims(layer)
    found = partial_sums(layer, cluster, N_MACHINES, dim=dims[0]) if dims else None
    return found.placement if found else _split(layer, cluster, dim=0)
