"""Machines for benchmarks: what a message takes here, and replicas of bare machines."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from distbelief.graph.layer import LayerGraph
from distbelief.partition.costs import AnalyticCosts, single_sample
from distbelief.partition.planning import Order
from distbelief.partition.profiling.host import Network, here
from distbelief.partition.profiling.measuring import profiled
from distbelief.partition.profiling.profiled_costs import ProfiledCosts
from distbelief.program.cluster import Cluster
from distbelief.program.plan import plan_for
from experiments.benchmarks.bare_machine import Setting
from experiments.benchmarks.crews import Crew, Hand
from experiments.benchmarks.hosts import HERE, Host
from experiments.benchmarks.ways import N_MACHINES, Way
from experiments.benchmarks.workload import Workload


SMALL: Final = 64
LARGE: Final = 1 << 20
"""Numbers of the messages that are timed."""


def network(folder: Path, *, ends: Sequence[Host] = HERE, seconds: float) -> Network:
    """Return what lies between two machines, measured.

    Half a round trip is overhead + latency + bytes / bandwidth. The first two are not
    told apart, but shared out evenly.
    """
    halves = []
    for n_numbers in (SMALL, LARGE):
        place = folder / f"exchange-{n_numbers}"
        place.mkdir()
        hands = [
            Hand(
                module="exchange",
                arguments=[str(n_numbers), str(index), host.address, str(place)],
                host=host,
            )
            for index, host in enumerate(ends)
        ]
        with Crew("exchange", hands, folder) as crew:
            halves.append(median(crew.turn(seconds=seconds)) / 2)
    small, large = halves
    return Network(
        bandwidth=4.0 * (LARGE - SMALL) / max(large - small, 1e-6),
        latency=small / 2,
        message_overhead=small / 2,
    )


def order_here(workload: Workload, between: Network, *, stages: bool = False) -> Order:
    """Return what is to be planned: for machines like this one, measured now.

    Args:
        workload: The net and the batch.
        between: What lies between machines.
        stages: Whether to try these too, for which layers are measured with fewer
            samples as well.
    """
    graph, batch = workload.graph(), workload.batch_size
    cluster = here(N_MACHINES, network=between)
    return Order(
        graph=graph,
        cluster=cluster,
        batch=batch,
        costs=_costs(graph, cluster, batch),
        costs_for=(lambda n: _costs(graph, cluster, n)) if stages else None,
        pins={},
    )


def replica(
    name: str,
    way: Way,
    order: Order,
    *,
    workload: Workload,
    folder: Path,
    ends: Sequence[Host] = HERE,
) -> Crew:
    """Return the machines that compute a net in this way."""
    place = folder / name.replace(" ", "_")
    place.mkdir()
    n_machines = 1 + max(
        placed for each in way.placements.values() for placed in each.computing
    )
    plan = plan_for(
        order.graph,
        way.placements,
        batch=order.batch,
        loss=workload.loss,
        cluster=order.cluster.first(n_machines),
    )
    plan = msgspec.structs.replace(plan, micro_batches=way.micro_batches)
    plan.save(place / "plan.json")
    setting = Setting(
        workload=workload, plan=str(place / "plan.json"), folder=str(place)
    )
    (place / "setting.json").write_bytes(msgspec.json.encode(setting))
    hands = [
        Hand(
            module="bare_machine",
            arguments=[str(place / "setting.json"), str(index), host.address],
            host=host,
        )
        for index, host in enumerate(ends[:n_machines])
    ]
    return Crew(name, hands, folder)


def _costs(graph: LayerGraph, cluster: Cluster, n_samples: int) -> ProfiledCosts:
    by_arithmetic = AnalyticCosts(cluster, batch=n_samples, single=single_sample(graph))
    profile = profiled(graph, batch=n_samples)
    return ProfiledCosts(profile, machines=by_arithmetic)
