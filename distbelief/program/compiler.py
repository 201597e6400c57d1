"""A plan compiled: every task, every message, and one program per machine."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, Generic, Literal, TypeVar, final, get_args

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import joined
from distbelief.graph.ops.norms import running_averages
from distbelief.graph.region import Region, disjoint, shared_by
from distbelief.program.instructions import (
    Backward,
    Combine,
    Fetch,
    Forward,
    Instruction,
    Message,
    MessageKind,
    Partial,
    Program,
    Push,
    Read,
    Receive,
    Reduce,
    Send,
    Task,
    backward_of,
    needed,
    tasks_of,
)
from distbelief.program.placement import Placement
from distbelief.program.traffic import Traffic


# Which layers have a gradient: it comes from an output, and some tensor wants it.

NO_GRADIENT: Final = "gradient"
"""The option by which a layer says, if False, that it has none (maxima of softmax)."""


def with_gradient(graph: LayerGraph) -> frozenset[str]:
    """Return the layers that take part in the backward pass.

    They train or read a layer that does, and an output depends on them. Whole numbers
    have no gradient, nor have maxima that only keep the numbers of a softmax small.
    """
    wanting: set[str] = set()
    for layer in graph.layers:
        trains = any(use.trains for use in layer.tensors.values())
        if _flows(layer) and (trains or not wanting.isdisjoint(layer.inputs)):
            wanting.add(layer.name)
    reached = set(graph.outputs)
    for layer in reversed(graph.layers):
        if layer.name in reached and _flows(layer):
            reached.update(layer.inputs)
    return frozenset(wanting & reached)


def _flows(layer: Layer) -> bool:
    if layer.kind == INPUT or layer.is_integer:
        return False
    return layer.options.get(NO_GRADIENT) is not False


# Parts of compiled plans, kept: plans that differ in one layer have most in common.
#
# Whoever compiles many plans of one graph, as a search does, hands the same store to all
# of them. What has not been asked for longest is forgotten first.

_T = TypeVar("_T")


@final
class Parts(Generic[_T]):
    """Results by what they were made from.

    Args:
        n_max: How many are kept.
    """

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._kept: dict[Hashable, _T] = {}

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what is kept under a key, made now if nothing is."""
        found = self._kept.pop(key) if key in self._kept else make()
        self._kept[key] = found  # now the last to be forgotten
        if len(self._kept) > self._n_max:
            del self._kept[next(iter(self._kept))]
        return found


# What every machine computes, and what it needs for that: states, tensors, sums.

