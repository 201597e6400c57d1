"""What replicated parameters cost: several machines use the same range of a tensor.

Rows of a convolution's image on four machines, say: all four use its whole weight. The
range is cut into a piece for each of its users. A piece's owner fetches it, broadcasts
it to the others before the forward pass, and adds up their gradients after the backward
pass: one owner, one version, one gradient. That is as much traffic, in both phases and
for each user, as the range has bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from distbelief.graph.region import Region
from distbelief.partition.costs import N_BYTES
from distbelief.program.cluster import Cluster


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A range of a tensor, and who uses it.

    Attributes:
        region: Of the tensor.
        users: Machines, ascending.
        trains: Whether it has a gradient.
    """

    region: Region
    users: tuple[int, ...]
    trains: bool

    @property
    def n_owners(self) -> int:
        """How many own a piece of it, cut along dimension 0."""
        extents = self.region.shape[:1]
        return min(len(self.users), *extents) if extents else 1


def ranges(
    used: Iterable[tuple[int, Mapping[str, Region]]], *, trains: Mapping[str, bool]
) -> list[Range]:
    """Return the ranges that machines use, of all tensors.

    Args:
        used: Machines, and which region of which tensor each uses.
        trains: Which tensors have a gradient.
    """
    users: defaultdict[tuple[str, Region], set[int]] = defaultdict(set)
    for machine, uses in used:
        for name, region in uses.items():
            if region.n_elements:
                users[name, region].add(machine)
    return [
        Range(region=region, users=tuple(sorted(machines)), trains=trains[name])
        for (name, region), machines in users.items()
    ]


def sync_seconds(found: Iterable[Range], cluster: Cluster) -> float:
    """Return the seconds of broadcasts and reductions, of the busiest machine.

    Args:
        found: What is used.
        cluster: The machines.
    """
    seconds: defaultdict[int, float] = defaultdict(float)
    for one in found:
        if len(one.users) > 1:
            each = _phase_seconds(one, cluster) * (2 if one.trains else 1)
            for machine in one.users:
                seconds[machine] += each
    return max(seconds.values(), default=0.0)


def _phase_seconds(one: Range, cluster: Cluster) -> float:
    """Return the seconds of a broadcast, of the user that owns most: the first."""
    n_others, n_owners = len(one.users) - 1, one.n_owners
    n_bytes = float(N_BYTES * one.region.n_elements)
    # Along dimension 0 a piece is of whole rows.
    rows = one.region.shape[0] if one.region.shape else 1
    largest = n_bytes * -(-rows // n_owners) / rows
    received = n_bytes - (n_bytes / n_owners if len(one.users) == n_owners else 0)
    rate = min(cluster.machines[machine].bandwidth for machine in one.users)
    if cluster.links:
        first = one.users[0]
        rate = min(rate, *(cluster.rate(first, other) for other in one.users[1:]))
    overhead = cluster.message_overhead
    sending = (largest / rate + overhead) * n_others
    receiving = received / rate + overhead * min(n_others, n_owners)
    return max(sending, receiving) + cluster.latency
