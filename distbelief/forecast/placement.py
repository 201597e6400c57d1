"""Which machines a job is simulated on: this host, machines like it, or a cluster.

no --cluster          this host, as `train` would use it: all roles share its cores
--cluster here        as many machines like this one as --machines says
--cluster NAME, FILE  machines that somebody has written down
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.config.job import Job
from distbelief.errors import JobError
from distbelief.forecast.calibration import constants_of, measure
from distbelief.forecast.measured_costs import Rates, job_key, load_rates, save_rates
from distbelief.forecast.prepare import Adapt, PreparedJob, costed
from distbelief.graph.graph import GraphError
from distbelief.partition.profiling.this_host import HERE, figures, here
from distbelief.program.cluster import Cluster, Machine, uniform
from distbelief.program.cluster_file import load_cluster
from distbelief.roles.role import SUPERVISOR, Address, Compute, Cost, Executor, Seconds
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ONE, ClusterOptions, CostScale
from distbelief.simulation.placement import Place, drawn_outages, options_for
from distbelief.simulation.world import Builder


# Where the roles of a job run: on machines of a cluster, each as fast as it is there.
#
# On this host, as `train` would have it, all roles share one machine and its cores. On a
# cluster every machine of a replica and every shard has a machine of its own (Dean et al.
# 2012, section 4: the parameter server is itself spread over machines), and one more has
# what computes little: supervisor, coordinator, evaluator.

VECTORS_OF_SHARD: Final = 4
"""Values, state of the rule, two slots: how often a shard has its part in memory."""

VECTORS_OF_REPLICA: Final = 4
"""Values, gradients, what has accrued, what is being fetched."""

_FIRST: Final[Place] = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCluster:
    """A cluster, and what this host's work takes on it.

    Attributes:
        cluster: Its machines.
        reference: A machine like the cores of this host, on which rates were measured.
        rates: Measured here; None if the job's own costs are to be believed.
        together: Whether all roles share the first machine.
        budget: How many machines of the cluster the user lets the job have; None: all.
    """

    cluster: Cluster
    reference: Machine
    rates: Rates | None
    together: bool
    budget: int | None = None

    def placement(self, staged: PreparedJob) -> dict[Address, Place]:
        """Return the machine of every role.

        Raises:
            JobError: there are not enough.
        """
        kinds = staged.kinds
        places: dict[Address, Place] = dict.fromkeys(kinds, _FIRST)
        if self.together:
            return places
        alone = [name for name in kinds if has_machine(name, kinds)]
        alone.sort(key=lambda name: kinds[name] == "shard")  # the fastest compute most
        n_needed = self.n_needed(staged)
        if n_needed > len(self.cluster):
            larger = "raise --machines" if self.budget else "name a larger cluster"
            raise JobError(
                f"{self._has()} the job takes {n_needed}: one for {count_of(staged)}, "
                "and one for the supervisor and who else computes little. Lower "
                f"[cluster] replicas, partitions or shards, or {larger}"
            )
        places.update(dict.fromkeys(kinds, len(alone)))
        places.update({name: index for index, name in enumerate(alone)})
        return places

    def _has(self) -> str:
        """Return how many machines there are, and who says so."""
        if self.budget is not None:
            return f"--machines {self.budget}:"
        return f"cluster {self.cluster.name!r} has {len(self.cluster)} machines, and"

    def n_needed(self, staged: PreparedJob) -> int:
        """Return how many machines a job takes."""
        kinds = staged.kinds
        if self.together:
            return 1
        return 1 + sum(has_machine(name, kinds) for name in kinds)

    def options(self, staged: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        """Return what the simulation is to be told of machines and links.

        Raises:
            JobError: the cluster cannot hold the job.
        """
        try:
            options = options_for(
                self.cluster,
                self.placement(staged),
                threads=staged.job.cluster.threads,
                memory=memory_of(staged),
                share_memory=staged.job.cluster.shared_memory,
            )
        except GraphError as error:
            raise JobError(f"--cluster {self.cluster.name}: {error}") from error
        if self.together and self.rates is not None:
            options = _handling(options, self.rates, staged.kinds)
        return replace(options, start=(SUPERVISOR,), faults=tuple(faults))

    @property
    def loses_machines(self) -> bool:
        """Whether machines of the cluster are gone now and then."""
        cluster = self.cluster
        return any((cluster.failures, cluster.preemptions, cluster.trace))

    def outages(self, staged: PreparedJob, *, seed: int, horizon: Seconds) -> tuple[Fault, ...]:
        """Return when machines of the job are gone, within so many seconds.

        That of the supervisor never is: it is where the user sits.

        Raises:
            JobError: the trace of the cluster ends earlier.
        """
        kinds = staged.kinds
        placement = {
            name: place
            for name, place in self.placement(staged).items()
            if has_machine(name, kinds)
        }
        try:
            return drawn_outages(self.cluster, placement, horizon=horizon, seed=seed)
        except GraphError as error:
            raise JobError(f"--cluster {self.cluster.name}: {error}") from error

    def builders(self, staged: PreparedJob, *, scale: CostScale = ONE) -> dict[Address, Builder]:
        """Return how to build the roles of a job, with the costs that were measured.

        Args:
            staged: The job.
            scale: By what those costs are going to be multiplied.
        """
        builders = staged.builders()
        if self.rates is None:
            return builders
        adapt: Adapt = partial(
            _at_cost,
            rates=self.rates,
            reference=self.reference,
            on_one_host=self.together,
            scale=scale,
        )
        return costed(builders, staged.kinds, adapt=adapt)


def _handling(
    options: ClusterOptions, rates: Rates, kinds: Mapping[Address, str]
) -> ClusterOptions:
    """Return the host, on whose cores roles handle their events as well."""
    return replace(
        options,
        machines={
            name: replace(machine, handling=rates.handling_of(kinds[name]))
            for name, machine in options.machines.items()
        },
        processors={
            host: replace(processor, wake_seconds=rates.exchange.wake)
            for host, processor in options.processors.items()
        },
    )


def has_machine(name: Address, kinds: Mapping[Address, str]) -> bool:
    """Return whether a role has a machine of its own."""
    if kinds[name] == "machine":
        return not name.startswith("evaluator")
    return kinds[name] in {"replica", "shard"}


def count_of(staged: PreparedJob) -> str:
    """Return in words what needs machines of its own."""
    cluster = staged.job.cluster
    n_machines = staged.answer.n_machines
    per_replica = "" if n_machines is None else f" of {n_machines} machines"
    copies = "" if cluster.shard_copies == 1 else f" in {cluster.shard_copies} copies"
    replicas = f"{_each(cluster.replicas, 'replica')}{per_replica}"
    return f"{replicas} and one for {_each(cluster.shards, 'shard')}{copies}"


def _each(n: int, noun: str) -> str:
    return f"the {noun}" if n == 1 else f"each of {n} {noun}s"


def memory_of(staged: PreparedJob) -> dict[Address, float]:
    """Return about how many bytes the vectors of each role take."""
    layout, kinds = staged.layout, staged.kinds
    itemsize = layout.dtype.itemsize
    n_shards, n_split = layout.n_shards, staged.answer.n_machines or 1
    whole = sum(float(layout.shard_size(k)) for k in range(n_shards)) * itemsize
    bytes_of = {
        "shard": VECTORS_OF_SHARD * whole / n_shards,
        "replica": VECTORS_OF_REPLICA * whole / n_split,
        "machine": VECTORS_OF_REPLICA * whole / n_split,
        "evaluator": whole / n_split,
    }
    return {name: bytes_of.get(kind, 0.0) for name, kind in kinds.items()}


def _at_cost(
    kind: str,
    asked: Compute,
    *,
    rates: Rates,
    reference: Machine,
    on_one_host: bool,
    scale: CostScale,
) -> Compute:
    """Return the work with a cost that comes to the measured time on this host.

    What was measured while all cores were at work holds as it is for this host. Only
    elsewhere does it matter how much of it is memory's.
    """
    found = rates.seconds_of(kind, asked)
    if found is None:
        return asked
    unit, seconds = found
    if unit == "times":  # it takes as long as it took, whatever stands for the net
        seconds /= scale.data_bytes if asked.lane is Executor.DATA else scale.flops
    waiting = rates.waiting_of(kind, asked)
    if unit == "bytes" and not on_one_host:
        cost = Cost(n_bytes=seconds * reference.memory_rate, waiting=waiting)
    else:
        cost = Cost(flops=seconds * reference.flops, waiting=waiting)
    return msgspec.structs.replace(asked, cost=cost)


N_HERE: Final = 64
"""Machines like this one, if nobody says how many."""

LOOPBACK_SECONDS: Final = 60e-6
LOOPBACK_RATE: Final = 4e9
"""Between processes of this host: of a small message, until it is measured; bytes."""


SHARE_MIN: Final = 0.9
"""Of a core: with less, others computed while the job's work was measured."""


