"""Cost of a compiled plan on a cluster: seconds, bytes and memory.

A `Costs` object gives the seconds of tasks; the cluster gives those of messages and of adding up
what they bring. The step simulator puts them together. The parameter server is left out: fetches
and pushes overlap the steps of Downpour SGD.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple, Protocol, final

import msgspec
import numpy as np
import numpy.typing as npt

from distbelief.graph.graph import INPUT, GraphError, Layer
from distbelief.graph.region import IntArray, Region
from distbelief.plans.cluster import Cluster, FloatArray
from distbelief.plans.compiler import NUMBER_BYTES, Compiled, index_bytes
from distbelief.plans.step_graph import schedule
from distbelief.plans.step_simulator import SimulatedStep, StepSimulator
from distbelief.plans.tasks import Task
from distbelief.plans.traffic import Traffic


# --- memory ---


def memory(compiled: Compiled, *, micro_batches: int = 1, copies: int = 1) -> tuple[int, ...]:
    """Return the bytes that each rank holds at the end of the forward pass.

    Tensors, inputs, states (owned and received) and contributions to sums, and the gradients of
    those that have one; of all micro-batches, which may be in memory at the same time. Temporary
    memory of an operator is not known, and not counted. There may be several copies of tensors.
    """
    totals = [0] * compiled.n_machines
    for machine, n_bytes in _tensors(compiled):
        totals[machine] += copies * n_bytes
    # The states of all micro-batches may be in memory at the same time (GPipe).
    for held in (_states(compiled), _received(compiled)):
        for machine, n_bytes in held:
            totals[machine] += micro_batches * n_bytes
    return tuple(totals)


def trained(compiled: Compiled) -> frozenset[str]:
    # The tensors that get a gradient.
    return frozenset(
        use.name
        for layer in compiled.graph.layers
        if layer.name in compiled.gradients
        for use in layer.tensors.values()
        if use.trains
    )


def _tensors(compiled: Compiled) -> Iterator[tuple[int, int]]:
    with_gradient = trained(compiled)
    for name, users in compiled.demands.tensors.items():
        each = NUMBER_BYTES * (2 if name in with_gradient else 1)
        for machine, regions in users.items():
            yield machine, each * _n_elements(regions)


def _states(compiled: Compiled) -> Iterator[tuple[int, int]]:
    needs = compiled.demands
    n_bytes = index_bytes(compiled.graph, batch=compiled.batch)
    for layer in compiled.graph.layers:
        # Twice: the state and its gradient.
        each = n_bytes[layer.name] * (2 if layer.name in compiled.gradients else 1)
        if layer.kind == INPUT:
            held = needs.states.get(layer.name, {})
        else:
            held = needs.contributions.get(layer.name, {})
            for machine, region in needs.owners[layer.name]:
                yield machine, each * region.n_elements
        for machine, regions in held.items():
            yield machine, each * _n_elements(regions)


def _received(compiled: Compiled) -> Iterator[tuple[int, int]]:
    for flow in compiled.traffic:
        if flow.kind == "state":
            both = 2 if flow.name in compiled.gradients else 1
            for machine, n_bytes in flow.received_bytes.items():
                yield machine, both * n_bytes


def _n_elements(regions: Sequence[Region]) -> int:
    return sum(region.n_elements for region in regions)


class PlanCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan asks of the hosts of its ranks, as far as the planner knows."""

    memory_bytes: int  # of the rank that holds most, with buffers for pushes and fetches
    seconds: float  # of a step, on machines with so many
    flops: float  # floating point operations a second


# --- breakdown of a step ---


class Seconds(NamedTuple):
    """Where the seconds of one rank go; the four sum to the step."""

    compute: float  # tasks, and messages at the same time that use the processor too
    communication: float  # sends or receives, and computes nothing
    sync: float  # sends or receives only replicated parameters or their gradients
    wait: float  # idle


def _shares(cost: "StepCost") -> Iterator[Seconds]:
    # A message appears twice, at its sender and at its receiver.
    simulated, n_tasks = cost.simulated, cost.simulated.n_tasks
    messages = np.arange(n_tasks, n_tasks + len(simulated.flows))
    kinds = [flow.kind in {"parameter", "parameter_gradient"} for flow in cost.traffic]
    is_sync = np.append(np.zeros(n_tasks, bool), np.array(kinds, bool)[simulated.flows])
    events = np.concatenate([np.arange(n_tasks), messages, messages])
    places = np.array([task.machine for task in cost.tasks], dtype=np.int64)
    machines = np.concatenate([places, simulated.senders, simulated.receivers])
    for own in _by_machine(events, machines, n_machines=cost.compiled.n_machines):
        # Each category counts only the time that the ones before it leave.
        compute = _covered(simulated, own[own < n_tasks])
        busy = _covered(simulated, own[~is_sync[own]])
        connected = _covered(simulated, own)
        yield Seconds(
            compute=compute,
            communication=busy - compute,
            sync=connected - busy,
            wait=cost.step_seconds - connected,
        )


def _by_machine(events: IntArray, machines: IntArray, *, n_machines: int) -> list[IntArray]:
    order = np.argsort(machines, kind="stable")
    bounds = np.searchsorted(machines[order], np.arange(1, n_machines))
    return np.split(events[order], bounds)


def _covered(simulated: SimulatedStep, events: npt.NDArray[np.int64]) -> float:
    # The length of the union of the intervals: sorted by start, each adds what lies after the
    # latest end so far.
    starts: FloatArray = simulated.starts[events]
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], simulated.ends[events][order]
    so_far = np.maximum.accumulate(np.append(0.0, ends))
    return float(np.maximum(ends - np.maximum(starts, so_far[:-1]), 0.0).sum())


