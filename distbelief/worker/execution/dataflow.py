"""Writes a rank's part of a compiled plan as a `Dataflow`: operations that read and write slots.

Gradients of inputs come before gradients of tensors where another rank waits for them:

    rank 0   (nothing to do)          x3 x2 x1 ...       x: gradient of an input
    rank 1   x8 x7 x6 x5 x4 --------^  w8 w7 w6 w5 w4    w: gradient of a tensor
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final, final

from distbelief.graph.graph import INPUT, Layer
from distbelief.graph.operator import joined, sums_of
from distbelief.graph.ops.norms import running_averages
from distbelief.graph.region import Region
from distbelief.plans.compiler import Compiled
from distbelief.plans.tasks import Message, MessageKind, Task, needed, rule_of, work_of, written_by
from distbelief.worker.execution import operations as ops
from distbelief.worker.execution.slots import Gather, How, gather


def urgent(compiled: Compiled) -> frozenset[str]:
    """Return the layers of which gradients of inputs come first.

    Those on a path to a message for another rank; but where the gradient of a tensor travels
    too, it does not wait for the end of the path. The same on all ranks.
    """
    sent, reduced = set[str](), set[str]()
    for message in compiled.traffic:
        if message.kind in {"gradient", "partial_gradient"}:
            sent.add(message.name)
        elif message.kind == "parameter_gradient":
            reduced.add(message.name)
    path, found = set[str](), set[str]()
    for layer in compiled.graph.layers:  # inputs before those that read them
        is_last = not sent.isdisjoint(layer.inputs)
        if not is_last and path.isdisjoint(layer.inputs):
            continue
        path.add(layer.name)
        if is_last or reduced.isdisjoint(use.name for use in layer.tensors.values()):
            found.add(layer.name)
    return frozenset(found)


# Operators whose gradients of inputs and of tensors share no work, or hardly any.
SEPARABLE: Final = frozenset({"linear", "convolution", "locally_connected", "gates", "recurrent"})

_ONCE_KINDS: Final = frozenset({"parameter", "parameter_gradient"})


def dataflow(
    compiled: Compiled,
    rank: int,
    *,
    training: bool = True,  # with the backward pass
    loss: str | None = None,  # the layer whose mean over the samples is the objective
    outputs: frozenset[str] = frozenset(),  # layers whose outputs are wanted at the end
    seeds: frozenset[str] | None = None,  # layers where gradients begin; by default the loss
) -> ops.Dataflow:
    if seeds is None:
        seeds = frozenset() if loss is None else frozenset({loss})
    builder = _FlowBuilder(
        compiled, rank, training=training, loss=loss, wanted=outputs, seeds=seeds
    )
    builder.forward()
    if training:
        builder.backward()
    return builder.finished()


@final
class _FlowBuilder:
    """Writes the operations of one rank.

    Fetch, send parameters
    per layer, in order:
        read if it is an input; else receive what its tasks need and is not there yet,
        compute; if partial, send contributions, receive contributions, combine;
        send states
    per layer, the last first:
        receive gradients; send and receive those of contributions
        compute; send gradients that are now complete
    receive gradients of tensors, push

    All ranks visit the layers in the same order, send as early and receive as late as possible: so
    one of them can always go on, and no deadlock is possible.
    """

    def __init__(
        self,
        compiled: Compiled,
        rank: int,
        *,
        training: bool,
        loss: str | None,
        wanted: frozenset[str],
        seeds: frozenset[str],
    ) -> None:
        self._compiled = compiled
        self._graph = compiled.graph
        self._rank = rank
        self._loss = loss
        self._wanted = wanted
        self._gradients = compiled.gradients if training else frozenset[str]()
        self._seeds = seeds & self._gradients
        self._urgent = urgent(compiled)
        averages = running_averages(compiled.graph) if training else {}
        self._running = {layer: tensor for tensor, layer in averages.items()}
        self._messages = _Messages(compiled, rank)
        self._slots = _Slots(joined(compiled.graph))
        own = {
            name: tuple(region for owner, region in pieces if owner == rank)
            for name, pieces in compiled.kept.items()
        }
        self._own = {name: regions for name, regions in own.items() if regions}
        # --- what has been written ---
        self._operations: list[ops.Operation] = []
        self._items: dict[tuple[str, Region], int] = {}
        self._losses: list[int] = []
        self._averages: dict[int, int] = {}
        self._outputs: list[tuple[str, Region, int]] = []
        self._reads: dict[str, tuple[Region, ...]] = {}
        self._forwards: dict[tuple[str, Region], int] = {}
        self._combined: defaultdict[str, list[Region]] = defaultdict(list)

    def forward(self) -> None:
        for name, regions in self._own.items():
            items = [self._items.setdefault((name, r), len(self._items)) for r in regions]
            self._add_input("parameter", name, regions, items=items)
            self._send("parameter", name)
        tasks = self._by_layer(self._compiled.demands.forward)
        for layer in self._graph.layers:
            needs = self._compiled.demands.states.get(layer.name, {})
            if layer.kind == INPUT and self._rank in needs:
                self._reads[layer.name] = needs[self._rank]
                self._add_input("state", layer.name, needs[self._rank], layer=layer.name)
            elif layer.name in tasks:
                self._compute(layer, tasks[layer.name])

    def _compute(self, layer: Layer, tasks: Sequence[Task]) -> None:
        for use in layer.tensors.values():
            self._receive("parameter", use.name)
        computed = [task for task in tasks if task.phase != "combine"]
        for name in layer.inputs if computed else ():
            self._receive("state", name)
        for task in computed:
            self._add_forward(layer, task.region, partial=task.is_partial)
        self._send("partial", layer.name)
        self._receive("partial", layer.name)
        for task in tasks:
            if task.phase == "combine":
                self._add_combine(layer, task.region)
        self._send("state", layer.name)

    def backward(self) -> None:
        tasks = self._by_layer(self._compiled.demands.backward)
        reads = self._firsts(tasks, lambda layer: layer.inputs)
        uses = self._firsts(tasks, _tensors)
        for layer in reversed(self._graph.layers):
            # All readers of this layer come after it, so its gradient on this rank is complete.
            self._receive("gradient", layer.name)
            self._send("partial_gradient", layer.name)
            self._receive("partial_gradient", layer.name)
            for task in tasks.get(layer.name, []):
                self._add_backward(layer, task.region, partial=task.is_partial)
            # Gradients to which no earlier layer adds are complete.
            for name in layer.inputs:
                if reads.get(name) == layer.name:
                    self._send("gradient", name)
            for name in _tensors(layer):
                if uses.get(name) == layer.name:
                    self._send("parameter_gradient", name)
        layers = {task.layer for task in self._compiled.demands.backward}
        trained = {
            use.name
            for layer in layers
            for use in self._graph[layer].tensors.values()
            if use.trains
        }
        for name, regions in self._own.items():
            if name in trained:
                self._receive("parameter_gradient", name)
                reads_of = [
                    self._slots.gather("parameter_gradient", name, r, how="sum") for r in regions
                ]
                items = tuple(self._items[name, region] for region in regions)
                self._operations.append(
                    ops.OutputOp(message=None, reads=tuple(reads_of), items=items, once=True)
                )

    def finished(self) -> ops.Dataflow:
        return ops.Dataflow(
            operations=tuple(self._operations),
            once=tuple(self._slots.once),
            added=frozenset(self._slots.added),
            sent=self._messages.sent,
            received=self._messages.received,
            items=tuple(self._items),
            losses=tuple(self._losses),
            averages=self._averages,
            outputs=tuple(self._outputs),
            reads=self._reads,
            joined=self._slots.joined,
            integers=frozenset(layer.name for layer in self._graph.layers if layer.is_integer),
        )

    def _by_layer(self, tasks: Iterable[Task]) -> dict[str, list[Task]]:
        found: dict[str, list[Task]] = {}
        for task in tasks:
            if task.machine == self._rank:
                found.setdefault(task.layer, []).append(task)
        return found

    def _firsts(
        self, layers: Container[str], names: Callable[[Layer], Iterable[str]]
    ) -> dict[str, str]:
        # The first of these layers that reads or uses each name; it goes back last.
        return {
            name: layer.name
            for layer in reversed(self._graph.layers)
            if layer.name in layers
            for name in names(layer)
        }

    # ------------------------------------------------------------------------ messages

    def _receive(self, kind: MessageKind, name: str) -> None:
        # Popped: each message is received once, before its first use.
        index, messages = self._messages.inbox.pop((kind, name), (0, []))
        for message in messages:
            self._messages.received[index, message.sender] = len(self._operations)
            self._add_input(kind, name, message.regions, message=message)

    def _send(self, kind: MessageKind, name: str) -> None:
        index, messages = self._messages.outbox.pop((kind, name), (0, []))
        how: How = "sum" if kind in {"gradient", "parameter_gradient"} else "cut"
        if messages and kind == "partial":
            how = sums_of(self._graph[name]).combine(self._graph[name])
        if messages and kind == "partial_gradient":
            self._complete_gradient(self._graph[name])
        for message in messages:
            reads = tuple(
                self._slots.gather(kind, name, region, how=how) for region in message.regions
            )
            self._messages.sent[index, message.receiver] = len(self._operations)
            self._operations.append(
                ops.OutputOp(message=message, reads=reads, items=(), once=kind in _ONCE_KINDS)
            )

    # --------------------------------------------------------------- single operations

    def _add_input(
        self,
        kind: MessageKind,
        name: str,
        regions: Sequence[Region],
        *,
        message: Message | None = None,
        layer: str | None = None,
        items: Sequence[int] = (),
    ) -> None:
        once = kind in _ONCE_KINDS
        writes = tuple(self._slots.new(once=once) for _ in regions)
        self._slots.known[kind, name] += zip(writes, regions, strict=True)
        self._operations.append(
            ops.InputOp(message=message, layer=layer, items=tuple(items), writes=writes, once=once)
        )

    def _add_forward(self, layer: Layer, region: Region, *, partial: bool) -> None:
        needs = needed(layer, region, partial=partial)
        uses = rule_of(layer, partial=partial).uses(layer, region)
        states = [self._slots.gather("state", name, r) for name, r in needs.reads]
        tensors = [self._slots.gather("parameter", name, r) for name, r in needs.uses]
        back = layer.name in self._gradients
        self._forwards[layer.name, region] = len(self._operations)
        slot, seed = self._slots.new(), None
        if partial:
            assert needs.writes is not None, layer.name
            self._slots.known["partial", layer.name].append((slot, needs.writes))
        else:
            seed = self._add_output(layer, region, slot)
        self._operations.append(
            ops.ForwardOp(
                layer=layer,
                region=region,
                partial=partial,
                reads=(*states, *tensors),
                n_inputs=len(states),
                tensor_names=tuple(uses),
                needs_gradient=(
                    *(back and name in self._gradients for name in layer.inputs),
                    *(back and layer.tensors[argument].trains for argument in uses),
                ),
                writes=slot,
                seed=seed,
                flops=work_of(layer, region, partial=partial).forward,
            )
        )

    def _add_combine(self, layer: Layer, region: Region) -> None:
        how = sums_of(layer).combine(layer)
        reads = (self._slots.gather("partial", layer.name, region, how=how),)
        slot = self._slots.new()
        seed = self._add_output(layer, region, slot)
        self._operations.append(ops.CombineOp(layer=layer, reads=reads, writes=slot, seed=seed))
        if layer.name in self._gradients:
            self._combined[layer.name].append(region)

    def _add_output(self, layer: Layer, region: Region, slot: int) -> int | None:
        name = layer.name
        self._slots.known["state", name].append((slot, region))
        if name == self._loss:
            self._losses.append(slot)
        if name in self._wanted:
            self._outputs.append((name, region, slot))
        # BatchNorm: this output replaces a running average.
        if name in self._running:
            self._averages[self._items[self._running[name], region]] = slot
        if name not in self._seeds:
            return None
        seed = self._slots.new()
        self._slots.known["gradient", name].append((seed, region))
        return seed

    def _add_backward(self, layer: Layer, region: Region, *, partial: bool) -> None:
        if partial:
            self._complete_gradient(layer)
            written = written_by(layer, region)
            gradient = self._slots.gather("partial_gradient", layer.name, written)
        else:
            gradient = self._slots.gather("gradient", layer.name, region, how="sum")
        index = self._forwards[layer.name, region]
        forward = self._operations[index]
        assert isinstance(forward, ops.ForwardOp), layer.name
        needs = needed(layer, region, partial=partial)
        writes: dict[int, int] = {}
        for place, (name, where) in enumerate((*needs.reads, *needs.uses)):
            if forward.needs_gradient[place]:
                is_state = place < forward.n_inputs
                if is_state:
                    slot = writes[place] = self._slots.new()
                    self._slots.known["gradient", name].append((slot, where))
                else:
                    writes[place] = self._slots.sum_of(layer, name, where)
        parts = [tuple(writes)]
        # Split, so that the gradients of inputs can be sent first.
        if layer.kind in SEPARABLE and layer.name in self._urgent:
            inputs = tuple(place for place in writes if place < forward.n_inputs)
            tensors = tuple(place for place in writes if place >= forward.n_inputs)
            parts = [part for part in (inputs, tensors) if part]
        flops = work_of(layer, region, partial=partial).backward
        for part in parts:
            self._operations.append(
                ops.BackwardOp(
                    forward=index,
                    reads=(gradient,) if part is parts[0] else (),
                    places=part,
                    writes=tuple(writes[place] for place in part),
                    flops=flops / len(parts),
                    is_last=part is parts[-1],
                    can_wait=part is not parts[0],
                )
            )

    def _complete_gradient(self, layer: Layer) -> None:
        # All consumers of a combined output have written their gradients by now.
        for region in self._combined.pop(layer.name, []):
            reads = (self._slots.gather("gradient", layer.name, region, how="sum"),)
            slot = self._slots.new()
            self._slots.known["partial_gradient", layer.name].append((slot, region))
            self._operations.append(ops.CombineOp(layer=layer, reads=reads, writes=slot, seed=None))


@final
class _Slots:
    """The slots written so far."""

    def __init__(self, joined: frozenset[str]) -> None:
        self.joined = joined  # layers whose output is one sample for the whole batch
        self.once: list[bool] = []  # per slot
        self.added: set[int] = set()
        # By kind of message and by layer or tensor.
        self.known: defaultdict[tuple[MessageKind, str], list[tuple[int, Region]]] = defaultdict(
            list
        )
        self._sums: dict[tuple[bytes, str, Region], int] = {}

    def new(self, *, once: bool = False) -> int:
        self.once.append(once)
        return len(self.once) - 1

    def sum_of(self, layer: Layer, name: str, where: Region) -> int:
        # For the gradient of a tensor: the steps of a recurrent layer add to the same one.
        key = (layer.signature, name, where)
        if key not in self._sums:
            slot = self._sums[key] = self.new(once=True)
            self.known["parameter_gradient", name].append((slot, where))
            self.added.add(slot)
        return self._sums[key]

    def gather(self, kind: MessageKind, name: str, region: Region, *, how: How = "cut") -> Gather:
        return gather(
            region,
            self.known[kind, name],
            how=how,
            samples=kind not in _ONCE_KINDS,
            joined=name in self.joined,
            what=f"{kind} {name!r}",
        )


@final
class _Messages:
    """The messages of a rank: those that are not written yet, and where the others are."""

    def __init__(self, compiled: Compiled, rank: int) -> None:
        # With the index of their traffic.
        self.inbox: dict[tuple[MessageKind, str], tuple[int, list[Message]]] = {}
        self.outbox: dict[tuple[MessageKind, str], tuple[int, list[Message]]] = {}
        # Operations, by that index and the other rank.
        self.sent: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[int, int], int] = {}
        for index, flow in enumerate(compiled.traffic):
            received = flow.receiving.get(rank, ())
            sent = [flow.message(index) for index in flow.sending.get(rank, ())]
            # Start with the next rank: else all would send to the first one at the same time.
            sent.sort(key=lambda message: (message.receiver < rank, message.receiver))
            self.inbox[flow.kind, flow.name] = index, [flow.message(int(i)) for i in received]
            self.outbox[flow.kind, flow.name] = index, sent


def _tensors(layer: Layer) -> list[str]:
    return [use.name for use in layer.tensors.values()]
