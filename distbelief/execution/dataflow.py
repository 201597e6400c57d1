"""Compiles a rank's program into a `Dataflow`: finds, for all that is read, the slots to read.

Gradients of inputs come before gradients of tensors where another rank waits for them:

    rank 0   (nothing to do)          x3 x2 x1 ...       x: gradient of an input
    rank 1   x8 x7 x6 x5 x4 --------^  w8 w7 w6 w5 w4    w: gradient of a tensor
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, assert_never, final

from distbelief.execution.operations import (
    BackwardOp,
    CombineOp,
    Dataflow,
    ForwardOp,
    InputOp,
    Operation,
    OutputOp,
)
from distbelief.execution.slots import Gather, How, gather
from distbelief.graph.graph import Layer
from distbelief.graph.operator import joined, operator_of
from distbelief.graph.ops.norms import running_averages
from distbelief.graph.region import Region
from distbelief.program.compiler import Compiled
from distbelief.program.instructions import (
    Backward,
    Combine,
    Fetch,
    Forward,
    Instruction,
    Message,
    MessageKind,
    Partial,
    Push,
    Read,
    Receive,
    Reduce,
    Send,
    needed,
    rule_of,
    work_of,
    written_by,
)


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


# Operators whose gradients of inputs and of tensors share no work.
SEPARABLE: Final = frozenset({"linear", "convolution", "locally_connected"})

FORWARD_KINDS: Final = frozenset({"state", "partial", "parameter"})
ONCE_KINDS: Final = frozenset({"parameter", "parameter_gradient"})


def dataflow(
    compiled: Compiled,
    rank: int,
    *,
    training: bool = True,
    loss: str | None = None,
    outputs: frozenset[str] = frozenset(),
    seeds: frozenset[str] | None = None,
) -> Dataflow:
    """Return what one rank computes.

    Args:
        compiled: The plan.
        rank: Which one.
        training: With the backward pass.
        loss: The layer whose mean over the samples is the objective.
        outputs: Layers whose outputs are wanted at the end.
        seeds: Layers where gradients begin; by default the loss.
    """
    wanted = {loss} if loss is not None else set()
    builder = _FlowBuilder(
        compiled=compiled,
        training=training,
        loss=loss,
        wanted=outputs,
        seeds=frozenset(wanted) if seeds is None else seeds,
    )
    for instruction in compiled.program(rank).instructions:
        if training or _is_forward(instruction):
            builder.add(instruction)
    return builder.finished()


def _is_forward(instruction: Instruction) -> bool:
    match instruction:
        case Send() | Receive():
            return instruction.message.kind in FORWARD_KINDS
        case Backward() | Reduce() | Push():
            return False
        case _:
            return True


@final
@dataclass(slots=True, kw_only=True)
class _FlowBuilder:
    compiled: Compiled
    training: bool
    loss: str | None
    wanted: frozenset[str]
    seeds: frozenset[str]
    operations: list[Operation] = field(default_factory=list)
    once: list[bool] = field(default_factory=list)
    added: set[int] = field(default_factory=set)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    received: dict[tuple[int, int], int] = field(default_factory=dict)
    items: dict[tuple[str, Region], int] = field(default_factory=dict)
    losses: list[int] = field(default_factory=list)
    averaged: list[tuple[str, Region, int]] = field(default_factory=list)
    outputs: list[tuple[str, Region, int]] = field(default_factory=list)
    reads: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    forwards: dict[tuple[str, Region, bool], int] = field(default_factory=dict)
    combined: defaultdict[str, list[Region]] = field(default_factory=lambda: defaultdict(list))
    # The slots written so far, by kind of message and by layer or tensor.
    known: defaultdict[tuple[MessageKind, str], list[tuple[int, Region]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    message_index: dict[tuple[MessageKind, str], int] = field(init=False)
    running: dict[str, str] = field(init=False)  # layer -> tensor
    urgent: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        traffic = self.compiled.traffic
        self.message_index = {
            (message.kind, message.name): index for index, message in enumerate(traffic)
        }
        found = running_averages(self.compiled.graph) if self.training else {}
        self.running = {layer: tensor for tensor, layer in found.items()}
        self.urgent = urgent(self.compiled)

    def add(self, instruction: Instruction) -> None:
        graph = self.compiled.graph
        match instruction:
            case Fetch(tensor=name, regions=regions):
                for region in regions:
                    self.items[name, region] = len(self.items)
                self._add_input(instruction, "parameter", name, regions)
            case Read(layer=name, regions=regions):
                self._add_input(instruction, "state", name, regions)
                self.reads[name] = regions
            case Receive(message=message):
                place = (self.message_index[message.kind, message.name], message.sender)
                self.received[place] = len(self.operations)
                self._add_input(instruction, message.kind, message.name, message.regions)
            case Send(message=message):
                self._add_send(message)
            case Push(tensor=name, regions=regions):
                self._add_push(name, regions)
            case Forward(layer=name, region=region):
                self._add_forward(graph[name], region, partial=False)
            case Partial(layer=name, part=part):
                self._add_forward(graph[name], part, partial=True)
            case Combine(layer=name, region=region):
                self._add_combine(graph[name], region)
            case Backward(layer=name, region=region, partial=partial):
                self._add_backward(graph[name], region, partial=partial)
            case Reduce():
                pass  # gradients are summed by their reader
            case _:
                assert_never(instruction)

    def finished(self) -> Dataflow:
        averages = {self.items[tensor, region]: slot for tensor, region, slot in self.averaged}
        return Dataflow(
            operations=tuple(self.operations),
            once=tuple(self.once),
            added=frozenset(self.added),
            sent=self.sent,
            received=self.received,
            items=tuple(self.items),
            losses=tuple(self.losses),
            averages=averages,
            outputs=tuple(self.outputs),
            reads=self.reads,
            joined=joined(self.compiled.graph),
            integers=frozenset(
                layer.name for layer in self.compiled.graph.layers if layer.is_integer
            ),
        )

    # --------------------------------------------------------------- single operations

    def _add_input(
        self,
        instruction: Fetch | Read | Receive,
        kind: MessageKind,
        name: str,
        regions: tuple[Region, ...],
    ) -> None:
        once = kind in ONCE_KINDS
        writes = []
        for region in regions:
            slot = self._slot(once=once)
            writes.append(slot)
            self.known[kind, name].append((slot, region))
        fetched = isinstance(instruction, Fetch)
        items = [self.items[name, region] for region in regions if fetched]
        self.operations.append(
            InputOp(instruction=instruction, writes=tuple(writes), items=tuple(items), once=once)
        )

    def _add_forward(self, layer: Layer, region: Region, *, partial: bool) -> None:
        needs = needed(layer, region, partial=partial)
        uses = rule_of(layer, partial=partial).uses(layer, region)
        states = [self._gather("state", name, r) for name, r in needs.reads]
        tensors = [self._gather("parameter", name, r) for name, r in needs.uses]
        gradients = self.compiled.gradients if self.training else frozenset[str]()
        back = layer.name in gradients
        self.forwards[layer.name, region, partial] = len(self.operations)
        slot, seed = self._slot(), None
        if partial:
            assert needs.writes is not None, layer.name
            self.known["partial", layer.name].append((slot, needs.writes))
        else:
            seed = self._add_output(layer, region, slot)
        self.operations.append(
            ForwardOp(
                layer=layer,
                region=region,
                partial=partial,
                reads=(*states, *tensors),
                n_inputs=len(states),
                tensor_names=tuple(uses),
                needs_gradient=(
                    *(back and name in gradients for name in layer.inputs),
                    *(back and layer.tensors[argument].trains for argument in uses),
                ),
                writes=slot,
                seed=seed,
                flops=work_of(layer, region, partial=partial).forward,
            )
        )

    def _add_combine(self, layer: Layer, region: Region) -> None:
        sums = operator_of(layer).partial
        assert sums is not None, layer.name
        reads = (self._gather("partial", layer.name, region, how=sums.combine),)
        slot = self._slot()
        seed = self._add_output(layer, region, slot)
        self.operations.append(CombineOp(layer=layer, reads=reads, writes=slot, seed=seed))
        if self.training and layer.name in self.compiled.gradients:
            self.combined[layer.name].append(region)

    def _add_output(self, layer: Layer, region: Region, slot: int) -> int | None:
        name = layer.name
        self.known["state", name].append((slot, region))
        if name == self.loss:
            self.losses.append(slot)
        if name in self.wanted:
            self.outputs.append((name, region, slot))
        # BatchNorm: this output replaces a running average.
        if name in self.running:
            self.averaged.append((self.running[name], region, slot))
        if not self.training or name not in self.seeds & self.compiled.gradients:
            return None
        seed = self._slot()
        self.known["gradient", name].append((seed, region))
        return seed

    def _add_backward(self, layer: Layer, region: Region, *, partial: bool) -> None:
        if partial:
            self._complete_gradient(layer)
            written = written_by(layer, region)
            gradient = self._gather("partial_gradient", layer.name, written)
        else:
            gradient = self._gather("gradient", layer.name, region, how="sum")
        index = self.forwards[layer.name, region, partial]
        forward = self.operations[index]
        assert isinstance(forward, ForwardOp), layer.name
        needs = needed(layer, region, partial=partial)
        writes: dict[int, int] = {}
        for place, (name, where) in enumerate((*needs.reads, *needs.uses)):
            if forward.needs_gradient[place]:
                is_state = place < forward.n_inputs
                kind: MessageKind = "gradient" if is_state else "parameter_gradient"
                slot = writes[place] = self._slot(once=not is_state)
                self.known[kind, name].append((slot, where))
                if not is_state:
                    self.added.add(slot)
        parts = [tuple(writes)]
        # Split, so that the gradients of inputs can be sent first.
        if layer.kind in SEPARABLE and layer.name in self.urgent:
            inputs = tuple(place for place in writes if place < forward.n_inputs)
            tensors = tuple(place for place in writes if place >= forward.n_inputs)
            parts = [part for part in (inputs, tensors) if part]
        flops = work_of(layer, region, partial=partial).backward
        for part in parts:
            self.operations.append(
                BackwardOp(
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
        for region in self.combined.pop(layer.name, []):
            reads = (self._gather("gradient", layer.name, region, how="sum"),)
            slot = self._slot()
            self.known["partial_gradient", layer.name].append((slot, region))
            self.operations.append(CombineOp(layer=layer, reads=reads, writes=slot, seed=None))

    def _add_send(self, message: Message) -> None:
        if message.kind == "partial_gradient":
            self._complete_gradient(self.compiled.graph[message.name])
        hows: dict[MessageKind, How] = {"gradient": "sum", "parameter_gradient": "sum"}
        how: How = hows.get(message.kind, "cut")
        if message.kind == "partial":
            sums = operator_of(self.compiled.graph[message.name]).partial
            assert sums is not None, message.name
            how = sums.combine
        reads = tuple(
            self._gather(message.kind, message.name, region, how=how) for region in message.regions
        )
        place = (self.message_index[message.kind, message.name], message.receiver)
        self.sent[place] = len(self.operations)
        once = message.kind in ONCE_KINDS
        self.operations.append(OutputOp(message=message, reads=reads, items=(), once=once))

    def _add_push(self, name: str, regions: tuple[Region, ...]) -> None:
        reads = tuple(
            self._gather("parameter_gradient", name, region, how="sum") for region in regions
        )
        items = tuple(self.items[name, region] for region in regions)
        self.operations.append(OutputOp(message=None, reads=reads, items=items, once=True))

    def _gather(self, kind: MessageKind, name: str, region: Region, *, how: How = "cut") -> Gather:
        return gather(
            region,
            self.known[kind, name],
            how=how,
            samples=kind not in ONCE_KINDS,
            what=f"{kind} {name!r}",
        )

    def _slot(self, *, once: bool = False) -> int:
        self.once.append(once)
        return len(self.once) - 1
