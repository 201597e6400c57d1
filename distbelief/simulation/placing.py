"""Roles on the machines of a cluster: what that is to a simulation.

placement   {"shard-0": 0, "replica-0": 1, "replica-1": (2, 4)}
machine 0   shard-0                     one card, its cores shared by its roles
machine 2 to 5, replica-1               a replica split over four: priced as one
                                        machine with all their cores and cards
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from distbelief.graph.layer import GraphError
from distbelief.program.cluster import Cluster, Machine as Given
from distbelief.roles import Address
from distbelief.simulation.fabric import Card, Fabric, Uplink
from distbelief.simulation.machines import Machine
from distbelief.simulation.options import ClusterOptions
from distbelief.simulation.sharing import Processor


Place = int | tuple[int, int]  # a machine; or the first of some, and how many

_LATENCY_JITTER: Final = 0.1


def options_for(
    cluster: Cluster,
    placement: Mapping[Address, Place],
    *,
    threads: int | Mapping[Address, int] = 1,
    memory: Mapping[Address, float] | None = None,
    share_memory: bool = True,
) -> ClusterOptions:
    """Return a simulated cluster with these roles on these machines.

    Add faults, scales and whatever else there is to say by `dataclasses.replace`.

    Args:
        cluster: Machines, and what lies between them.
        placement: Where each role is.
        threads: That the compute lane of a role keeps busy, at most; of a role on
            several machines, all their cores.
        memory: Bytes that roles take; what is not named takes none.
        share_memory: Whether the roles of a machine fetch and push through memory that
            they share; else by messages.

    Raises:
        GraphError: there is no such machine, or it cannot hold what is put there.
    """
    on: dict[Place, list[Address]] = defaultdict(list)
    for name, place in placement.items():
        _check(cluster, name, place)
        on[place].append(name)
    _check_groups(cluster, on)
    _check_memory(cluster, on, memory or {})
    hosts = {place: _together(cluster, place) for place in on}
    machines = {}
    for place, names in on.items():
        for name in names:
            wanted = threads if isinstance(threads, int) else threads.get(name, 1)
            if isinstance(place, tuple):
                wanted = hosts[place].cores
            machine = machine_of(hosts[place], threads=wanted)
            machines[name] = replace(machine, host=host_name(place), shares_memory=share_memory)
    return ClusterOptions(
        machines=machines,
        fabric=_fabric(cluster, hosts),
        processors={
            host_name(place): Processor(cores=host.cores, bytes_per_second=host.memory_rate)
            for place, host in hosts.items()
        },
    )


def machine_of(given: Given, *, threads: int = 1) -> Machine:
    """Return what a role with so many threads has of a machine."""
    threads = min(threads, given.cores)
    return Machine(
        flops_per_second=given.flops * threads / given.cores,
        bytes_per_second=given.memory_rate,
        overhead_seconds=given.overhead,
        jitter=0.0,
        spread=given.jitter,
        threads=threads,
        handling_seconds=given.handling,
        handling_bytes_per_second=given.message_rate / given.cores,
    )


def spread(names: Sequence[Address], n_machines: int, *, first: int = 0) -> dict[Address, Place]:
    """Return a placement of roles on machines, one after the other, in turns."""
    return {name: first + index % n_machines for index, name in enumerate(names)}


def host_name(place: Place) -> str:
    """Return how the simulation calls a machine, or several as one."""
    if isinstance(place, int):
        return f"machine-{place}"
    first, n = place
    return f"machine-{first}..{first + n - 1}"


def _check(cluster: Cluster, name: Address, place: Place) -> None:
    first, n = place if isinstance(place, tuple) else (place, 1)
    if first < 0 or n < 1 or first + n > len(cluster):
        last = f" to {first + n - 1}" if n > 1 else ""
        raise GraphError(
            f"{name} is put on machine {first}{last} of cluster {cluster.name!r}, "
            f"which has {len(cluster)}, counted from 0: use fewer, or a larger cluster"
        )


def _check_groups(cluster: Cluster, on: Mapping[Place, Sequence[Address]]) -> None:
    """Refuse a machine that is in a group and used otherwise as well."""
    user: dict[int, Place] = {}
    for place, names in on.items():
        first, n = place if isinstance(place, tuple) else (place, 1)
        if isinstance(place, tuple) and len(names) > 1:
            raise GraphError(
                f"{names[0]} and {names[1]} are both put on {host_name(place)} of "
                f"cluster {cluster.name!r}: several machines hold one role"
            )
        for index in range(first, first + n):
            if index in user:
                raise GraphError(
                    f"{names[0]} and {on[user[index]][0]} are both put on machine "
                    f"{index} of cluster {cluster.name!r}, one of them together with "
                    "other machines: keep them apart"
                )
            user[index] = place


def _check_memory(
    cluster: Cluster, on: Mapping[Place, Sequence[Address]], memory: Mapping[Address, float]
) -> None:
    for place, names in on.items():
        has = _together(cluster, place).memory
        needs = sum(memory.get(name, 0.0) for name in names)
        if needs > has:
            raise GraphError(
                f"{host_name(place)} of cluster {cluster.name!r} cannot hold "
                f"{', '.join(names)}: they take {needs / 2**30:.3g} GiB, and it has "
                f"{has / 2**30:.3g} GiB: use more machines, more shards or a smaller "
                "net"
            )


def _together(cluster: Cluster, place: Place) -> Given:
    """Return several machines as one; the slowest sets the pace of all."""
    if isinstance(place, int):
        return cluster.machines[place]
    first, n = place
    machines = cluster.machines[first : first + n]
    least = {
        name: min(getattr(machine, name) for machine in machines)
        for name in ("flops", "memory_rate", "message_rate", "memory", "bandwidth")
    }
    most = {
        name: max(getattr(machine, name) for machine in machines)
        for name in ("overhead", "jitter", "handling")
    }
    cores = min(machine.cores for machine in machines)
    return Given(cores=n * cores, **{name: n * rate for name, rate in least.items()}, **most)


def _fabric(cluster: Cluster, hosts: Mapping[Place, Given]) -> Fabric:
    names = {place: host_name(place) for place in hosts}
    firsts = {
        place[0] if isinstance(place, tuple) else place: name for place, name in names.items()
    }
    links = {}
    for ends, rate in cluster.links.items():
        a, b = map(int, ends.split("-"))
        if a in firsts and b in firsts:
            links[firsts[a], firsts[b]] = links[firsts[b], firsts[a]] = rate
    inner_first = sorted(cluster.switches, key=lambda switch: switch.last - switch.first)
    return Fabric(
        cards={
            names[place]: Card(
                bytes_per_second=host.bandwidth, overhead_seconds=cluster.message_overhead
            )
            for place, host in hosts.items()
        },
        uplinks=tuple(
            Uplink(
                hosts=frozenset(
                    name for index, name in firsts.items() if switch.first <= index <= switch.last
                ),
                bytes_per_second=switch.bandwidth,
            )
            for switch in inner_first
        ),
        links=links,
        latency_seconds=cluster.latency,
        jitter=_LATENCY_JITTER,
    )
