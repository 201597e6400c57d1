"""What a compiled plan costs on a cluster: seconds, bytes and memory.

Seconds of tasks are somebody else's business (`Costs`); of messages, and of adding up
what they bring, the cluster's. Put together by playing the step through (`queues`). The
parameter server is not part of it: fetches and pushes go on beside the steps of
Downpour SGD.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol, final

import numpy as np

from distbelief.graph.layer import GraphError, Layer
from distbelief.graph.region import Region
from distbelief.program.cluster import Cluster
from distbelief.program.compilation import Compiled
from distbelief.program.footprint import memory
from distbelief.program.queues import FloatArray, Played, Queues
from distbelief.program.schedule import schedule
from distbelief.program.shares import Seconds, shares
from distbelief.program.tasks import Task
from distbelief.program.traffic import Traffic


_ADDING: Final = 3
"""Bytes moved for each that is added to a sum: it is read, and the sum, and written."""


class Costs(Protocol):
    """Seconds that machines take for tasks, with all samples of the batch.

    `region` is of the output or, if `partial`, of the first input.
    """

    def forward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of a forward pass."""
        ...

    def backward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of a backward pass."""
        ...


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Price:
    """What a step costs.

    Attributes:
        compiled: The plan, for the samples of one micro-batch.
        micro_batches: How many of them a step has.
        tasks: Of the step.
        traffic: Its messages.
        step_seconds: Until the last machine is done.
        played: When what happened.
    """

    compiled: Compiled
    micro_batches: int
    tasks: tuple[Task, ...]
    traffic: tuple[Traffic, ...]
    step_seconds: float
    played: Played

    @cached_property
    def seconds(self) -> tuple[Seconds, ...]:
        """What each machine does with the seconds of the step."""
        found = shares(
            self.played,
            self.tasks,
            self.traffic,
            n_machines=self.compiled.n_machines,
            step_seconds=self.step_seconds,
        )
        return tuple(found)

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """What each machine holds."""
        return memory(self.compiled, micro_batches=self.micro_batches)

    @cached_property
    def link_bytes(self) -> Mapping[tuple[int, int], int]:
        """Bytes per sender and receiver."""
        n = self.compiled.n_machines
        totals = np.zeros(n * n, dtype=np.int64)
        for way in self.traffic:
            np.add.at(totals, way.senders * n + way.receivers, way.n_bytes)
        used = np.flatnonzero(totals)
        pairs = zip(used.tolist(), totals[used].tolist(), strict=True)
        return {divmod(pair, n): n_bytes for pair, n_bytes in pairs}


def price(compiled: Compiled, cluster: Cluster, costs: Costs, *, micro_batches: int = 1) -> Price:
    """Return what a step of this plan costs.

    Args:
        compiled: The plan, for the samples of one micro-batch.
        cluster: On which machines.
        costs: Of its tasks, with as many samples.
        micro_batches: How many of them pass in a step.

    Raises:
        GraphError: the plan is for more machines than the cluster has.
    """
    if len(cluster) < compiled.n_machines:
        raise GraphError(
            f"the plan is for {compiled.n_machines} machines; cluster "
            f"{cluster.name!r} has {len(cluster)}"
        )
    place = {machine: index for index, machine in enumerate(compiled.order)}
    step = schedule(compiled, micro_batches=micro_batches)
    seconds = [_seconds(task, compiled, cluster, costs) for task in compiled.tasks]
    machines = [cluster.machines[p] for p in compiled.order]
    played = Queues(
        step.nodes,
        machines=compiled.order,
        places=[place[task.machine] for task in step.tasks],
        seconds=seconds * micro_batches,
        traffic=step.traffic,
        rates=_rates(cluster, compiled.order),
        latency=cluster.latency,
        overhead=cluster.message_overhead,
        handling=[1.0 / machine.message_rate for machine in machines],
        each=[machine.handling / machine.cores for machine in machines],
        adding=[_ADDING / machine.memory_rate for machine in machines],
    ).play()
    return Price(
        compiled=compiled,
        micro_batches=micro_batches,
        tasks=step.tasks,
        traffic=step.traffic,
        step_seconds=float(played.arrivals.max(initial=0.0)),
        played=played,
    )


def _seconds(task: Task, compiled: Compiled, cluster: Cluster, costs: Costs) -> float:
    layer, machine = compiled.graph[task.layer], task.machine
    match task.phase:
        case "forward" | "partial":
            return costs.forward(layer, task.region, machine, partial=task.is_partial)
        case "backward" | "partial_backward":
            return costs.backward(layer, task.region, machine, partial=task.is_partial)
        case "combine":
            figures = cluster.machines[machine]
            return figures.overhead + task.n_bytes / figures.memory_rate


def _rates(cluster: Cluster, machines: Sequence[int]) -> FloatArray:
    """Return bytes per second from each to each: (n_machines, n_machines)."""
    if cluster.links:
        rows = [[cluster.rate(p, q) for q in machines] for p in machines]
        return np.array(rows, dtype=np.float64)
    bandwidths = np.array([cluster.machines[p].bandwidth for p in machines])
    return np.asarray(np.minimum.outer(bandwidths, bandwidths), dtype=np.float64)