class Passes(NamedTuple):
    """Seconds of both passes of a task."""

    forward: float
    backward: float


class Costs(Protocol):
    """Seconds of tasks on machines, for all samples of the batch.

    `region` is of the output or, if `partial`, of the first input.
    """

    def passes(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> Passes: ...


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class StepCost:
    compiled: Compiled  # for the samples of one micro-batch
    micro_batches: int
    tasks: tuple[Task, ...]  # of all micro-batches
    traffic: tuple[Traffic, ...]  # messages of the step
    step_seconds: float  # until the last rank is done
    simulated: SimulatedStep  # when each task and message ran

    @cached_property
    def seconds(self) -> tuple[Seconds, ...]:
        return tuple(_shares(self))

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        return memory(self.compiled, micro_batches=self.micro_batches)

    @cached_property  # by (sender, receiver)
    def link_bytes(self) -> Mapping[tuple[int, int], int]:
        n = self.compiled.n_machines
        totals = np.zeros(n * n, dtype=np.int64)
        for flow in self.traffic:
            np.add.at(totals, flow.senders * n + flow.receivers, flow.n_bytes)
        used = np.flatnonzero(totals)
        pairs = zip(used.tolist(), totals[used].tolist(), strict=True)
        return {divmod(pair, n): n_bytes for pair, n_bytes in pairs}


def step_cost(
    compiled: Compiled, cluster: Cluster, costs: Costs, *, micro_batches: int = 1
) -> StepCost:
    """Simulate a step of a plan and return its cost.

    The compiled plan and the costs are for the samples of one micro-batch. GraphError if the plan
    is for more machines than the cluster has.
    """
    if len(cluster) < compiled.n_machines:
        raise GraphError(
            f"the plan needs {compiled.n_machines} machines, but cluster "
            f"{cluster.name!r} has {len(cluster)}: use a larger cluster"
        )
    step = schedule(compiled, micro_batches=micro_batches)
    seconds = [_seconds(task, compiled, cluster, costs) for task in compiled.tasks]
    simulator = StepSimulator(step, seconds * micro_batches, order=compiled.order, cluster=cluster)
    simulated = simulator.play()
    return StepCost(
        compiled=compiled,
        micro_batches=micro_batches,
        tasks=step.tasks,
        traffic=step.traffic,
        step_seconds=float(simulated.arrivals.max(initial=0.0)),
        simulated=simulated,
    )


def _seconds(task: Task, compiled: Compiled, cluster: Cluster, costs: Costs) -> float:
    if task.phase == "combine":  # bound by memory
        figures = cluster.machines[task.machine]
        return figures.overhead + task.n_bytes / figures.memory_rate
    layer = compiled.graph[task.layer]
    passes = costs.passes(layer, task.region, task.machine, partial=task.is_partial)
    return passes.forward if task.phase in {"forward", "partial"} else passes.backward


# --- Chrome trace ---

TraceEvent = dict[str, str | int | float | dict[str, str | int]]

_TRACKS: Final = ("compute", "send", "receive")  # rows of a machine


class Event(NamedTuple):
    """A task, or a message as seen by one of its ends."""

    machine: int
    track: Literal["compute", "send", "receive"]
    what: str  # phase of a task, kind of a message
    name: str  # of the layer or tensor
    start: float  # seconds from the start of the step
    seconds: float  # of a message, without the latency after it
    peer: int | None = None  # the other end of a message
    n_bytes: int = 0  # of a message


def events(step_cost: StepCost) -> Iterator[Event]:
    """Yield all events of a step; messages twice, at the sender and at the receiver."""
    simulated, n_tasks = step_cost.simulated, step_cost.simulated.n_tasks
    spans = list(zip(simulated.starts.tolist(), simulated.ends.tolist(), strict=True))
    for task, (start, end) in zip(step_cost.tasks, spans[:n_tasks], strict=True):
        yield Event(task.machine, "compute", task.phase, task.layer, start, end - start)
    ends = (simulated.senders, simulated.receivers, simulated.n_bytes, simulated.flows)
    messages = zip(*(numbers.tolist() for numbers in ends), strict=True)
    for (sender, receiver, n_bytes, index), (start, end) in zip(
        messages, spans[n_tasks:], strict=True
    ):
        flow = step_cost.traffic[index]
        span = (flow.kind, flow.name, start, end - start)
        yield Event(sender, "send", *span, receiver, n_bytes)
        yield Event(receiver, "receive", *span, sender, n_bytes)


def chrome_trace(step_cost: StepCost) -> list[TraceEvent]:
    """Return a step in the Trace Event Format, ready for JSON.

    chrome://tracing and ui.perfetto.dev show it: a process per machine, with one row each for
    computing, sending and receiving.
    """
    trace: list[TraceEvent] = []
    # "M" events name processes and threads; "X" events have a start and a duration in us.
    for machine in sorted(step_cost.compiled.order):
        names = [("process_name", 0, f"machine {machine}")]
        names += [("thread_name", row, track) for row, track in enumerate(_TRACKS)]
        trace += [
            {"ph": "M", "pid": machine, "tid": row, "name": name, "args": {"name": text}}
            for name, row, text in names
        ]
    for event in events(step_cost):
        details: dict[str, str | int] = {"kind": event.what}
        if event.peer is not None:
            details |= {"peer": event.peer, "bytes": event.n_bytes}
        trace.append(
            {
                "ph": "X",
                "pid": event.machine,
                "tid": _TRACKS.index(event.track),
                "name": f"{event.name} {event.what}",
                "cat": event.what,
                "ts": event.start * 1e6,
                "dur": event.seconds * 1e6,
                "args": details,
            }
        )
    return trace
