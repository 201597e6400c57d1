"""The machines on which a job is simulated, and the cost of its work on them.

no --cluster          this host, as `train` uses it: all roles share its cores
--cluster here        --machines machines like this host
--cluster NAME, FILE  a built-in cluster, or a cluster file

On a cluster, `supervisor.role_placement` decides where roles run, as if its machines had joined the
job with cores for one process of a replica each. One more machine is the supervisor's own, which
runs no replica. So with `[cluster] placement = "spread"` and enough machines, each shard and each
rank of a replica has a machine of its own (Dean et al. 2012, section 4: the parameter server is
itself spread over machines). A role whose machine is lost comes back on the same one.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.config.algorithms import facts_of
from distbelief.config.job import Job
from distbelief.core import units
from distbelief.core.errors import JobError
from distbelief.graph.graph import GraphError
from distbelief.parameter_server.codecs import Bfloat16
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.plans.cluster import Cluster, Machine, Outages, uniform
from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.planner.profiling.this_host import HERE, figures, here
from distbelief.protocol import Offer
from distbelief.protocol.role import HOST, SUPERVISOR, Address, Compute, Cost, Seconds
from distbelief.simulation.cluster_options import options_for, outages
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault, Outage
from distbelief.simulation.forecast.calibration import (
    EVENT_SECONDS,
    WAKE_SECONDS,
    Rates,
    amount,
    job_key,
    load_rates,
    measure,
    save_rates,
)
from distbelief.simulation.forecast.prepare import Adapt, PreparedJob, costed
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.network import WITHIN_HOST
from distbelief.supervisor.hosts import ClusterConfig, Host, HostTable
from distbelief.supervisor.membership import Membership
from distbelief.supervisor.role_placement import (
    FIRST,
    RolePlacement,
    form_replicas,
    place_roles,
    replica_groups,
    takes_slots,
)
from distbelief.worker.build import roster_of


AWAY_MAX: Final = 86400.0  # seconds: who would wait longer for a machine?
VECTORS_OF_REPLICA: Final = 4  # values, gradients, accumulated gradients, fetch buffer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCluster:
    cluster: Cluster
    reference: Machine  # one core of this host, on which the rates were measured
    rates: Rates | None  # measured costs; None: the costs that the roles compute
    together: bool  # all roles share the first machine
    budget: int | None = None  # --machines; None: all

    def placement(self, prepared: PreparedJob) -> dict[Address, int]:
        """Return the machine of each role; the last one used is the supervisor's own."""
        n_used = self.n_needed(prepared)
        if self.together:
            return dict.fromkeys(prepared.kinds, 0)
        if n_used > len(self.cluster):
            has = f"cluster {self.cluster.name!r} has {len(self.cluster)} machines, and"
            larger = "name a larger cluster"
            if self.budget is not None:
                has, larger = f"--machines {self.budget}:", "raise --machines"
            raise JobError(
                f"{has} the job needs {n_used}: one for each rank of a replica, and one for the "
                "supervisor and other small roles. Lower [cluster] replicas or partitions, or "
                f"{larger}"
            )
        config, members = self._config(prepared), Membership(prepared.roster)
        hosts = hosts_of(self.cluster.first(n_used), config)
        if config.costs:
            form_replicas(members, hosts, config)
        waiting = {record.name: 1 for record in members}
        places = {SUPERVISOR: n_used - 1}
        for name, host in place_roles(members, waiting, hosts, RolePlacement.of(config)).items():
            assert host is not None, f"{name} waits for a slot"
            places[name] = n_used - 1 if host is hosts.here else int(host.label)
        return places

    def _config(self, prepared: PreparedJob) -> ClusterConfig:
        config = ClusterConfig.of(prepared.job, prepared.layout, slots_here=0)
        return replace(config, costs=prepared.preflight.costs)

    def formed(self, prepared: PreparedJob) -> PreparedJob:
        """Return the job with the ranks that its replicas have on this cluster."""
        if not prepared.preflight.costs:
            return prepared
        if self.together:
            prepared.job.cluster.check_formed()
        job, config = prepared.job, self._config(prepared)
        groups = replica_groups(
            hosts_of(self.cluster, config).usable, job.cluster.n_replicas, config
        )
        if len(groups) < job.cluster.n_replicas:
            raise JobError(
                f"cluster {self.cluster.name!r}: its machines hold {len(groups)} replicas, and "
                f"[cluster] replicas = {job.cluster.n_replicas}: use fewer, a larger max of "
                "partitions, or a larger cluster"
            )
        found = prepared.preflight.formed(tuple(map(len, groups)))
        return replace(prepared, preflight=found, roster=tuple(roster_of(job, ranks=found.ranks)))

    def n_needed(self, prepared: PreparedJob) -> int:
        """Return how many machines the job uses: more than there are if it does not fit."""
        if self.together:
            return 1
        if prepared.preflight.costs:
            return len(self.cluster)
        members = Membership(prepared.roster)
        n_needed = 1 + sum(map(takes_slots, members))
        apart = prepared.job.cluster.placement == "spread"
        n_useful = n_needed + len(members.of("shard")) * apart
        return max(n_needed, min(n_useful, len(self.cluster)))

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        """Return the options of the simulation; JobError if the job does not fit the cluster."""
        shares = prepared.job.cluster.shared_memory
        try:
            options = options_for(
                self.cluster,
                self.placement(prepared),
                threads=prepared.job.cluster.threads,
                memory=memory_of(prepared, by_blocks=not (self.together and shares)),
                share_memory=shares,
            )
        except GraphError as error:
            raise JobError(f"--cluster {self.cluster.name}: {error}") from error
        if self.together and self.rates is not None:
            # On one host, the handling of events uses the shared cores too.
            machines = {
                name: replace(machine, event_seconds=EVENT_SECONDS, wake_seconds=WAKE_SECONDS)
                for name, machine in options.machines.items()
            }
            link = replace(WITHIN_HOST, latency_seconds=self.cluster.latency, jitter=0.0)
            options = replace(options, machines=machines, link_within_host=link)
        return replace(options, start=(SUPERVISOR,), faults=tuple(faults))

    @property
    def loses_machines(self) -> bool:
        cluster = self.cluster
        return any((cluster.failures, cluster.preemptions, cluster.trace)) or any(
            machine.preemptions or machine.join or machine.leave < math.inf
            for machine in {id(machine): machine for machine in cluster.machines}.values()
        )

    def outages(self, prepared: PreparedJob, *, seed: int) -> Iterator[Outage]:
        """Yield the outages of the job's machines, in order of time; there may be no end.

        JobError if no replica can ever come back, or a machine leaves with a shard for days.
        """
        places, kinds = self.placement(prepared), prepared.kinds
        # The supervisor's machine never fails: it is the user's own host.
        placement = {n: place for n, place in places.items() if place != places[SUPERVISOR]}
        where = f"--cluster {self.cluster.name}"
        staying = {n for n, kind in kinds.items() if kind == "replica"}
        for name, place in placement.items():
            if name not in staying and self.cluster.machines[place].leave < math.inf:
                raise JobError(
                    f"{where}: machine {place} leaves, and {name} is there, which no other machine "
                    'takes over: use [cluster] placement = "here", or more machines that stay'
                )
        try:
            for outage in outages(self.cluster, placement, seed=seed):
                for name in outage.roles if AWAY_MAX < outage.seconds < math.inf else ():
                    if _is_awaited(name, kinds[name], at=outage.at):
                        raise JobError(
                            f"{where}: machine {places[name]} is away for "
                            f"{outage.seconds / 86400:,.1f} days after {outage.at:.3g} s, and the "
                            f'job waits for {name} there: use [cluster] placement = "here", or '
                            "let it come earlier"
                        )
                yield outage
                if outage.seconds == math.inf:
                    staying.difference_update(outage.roles)
                if not staying:
                    raise JobError(
                        f"{where}: all machines with replicas have left after {outage.at:g} s, and "
                        "the job is not over: let some stay, or let [stop] end it earlier"
                    )
        except GraphError as error:
            raise JobError(f"{where}: {error}") from error

    def late(self, prepared: PreparedJob) -> list[str]:
        """Return a warning if nothing is trained until a machine joins."""
        places, kinds = self.placement(prepared), prepared.kinds
        joins = [
            (self.cluster.machines[place].join, place, name)
            for name, place in places.items()
            if place != places[SUPERVISOR] and _is_awaited(name, kinds[name], at=0.0)
        ]
        join, place, name = max(joins, default=(0.0, 0, ""))
        said = f"machine {place} joins after {join:,g} s, and the job waits for {name} there"
        return [f"{said}: times of training, and to the target, begin then"] if join else []

    def price(
        self, prepared: PreparedJob, absences: Iterable[Outage], *, seconds: Seconds
    ) -> float | None:
        """Return what the job's machines cost while they are there; None if none has a price."""
        cluster = self.cluster
        if not any(machine.price for machine in cluster.machines):
            return None
        places = self.placement(prepared)
        away, back_at = dict.fromkeys(places.values(), 0.0), dict.fromkeys(places.values(), 0.0)
        for outage in absences:
            place = places[outage.roles[0]]
            ends = min(outage.at + outage.seconds, seconds)
            away[place] += max(0.0, ends - max(outage.at, back_at[place]))
            back_at[place] = max(back_at[place], ends)
        unused = range(self.n_needed(prepared))  # machines without a role are paid for, too
        return sum(
            cluster.machines[n].price * (seconds - away.get(n, 0.0)) / 3600.0 for n in unused
        )

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]:
        builders = prepared.builders(machines_go=self.loses_machines)
        if self.rates is None:
            return builders
        adapt: Adapt = partial(
            _at_cost, rates=self.rates, reference=self.reference, on_one_host=self.together
        )
        return costed(builders, prepared.kinds, adapt=adapt)


