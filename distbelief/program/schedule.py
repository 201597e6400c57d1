"""All tasks and messages of one step, and what waits for what.

A batch may pass in several *micro-batches*, so that machines with different layers are
busy at the same time (Huang et al. 2019, "GPipe"):

    machine 0   f1 f2 f3       b1 b2 b3         each task once per micro-batch;
    machine 1      f1 f2 f3 b1 b2 b3            parameters are sent before the first,
                                                their gradients once, after the last

Of what is ready, a machine takes the earlier micro-batch first, so that backward passes
begin as soon as they can (Narayanan et al. 2019, "PipeDream", section 3.2).
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Final, final

from distbelief.graph.kind import joined
from distbelief.graph.layer import GraphError, LayerGraph
from distbelief.program.compilation import Compiled
from distbelief.program.dependencies import Dependencies, dependencies
from distbelief.program.tasks import Task
from distbelief.program.traffic import Traffic


_ONCE: Final = frozenset({"parameter", "parameter_gradient"})
"""Kinds of messages that a step has once, however many micro-batches."""


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """One step.

    Attributes:
        tasks: Of all micro-batches, the first one's first.
        traffic: Likewise.
        nodes: What waits for what; task i is node i.
    """

    tasks: tuple[Task, ...]
    traffic: tuple[Traffic, ...]
    nodes: Dependencies


def schedule(compiled: Compiled, *, micro_batches: int = 1) -> Schedule:
    """Return the step of a plan.

    Args:
        compiled: For the samples of one micro-batch.
        micro_batches: How many of them a step has.

    Raises:
        GraphError: there are several, and a layer has statistics of the batch.
    """
    once = Schedule(compiled.tasks, compiled.traffic, dependencies(compiled))
    if micro_batches == 1:
        return once
    statistics = statistics_of(compiled.graph)
    if statistics:
        raise GraphError(
            f"layer {statistics[0]!r} has statistics of the whole batch: in "
            f"{micro_batches} micro-batches it would compute something else"
        )
    return _Repeated(once, micro_batches).schedule()


def statistics_of(graph: LayerGraph) -> list[str]:
    """Return the layers that join samples: what they compute depends on the batch."""
    single = joined(graph)
    return [
        layer.name
        for layer in graph.layers
        if layer.name in single and not single.issuperset(layer.inputs)
    ]


@final
class _Repeated:
    """One micro-batch after the other; some messages are shared by all."""

    def __init__(self, once: Schedule, n: int) -> None:
        self._once = once
        self._n = n
        each = [i for i, way in enumerate(once.traffic) if way.kind not in _ONCE]
        self._each = {index: place for place, index in enumerate(each)}
        self._nodes = Dependencies(0, [], [])
        self._shared: dict[int, int] = {}

    def schedule(self) -> Schedule:
        once, nodes = self._once, self._nodes
        n_tasks = once.nodes.n_tasks
        for _ in range(self._n * n_tasks):
            nodes.new()
        nodes.n_tasks = self._n * n_tasks
        shared = {
            node
            for numbered in (once.nodes.sending, once.nodes.arrival)
            for (way, _), node in numbered.items()
            if once.traffic[way].kind in _ONCE
        }
        for copy in range(self._n):
            self._add(copy, shared)
        return Schedule(
            tasks=once.tasks * self._n,
            traffic=(*once.traffic, *self._ways() * (self._n - 1)),
            nodes=nodes,
        )

    def _ways(self) -> tuple[Traffic, ...]:
        return tuple(self._once.traffic[index] for index in self._each)

    def _add(self, copy: int, shared: Container[int]) -> None:
        """Add the nodes of one micro-batch."""
        once, nodes = self._once.nodes, self._nodes
        here = self._numbers(copy, shared)
        for node, after in enumerate(once.after):
            for other in after:
                nodes.wait(here[other], [here[node]])
        self._name(copy, shared, here)

    def _numbers(self, copy: int, shared: Container[int]) -> list[int]:
        """Return what each node of the plan is called in this micro-batch."""
        once, nodes = self._once.nodes, self._nodes
        n_tasks = once.n_tasks
        here: list[int] = []
        for node in range(len(once.after)):
            if node < n_tasks:
                here.append(copy * n_tasks + node)
            elif node in shared:
                here.append(self._shared.setdefault(node, len(nodes.after)))
                if copy == 0:
                    nodes.new()
            else:
                here.append(nodes.new())
        return here

    def _name(self, copy: int, shared: Container[int], here: list[int]) -> None:
        """Say which nodes are of messages sent, and of messages that have arrived."""
        once, nodes = self._once.nodes, self._nodes
        for numbered, mine in ((once.sending, nodes.sending), (once.arrival, nodes.arrival)):
            for (way, machine), node in numbered.items():
                if copy and node in shared:
                    continue
                mine[self._way(copy, way), machine] = here[node]
                if numbered is once.arrival:
                    nodes.n_before[here[node]] = 1  # the last of its messages

    def _way(self, copy: int, way: int) -> int:
        """Return the index of the traffic of this micro-batch."""
        if copy == 0:
            return way
        n_before = len(self._once.traffic) + (copy - 1) * len(self._each)
        return n_before + self._each[way]
