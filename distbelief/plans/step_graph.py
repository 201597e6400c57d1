"""Dependencies between all tasks and messages of one step.

A batch may be split into micro-batches, so that ranks with different layers are busy at the same
time (Huang et al. 2019, "GPipe"):

    rank 0   f1 f2 f3       b1 b2 b3         each task once per micro-batch;
    rank 1      f1 f2 f3 b1 b2 b3            parameters are sent before the first,
                                             their gradients once, after the last

Among ready tasks a rank takes the earlier micro-batch first, so that backward passes begin as soon
as they can (Narayanan et al. 2019, "PipeDream", section 3.2).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.graph.graph import GraphError, Layer, LayerGraph
from distbelief.graph.operator import joined
from distbelief.graph.ops.call import is_module
from distbelief.plans.compiler import Compiled
from distbelief.plans.tasks import MessageKind, Task
from distbelief.plans.traffic import Traffic


@final
@dataclass(slots=True)
class Dependencies:
    """A graph of nodes; node i is task i, nodes from `n_tasks` on are no tasks.

    task     of one rank, in a phase; also waits until its rank is free
    sending  the messages of one kind and name from one rank; each also waits for the network
    arrival  all messages of one kind and name have reached one rank
    gate     takes no time: "layer v is computed on rank q", if by several tasks
    """

    n_tasks: int
    n_before: list[int]  # per node, the number of nodes that it waits for
    after: list[list[int]]  # per node, the nodes that wait for it
    # By node: index of the traffic, and rank.
    sending: dict[int, tuple[int, int]] = field(default_factory=dict)
    arrival: dict[int, tuple[int, int]] = field(default_factory=dict)

    def new(self, n: int = 1) -> range:
        """Add nodes without dependencies and return them."""
        first = len(self.after)
        self.n_before += [0] * n
        self.after += [[] for _ in range(n)]
        return range(first, first + n)

    def wait(self, node: int, others: Iterable[int]) -> None:
        for other in others:
            self.after[other].append(node)
            self.n_before[node] += 1


_Nodes = dict[str, dict[int, int]]  # by layer and rank


@final
class _Builder:
    def __init__(self, compiled: Compiled) -> None:
        n_tasks = len(compiled.tasks)
        self._compiled = compiled
        self._nodes = Dependencies(n_tasks, [0] * n_tasks, [[] for _ in range(n_tasks)])
        self._sending: defaultdict[MessageKind, _Nodes] = defaultdict(dict)
        self._arrival: defaultdict[MessageKind, _Nodes] = defaultdict(dict)
        for index, flow in enumerate(compiled.traffic):
            for found, numbered, machines in (
                (self._sending, self._nodes.sending, flow.sending),
                (self._arrival, self._nodes.arrival, flow.receiving),
            ):
                nodes = dict(zip(machines, self._nodes.new(len(machines)), strict=True))
                found[flow.kind][flow.name] = nodes
                numbered |= {node: (index, machine) for machine, node in nodes.items()}
        for node in self._nodes.arrival:
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
        for layer in compiled.graph.computed:
            self._forward(layer, forward[layer.name])
        for layer in reversed(compiled.graph.layers):
            if layer.name in backward:
                self._backward(layer, backward[layer.name])
        users = self._users()
        for name, nodes in self._sending["parameter_gradient"].items():
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
                self._wait(node, self._arrival["state"], inputs, machine)
                self._wait(node, self._arrival["parameter"], tensors, machine)
            done[machine] = self._gate(nodes)
        if combining:  # partial: the output is there only after the sums
            self._contributed[name] = done
            self._release("partial", name, self._contributed)
            done = {}
        for machine, nodes in _by_machine(combining).items():
            for node in nodes:
                self._wait(node, self._contributed, [name], machine)
                self._wait(node, self._arrival["partial"], [name], machine)
            done[machine] = self._gate(nodes)
        self._computed[name] = done
        self._release("state", name, self._computed)

    def _backward(self, layer: Layer, tasks: list[tuple[int, Task]]) -> None:
        name = layer.name
        readers = [reader.name for reader in self._compiled.graph.consumers[name]]
        for machine, node in self._sending["gradient"].get(name, {}).items():
            self._wait(node, self._gone_back, readers, machine)
        # The gradient is complete on a rank when its own readers are done and all others have sent.
        self._gradient[name] = {}
        for machine, computed in self._computed[name].items():
            (node,) = self._nodes.new()
            self._nodes.wait(node, [computed])
            self._wait(node, self._gone_back, readers, machine)
            self._wait(node, self._arrival["gradient"], [name], machine)
            self._gradient[name][machine] = node
        self._release("partial_gradient", name, self._gradient)
        self._gone_back[name] = {}
        for machine, nodes in _by_machine(tasks).items():
            for node in nodes:
                self._wait(node, self._contributed, [name], machine)
                self._wait(node, self._gradient, [name], machine)
                self._wait(node, self._arrival["partial_gradient"], [name], machine)
            self._gone_back[name][machine] = self._gate(nodes)

    def _users(self) -> dict[str, dict[str, None]]:
        # The layers that use each tensor, in order, each once.
        found: dict[str, dict[str, None]] = {}
        for layer in self._compiled.graph.layers:
            for use in layer.tensors.values():
                found.setdefault(use.name, {})[layer.name] = None
        return found

    def _gate(self, others: Sequence[int]) -> int:
        if len(others) == 1:
            return others[0]
        (node,) = self._nodes.new()
        self._nodes.wait(node, others)
        return node

    def _wait(self, node: int, there: _Nodes, names: Iterable[str], machine: int) -> None:
        # Called a million times for a large model.
        n_before, after = self._nodes.n_before, self._nodes.after
        for name in names:
            if name in there and machine in (places := there[name]):
                after[places[machine]].append(node)
                n_before[node] += 1

    def _release(self, kind: MessageKind, name: str, there: _Nodes) -> None:
        # Messages can be sent once their sender has computed what they carry.
        for machine, node in self._sending[kind].get(name, {}).items():
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
    tasks: tuple[Task, ...]  # those of the first micro-batch first
    traffic: tuple[Traffic, ...]  # those of the first micro-batch first
    nodes: Dependencies


def schedule(compiled: Compiled, *, micro_batches: int = 1) -> Schedule:
    """Return the step of a plan.

    The compiled plan is for the samples of one micro-batch. GraphError if there are several, and a
    layer has batch statistics.
    """
    once = Schedule(compiled.tasks, compiled.traffic, _Builder(compiled).build())
    if micro_batches == 1:
        return once
    statistics = statistics_of(compiled.graph)
    if statistics:
        raise GraphError(
            f"layer {statistics[0]!r} has statistics of the whole batch, or may have, which "
            f"{micro_batches} micro-batches would change: use 1 micro-batch"
        )
    return _repeated(once, micro_batches)


def statistics_of(graph: LayerGraph) -> list[str]:
    # Layers that join samples: their result depends on the whole batch. That of an opaque module
    # may, too: nobody looks into it. Nor into an operator that could not be tried.
    single = joined(graph)
    return [
        layer.name
        for layer in graph.layers
        if is_module(layer)
        or layer.options.get("unchecked")
        or (layer.name in single and not single.issuperset(layer.inputs))
    ]


def _repeated(once: Schedule, n: int) -> Schedule:
    # One copy of the step per micro-batch; parameter messages are shared by all copies.
    own, n_tasks = once.nodes, once.nodes.n_tasks
    nodes = Dependencies(n * n_tasks, [0] * (n * n_tasks), [[] for _ in range(n * n_tasks)])
    each = [index for index, flow in enumerate(once.traffic) if flow.kind not in _ONCE]
    shared = {
        node
        for numbered in (own.sending, own.arrival)
        for node, (flow, _) in numbered.items()
        if once.traffic[flow].kind in _ONCE
    }
    first: list[int] = []  # the numbers of the nodes in the first copy
    for copy in range(n):
        here = [copy * n_tasks + task for task in range(n_tasks)]
        here += [
            first[node] if copy and node in shared else nodes.new()[0]
            for node in range(n_tasks, len(own.after))
        ]
        first = first or here
        for node, after in enumerate(own.after):
            for other in after:
                nodes.wait(here[other], [here[node]])
        # The traffic of this copy is numbered after that of those before it.
        added = len(once.traffic) + (copy - 1) * len(each)
        index = {flow: added + place if copy else flow for place, flow in enumerate(each)}
        for numbered, mine in ((own.sending, nodes.sending), (own.arrival, nodes.arrival)):
            for node, (flow, machine) in numbered.items():
                if not (copy and node in shared):
                    mine[here[node]] = (index.get(flow, flow), machine)
        for node in own.arrival:
            nodes.n_before[here[node]] = 1  # the last of its messages
    return Schedule(
        tasks=once.tasks * n,
        traffic=(*once.traffic, *[once.traffic[flow] for flow in each] * (n - 1)),
        nodes=nodes,
    )
