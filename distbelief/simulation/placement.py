"""Roles on the machines of a cluster, and the outages of these machines.

placement   {"shard-0": 0, "replica-0": 1, "replica-1": (2, 4)}
machine 0   shard-0                     one network card; roles share the cores
machine 2 to 5, replica-1               a replica split over four machines, simulated as one
                                        machine with all their cores and cards
"""

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
from distbelief.simulation.network import Card, SwitchedNetwork, Uplink


Place = int | tuple[int, int]  # a machine; or the first of several, and their number

_LATENCY_JITTER: Final = 0.1


def options_for(
    cluster: Cluster,
    placement: Mapping[Address, Place],
    *,
    threads: int | Mapping[Address, int] = 1,
    memory: Mapping[Address, float] | None = None,
    share_memory: bool = True,
) -> ClusterOptions:
    """Return the options of a simulated cluster with these roles on these machines.

    Add faults, scales and other options with `dataclasses.replace`.

    Args:
        cluster: Machines and network.
        placement: The machine of each role.
        threads: Cores that the compute executor of a role uses at most. A role on several
            machines uses all their cores.
        memory: Bytes that each role needs; roles without an entry need none.
        share_memory: Whether roles on one machine fetch and push through shared memory;
            otherwise they use messages.

    Raises:
        GraphError: a machine does not exist, or has not enough memory.
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
    """Return the machine as a role with `threads` threads sees it."""
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
    """Place roles on machines round-robin."""
    return {name: first + index % n_machines for index, name in enumerate(names)}


def host_name(place: Place) -> str:
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
    # A machine of a group must not hold another role.
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
                "model"
            )


def _together(cluster: Cluster, place: Place) -> Given:
    # Several machines as one. The slowest one limits the others.
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


def _fabric(cluster: Cluster, hosts: Mapping[Place, Given]) -> SwitchedNetwork:
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
    return SwitchedNetwork(
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

Absence = tuple[Seconds, int, Seconds]  # start, machine, duration


def drawn_outages(
    cluster: Cluster,
    placement: Mapping[Address, Place],
    *,
    horizon: Seconds,
    seed: int,
    restarts: bool = False,
) -> tuple[Outage, ...]:
    """Return the outages of machines that hold roles, ordered by time.

    They come from the cluster's failure and preemption processes, and from its trace.

    Args:
        cluster: The cluster.
        placement: The machine of each role.
        horizon: Seconds.
        seed: The same seed and cluster give the same outages, wherever the roles are.
        restarts: Whether the roles restart by themselves; otherwise a supervisor does it.

    Raises:
        GraphError: the trace ends before the horizon, or there are too many outages.
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
                f"{cluster.trace.covers:g} of {horizon:g} s: give a longer one, or "
                "simulate less time"
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
            f"{horizon:g} s: simulate less time, or raise mean_time "
            f"({process.mean_time:g} s)"
        )
