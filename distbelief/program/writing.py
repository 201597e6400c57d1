"""The program of one machine: its tasks in order, and messages where they belong.

    Fetch, Send parameters
    per layer, in order:
        Read if it is an input; else Receive what its tasks need and was not there yet,
        Forward; or Partial, Send partials, Receive partials, Combine;
        Send states
    per layer, the last first:
        Receive gradients; Send and Receive those of partials
        Backward; Send gradients that are now complete
    Receive gradients of tensors, Reduce, Push

Every machine goes through the layers in the same order, sends as soon as it can and
receives as late as it can; so there is always one that can go on.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from distbelief.graph.layer import INPUT, Layer, LayerGraph
from distbelief.graph.region import Region
from distbelief.program.demands import Demands
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
)
from distbelief.program.routing import Kept
from distbelief.program.tasks import Task
from distbelief.program.traffic import Traffic


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