def _is_awaited(name: Address, kind: str, *, at: Seconds) -> bool:
    # Others train on without a replica, once the first one has begun.
    is_first = not at and name.partition(".")[0] == FIRST
    return is_first or kind not in {"replica", "rank"}


def hosts_of(cluster: Cluster, config: ClusterConfig) -> HostTable:
    """Return the hosts of a job as if all machines but the last, the supervisor's, had joined."""
    hosts = HostTable(slots_here=0)
    for index, machine in enumerate(cluster.machines[:-1]):
        offer = Offer(
            incarnation=1,
            label=str(index),
            endpoint="",
            cores=config.threads,
            memory_bytes=int(min(machine.memory, 1e18)),
            devices=(config.device,),
            flops=machine.flops / machine.cores,
            domain=machine.region,
        )
        host = Host.of(Address(f"{HOST}{index}"), offer, 0.0)
        # At most what a host may report.
        config.admit(host, min(cluster.rate(len(cluster) - 1, index), 1e18))
        hosts.joined[host.name] = host
    return hosts


def vectors_of_shard(
    rule: UpdateRule | None, *, n_clients: int, by_blocks: bool, policy: ExchangePolicy = DOWNPOUR
) -> float:
    """Return how many vectors a shard holds: values, the rule's state, push buffers, lent copies.

    `by_blocks`: clients on other hosts read copies; otherwise they read the values. Of encoded
    pushes it holds the words of one for each client, at the end of bfloat16; to know what has
    changed, or to move by words, it copies the values.
    """
    codec, fetched, n_more = policy.push_codec, policy.fetched, 0.0
    of_pushes = 2.0
    if codec is not None:
        of_pushes = max(codec.words_per_element, Bfloat16().words_per_element)
    if fetched not in {"float32", "bfloat16"}:
        n_more = 1.5 if fetched == "changed" else 3.0  # and a log, and what is held back
    rules = () if rule is None else rule.rules
    n_state = len({name for one in rules for name in one.state(0, "f")})
    n_lent = min(n_clients, ShardConfig.n_copies) if by_blocks else 0
    return 1 + n_state + of_pushes * n_clients + n_lent + n_more


