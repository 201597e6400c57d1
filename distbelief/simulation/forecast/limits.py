"""What limits a run: its busiest resource, and what one more of it brings, by trying it.

    resource            one more of it
    processors          a replica, on one more machine like its own; where all share a host, a core
    shard               a shard, on one more machine where each has its own
    card, link, switch  a second one, at each place where it is as busy

A second run with the same seed tells the gain. A resource may be busy and yet limit nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.plans.cluster import Cluster, Machine
from distbelief.protocol.role import SUPERVISOR, Address
from distbelief.simulation.cluster_options import host_name
from distbelief.simulation.forecast.placed_cluster import PlacedCluster
from distbelief.simulation.forecast.prepare import PreparedJob
from distbelief.simulation.forecast.run import Trial, first_word
from distbelief.simulation.forecast.sweep import Limit, Outcome, Resource, has_target


AS_BUSY: Final = 0.9  # of the busiest one's share of the time: others that limit as much

Stage = Callable[[Job], PreparedJob]
Run = Callable[[Trial], Outcome]


def limit_of(trial: Trial, outcome: Outcome, *, stage: Stage, run: Run) -> Limit | None:
    """Return what limits a run, tried by a second one; None if nothing worked."""
    if not outcome.resources or outcome.error is not None:
        return None
    busiest = outcome.resources[0]
    places = trial.host.placement(trial.job)
    alike = {
        one.name
        for one in outcome.resources
        if one.kind == busiest.kind
        and one.share >= AS_BUSY * busiest.share
        and _users(one, places) == _users(busiest, places)
    }
    users = " and ".join(f"{user}s" for user in _users(busiest, places))
    name = f"{busiest.kind}s of {users}" if users and busiest.kind != "shard" else busiest.kind
    if busiest.kind in {"link", "switch"}:
        name = busiest.name
    more, why_not, gain = "", "", None
    try:
        more, other = _one_more(trial, busiest, alike, places, stage=stage)
        found = run(other)
        gain, why_not = _gain(trial.job.job, outcome, found), found.error or ""
    except JobError as error:
        why_not = str(error)
    return Limit(resource=name, share=busiest.share, more=more, gain=gain, why_not=why_not)


def _users(resource: Resource, places: Mapping[Address, int]) -> tuple[str, ...]:
    """Return the kinds of roles that have this machine: those that matter for it."""
    kinds = {first_word(n) for n, place in places.items() if host_name(place) == resource.name}
    found = tuple(kind for kind in ("replica", "shard") if kind in kinds)
    return found or tuple(kinds & {SUPERVISOR})


def _one_more(
    trial: Trial, busiest: Resource, alike: set[str], places: Mapping[Address, int], *, stage: Stage
) -> tuple[str, Trial]:
    host, job, cluster = trial.host, trial.job.job, trial.host.cluster
    is_computing = busiest.kind in {"shard", "processor"}
    if busiest.kind == "processor" and host.together:
        (machine,) = cluster.machines
        n = machine.cores + 1
        machine = msgspec.structs.replace(machine, cores=n, flops=machine.flops * n / (n - 1))
        return "one more core", _moved(trial, _with(cluster, {0: machine}))
    if is_computing and "replica" in _users(busiest, places):
        n = job.cluster.n_replicas
        last = {place for name, place in places.items() if name.split(".")[0] == f"replica-{n - 1}"}
        for place in sorted(last, reverse=True):  # of each rank
            cluster = cluster.with_copy(place)
        table = msgspec.structs.replace(job.cluster, replicas=n + 1)
        changed = msgspec.structs.replace(job, cluster=table)
        return "one more replica", _staged(trial, changed, stage, host, cluster)
    if is_computing:
        table = msgspec.structs.replace(job.cluster, shards=job.cluster.shards + 1)
        changed = msgspec.structs.replace(job, cluster=table)
        if not host.together and table.placement == "spread":
            own = max(place for name, place in places.items() if first_word(name) == "shard")
            cluster = cluster.with_copy(own)
        return "one more shard", _staged(trial, changed, stage, host, cluster)
    return f"a second {busiest.kind}", _moved(trial, _wider(cluster, busiest.kind, alike))


def _wider(cluster: Cluster, kind: str, names: set[str]) -> Cluster:
    if kind == "card":
        machines = {
            index: msgspec.structs.replace(
                machine, bandwidth=2 * machine.bandwidth, upload=2 * machine.upload
            )
            for index, machine in enumerate(cluster.machines)
            if host_name(index) in names
        }
        return _with(cluster, machines)
    if kind == "switch":  # inner ones first, as in the network
        inner_first = sorted(cluster.switches, key=lambda switch: switch.last - switch.first)
        switches = tuple(
            msgspec.structs.replace(
                switch, bandwidth=switch.bandwidth * (1 + (f"switch-{index}" in names))
            )
            for index, switch in enumerate(inner_first)
        )
        return msgspec.structs.replace(cluster, switches=switches)

    def named(ends: str) -> str:
        return "-".join(sorted(host_name(int(n)) for n in ends.split("-")))

    links = {ends: rate * (1 + (named(ends) in names)) for ends, rate in cluster.links.items()}
    return msgspec.structs.replace(cluster, links=links)


def _with(cluster: Cluster, machines: Mapping[int, Machine]) -> Cluster:
    changed = tuple(machines.get(index, one) for index, one in enumerate(cluster.machines))
    return msgspec.structs.replace(cluster, machines=changed)


def _moved(trial: Trial, cluster: Cluster) -> Trial:
    return replace(trial, host=replace(trial.host, cluster=cluster))


def _staged(trial: Trial, job: Job, stage: Stage, host: PlacedCluster, cluster: Cluster) -> Trial:
    host = replace(host, cluster=cluster, budget=None)
    return replace(trial, job=host.formed(stage(job)), host=host)


def _gain(job: Job, before: Outcome, after: Outcome) -> float | None:
    if has_target(job) and before.target_seconds and after.target_seconds:
        return before.target_seconds / after.target_seconds - 1.0
    if before.samples_per_second and after.samples_per_second:
        return after.samples_per_second / before.samples_per_second - 1.0
    return None
