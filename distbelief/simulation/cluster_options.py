"""Roles on the machines of a cluster, and the outages of these machines.

placement   {"shard-0": 0, "replica-0": 1, "replica-1": 1}
machine 1   replica-0, replica-1        one network card; roles share the cores

A role that is spread over several equal machines is simulated on one that has all their cores
and cards (`several`).
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import merge
from itertools import groupby
from operator import attrgetter
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
        fabric=_fabric(cluster, dict.fromkeys(sorted(on))),
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
    sums = ("cores", "flops", "memory_rate", "message_rate", "memory", "bandwidth", "upload")
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


def _fabric(cluster: Cluster, used: Collection[int]) -> SwitchedNetwork:
    links = {}
    for ends, rate in cluster.links.items():
        a, b = map(int, ends.split("-"))
        if a in used and b in used:
            names = host_name(a), host_name(b)
            links[names] = links[names[::-1]] = rate
    latencies = {}
    for ends, seconds in cluster.latencies.items():
        a_name, _, b_name = ends.partition("-")
        names = (
            (host_name(int(a_name)), host_name(int(b_name)))
            if a_name.isdigit()
            else (a_name, b_name)
        )
        latencies[names] = latencies[names[::-1]] = seconds
    inner_first = sorted(cluster.switches, key=lambda switch: switch.last - switch.first)
    return SwitchedNetwork(
        cards={
            host_name(index): Card(
                bytes_per_second=cluster.machines[index].bandwidth,
                overhead_seconds=cluster.message_overhead,
                sends_per_second=cluster.machines[index].upload,
                region=cluster.machines[index].region,
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
        latencies=latencies,
        jitter=_LATENCY_JITTER,
    )


N_OUTAGES_MAX: Final = 1_000_000  # of one run

_spot_key: Final = attrgetter("region", "preemptions")  # no group spans two regions

Absence = tuple[Seconds, int, Seconds]  # start, machine, duration


def outages(
    cluster: Cluster,
    placement: Mapping[Address, int],
    *,
    seed: int,
    restarts: bool = False,  # True: the roles restart by themselves; False: the supervisor does
) -> Iterator[Outage]:
    """Yield the outages of machines that hold roles, ordered by time; there may be no end.

    They come from the failure and preemption processes, from the trace, and from when machines join
    and leave: before and after, they are away. The same seed and cluster give the same outages,
    wherever the roles are. GraphError if there are too many.
    """
    on: dict[int, list[Address]] = defaultdict(list)
    for name, index in placement.items():
        on[index].append(name)
    recorded = () if cluster.trace is None else cluster.trace.outages
    found = merge(
        sorted(_comings(cluster, on)),
        ((lost.at, lost.machine, lost.away) for lost in recorded),
        *_processes(cluster, on, seed=seed),
    )
    n = 0
    for at, index, away in found:
        gone = at > cluster.machines[index].leave
        if index not in on or not away > 0 or gone:
            continue
        n += 1
        if n > N_OUTAGES_MAX:
            raise GraphError(
                f"cluster {cluster.name!r} has more than {N_OUTAGES_MAX:,} outages within "
                f"{at:.3g} s: simulate less time, or raise mean_time"
            )
        yield Outage(at=at, roles=tuple(on[index]), seconds=away, restarts=restarts)


def _comings(cluster: Cluster, used: Iterable[int]) -> Iterator[Absence]:
    for index in used:
        machine = cluster.machines[index]
        if machine.join:
            yield 0.0, index, machine.join
        if machine.leave < math.inf:
            yield machine.leave, index, math.inf


def _processes(
    cluster: Cluster, used: Collection[int], *, seed: int
) -> Iterator[Iterator[Absence]]:
    everyone = range(len(cluster))
    found = [(everyone, cluster.failures), (everyone, cluster.preemptions)]
    first = 0
    for (_, own), alike in groupby(cluster.machines, key=_spot_key):
        last = first + len(list(alike))
        found.append((range(first, last), own))
        first = last
    for kind, (machines, process) in enumerate(found):
        if process is None:
            continue
        for start in machines[:: process.group]:
            group = range(start, min(start + process.group, machines.stop))
            # Others' outages are of no use: once these have left, a search would never end.
            until = max((cluster.machines[n].leave for n in group if n in used), default=None)
            if until is not None:
                yield _drawn(process, group, until, stream=[seed, 0x60E, min(kind, 2), start])


def _drawn(
    process: Outages, group: range, until: Seconds, *, stream: Sequence[int]
) -> Iterator[Absence]:
    drawn = np.random.default_rng(stream)
    at = float(drawn.exponential(process.mean_time))
    while at <= until:
        yield from ((at, machine, process.away) for machine in group)
        at += process.away + float(drawn.exponential(process.mean_time))