def memory_of(prepared: PreparedJob, *, by_blocks: bool) -> dict[Address, float]:
    """Return the approximate bytes of the vectors of each role."""
    layout, kinds, job = prepared.layout, prepared.kinds, prepared.job
    facts = facts_of(job)
    n_vectors = vectors_of_shard(
        facts.rule,
        n_clients=job.cluster.n_replicas,
        by_blocks=by_blocks,
        policy=facts.policy or DOWNPOUR,
    )
    n_vectors += facts.n_vectors
    n_shards, itemsize = layout.n_shards, layout.dtype.itemsize
    whole = sum(float(layout.shard_size(k)) for k in range(n_shards)) * itemsize
    # Each thread has gradients of its own, and a sum of them.
    n_more = 2 * ((facts.threads or 1) - 1)
    ranks = {record.name: record.ranks for record in Membership(prepared.roster)}
    bytes_of = {
        "shard": n_vectors * whole / n_shards,
        "replica": (VECTORS_OF_REPLICA + n_more) * whole,
        "rank": VECTORS_OF_REPLICA * whole,
        "evaluator": whole,
    }
    return {name: bytes_of.get(kind, 0.0) / ranks.get(name, 1) for name, kind in kinds.items()}


def _at_cost(
    kind: str, asked: Compute, *, rates: Rates, reference: Machine, on_one_host: bool
) -> Compute:
    # Replace the cost of work by one that gives the measured time on this host. The time was
    # measured with all cores busy, so it already includes the contention for memory here;
    # on another machine the memory's part scales with its memory rate.
    rate = rates.rate_of(kind, asked)
    if rate is None:
        return asked
    units = amount(asked.cost, rate.unit)
    seconds, waiting = rate.seconds * units, rate.waiting * units
    if rate.unit == "bytes" and not on_one_host:
        cost = Cost(n_bytes=seconds * reference.memory_rate, waiting=waiting)
    else:
        flops = seconds * reference.flops
        cost = Cost(flops=flops, waiting=waiting, threads=asked.cost.threads)
    return msgspec.structs.replace(asked, cost=cost)


