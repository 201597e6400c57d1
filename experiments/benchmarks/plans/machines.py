"""Machines for benchmarks: what a message takes here, and ways to split a net over two of them.

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

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from distbelief.graph.graph import Layer, LayerGraph
from distbelief.plans.cluster import Cluster
from distbelief.plans.placement import Placement
from distbelief.plans.plan import Plan, plan_for
from distbelief.plans.planner.baselines import even, whole_layers
from distbelief.plans.planner.candidates import partial_sums, split, summed_dims, whole
from distbelief.plans.planner.cost_model import AnalyticCosts, ProfiledCosts, single_sample
from distbelief.plans.planner.grouping import groups
from distbelief.plans.planner.planner import plan
from distbelief.plans.planner.profile import Profile
from distbelief.plans.planner.profiling.layer_timer import profiled
from distbelief.plans.planner.profiling.this_host import Network, here
from distbelief.plans.planner.search import PlanningRequest
from distbelief.transport.shared_memory import FileMemory
from experiments.benchmarks.bare.machine import Setting
from experiments.benchmarks.measuring.workers import Workers, module
from experiments.benchmarks.measuring.workload import Workload
from experiments.benchmarks.network.hosts import HERE, Host


N_MACHINES: Final = 2
PLACES: Final = {"rows": 1, "columns": 2}  # dimensions of images, channels being the first
Choose = Callable[[Layer, int], Placement]  # choose(layer, its place in the net) -> where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
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


SMALL, LARGE = 64, 1 << 20  # numbers of the messages that are timed
N_ENDS: Final = 4  # of the two messages of a round trip


def network(
    folder: Path, *, ends: Sequence[Host] = HERE, seconds: float, large: int = LARGE
) -> Network:
    """Return what lies between two machines, measured.

    Half a round trip is overhead + latency + bytes / bandwidth. The first two are not
    told apart, but shared out evenly. What a small message takes of processors is what
    both processes have computed meanwhile: little else than that.
    """
    halves, handling = [], []
    for n_numbers in (SMALL, large):
        place = folder / f"exchange-{n_numbers}"
        place.mkdir()
        programs = [
            module("bare.exchange", n_numbers, index, host.address, place, host=host)
            for index, host in enumerate(ends)
        ]
        with Workers("exchange", programs, folder) as workers:
            turn = workers.turn(seconds=seconds)
        halves.append(turn.seconds / 2)
        handling.append(turn.cpu_seconds / N_ENDS)
    small, slow = halves
    return Network(
        bandwidth=4.0 * (large - SMALL) / max(slow - small, 1e-6),
        latency=small / 2,
        message_overhead=small / 2,
        handling=handling[0],
    )


def kept_network(folder: Path, *, seconds: float) -> Network:
    """Return what lies between two machines here; measure it once for a folder."""
    path = folder / "network.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Network)
    found = network(folder, seconds=seconds)
    path.write_bytes(msgspec.json.encode(found))
    return found


def order_here(workload: Workload, between: Network, *, stages: bool = False) -> PlanningRequest:
    profile = profiled(workload.graph(), batch=workload.batch_size)
    return order_by(profile, workload, between, stages=stages)


def order_by(
    profile: Profile, workload: Workload, between: Network, *, stages: bool = False
) -> PlanningRequest:
    graph, batch = workload.graph(), workload.batch_size
    cluster = here(N_MACHINES, network=between)
    by_arithmetic = AnalyticCosts(cluster, batch=batch, single=single_sample(graph))
    costs = ProfiledCosts(profile, machines=by_arithmetic)
    return PlanningRequest(
        graph=graph, cluster=cluster, batch=batch, costs=costs, micro_batches=stages, pins={}
    )


def plan_of(way: Way, order: PlanningRequest, *, loss: str) -> Plan:
    n_machines = 1 + max(placed for each in way.placements.values() for placed in each.computing)
    plan = plan_for(
        order.graph,
        way.placements,
        batch=order.batch,
        loss=loss,
        cluster=order.cluster.first(n_machines),
    )
    return replace(plan, micro_batches=way.micro_batches)


def machines(
    name: str,
    plans: Mapping[str, Plan],
    *,
    workload: Workload,
    folder: Path,
    ends: Sequence[Host] = HERE,
) -> Workers:
    """Return machines that know all these plans; a request is a plan's name and a number.

    Those on this host share memory.
    """
    place = folder / name.replace(" ", "_")
    place.mkdir()
    paths = {key: place / f"plan-{index}.json" for index, key in enumerate(plans)}
    for key, path in paths.items():
        plans[key].save(path)
    n_machines = max(each.cluster.n_machines for each in plans.values())
    setting = Setting(
        workload=workload,
        plans={key: str(path) for key, path in paths.items()},
        n_machines=n_machines,
        folder=str(place),
        memory=_shared_memory() if ends is HERE else "",
    )
    programs = [
        module("bare.machine", setting, index, host.address, host=host)
        for index, host in enumerate(ends[:n_machines])
    ]
    return Workers(name, programs, folder)


def _shared_memory() -> str:
    memory = FileMemory.make()
    atexit.register(memory.remove_all)
    return str(memory.directory)
