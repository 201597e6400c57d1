"""What must hold after every event, whatever breaks: section 3 of the design.

    identity   a shard's clock never falls within one life, and counts its pushes
    push       every push is applied once, or never; never NaN, never half
    staleness  between 0 and the shard's clock
    bounds     queues are no longer than there are clients; host memory does not grow
               with the number of lives

A class per invariant: built with the cluster, asked after every event (`watch`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distbelief.parameter_server.shard import ParameterServerShard
from distbelief.roles import Address
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.vectors import Vector


@dataclass(kw_only=True)
class Invariants:
    """All of them, for these shards."""

    cluster: SimulatedCluster
    shards: Sequence[Address]
    n_clients: int
    host_bytes_max: int
    clocks: dict[tuple[Address, int], float] = field(default_factory=dict)

    def __call__(self) -> None:
        for name in self.shards:
            if name in self.cluster.alive:
                self.clock_rises(name)
                self.staleness_is_bounded(name)
                self.queue_is_bounded(name)
        self.memory_is_bounded()

    def counters(self, name: Address) -> dict[str, float]:
        return dict(self.cluster.role(name).status()[1])

    def clock_rises(self, name: Address) -> None:
        life = name, self.cluster.incarnation(name)
        counters = self.counters(name)
        clock = counters["clock"]
        assert clock >= self.clocks.get(life, 0.0), f"{name}'s clock fell to {clock}"
        assert counters["pushes_applied"] <= clock
        self.clocks[life] = clock

    def staleness_is_bounded(self, name: Address) -> None:
        counters = self.counters(name)
        assert 0 <= counters["staleness_max"] <= counters["clock"]

    def queue_is_bounded(self, name: Address) -> None:
        assert self.counters(name)["queue"] <= self.n_clients

    def memory_is_bounded(self) -> None:
        for name in self.shards:
            taken = self.cluster.memory(name).n_bytes
            assert taken <= self.host_bytes_max, f"{taken} bytes on {name}'s host"


def times_applied(cluster: SimulatedCluster, name: Address) -> Vector:
    """Return how often a shard of `workers` has applied each push, by mark."""
    role = cluster.role(name)
    assert isinstance(role, ParameterServerShard)
    return -role._values.vector


def assert_applied_once_or_never(cluster: SimulatedCluster, name: Address) -> None:
    times = times_applied(cluster, name)
    wrong = np.flatnonzero(~np.isin(times, (0.0, 1.0)))
    assert not wrong.size, f"{name} applied push {wrong[0]} {times[wrong[0]]} times"