N_HERE: Final = 64  # machines of `--cluster here` without --machines

# Between processes of this host: latency of a small message until it is measured, and bytes
# per second.
LOOPBACK_SECONDS: Final = 60e-6
LOOPBACK_RATE: Final = 4e9

SHARE_MIN: Final = 0.9  # of a core; with less, other programs disturbed the measurement


@final
class HostCosts:
    """A cluster, and the measured costs of jobs on this host.

    JobError if the cluster does not exist, or has fewer machines.
    """

    def __init__(
        self,
        name: str | None,  # or path; None: this host
        *,
        machines: int | None,  # None: all
        measures: bool,  # the cost of work on this host
    ) -> None:
        self._measures = measures
        self._budget = machines
        self._rates: dict[str, Rates] = {}
        self._together = name is None and machines is None
        try:
            self.cluster = _cluster(name, machines)
        except GraphError as error:
            name = HERE if name is None else name
            why = str(error).removeprefix(f"{Path(name)}: ")
            shown = name or repr("")
            raise JobError(f"--cluster {shown}: {why}") from error

    @property
    def constants(self) -> tuple[tuple[str, str], ...]:
        rows = constants_of(self.cluster)
        for rates in list(self._rates.values())[-1:]:
            rows.append(("work of the roles", f"{len(rates.work)} kinds, measured on this host"))
            if rates.share < SHARE_MIN:
                rows.append(("free share of each core then", f"{100 * rates.share:.0f} %"))
            if self._together:
                rows.append(("core time of an event", _shown(EVENT_SECONDS, "time")))
                rows.append(("until a sleeping thread continues", _shown(WAKE_SECONDS, "time")))
        if not self._measures:
            rows.append(("work of the roles", "counted, not measured"))
        return tuple(rows)

    def hosting(self, job: Job, *, tell: Callable[[str], None]) -> PlacedCluster:
        """Return the machines for a job; measures the cost of its work if it is not known.

        `tell` is called before a measurement. JobError if the job cannot be run.
        """
        rates = self._rates_of(job, tell) if self._measures else None
        if rates is not None and self._together:
            # The core time of an event has all that a message between processes takes.
            self.cluster = msgspec.structs.replace(self.cluster, latency=0.0)
        return PlacedCluster(
            cluster=self.cluster,
            reference=_one_core(),
            rates=rates,
            together=self._together,
            budget=self._budget,
        )

    def _rates_of(self, job: Job, tell: Callable[[str], None]) -> Rates:
        key = job_key(job)
        if key not in self._rates:
            known = load_rates(job)
            if known is None:
                tell("Measuring the cost of the job's work on this host")
                known = measure(job, n_processes=os.cpu_count() or 1)
                save_rates(job, known)
            self._rates[key] = known
        return self._rates[key]