@final
class HostCosts:
    """Machines, and what a job's work takes on them.

    Args:
        name: Of a cluster, or its path; None: this host.
        machines: How many of them; None: all.
        measures: Whether what work takes is measured on this host.

    Raises:
        JobError: there is no such cluster, or it has fewer machines.
    """

    def __init__(self, name: str | None, *, machines: int | None, measures: bool) -> None:
        self._measures = measures
        self._budget = machines
        self._rates: dict[str, Rates] = {}
        self._together = name is None and machines is None
        try:
            self.cluster = _cluster(name, machines)
        except GraphError as error:
            name = name or HERE  # that of a file is in the error already
            why = str(error).removeprefix(f"{Path(name)}: ")
            raise JobError(f"--cluster {name}: {why}") from error

    @property
    def constants(self) -> tuple[tuple[str, str, str], ...]:
        """Name, value and origin of every figure."""
        rows = constants_of(self.cluster)
        if self._rates:
            n_kinds = sum(len(rates.work) for rates in self._rates.values())
            date = max(rates.date for rates in self._rates.values())
            measured = f"measured on this host, {date}"
            share = min(rates.share for rates in self._rates.values())
            if share < SHARE_MIN:
                measured += f", when others left {100 * share:.0f} % of each core"
            rows.append(("work of the roles", f"{n_kinds} kinds of it", measured))
            if self._together:
                rows += _exchange_rows([*self._rates.values()][-1], measured)
        elif not self._measures:
            rows.append(("work of the roles", "by arithmetic", "counted, not measured"))
        return tuple(rows)

    def hosting(self, job: Job, *, tell: Callable[[str], None]) -> PlacedCluster:
        """Return the machines for a job; its work is measured if nobody has yet.

        Args:
            job: The job.
            tell: Told what is being done, if it takes long.

        Raises:
            JobError: the job cannot be run.
        """
        rates = self._rates_of(job, tell) if self._measures else None
        if rates is not None and self._together:
            latency = rates.exchange.latency
            self.cluster = msgspec.structs.replace(self.cluster, latency=latency)
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
                tell("Measuring what the job's work takes on this host")
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


