"""When machines are gone, as faults: drawn from a cluster's processes, or its trace."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from distbelief.graph.graph import GraphError
from distbelief.program.cluster import Cluster, Machine as Given, Outages
from distbelief.roles.role import Address, Seconds
from distbelief.simulation.cpu import Processor
from distbelief.simulation.faults import Outage
from distbelief.simulation.machines import ClusterOptions, Machine
from distbelief.simulation.topology import Card, Fabric, Uplink


# Roles on the machines of a cluster: what that is to a simulation.
#
# placement   {"shard-0": 0, "replica-0": 1, "replica-1": (2, 4)}
# machine 0   shard-0                     one card, its cores shared by its roles
# machine 2 to 5, replica-1               a replica split over four: priced as one
#                                         machine with all their cores and cards

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


N_DRAWN_MAX: Final = 1_000_000

Absence = tuple[Seconds, int, Seconds]  # from when, which machine, for how long


def drawn_outages(
    cluster: Cluster,
    placement: Mapping[Address, Place],
    *,
    horizon: Seconds,
    seed: int,
    restarts: bool = False,
) -> tuple[Outage, ...]:
    """Return what befalls the machines that hold roles, in order of time.

    Args:
        cluster: Whose failures, preemptions and trace these are.
        placement: Which roles die with a machine.
        horizon: Seconds within which.
        seed: Same seed and cluster, same outages, wherever the roles are.
        restarts: Whether the roles come back by themselves; else a supervisor asks.

    Raises:
        GraphError: the trace ends before the horizon, or there are too many.
    """
    on: dict[int, list[Address]] = defaultdict(list)
    for name, place in placement.items():
        first, n = place if isinstance(place, tuple) else (place, 1)
        for index in range(first, first + n):
            on[index].append(name)
    found = [*_drawn(cluster, horizon=horizon, seed=seed)]
    if cluster.trace is not None:
        if cluster.trace.covers < horizon:
            raise GraphError(
                f"the trace of cluster {cluster.name!r} ends early: it covers "
                f"{cluster.trace.covers:g} s, and {horizon:g} s are asked for: give a "
                "longer one, or simulate less"
            )
        found += [(lost.at, lost.machine, lost.away) for lost in cluster.trace.outages]
    return tuple(
        Outage(at=at, roles=tuple(on[machine]), seconds=away, restarts=restarts)
        for at, machine, away in sorted(found)
        if machine in on and at < horizon and away > 0
    )


def _drawn(cluster: Cluster, *, horizon: Seconds, seed: int) -> Iterator[Absence]:
    for kind, process in enumerate((cluster.failures, cluster.preemptions)):
        if process is None:
            continue
        _check_outages(process, cluster, horizon)
        for first in range(0, len(cluster), process.group):
            group = range(first, min(first + process.group, len(cluster)))
            stream = np.random.default_rng([seed, 0x60E, kind, first])
            at = float(stream.exponential(process.mean_time))
            while at < horizon:
                yield from ((at, machine, process.away) for machine in group)
                at += process.away + float(stream.exponential(process.mean_time))


def _check_outages(process: Outages, cluster: Cluster, horizon: Seconds) -> None:
    n_groups = math.ceil(len(cluster) / process.group)
    expected = n_groups * horizon / process.mean_time
    if not expected <= N_DRAWN_MAX:
        raise GraphError(
            f"cluster {cluster.name!r} would have about {expected:.0f} outages within "
            f"{horizon:g} s: simulate less, or raise mean_time "
            f"({process.mean_time:g} s)"
        )
