"""Decides which host runs each role: one function, for `train` as for forecasts.

    here              every shard on the supervisor's host
    spread            one shard on each host, those with fast links first; then where there are the
                      fewest bytes of shards for the bandwidth
    beside replicas   shards on the hosts of replicas, in turn: a part of the traffic stays there

With "spread" and "beside replicas" the two copies of a shard are on different hosts if there are
any, and the evaluator goes to a host with room. With each of them, replicas go to the fastest hosts
with free slots, and the coordinator stays on the supervisor's host.

With `[cluster] partitions = { max = N }` replicas are formed once, from the hosts that are there
when the job begins: `replica_groups`.

Shards and evaluator take no slot: a slot is what a process of a replica keeps busy all the time, a
shard works in short bursts. If it took one, a job with as many replicas as cores would not begin.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, Self, final

from distbelief.config.job import ShardPlacement
from distbelief.parameter_server.shard_config import other_copy, shard_of
from distbelief.protocol.role import Address
from distbelief.supervisor.hosts import ALIKE, ClusterConfig, Host, HostTable
from distbelief.supervisor.membership import Membership, RoleRecord
from distbelief.worker.group import rank_name


FIRST: Final = "replica-0"  # all other replicas wait for it
RETURNS_MAX: Final = 1  # restarts in a row after which a shard tries another host


class PlacementPolicy(Protocol):
    """Decides which host runs a role."""

    def place(
        self, role: Sequence[RoleRecord], hosts: HostTable, *, begun: bool
    ) -> Sequence[Host] | None:
        """Return the host of each rank of a role; None: it waits for a host with free slots.

        A role is one rank unless it is a model-parallel group, of which others may have `begun`.
        """
        ...


def takes_slots(record: RoleRecord) -> bool:
    """Return whether a role takes a slot of its host, as ranks of replicas do."""
    return record.trains and record.kind != "coordinator"


def place_roles(
    members: Membership,
    waiting: Mapping[Address, int],  # roles to place, and their incarnations
    hosts: HostTable,
    policy: PlacementPolicy,
) -> dict[Address, Host | None]:
    """Put waiting roles on hosts; None if a role waits on, for a free slot."""
    found: dict[Address, Host | None] = {}
    with hosts.placing():
        # Replicas first: shards may go beside them. The evaluator gets what is left.
        for group in sorted(members.groups(waiting), key=_turn):
            wanted = [record for record in group if record.name in waiting]
            others = [record for record in group if record.name not in waiting]
            running = [record for record in others if hosts.at(record.name)]
            # A group is placed as a whole: the other ranks are about to be launched.
            if not wanted or any(r.is_alive and r not in running for r in others):
                continue
            places = policy.place(wanted, hosts, begun=bool(running))
            for index, record in enumerate(wanted):
                host = None if places is None else places[index]
                found[record.name] = host
                if host is not None:
                    slots = int(takes_slots(record))
                    hosts.put(record.name, waiting[record.name], host, slots=slots)
    return found


def _turn(group: Sequence[RoleRecord]) -> int:
    return 0 if takes_slots(group[0]) else 1 + (group[0].kind != "shard")


@final
@dataclass(frozen=True, kw_only=True)
class RolePlacement:
    """The placement that a job asks for by `[cluster] placement`."""

    shards: ShardPlacement = "here"
    shard_bytes: Mapping[Address, int] = field(default_factory=dict)  # 1 without an entry
    forms: ClusterConfig | None = None  # if replicas are formed by hosts

    @classmethod
    def of(cls, cluster: ClusterConfig | None) -> Self:
        if cluster is None:
            return cls()
        forms = cluster if cluster.costs else None
        return cls(shards=cluster.placement, shard_bytes=cluster.shard_bytes, forms=forms)

    def place(
        self, role: Sequence[RoleRecord], hosts: HostTable, *, begun: bool
    ) -> Sequence[Host] | None:
        first, names = role[0], [record.name for record in role]
        if takes_slots(first):
            if self.forms is not None:
                return _apart(role, hosts, self.forms)
            # Replica 0 stays here if it fits: no network in between.
            if first.group == FIRST and hosts.here.free >= len(role):
                return [hosts.here] * len(role)
            # All replicas wait for the first one, and a group cannot compute without a rank.
            return hosts.find(names, must=first.group == FIRST or begun)
        if self.shards == "here" or first.kind == "coordinator":
            return [hosts.here] * len(role)
        if first.kind == "shard":
            return [self._of_shard(first, hosts)]
        before = hosts.was_at(first.name)
        with_room = [host for host in hosts.usable if host.room >= len(role)]
        with_room.sort(key=lambda host: (host is not before, -host.room))
        return [*with_room, hosts.here][:1] * len(role)

    def _of_shard(self, record: RoleRecord, hosts: HostTable) -> Host:
        allowed = apart_from(hosts.at(other_copy(record.name)), hosts.usable)
        if self.shards == "beside replicas":
            allowed = [host for host in allowed if _has_replica(host)] or allowed
        before = hosts.was_at(record.name)
        if before is not None and before in allowed:
            if record.restarts_in_a_row <= RETURNS_MAX:
                return before
            allowed = [host for host in allowed if host is not before] or allowed
        if self.shards == "beside replicas":
            return min(allowed, key=lambda host: sum(map(_is_shard, host.roles)))
        fastest = max((host.bandwidth for host in allowed), default=0.0) or 1.0

        def load(host: Host) -> tuple[float, int, float, bool]:
            rate = host.bandwidth or fastest  # the supervisor's host has no link to itself
            n_bytes = sum(self.shard_bytes.get(shard_of(r), 1) for r in host.roles if _is_shard(r))
            grade = round(math.log(fastest / rate) / ALIKE)
            return n_bytes / rate, grade, host.used / max(host.slots, 1), host is hosts.here

        return min(allowed, key=load)


def _apart(
    role: Sequence[RoleRecord], hosts: HostTable, cluster: ClusterConfig
) -> list[Host] | None:
    # Each rank on a host that no replica has: where it was formed, else the fastest that holds it.
    found: list[Host] = []
    n, free = role[0].ranks, [host for host in hosts.usable if not _has_replica(host)]
    fits = [host for host in free if host.slots and cluster.holds(host, n)]
    for before in (hosts.was_at(record.name) for record in role[: len(fits)]):
        best = min(fits, key=lambda host: (host is not before, cluster.rank_seconds(host, n)))
        fits.remove(best)
        found.append(best)
    return found if len(found) == len(role) else None


ACROSS: Final = 0.9  # what a step counts of a replica in several domains: it is lost with each

_Groups = tuple[Sequence[Host], "_Groups"] | tuple[()]


def replica_groups(
    hosts: Iterable[Host], n_max: int, cluster: ClusterConfig
) -> list[Sequence[Host]]:
    """Return the hosts of each of `n_max` replicas, or of as many as they can hold.

    As many replicas as possible, then as many steps a second as possible of all together. Ranks
    have like shares and the slowest decides, so hosts are ranked by speed, and neighbours that can
    hold a rank form a group; of hosts that are alike, those of one domain are neighbours. Where it
    makes more, or faster ones, they are ranked by memory.
    """

    def speed(host: Host) -> tuple[int, str, int, Address]:
        grade = round(math.log(cluster.rank_seconds(host, max(cluster.costs))) / ALIKE)
        return grade, host.offer.domain, -host.offer.memory_bytes, host.name

    by_speed = sorted((host for host in hosts if host.slots), key=speed)
    by_memory = sorted(by_speed, key=lambda host: -host.offer.memory_bytes)
    rows = [_grouped(ranked, n_max, cluster) for ranked in (by_speed, by_memory)]
    _, chain = max(rows, key=lambda row: (len(row), row[-1][0]))[-1]
    found: list[Sequence[Host]] = []
    while chain:
        found.append(chain[0])
        chain = chain[1]
    return sorted(found, key=lambda group: min(map(speed, group)))


def _grouped(
    ranked: Sequence[Host], n_max: int, cluster: ClusterConfig
) -> list[tuple[float, _Groups]]:
    # The best 0, 1, 2, ... replicas, by their steps a second; row i is of the first i hosts.
    holding: dict[int, list[int]] = {n: [] for n in cluster.costs}  # hosts that hold such ranks
    rows: list[list[tuple[float, _Groups]]] = [[(0.0, ())]]
    for index, host in enumerate(ranked):
        row = list(rows[-1])
        for n in (n for n in holding if cluster.holds(host, n)):
            holding[n].append(index)
            group = [ranked[place] for place in holding[n][-n:]]
            weight = ACROSS if len({each.offer.domain for each in group}) > 1 else 1.0
            rate = weight / max(cluster.rank_seconds(each, n) for each in group)
            before = rows[holding[n][-n]][:n_max] if len(group) == n else []
            for r, (others, chain) in enumerate(before, start=1):
                if r == len(row):
                    row.append((rate + others, (group, chain)))
                elif rate + others > row[r][0]:
                    row[r] = rate + others, (group, chain)
        rows.append(row)
    return rows[-1]


def form_replicas(
    members: Membership, hosts: HostTable, cluster: ClusterConfig
) -> list[Sequence[Host]]:
    """Give each replica the ranks that its hosts make, and return the hosts of each.

    Replicas without hosts have most ranks, and wait for hosts.
    """
    n_replicas, most = len(members.of("replica")), max(cluster.costs)
    groups = replica_groups(hosts.usable, n_replicas, cluster)
    n_ranks = [len(group) for group in groups] + [most] * (n_replicas - len(groups))
    members.keep_ranks(n_ranks)
    for replica, group in enumerate(groups):
        for rank, host in enumerate(group):
            hosts.reserve(rank_name(replica, rank), host)
    return groups


def apart_from(other: Host | None, hosts: Sequence[Host]) -> Sequence[Host]:
    """Return the hosts that do not fail together with another one; all, if each of them does."""
    if other is None:
        return hosts
    others = [host for host in hosts if host is not other]
    return [host for host in others if host.domain != other.domain] or others or hosts


def _is_shard(role: Address) -> bool:
    return role.startswith("shard-")


def _has_replica(host: Host) -> bool:
    return any(role.startswith("replica-") for role in host.roles)
