"""Roles on the machines of a cluster, and the outages of these machines.

placement   {"shard-0": 0, "replica-0": 1, "replica-1": 1}
machine 1   replica-0, replica-1        one network card; roles share the cores

A role that is spread over several equal machines is simulated on one that has all their cores
and cards (`several`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from distbelief.graph.graph import GraphError
from distbelief.plans.cluster import Cluster, Machine, Outages
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.cpu import Processor
from distbelief.simulation.faults import Outage
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Card, SwitchedNetwork, Uplink


_LATENCY_JITTER: Final = 0.1


def options_for(
    cluster: Cluster,
    placement: Mapping[Address, int],
    *,
    threads: int | Mapping[Address, int] = 1,
    memory: Mapping[Address, float] | None = None,
    share_memory: bool = True,
) -> ClusterOptions:
    """Return the options of a simulated cluster with these roles on these machines.

    Add faults, scales and other options with `dataclasses.replace`. The compute executor of a role
    uses at most `threads` cores; `memory` is the bytes that roles need, none without an entry.
    Roles on one machine fetch and push through shared memory if they `share_memory`, else by
    messages. GraphError if a machine does not exist, or has not enough memory.
    """
    on: dict[int, list[Address]] = defaultdict(list)
    for name, index in placement.items():
        if not 0 <= index < len(cluster):
            raise GraphError(
                f"{name} is put on machine {index} of cluster {cluster.name!r}, which has "
                f"{len(cluster)}, counted from 0: use fewer, or a larger cluster"
            )
        on[index].append(name)
    _check_memory(cluster, on, memory or {})
    machines = {}
    for index, names in on.items():
        for name in names:
            wanted = threads if isinstance(threads, int) else threads.get(name, 1)
            machine = machine_of(cluster.machines[index], threads=wanted)
            machines[name] = replace(machine, host=host_name(index), shares_memory=share_memory)
    return ClusterOptions(
        machines=machines,
        fabric=_fabric(cluster, sorted(on)),
        processors={
            host_name(index): Processor(
                cores=cluster.machines[index].cores,
                bytes_per_second=cluster.machines[index].memory_rate,
            )
            for index in on
        },
    )


def machine_of(given: Machine, *, threads: int = 1) -> SimulatedMachine:
    """Return the machine as a role with `threads` threads sees it."""
    threads = min(threads, given.cores)
    return SimulatedMachine(
        flops_per_second=given.flops * threads / given.cores,
        bytes_per_second=given.memory_rate,
        overhead_seconds=given.overhead,
        jitter=0.0,
        spread=given.jitter,
        threads=threads,
        handling_seconds=given.handling,
        handling_bytes_per_second=given.message_rate / given.cores,
    )


def several(machine: Machine, n: int) -> Machine:
    """Return one machine with the cores, memory and cards of `n` such machines."""
    sums = ("cores", "flops", "memory_rate", "message_rate", "memory", "bandwidth")
    return msgspec.structs.replace(machine, **{name: n * getattr(machine, name) for name in sums})


def host_name(index: int) -> str:
    return f"machine-{index}"


def _check_memory(
    cluster: Cluster, on: Mapping[int, Sequence[Address]], memory: Mapping[Address, float]
) -> None:
    for index, names in on.items():
        has = cluster.machines[index].memory
        needs = sum(memory.get(name, 0.0) for name in names)
        if needs > has:
            raise GraphError(
                f"{host_name(index)} of cluster {cluster.name!r} cannot hold "
                f"{', '.join(names)}: they take {needs / 2**30:.3g} GiB, and it has "
                f"{has / 2**30:.3g} GiB: use more machines, more shards or a smaller "
                "model"
            )


def _fabric(cluster: Cluster, used: Sequence[int]) -> SwitchedNetwork:
    links = {}
    for ends, rate in cluster.links.items():
        a, b = map(int, ends.split("-"))
        if a in used and b in used:
            names = host_name(a), host_name(b)
            links[names] = links[names[::-1]] = rate
    inner_first = sorted(cluster.switches, key=lambda switch: switch.last - switch.first)
    return SwitchedNetwork(
        cards={
            host_name(index): Card(
                bytes_per_second=cluster.machines[index].bandwidth,
                overhead_seconds=cluster.message_overhead,
            )
            for index in used
        },
        uplinks=tuple(
            Uplink(
                hosts=frozenset(
                    host_name(index) for index in used if switch.first <= index <= switch.last
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
    placement: Mapping[Address, int],
    *,
    horizon: Seconds,
    seed: int,
    restarts: bool = False,  # True: the roles restart by themselves; False: the supervisor does
) -> tuple[Outage, ...]:
    """Return the outages of machines that hold roles, ordered by time.

    They come from the cluster's failure and preemption processes, and from its trace. The same seed
    and cluster give the same outages, wherever the roles are. GraphError if the trace ends before
    the horizon, or there are too many outages.
    """
    on: dict[int, list[Address]] = defaultdict(list)
    for name, index in placement.items():
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
