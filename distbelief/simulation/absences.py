"""When machines are gone, as faults: drawn from a cluster's processes, or its trace."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from distbelief.graph.layer import GraphError
from distbelief.program.cluster import Cluster
from distbelief.program.outages import Outages
from distbelief.roles import Address, Seconds
from distbelief.simulation.faults import Outage
from distbelief.simulation.placing import Place


N_DRAWN_MAX: Final = 1_000_000

Absence = tuple[Seconds, int, Seconds]  # from when, which machine, for how long


def absences(
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
        _check(process, cluster, horizon)
        for first in range(0, len(cluster), process.group):
            group = range(first, min(first + process.group, len(cluster)))
            stream = np.random.default_rng([seed, 0x60E, kind, first])
            at = float(stream.exponential(process.mean_time))
            while at < horizon:
                yield from ((at, machine, process.away) for machine in group)
                at += process.away + float(stream.exponential(process.mean_time))


def _check(process: Outages, cluster: Cluster, horizon: Seconds) -> None:
    n_groups = math.ceil(len(cluster) / process.group)
    expected = n_groups * horizon / process.mean_time
    if not expected <= N_DRAWN_MAX:
        raise GraphError(
            f"cluster {cluster.name!r} would have about {expected:.0f} outages within "
            f"{horizon:g} s: simulate less, or raise mean_time "
            f"({process.mean_time:g} s)"
        )