def _cluster(name: str | None, machines: int | None) -> Cluster:
    if name is None and machines is None:
        return this_host()
    if name is None or name == HERE:
        return here(N_HERE if machines is None else machines)
    cluster = load_cluster(name)
    return cluster if machines is None else cluster.first(machines)


_DIMENSIONS: Final[Mapping[str, units.Dimension]] = {
    "flops": "compute",
    "memory_rate": "rate",
    "memory": "bytes",
    "bandwidth": "rate",
    "upload": "rate",
    "join": "time",
    "leave": "time",
    "message_rate": "rate",
    "overhead": "time",
    "handling": "time",
}


def _shown(value: float, dimension: units.Dimension, name: str = "") -> str:
    if name == "memory":
        return f"{value / 2**30:.3g} GiB"
    if name in {"memory_rate", "message_rate"}:  # of memory; links are in bits
        return f"{value / 1e9:.3g} GB/s"
    return units.show(float(f"{value:.3g}"), dimension)


def constants_of(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the constants of a cluster; equal machines are listed once."""
    rows: list[tuple[str, str]] = []
    for machine, group in groupby(cluster.machines):
        rows += [("machines", str(len(list(group)))), ("cores", str(machine.cores))]
        for name, dimension in _DIMENSIONS.items():
            value = getattr(machine, name)
            if math.isfinite(value) and value:
                rows.append((name.replace("_", " "), _shown(value, dimension, name)))
        rows.append(("jitter", f"{machine.jitter:.3g}"))
        rows += [("region", machine.region)] * bool(machine.region)
        rows += [("price of an hour", f"{machine.price:g}")] * bool(machine.price)
        rows += _outage_rows("preemptions", machine.preemptions)
    rows.append(("latency", _shown(cluster.latency, "time")))
    rows.append(("message overhead", _shown(cluster.message_overhead, "time")))
    rows += [(f"link {ends}", _shown(rate, "rate")) for ends, rate in cluster.links.items()]
    rows += [
        (f"switch {switch.first}-{switch.last}", _shown(switch.bandwidth, "rate"))
        for switch in cluster.switches
    ]
    rows += [(f"latency {e}", _shown(value, "time")) for e, value in cluster.latencies.items()]
    for name, process in (("failures", cluster.failures), ("preemptions", cluster.preemptions)):
        rows += _outage_rows(name, process)
    if (trace := cluster.trace) is not None:
        rows.append(("trace", f"{len(trace.outages):,} outages within {trace.covers:g} s"))
    return rows


def _outage_rows(name: str, process: Outages | None) -> list[tuple[str, str]]:
    if process is None:
        return []
    often = f"of each machine every {process.mean_time / 3600:.3g} h"
    return [(name, f"{often}, away {process.away:.3g} s, {process.group} together")]


def this_host() -> Cluster:
    """Return this host as a cluster of one machine, with all its cores."""
    one, n_cores = _one_core(), len(os.sched_getaffinity(0))
    machine = msgspec.structs.replace(one, flops=one.flops * n_cores, cores=n_cores)
    return msgspec.structs.replace(
        uniform("this-host", machine, 1, latency=LOOPBACK_SECONDS), origin="measured"
    )


def _one_core() -> Machine:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = figures()
    finally:
        torch.set_num_threads(n_threads)
    return Machine(
        flops=found.flops,
        memory_rate=found.memory_rate,
        memory=found.memory,
        overhead=found.overhead,
        jitter=found.jitter,
        bandwidth=LOOPBACK_RATE,
    )
