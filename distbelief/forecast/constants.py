"""Every figure that a forecast rests on, in words, with where it is from."""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Final

from distbelief import units
from distbelief.program.cluster import Cluster, Machine
from distbelief.program.outages import Outages


Constant = tuple[str, str, str]
"""Name, value, origin."""

_DIMENSIONS: Final[Mapping[str, units.Dimension]] = {
    "flops": "compute",
    "memory_rate": "rate",
    "memory": "bytes",
    "bandwidth": "rate",
    "message_rate": "rate",
    "overhead": "time",
    "handling": "time",
}


def constants_of(cluster: Cluster) -> list[Constant]:
    """Return the figures of a cluster, one row each; of equal machines once."""
    rows: list[Constant] = []
    for machine, group in groupby(cluster.machines):
        count = len(list(group))
        rows.append(("machines", str(count), _origin(cluster, "count")))
        rows += _machine(cluster, machine)
    rows += [
        ("latency", _microseconds(cluster.latency), _origin(cluster, "latency")),
        (
            "message overhead",
            _microseconds(cluster.message_overhead),
            _origin(cluster, "message_overhead"),
        ),
    ]
    rows += [
        (f"link {ends}", _shown(rate, "rate"), _origin(cluster, "links"))
        for ends, rate in cluster.links.items()
    ]
    rows += [
        (
            f"switch {switch.first}-{switch.last}",
            _shown(switch.bandwidth, "rate"),
            _origin(cluster, "switches"),
        )
        for switch in cluster.switches
    ]
    rows += [
        (name, _process(process), _origin(cluster, name))
        for name, process in (("failures", cluster.failures), ("preemptions", cluster.preemptions))
        if process is not None
    ]
    if (trace := cluster.trace) is not None:
        watched = f"{len(trace.outages):,} outages within {trace.covers:g} s"
        rows.append(("trace", watched, _origin(cluster, "trace")))
    return rows


def _machine(cluster: Cluster, machine: Machine) -> list[Constant]:
    rows: list[Constant] = [("cores", str(machine.cores), _origin(cluster, "cores"))]
    for name, dimension in _DIMENSIONS.items():
        value = getattr(machine, name)
        if math.isfinite(value) and value:
            text = _shown(value, dimension)
            rows.append((name.replace("_", " "), text, _origin(cluster, name)))
    rows.append(("jitter", f"{machine.jitter:.3g}", _origin(cluster, "jitter")))
    return rows


def _process(process: Outages) -> str:
    often = f"of each machine every {process.mean_time / 3600:.3g} h"
    return f"{often}, away {process.away:.3g} s, {process.group} together"


def _origin(cluster: Cluster, name: str) -> str:
    return cluster.origins.get(name, cluster.origin)


def _shown(value: float, dimension: units.Dimension) -> str:
    if dimension == "time":
        return _microseconds(value)
    digits = float(f"{value:.3g}")
    match dimension:
        case "rate":
            return f"{digits / 1e9:.3g} GB/s"
        case "compute":
            return f"{digits / 1e9:.3g} GFLOP/s"
        case _:
            return f"{value / 2**30:.3g} GiB"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