def _exchange_rows(rates: Rates, origin: str) -> list[tuple[str, str, str]]:
    words = {
        "message": "core time of a message, both ends",
        "work": "core time of handing on a piece of work",
        "timer": "core time of a timer",
        "latency": "latency of a message besides",
        "wake": "until a sleeper has one of the taken cores",
        "begins": "until a lane begins what it is handed",
        "answers": "until a process handles what its lane has done",
    }
    rows = [
        (word, f"{1e6 * getattr(rates.exchange, name):.3g} us", origin)
        for name, word in words.items()
    ]
    handling = max(
        (seconds for key, seconds in rates.handling.items() if " " not in key), default=0.0
    )
    return [*rows, ("handling of an event, at most", f"{1e6 * handling:.3g} us", origin)]


def this_host() -> Cluster:
    """Return this host as a cluster of one machine, with all its cores."""
    n_cores = len(os.sched_getaffinity(0))
    one = _one_core()
    machine = Machine(
        flops=one.flops * n_cores,
        memory_rate=one.memory_rate,
        memory=one.memory,
        overhead=one.overhead,
        jitter=one.jitter,
        bandwidth=LOOPBACK_RATE,
        cores=n_cores,
    )
    return msgspec.structs.replace(
        uniform("this-host", machine, 1, latency=LOOPBACK_SECONDS), origin="measured"
    )


def _one_core() -> Machine:
    """Return one core of this host."""
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
