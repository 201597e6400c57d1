"""Where the roles of a job run: on machines of a cluster, each as fast as it is there.

On this host, as `train` would have it, all roles share one machine and its cores. On a
cluster every machine of a replica and every shard has a machine of its own (Dean et al.
2012, section 4: the parameter server is itself spread over machines), and one more has
what computes little: supervisor, coordinator, evaluator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import msgspec

from distbelief.errors import JobError
from distbelief.forecast.adapted import Adapt, adapted
from distbelief.forecast.rates import Rates
from distbelief.forecast.staging import StagedJob
from distbelief.graph.layer import GraphError
from distbelief.program.cluster import Cluster, Machine
from distbelief.roles import SUPERVISOR, Address, Compute, Cost, Lane, Seconds
from distbelief.simulation.absences import absences
from distbelief.simulation.faults import Fault
from distbelief.simulation.options import ClusterOptions
from distbelief.simulation.placing import Place, options_for
from distbelief.simulation.scales import ONE, Scale
from distbelief.simulation.world import Builder


VECTORS_OF_SHARD: Final = 4
"""Values, state of the rule, two slots: how often a shard has its part in memory."""

VECTORS_OF_REPLICA: Final = 4
"""Values, gradients, what has accrued, what is being fetched."""

_FIRST: Final[Place] = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
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

    def placement(self, staged: StagedJob) -> dict[Address, Place]:
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

    def n_needed(self, staged: StagedJob) -> int:
        """Return how many machines a job takes."""
        kinds = staged.kinds
        if self.together:
            return 1
        return 1 + sum(has_machine(name, kinds) for name in kinds)

    def options(self, staged: StagedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
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

    def outages(self, staged: StagedJob, *, seed: int, horizon: Seconds) -> tuple[Fault, ...]:
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
            return absences(self.cluster, placement, horizon=horizon, seed=seed)
        except GraphError as error:
            raise JobError(f"--cluster {self.cluster.name}: {error}") from error

    def builders(self, staged: StagedJob, *, scale: Scale = ONE) -> dict[Address, Builder]:
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
        return adapted(builders, staged.kinds, adapt=adapt)


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


def count_of(staged: StagedJob) -> str:
    """Return in words what needs machines of its own."""
    cluster = staged.job.cluster
    n_machines = staged.answer.n_machines
    per_replica = "" if n_machines is None else f" of {n_machines} machines"
    copies = "" if cluster.shard_copies == 1 else f" in {cluster.shard_copies} copies"
    replicas = f"{_each(cluster.replicas, 'replica')}{per_replica}"
    return f"{replicas} and one for {_each(cluster.shards, 'shard')}{copies}"


def _each(n: int, noun: str) -> str:
    return f"the {noun}" if n == 1 else f"each of {n} {noun}s"


def memory_of(staged: StagedJob) -> dict[Address, float]:
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
    kind: str, asked: Compute, *, rates: Rates, reference: Machine, on_one_host: bool, scale: Scale
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
        seconds /= scale.data_bytes if asked.lane is Lane.DATA else scale.flops
    waiting = rates.waiting_of(kind, asked)
    if unit == "bytes" and not on_one_host:
        cost = Cost(n_bytes=seconds * reference.memory_rate, waiting=waiting)
    else:
        cost = Cost(flops=seconds * reference.flops, waiting=waiting)
    return msgspec.structs.replace(asked, cost=cost)
