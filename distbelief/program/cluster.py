"""Machines and the network between them, as far as prices depend on them.

Every figure says where it is from: measured on this host, or written into a file by
somebody who may never have seen the machines.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, Literal, final

import msgspec

from distbelief.graph.layer import GraphError


Origin = Literal["measured", "assumed"]

UNLIMITED: Final = math.inf


@final
class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine.

    Attributes:
        flops: Floating point operations per second in a large matrix product.
        memory_rate: Bytes per second to and from memory.
        message_rate: Bytes per second of messages, sent or received, that would keep
            its processors busy; what it computes meanwhile takes longer.
        memory: Bytes that parameters, gradients and activations may take.
        overhead: Seconds that each layer costs, however small.
        jitter: Standard deviation of the logarithm of its compute times: 0.1 is a
            machine whose steps are often 10 % faster or slower.
        bandwidth: Bytes per second that it can send, and likewise receive.
    """

    flops: float
    memory_rate: float
    message_rate: float = UNLIMITED
    memory: float = UNLIMITED
    overhead: float = 0.0
    jitter: float = 0.0
    bandwidth: float

    def __post_init__(self) -> None:
        for name in ("flops", "memory_rate", "message_rate", "memory", "bandwidth"):
            if not getattr(self, name) > 0:
                raise GraphError(
                    f"a machine's {name} is {getattr(self, name)}; use a number above 0"
                )
        for name in ("overhead", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise GraphError(
                    f"a machine's {name} is {getattr(self, name)}; use 0 or more"
                )


@final
class Cluster(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Machines, fastest first, and what lies between them.

    Attributes:
        name: What it is called.
        machines: All there are.
        latency: Seconds from the end of sending a message to its arrival.
        message_overhead: Seconds that a message, however small, keeps both its ends
            from sending and receiving others: what software costs.
        links: Bytes per second between two machines, by "0-5", where it is less than
            both of them can do; in both directions.
        origin: Where the figures are from.
        note: What a reader should know of them.
    """

    name: str
    machines: tuple[Machine, ...]
    latency: float = 0.0
    message_overhead: float = 0.0
    links: Mapping[str, float] = msgspec.field(default_factory=dict)
    origin: Origin = "assumed"
    note: str = ""

    def __post_init__(self) -> None:
        if not self.machines:
            raise GraphError(f"cluster {self.name!r} has no machine")
        for name in ("latency", "message_overhead"):
            if not 0 <= getattr(self, name) < math.inf:
                raise GraphError(
                    f"cluster {self.name!r}: {name} is {getattr(self, name)}; use 0 or "
                    "more"
                )
        for ends, rate in self.links.items():
            if not rate > 0:
                raise GraphError(
                    f"cluster {self.name!r}: link {ends} has bandwidth {rate}; use a "
                    "number above 0, or leave machines out that nobody can reach"
                )

    def __len__(self) -> int:
        """How many machines."""
        return len(self.machines)

    def first(self, n: int) -> "Cluster":
        """Return the cluster with its first n machines only.

        Raises:
            GraphError: it has fewer.
        """
        if not 1 <= n <= len(self.machines):
            raise GraphError(
                f"cluster {self.name!r} has {len(self.machines)} machines; {n} are "
                "asked for"
            )
        return msgspec.structs.replace(self, machines=self.machines[:n])

    def rate(self, sender: int, receiver: int) -> float:
        """Return the most bytes per second from one machine to another."""
        rate = min(self.machines[sender].bandwidth, self.machines[receiver].bandwidth)
        if not self.links:
            return rate
        low, high = sorted((sender, receiver))
        return min(rate, self.links.get(f"{low}-{high}", math.inf))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all machines, and all links, are alike."""
        return not self.links and len(set(self.machines)) == 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all its figures; equal machines are equal whatever their name."""
        delays = (self.latency, self.message_overhead)
        figures = (self.machines, delays, dict(self.links))
        encoded = msgspec.json.encode(figures, order="sorted")
        return hashlib.sha256(encoded).hexdigest()[:16]


def uniform(name: str, machine: Machine, n: int, *, latency: float = 0.0) -> Cluster:
    """Return a cluster of n equal machines."""
    return Cluster(name=name, machines=(machine,) * n, latency=latency)


def weights(machines: Sequence[Machine]) -> list[float]:
    """Return the speed of each machine, the fastest being 1."""
    fastest = max(machine.flops for machine in machines)
    return [machine.flops / fastest for machine in machines]