Needs = Mapping[str, Mapping[int, tuple[Region, ...]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What machines do and need. Regions of one machine are disjoint, none empty.

    Attributes:
        forward: Tasks, layer by layer.
        backward: Tasks, the last layer first.
        states: Per layer that is read and machine that reads it.
        tensors: Per tensor and machine that uses it.
        contributions: Per partial layer and machine, what of the output it adds to.
    """

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    states: Needs
    tensors: Needs
    contributions: Needs


def check(
    graph: LayerGraph, placements: Mapping[str, Placement], *, n_machines: int, known: Parts[None]
) -> None:
    """Check that every layer has a place where it can be computed.

    Args:
        graph: What is computed.
        placements: Where.
        n_machines: They are counted from 0.
        known: Layers, their placements and numbers of machines that are in order.

    Raises:
        GraphError: one has not, or there is a place for no layer.
    """
    computed = {layer.name for layer in graph.layers if layer.kind != INPUT}
    for name in placements:
        if name in computed:
            continue
        if name in graph.by_name:
            raise GraphError(
                f"the plan places {name!r}, an input: every machine reads it from the "
                "data, so leave it out"
            )
        raise GraphError(
            f"the plan places {name!r}, which is no layer of the graph (it has "
            f"{', '.join(sorted(computed))})"
        )
    missing = [layer.name for layer in graph.layers if layer.name in computed]
    missing = [name for name in missing if name not in placements]
    if missing:
        raise GraphError(
            f"the plan has no placement for {', '.join(map(repr, missing))}: every "
            "layer needs one, except inputs"
        )
    for name, placement in placements.items():
        check_one = partial(placement.check, graph[name], n_machines=n_machines)
        known.get((name, placement, n_machines), check_one)


_Found = dict[str, dict[int, set[Region]]]
_Sort = Literal["states", "tensors", "contributions"]


@final
@dataclass(frozen=True, slots=True)
class _Entered:
    """A layer by itself: its tasks, and what they need."""

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]  # the last cell first
    needs: Mapping[_Sort, _Found]


@final
class KnownDemands:
    """What has been worked out for one graph and batch, whatever the plan.

    Args:
        n_max: Parts of each sort that are kept.
    """

    def __init__(self, n_max: int) -> None:
        self.layers = Parts[_Entered](n_max)
        self.unions = Parts[Mapping[int, tuple[Region, ...]]](n_max)


def demands(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    gradients: frozenset[str],
    known: KnownDemands,
) -> Demands:
    """Return what machines compute and need.

    Args:
        graph: What is computed.
        placements: Checked.
        batch: Samples of a step.
        gradients: Layers with a backward pass.
        known: Of plans of the same graph, batch and gradients.
    """
    entered: dict[str, _Entered] = {}
    once = joined(graph)
    for layer in graph.layers:
        if layer.kind == INPUT:
            continue
        name = layer.name
        # A statistic of the batch is one sample, but reads all of them.
        n_samples = 1 if once.issuperset((name, *layer.inputs)) else batch
        enter = partial(
            _entered, layer, placements[name], batch=n_samples, backward=name in gradients
        )
        entered[name] = known.layers.get((name, placements[name]), enter)
    united = {sort: _united(entered, sort, placements, known=known) for sort in get_args(_Sort)}
    return Demands(
        forward=tuple(task for each in entered.values() for task in each.forward),
        backward=tuple(task for each in reversed(entered.values()) for task in each.backward),
        **united,
    )


def _entered(layer: Layer, placement: Placement, *, batch: int, backward: bool) -> _Entered:
    tasks = list(tasks_of(layer, placement, batch=batch))
    computing = [task for task in tasks if task.phase != "combine"]
    needs: dict[_Sort, _Found] = {"states": {}, "tensors": {}, "contributions": {}}
    for task in computing:
        found = needed(layer, task.region, partial=task.is_partial)
        for name, region in found.reads:
            _add(needs["states"], name, task.machine, region)
        for name, region in found.uses:
            _add(needs["tensors"], name, task.machine, region)
        if found.writes is not None:
            _add(needs["contributions"], task.layer, task.machine, found.writes)
    back = [backward_of(task, layer, batch=batch) for task in computing]
    return _Entered(tuple(tasks), tuple(reversed(back)) if backward else (), needs)


def _add(found: _Found, name: str, machine: int, region: Region) -> None:
    if region.n_elements:
        found.setdefault(name, {}).setdefault(machine, set()).add(region)


def _united(
    entered: Mapping[str, _Entered],
    sort: _Sort,
    placements: Mapping[str, Placement],
    *,
    known: KnownDemands,
) -> Needs:
    """Return, by name, what each machine needs for all layers together."""
    users: dict[str, list[str]] = {}
    for layer, each in entered.items():
        for name in each.needs[sort]:
            users.setdefault(name, []).append(layer)

    def union(name: str, layers: Sequence[str]) -> dict[int, tuple[Region, ...]]:
        found: dict[int, set[Region]] = {}
        for layer in layers:
            for machine, regions in entered[layer].needs[sort][name].items():
                found.setdefault(machine, set()).update(regions)
        return {machine: disjoint(regions) for machine, regions in found.items()}

    return {
        name: known.unions.get(
            (sort, name, tuple((layer, placements[layer]) for layer in layers)),
            partial(union, name, layers),
        )
        for name, layers in users.items()
    }


# Tensors that several machines use: who keeps which piece of them.
#
#     weight of a convolution, image cut into 3 bands       used by 0, 1 and 2
#     rows   0:5 | 5:11 | 11:16                             kept by 0  | 1 | 2
#
# A range with several users is cut evenly among them, along its first dimension. Who
# keeps a piece fetches it, sends it to the other users before the forward pass, adds up
# their gradients after the backward pass, and pushes the sum. So a range has one version
# and one gradient, and the server sees each number once.


def pieces(uses: Mapping[int, Sequence[Region]], *, n_dims: int) -> list[tuple[int, Region]]:
    """Return who keeps which part of a tensor: all that is used, once.

    Args:
        uses: By machine; disjoint. The order of machines decides who keeps what.
        n_dims: Of the tensor.
    """
    return [piece for users, region in shared_by(uses, n_dims) for piece in _cut(users, region)]


def _cut(users: Sequence[int], region: Region) -> list[tuple[int, Region]]:
    if len(users) == 1 or not region.intervals or region.shape[0] == 1:
        return [(users[0], region)]
    parts = region.cut(0, [1.0] * len(users))
    owned = zip(users, parts, strict=True)
    return [(machine, part) for machine, part in owned if part.n_elements]


# Who sends what to whom: the messages of a step, the most urgent first.
#
#     states      go from who computes to who reads: owners' cells meet readers' boxes
#     partials    go from the parts of a layer to who combines them
#     parameters  go from who keeps a piece to who uses it
#     gradients   are all of these on their way back
#
# Input layers are read from the data by whoever needs them, and travel nowhere.

NUMBER_BYTES: Final = 4
INTEGER_BYTES: Final = 8

Kept = Mapping[str, list[tuple[int, Region]]]


def index_bytes(graph: LayerGraph, *, batch: int) -> dict[str, int]:
    """Return what one index of each layer's output takes, all samples together."""
    once = joined(graph)
    return {
        layer.name: (INTEGER_BYTES if layer.is_integer else NUMBER_BYTES)
        * (1 if layer.name in once else batch)
        for layer in graph.layers
    }


def route(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    needs: Demands,
    kept: Kept,
    *,
    batch: int,
    gradients: frozenset[str],
    known: Parts[Traffic],
) -> tuple[Traffic, ...]:
    """Return all messages, by kind and name.

    Args:
        graph: What is computed.
        placements: Where.
        needs: What machines do and need.
        kept: Who keeps which piece of each tensor.
        batch: Samples of a step.
        gradients: Layers with a backward pass.
        known: Of plans of the same graph and batch.
    """
    n_bytes = index_bytes(graph, batch=batch)

    def ways(kind: MessageKind, wanted: Needs) -> dict[str, Traffic]:
        return {
            layer.name: _way(
                (kind, layer.name),
                placements[layer.name].owners(layer),
                wanted.get(layer.name, {}),
                n_bytes=n_bytes[layer.name],
                n_dims=len(layer.shape),
                known=known,
            )
            for layer in graph.layers
            if layer.kind != INPUT
        }

    states = ways("state", needs.states)
    sums = ways("partial_gradient", needs.contributions)
    parameters = {
        name: _way(
            ("parameter", name),
            kept[name],
            by_machine,
            n_bytes=NUMBER_BYTES,
            n_dims=len(graph.tensors[name].shape),
            known=known,
        )
        for name, by_machine in needs.tensors.items()
    }
    found = _Routes(graph, needs, gradients, states, sums, parameters)
    return tuple(way for way in (*found.forward(), *found.back()) if len(way))


def _way(
    subject: tuple[MessageKind, str],
    owners: Sequence[tuple[int, Region]],
    needs: Mapping[int, tuple[Region, ...]],
    *,
    n_bytes: int,
    n_dims: int,
    known: Parts[Traffic],
) -> Traffic:
    return known.get(
        (subject, tuple(owners), tuple(needs.items())),
        lambda: Traffic.between(subject, owners, needs, n_bytes=n_bytes, n_dims=n_dims),
    )


@final
@dataclass(frozen=True, slots=True)
class _Routes:
    graph: LayerGraph
    needs: Demands
    gradients: frozenset[str]
    states: Mapping[str, Traffic]
    sums: Mapping[str, Traffic]
    parameters: Mapping[str, Traffic]

    def forward(self) -> Iterator[Traffic]:
        # Tensors are in the order of the first layer that uses them.
        parameters = dict(self.parameters)
        for layer in self.graph.layers:
            if layer.kind == INPUT:
                continue
            for use in layer.tensors.values():
                if use.name in parameters:
                    yield parameters.pop(use.name)
            contributing = self.needs.contributions.get(layer.name, {})
            yield self.sums[layer.name].back("partial", senders=contributing)
            yield self.states[layer.name]

    def back(self) -> Iterator[Traffic]:
        backward = [layer for layer in self.graph.layers if layer.name in self.gradients]
        going_back: dict[str, set[int]] = {}
        for task in self.needs.backward:
            going_back.setdefault(task.layer, set()).add(task.machine)
        users: dict[str, list[Layer]] = {}
        for layer in backward:
            for use in layer.tensors.values():
                users.setdefault(use.name, []).append(layer)
        for layer in reversed(backward):
            readers = self.graph.consumers[layer.name]
            yield self.states[layer.name].back("gradient", senders=_machines(going_back, readers))
            yield self.sums[layer.name]
        for name, way in reversed(list(self.parameters.items())):
            if self.graph.tensors[name].trains:
                senders = _machines(going_back, users.get(name, []))
                yield way.back("parameter_gradient", senders=senders)


def _machines(by_layer: Mapping[str, set[int]], layers: Iterable[Layer]) -> set[int]:
    return {m for layer in layers for m in by_layer.get(layer.name, ())}


# The program of one machine: its tasks in order, and messages where they belong.
#
#     Fetch, Send parameters
#     per layer, in order:
#         Read if it is an input; else Receive what its tasks need and was not there yet,
#         Forward; or Partial, Send partials, Receive partials, Combine;
#         Send states
#     per layer, the last first:
#         Receive gradients; Send and Receive those of partials
#         Backward; Send gradients that are now complete
#     Receive gradients of tensors, Reduce, Push
#
# Every machine goes through the layers in the same order, sends as soon as it can and
# receives as late as it can; so there is always one that can go on.

_Mail = defaultdict[tuple[MessageKind, str], list[Message]]


def write(
    graph: LayerGraph, demands: Demands, kept: Kept, *, traffic: Sequence[Traffic], machine: int
) -> Program:
    """Return what one machine does.

    Args:
        graph: What is computed.
        demands: What machines do and need.
        kept: Who keeps which piece of each tensor.
        traffic: All messages.
        machine: Which.
    """
    inbox: _Mail = defaultdict(list)
    outbox: _Mail = defaultdict(list)
    for way in traffic:
        subject = (way.kind, way.name)
        received = way.receiving.get(machine, ())
        inbox[subject] += [way.message(int(index)) for index in received]
        sent = way.sending.get(machine, ())
        # Beginning with the next machine, or all would send to the first one at once.
        outbox[subject] += sorted(
            [way.message(index) for index in sent],
            key=lambda message: (message.receiver < machine, message.receiver),
        )
    own = {
        name: tuple(region for owner, region in pieces if owner == machine)
        for name, pieces in kept.items()
    }
    writer = _Writer(
        graph=graph,
        demands=demands,
        machine=machine,
        own={name: regions for name, regions in own.items() if regions},
        inbox=inbox,
        outbox=outbox,
    )
    return Program(machine=machine, instructions=tuple(writer.instructions()))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    graph: LayerGraph
    demands: Demands
    machine: int
    own: dict[str, tuple[Region, ...]]
    inbox: _Mail
    outbox: _Mail

    def instructions(self) -> Iterator[Instruction]:
        for name, regions in self.own.items():
            yield Fetch(name, regions)
            yield from self._send("parameter", name)
        forward = self._by_layer(self.demands.forward)
        for layer in self.graph.layers:
            if layer.kind == INPUT:
                yield from self._read(layer)
            elif layer.name in forward:
                yield from self._forward(layer, forward[layer.name])
        backward = self._by_layer(self.demands.backward)
        firsts = self._firsts(backward)
        for layer in reversed(self.graph.layers):
            yield from self._backward(layer, backward.get(layer.name, []))
            if layer.name in backward:
                yield from self._send_complete(layer, firsts)
        yield from self._push()

    def _read(self, layer: Layer) -> Iterator[Instruction]:
        needed = self.demands.states.get(layer.name, {})
        if self.machine in needed:
            yield Read(layer.name, needed[self.machine])

    def _push(self) -> Iterator[Instruction]:
        layers = {task.layer for task in self.demands.backward}
        trained = {
            use.name for layer in layers for use in self.graph[layer].tensors.values() if use.trains
        }
        for name, regions in self.own.items():
            if name in trained:
                yield from self._receive("parameter_gradient", name)
                yield Reduce(name, regions)
                yield Push(name, regions)

    def _forward(self, layer: Layer, tasks: Sequence[Task]) -> Iterator[Instruction]:
        for use in layer.tensors.values():
            yield from self._receive("parameter", use.name)
        computed = [task for task in tasks if task.phase != "combine"]
        for name in dict.fromkeys(layer.inputs) if computed else ():
            yield from self._receive("state", name)
        for task in computed:
            if task.is_partial:
                yield Partial(layer.name, task.region)
            else:
                yield Forward(layer.name, task.region)
        yield from self._send("partial", layer.name)
        yield from self._receive("partial", layer.name)
        for task in tasks:
            if task.phase == "combine":
                yield Combine(layer.name, task.region)
        yield from self._send("state", layer.name)

    def _backward(self, layer: Layer, tasks: Sequence[Task]) -> Iterator[Instruction]:
        # All that read the layer come after it, so its gradient here is complete.
        yield from self._receive("gradient", layer.name)
        yield from self._send("partial_gradient", layer.name)
        yield from self._receive("partial_gradient", layer.name)
        for task in tasks:
            yield Backward(layer.name, task.region, partial=task.is_partial)

    def _send_complete(
        self, layer: Layer, firsts: tuple[Mapping[str, str], Mapping[str, str]]
    ) -> Iterator[Send]:
        """Send gradients that nothing before this layer adds to."""
        reads, uses = firsts
        for name in dict.fromkeys(layer.inputs):
            if reads.get(name) == layer.name:
                yield from self._send("gradient", name)
        for name in dict.fromkeys(use.name for use in layer.tensors.values()):
            if uses.get(name) == layer.name:
                yield from self._send("parameter_gradient", name)

    def _firsts(self, layers: Collection[str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the first of these layers to read each layer, to use each tensor."""
        reads: dict[str, str] = {}
        uses: dict[str, str] = {}
        for layer in self.graph.layers:
            if layer.name in layers:
                for name in layer.inputs:
                    reads.setdefault(name, layer.name)
                for use in layer.tensors.values():
                    uses.setdefault(use.name, layer.name)
        return reads, uses

    def _by_layer(self, tasks: Iterable[Task]) -> dict[str, list[Task]]:
        found: dict[str, list[Task]] = {}
        for task in tasks:
            if task.machine == self.machine:
                found.setdefault(task.layer, []).append(task)
        return found

    def _receive(self, kind: MessageKind, name: str) -> list[Receive]:
        return [Receive(message) for message in self.inbox.pop((kind, name), [])]

    def _send(self, kind: MessageKind, name: str) -> list[Send]:
        return [Send(message) for message in self.outbox.pop((kind, name), [])]


@final
@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a plan comes to.

    Attributes:
        graph: What is computed.
        placements: Where.
        batch: Samples of a step.
        n_machines: Of the cluster; some may have nothing to do.
        order: Machines with something to do, as they first appear in the plan.
        gradients: Layers with a backward pass.
        demands: What machines do and need.
        kept: Per tensor who keeps which piece.
        traffic: All messages, by kind and name; the first are the most urgent.
    """

    graph: LayerGraph
    placements: Mapping[str, Placement]
    batch: int
    n_machines: int
    order: tuple[int, ...]
    gradients: frozenset[str]
    demands: Demands
    kept: Kept
    traffic: tuple[Traffic, ...]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All computations, in an order in which they can be done."""
        return (*self.demands.forward, *self.demands.backward)

    @property
    def n_messages(self) -> int:
        """How many messages a step has."""
        return sum(map(len, self.traffic))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All of them; slow if there are many."""
        return tuple(way.message(i) for way in self.traffic for i in range(len(way)))

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Of every machine; slow if there are many messages."""
        return tuple(map(self.program, range(self.n_machines)))

    def program(self, machine: int) -> Program:
        """Return what one machine does."""
        return write(self.graph, self.demands, self.kept, traffic=self.traffic, machine=machine)


@final
class CompilerCache:
    """What is alike in plans of one graph and batch, kept for whoever compiles many.

    Args:
        graph: Of all plans.
        n_plans: So many that have nothing in common can be kept.
    """

    def __init__(self, graph: LayerGraph, *, n_plans: int = 4) -> None:
        n_parts = n_plans * (2 * len(graph.layers) + len(graph.tensors))
        self.checked = Parts[None](n_parts)
        self.demands = KnownDemands(n_parts)
        self.pieces = Parts[list[tuple[int, Region]]](n_parts)
        self.traffic = Parts[Traffic](n_parts)
        self.gradients = with_gradient(graph)


def compile_plan(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    n_machines: int,
    known: CompilerCache | None = None,
) -> Compiled:
    """Return who computes and sends what.

    Args:
        graph: What is computed.
        placements: Of every layer except inputs.
        batch: Samples of a step.
        n_machines: They are counted from 0.
        known: Of other plans of this graph and batch.

    Raises:
        GraphError: a layer has no place, cannot be computed there, or is unknown.
    """
    known = known or CompilerCache(graph, n_plans=1)
    check(graph, placements, n_machines=n_machines, known=known.checked)
    order = _order(graph, placements)
    gradients = known.gradients
    needs = demands(graph, placements, batch=batch, gradients=gradients, known=known.demands)
    kept = {}
    averages = running_averages(graph)
    for name, by_machine in needs.tensors.items():
        if name in averages:  # who computes a new running statistic keeps it
            layer = graph[averages[name]]
            kept[name] = placements[layer.name].owners(layer)
            continue
        # In the order of the plan, so that machines' numbers do not matter.
        users = {m: by_machine[m] for m in order if m in by_machine}
        n_dims = len(graph.tensors[name].shape)
        kept[name] = known.pieces.get(
            (name, tuple(users.items())), partial(pieces, users, n_dims=n_dims)
        )
    return Compiled(
        graph=graph,
        placements=placements,
        batch=batch,
        n_machines=n_machines,
        order=order,
        gradients=gradients,
        demands=needs,
        kept=kept,
        traffic=route(
            graph, placements, needs, kept, batch=batch, gradients=gradients, known=known.traffic
        ),
    )


def _order(graph: LayerGraph, placements: Mapping[str, Placement]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for layer in graph.layers:
        if layer.kind != INPUT:
            placement = placements[layer.name]
            found |= dict.fromkeys(placement.machines)
            if placement.combine is not None:
                found |= dict.fromkeys(placement.combine.machines)
    return tuple(found)
