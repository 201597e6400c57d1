"""Machines for benchmarks: what a message takes here, and replicas of bare machines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from distbelief.partition.cost_model import (
    AnalyticCosts,
    MicroBatchScaling,
    ProfiledCosts,
    single_sample,
)
from distbelief.partition.profiling.layer_timer import profiled
from distbelief.partition.profiling.profile import Profile
from distbelief.partition.profiling.this_host import Network, here
from distbelief.partition.search import PlanningRequest
from distbelief.program.plan import Plan, plan_for
from experiments.benchmarks.bare.machine import Setting
from experiments.benchmarks.measuring.workers import Workers, module
from experiments.benchmarks.measuring.workload import Workload
from experiments.benchmarks.network.hosts import HERE, Host
from experiments.benchmarks.plans.ways import N_MACHINES, Way


SMALL, LARGE = 64, 1 << 20  # numbers of the messages that are timed
N_ENDS: Final = 4  # of the two messages of a round trip


def network(folder: Path, *, ends: Sequence[Host] = HERE, seconds: float) -> Network:
    """Return what lies between two machines, measured.

    Half a round trip is overhead + latency + bytes / bandwidth. The first two are not
    told apart, but shared out evenly. What a small message takes of processors is what
    both processes have computed meanwhile: little else than that.
    """
    halves, handling = [], []
    for n_numbers in (SMALL, LARGE):
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
    small, large = halves
    return Network(
        bandwidth=4.0 * (LARGE - SMALL) / max(large - small, 1e-6),
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
    cluster, single = here(N_MACHINES, network=between), single_sample(graph)
    by_arithmetic = AnalyticCosts(cluster, batch=batch, single=single)
    costs = ProfiledCosts(profile, machines=by_arithmetic)

    def fewer(n_samples: int) -> MicroBatchScaling:
        part = AnalyticCosts(cluster, batch=n_samples, single=single)
        shares = costs.shares
        return MicroBatchScaling(costs, batch=by_arithmetic, part=part, shares=shares)

    return PlanningRequest(
        graph=graph,
        cluster=cluster,
        batch=batch,
        costs=costs,
        costs_for=fewer if stages else None,
        pins={},
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
    """Return machines that know all these plans; a request is a plan's name and a number."""
    place = folder / name.replace(" ", "_")
    place.mkdir()
    paths = {plan: place / f"plan-{index}.json" for index, plan in enumerate(plans)}
    for plan, path in paths.items():
        plans[plan].save(path)
    n_machines = max(plan.cluster.n_machines for plan in plans.values())
    setting = Setting(
        workload=workload,
        plans={plan: str(path) for plan, path in paths.items()},
        n_machines=n_machines,
        folder=str(place),
    )
    file = place / "setting.json"
    file.write_bytes(msgspec.json.encode(setting))
    programs = [
        module("bare.machine", file, index, host.address, host=host)
        for index, host in enumerate(ends[:n_machines])
    ]
    return Workers(name, programs, folder)
