"""Dependencies between all tasks and messages of one step.

A batch may be split into micro-batches, so that ranks with different layers are busy at the same
time (Huang et al. 2019, "GPipe"):

    rank 0   f1 f2 f3       b1 b2 b3         each task once per micro-batch;
    rank 1      f1 f2 f3 b1 b2 b3            parameters are sent before the first,
                                             their gradients once, after the last

Among ready tasks a rank takes the earlier micro-batch first, so that backward passes begin as soon
as they can (Narayanan et al. 2019, "PipeDream", section 3.2).
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import joined
from distbelief.program.compiler import Compiled
from distbelief.program.instructions import MessageKind, Task
from distbelief.program.traffic import Traffic


@final
@dataclass(slots=True)
class Dependencies:
    """A graph of nodes; node i is task i, nodes from `n_tasks` on are no tasks.

    task     of one rank, in a phase; also waits until its rank is free
    sending  the messages of one kind and name from one rank; each also waits for the network
    arrival  all messages of one kind and name have reached one rank
    gate     takes no time: "layer v is computed on rank q"
    """

    n_tasks: int
    n_before: list[int]  # per node, the number of nodes that it waits for
    after: list[list[int]]  # per node, the nodes that wait for it
    # By index of the traffic and rank.
    sending: dict[tuple[int, int], int] = field(default_factory=dict)
    # By index of the traffic and rank.
    arrival: dict[tuple[int, int], int] = field(default_factory=dict)

    def new(self) -> int:
        """Add a node without dependencies and return it."""
        self.n_before.append(0)
        self.after.append([])
        return len(self.after) - 1

    def wait(self, node: int, others: Iterable[int]) -> None:
        for other in others:
            self.after[other].append(node)
            self.n_before[node] += 1


def dependencies(compiled: Compiled) -> Dependencies:
    return _Builder(compiled).build()


_Nodes = dict[str, dict[int, int]]  # by layer and rank


@final
class _Builder:
    def __init__(self, compiled: Compiled) -> None:
        n_tasks = len(compiled.tasks)
        self._compiled = compiled
        self._nodes = Dependencies(n_tasks, [0] * n_tasks, [[] for _ in range(n_tasks)])
        self._sending: dict[tuple[MessageKind, str], dict[int, int]] = {}
        self._arrival: dict[tuple[MessageKind, str], dict[int, int]] = {}
        for index, flow in enumerate(compiled.traffic):
            for found, numbered, machines in (
                (self._sending, self._nodes.sending, flow.sending),
                (self._arrival, self._nodes.arrival, flow.receiving),
            ):
                nodes = {machine: self._nodes.new() for machine in machines}
                found[flow.kind, flow.name] = nodes
                numbered |= {(index, machine): node for machine, node in nodes.items()}
        for node in self._nodes.arrival.values():
            self._nodes.n_before[node] = 1  # the last of its messages
        # Gates, by layer and rank: its contributions are computed; its output; its gradient is
        # complete; its backward tasks are done.
        self._contributed: _Nodes = {}
        self._computed: _Nodes = {}
        self._gradient: _Nodes = {}
        self._gone_back: _Nodes = {}

    def build(self) -> Dependencies:
        compiled = self._compiled
        tasks = list(enumerate(compiled.tasks))
        n_forward = len(compiled.demands.forward)
        forward = _by_layer(tasks[:n_forward])
        backward = _by_layer(tasks[n_forward:])
        for layer in compiled.graph.layers:
            if layer.kind != INPUT:
                self._forward(layer, forward[layer.name])
        for layer in reversed(compiled.graph.layers):
            if layer.name in backward:
                self._backward(layer, backward[layer.name])
        users = self._users()
        for (kind, name), nodes in self._sending.items():
            if kind == "parameter_gradient":
                for machine, node in nodes.items():
                    self._wait(node, self._gone_back, users[name], machine)
        return self._nodes

    def _forward(self, layer: Layer, tasks: list[tuple[int, Task]]) -> None:
        name = layer.name
        computing = [(i, task) for i, task in tasks if task.phase != "combine"]
        combining = [(i, task) for i, task in tasks if task.phase == "combine"]
        tensors = list(dict.fromkeys(use.name for use in layer.tensors.values()))
        inputs = list(dict.fromkeys(layer.inputs))
        done: dict[int, int] = {}
        # A task starts once its rank has all that it ever needs of each layer and tensor that the
        # task reads, as in the program; not earlier, though a part of it might be enough.
        for machine, nodes in _by_machine(computing).items():
            for node in nodes:
                self._wait(node, self._computed, inputs, machine)
                self._wait_for_arrival(node, "state", inputs, machine)
                self._wait_for_arrival(node, "parameter", tensors, machine)
            done[machine] = self._gate(nodes)
        if combining:  # partial: the output is there only after the sums
            self._contributed[name] = done
            self._release("partial", name, self._contributed)
            done = {}
        for machine, nodes in _by_machine(combining).items():
            for node in nodes:
                self._wait(node, self._contributed, [name], machine)
                self._wait_for_arrival(node, "partial", [name], machine)
            done[machine] = self._gate(nodes)
        self._computed[name] = done
        self._release("state", name, self._computed)

    def _backward(self, layer: Layer, tasks: list[tuple[int, Task]]) -> None:
        name = layer.name
        readers = [reader.name for reader in self._compiled.graph.consumers[name]]
        for machine, node in self._sending.get(("gradient", name), {}).items():
            self._wait(node, self._gone_back, readers, machine)
        # The gradient is complete on a rank when its own readers are done and all others have sent.
        self._gradient[name] = {}
        for machine, computed in self._computed[name].items():
            node = self._gate([computed])
            self._wait(node, self._gone_back, readers, machine)
            self._wait_for_arrival(node, "gradient", [name], machine)
            self._gradient[name][machine] = node
        self._release("partial_gradient", name, self._gradient)
        self._gone_back[name] = {}
        for machine, nodes in _by_machine(tasks).items():
            for node in nodes:
                self._wait(node, self._contributed, [name], machine)
                self._wait(node, self._gradient, [name], machine)
                self._wait_for_arrival(node, "partial_gradient", [name], machine)
            self._gone_back[name][machine] = self._gate(nodes)

    def _users(self) -> dict[str, dict[str, None]]:
        # The layers that use each tensor, in order, each once.
        found: dict[str, dict[str, None]] = {}
        for layer in self._compiled.graph.layers:
            for use in layer.tensors.values():
                found.setdefault(use.name, {})[layer.name] = None
        return found

    def _gate(self, others: Iterable[int]) -> int:
        node = self._nodes.new()
        self._nodes.wait(node, others)
        return node

    def _wait(self, node: int, there: _Nodes, names: Iterable[str], machine: int) -> None:
        places = (there.get(name, {}) for name in names)
        self._nodes.wait(node, [p[machine] for p in places if machine in p])

    def _wait_for_arrival(
        self, node: int, kind: MessageKind, names: Iterable[str], machine: int
    ) -> None:
        places = (self._arrival.get((kind, name), {}) for name in names)
        self._nodes.wait(node, [p[machine] for p in places if machine in p])

    def _release(self, kind: MessageKind, name: str, there: _Nodes) -> None:
        # Messages can be sent once their sender has computed what they carry.
        for machine, node in self._sending.get((kind, name), {}).items():
            self._nodes.wait(node, [there[name][machine]])


def _by_layer(tasks: Iterable[tuple[int, Task]]) -> dict[str, list[tuple[int, Task]]]:
    found: dict[str, list[tuple[int, Task]]] = {}
    for index, task in tasks:
        found.setdefault(task.layer, []).append((index, task))
    return found


def _by_machine(tasks: Iterable[tuple[int, Task]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, task in tasks:
        found.setdefault(task.machine, []).append(index)
    return found


# Kinds that are sent once per step, not once per micro-batch.
_ONCE: Final = frozenset({"parameter", "parameter_gradient"})


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """One step of a plan."""

    tasks: tuple[Task, ...]  # those of the first micro-batch first
    traffic: tuple[Traffic, ...]  # those of the first micro-batch first
    nodes: Dependencies


def schedule(compiled: Compiled, *, micro_batches: int = 1) -> Schedule:
    """Return the step of a plan.

    Args:
        compiled: For the samples of one micro-batch.
        micro_batches: Number of micro-batches in a step.

    Raises:
        GraphError: there are several, and a layer has batch statistics.
    """
    once = Schedule(compiled.tasks, compiled.traffic, dependencies(compiled))
    if micro_batches == 1:
        return once
    statistics = statistics_of(compiled.graph)
    if statistics:
        raise GraphError(
            f"layer {statistics[0]!r} has statistics of the whole batch, which "
            f"{micro_batches} micro-batches would change: use 1 micro-batch"
        )
    return _Repeated(once, micro_batches).schedule()


def statistics_of(graph: LayerGraph) -> list[str]:
    # Layers that join samples: their result depends on the whole batch.
    single = joined(graph)
    return [
        layer.name
        for layer in graph.layers
        if layer.name in single and not single.issuperset(layer.inputs)
    ]


@final
class _Repeated:
    # One copy of the step per micro-batch; parameter messages are shared by all copies.

    def __init__(self, once: Schedule, n: int) -> None:
        self._once = once
        self._n = n
        each = [i for i, flow in enumerate(once.traffic) if flow.kind not in _ONCE]
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
            for (flow, _), node in numbered.items()
            if once.traffic[flow].kind in _ONCE
        }
        for copy in range(self._n):
            self._add(copy, shared)
        return Schedule(
            tasks=once.tasks * self._n,
            traffic=(*once.traffic, *self._flows() * (self._n - 1)),
            nodes=nodes,
        )

    def _flows(self) -> tuple[Traffic, ...]:
        return tuple(self._once.traffic[index] for index in self._each)

    def _add(self, copy: int, shared: Container[int]) -> None:
        once, nodes = self._once.nodes, self._nodes
        here = self._numbers(copy, shared)
        for node, after in enumerate(once.after):
            for other in after:
                nodes.wait(here[other], [here[node]])
        self._name(copy, shared, here)

    def _numbers(self, copy: int, shared: Container[int]) -> list[int]:
        # The number of each node in this micro-batch.
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
        # Registers the sending and arrival nodes of this micro-batch.
        once, nodes = self._once.nodes, self._nodes
        for numbered, mine in ((once.sending, nodes.sending), (once.arrival, nodes.arrival)):
            for (flow, machine), node in numbered.items():
                if copy and node in shared:
                    continue
                mine[self._flow(copy, flow), machine] = here[node]
                if numbered is once.arrival:
                    nodes.n_before[here[node]] = 1  # the last of its messages

    def _flow(self, copy: int, flow: int) -> int:
        # The index of the traffic in this micro-batch.
        if copy == 0:
            return flow
        n_before = len(self._once.traffic) + (copy - 1) * len(self._each)
        return n_before + self._each[flow]
