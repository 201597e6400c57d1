"""Programs executed to the letter, for all machines in one process.

A machine knows what it read, received or computed, and nothing else: whatever a program
forgot to send is missed here, and whatever comes twice is noticed.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import assert_never

import torch

from distbelief.graph.kind import Step, kind_of
from distbelief.graph.layer import Layer, LayerGraph
from distbelief.graph.region import Region
from distbelief.program.compilation import Compiled
from distbelief.program.instructions import (
    Backward,
    Combine,
    Fetch,
    Forward,
    Instruction,
    Message,
    Partial,
    Push,
    Read,
    Receive,
    Reduce,
    Send,
)
from distbelief.program.tasks import needed


Payload = list[torch.Tensor]


@dataclass
class Store:
    """Tensors of which some indices are known.

    Attributes:
        shapes: Of the whole of each.
        samples: Whether they have a batch dimension before.
    """

    shapes: Mapping[str, tuple[int, ...]]
    samples: bool = True
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    known: dict[str, torch.Tensor] = field(default_factory=dict)

    def _open(self, name: str, like: torch.Tensor) -> None:
        if name not in self.values:
            batch = like.shape[:1] if self.samples else ()
            self.values[name] = like.new_zeros((*batch, *self.shapes[name]))
            self.known[name] = torch.zeros(self.shapes[name], dtype=torch.bool)

    def _at(self, region: Region) -> tuple[slice, ...]:
        return (slice(None), *region.slices) if self.samples else region.slices

    def put(self, name: str, region: Region, value: torch.Tensor) -> None:
        """Know what was not known."""
        self._open(name, value)
        assert not self.known[name][region.slices].any(), f"{name} {region} twice"
        self.values[name][self._at(region)] = value.detach()
        self.known[name][region.slices] = True

    def add(self, name: str, region: Region, value: torch.Tensor) -> None:
        """Add to what is known, or 0."""
        self._open(name, value)
        self.values[name][self._at(region)] += value.detach()
        self.known[name][region.slices] = True

    def largest(self, name: str, region: Region, value: torch.Tensor) -> None:
        """Keep the larger of what is known and this."""
        self._open(name, value)
        at, known = self._at(region), self.known[name][region.slices]
        larger = torch.maximum(self.values[name][at], value.detach())
        self.values[name][at] = torch.where(known, larger, value.detach())
        self.known[name][region.slices] = True

    def cut(self, name: str, region: Region) -> torch.Tensor:
        """Return what is known."""
        assert self.known[name][region.slices].all(), f"{name} {region} is not there"
        return self.values[name][self._at(region)].clone()

    def or_zeros(self, name: str, region: Region, like: torch.Tensor) -> torch.Tensor:
        """Return a gradient, 0 where nothing was added."""
        self._open(name, like)
        return self.values[name][self._at(region)].clone()


@dataclass
class Taped:
    output: torch.Tensor
    reads: list[tuple[str, Region, torch.Tensor]]
    uses: list[tuple[str, Region, torch.Tensor]]


@dataclass
class World:
    """What machines share: the data, the parameter server, and the network."""

    compiled: Compiled
    inputs: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor]
    step: Step
    network: dict[Message, Payload] = field(default_factory=dict)
    pushed: Store = field(init=False)

    def __post_init__(self) -> None:
        self.pushed = Store(_tensor_shapes(self.graph), samples=False)

    @property
    def graph(self) -> LayerGraph:
        return self.compiled.graph

    def run(self) -> "list[Computer]":
        """Run all programs to their end."""
        programs = self.compiled.programs
        computers = [Computer(self, program.machine) for program in programs]
        running = deque(
            computer.execute(program.instructions)
            for computer, program in zip(computers, programs, strict=True)
        )
        n_waiting = 0
        while running:
            assert n_waiting <= len(running), "all machines wait for each other"
            process = running.popleft()
            try:
                n_waiting = 0 if next(process) else n_waiting + 1
            except StopIteration:
                n_waiting = 0
                continue
            running.append(process)
        assert not self.network, "somebody sent what nobody wanted"
        return computers


class Computer:
    """One machine."""

    def __init__(self, world: World, machine: int) -> None:
        self.world = world
        self.machine = machine
        shapes = {layer.name: layer.shape for layer in world.graph.layers}
        self.states = Store(shapes)
        self.gradients = Store(shapes)
        self.contributions = Store(shapes)
        self.contributions_gradients = Store(shapes)
        self.parameters = Store(_tensor_shapes(world.graph), samples=False)
        self.parameter_gradients = Store(_tensor_shapes(world.graph), samples=False)
        self.tape: dict[tuple[str, Region, bool], Taped] = {}
        self.combined: dict[str, list[Region]] = {}

    def execute(self, instructions: tuple[Instruction, ...]) -> Iterator[bool]:
        """Execute them; yield whether something was done, or it has to wait."""
        has_moved = False
        for instruction in instructions:
            if isinstance(instruction, Receive):
                while instruction.message not in self.world.network:
                    yield has_moved
                    has_moved = False
                self._receive(instruction.message)
            else:
                self._do(instruction)
            has_moved = True

    def _do(self, instruction: Instruction) -> None:  # noqa: C901, PLR0912
        world = self.world
        match instruction:
            case Fetch(tensor=name, regions=regions):
                for region in regions:
                    value = world.tensors[name][region.slices]
                    self.parameters.put(name, region, value)
            case Read(layer=name, regions=regions):
                for region in regions:
                    value = world.inputs[name][(slice(None), *region.slices)]
                    self.states.put(name, region, value)
            case Send(message=message):
                self._send(message)
            case Forward(layer=name, region=region):
                output = self._compute(world.graph[name], region, partial=False)
                self._have(name, region, output)
            case Partial(layer=name, part=part):
                self._contribute(world.graph[name], part)
            case Combine(layer=name, region=region):
                self.combined.setdefault(name, []).append(region)
                self._have(name, region, self.contributions.cut(name, region))
            case Backward(layer=name, region=region, partial=partial):
                self._backward(world.graph[name], region, partial=partial)
            case Reduce():
                pass  # gradients are added as they come
            case Push(tensor=name, regions=regions):
                for region in regions:
                    like = world.tensors[name]
                    value = self.parameter_gradients.or_zeros(name, region, like)
                    world.pushed.put(name, region, value)
            case Receive():
                raise AssertionError
            case _:
                assert_never(instruction)

    def _store(self, message: Message) -> Store:
        return {
            "state": self.states,
            "gradient": self.gradients,
            "partial": self.contributions,
            "partial_gradient": self.contributions_gradients,
            "parameter": self.parameters,
            "parameter_gradient": self.parameter_gradients,
        }[message.kind]

    def _send(self, message: Message) -> None:
        assert message.sender == self.machine
        assert message not in self.world.network
        store = self._store(message)
        if message.kind in {"state", "partial", "parameter"}:
            payload = [store.cut(message.name, region) for region in message.regions]
        else:
            # What has gone back to the layer is complete where it was combined.
            store = self.gradients if message.kind == "partial_gradient" else store
            like = self._like(message)
            payload = [store.or_zeros(message.name, r, like) for r in message.regions]
        size = sum(tensor.numel() for tensor in payload)
        each = 8 if payload[0].dtype == torch.long else 4
        assert message.n_bytes == each * size, message
        self.world.network[message] = payload

    def _like(self, message: Message) -> torch.Tensor:
        if message.kind == "parameter_gradient":
            return self.world.tensors[message.name]
        return self.states.values[message.name]

    def _receive(self, message: Message) -> None:
        assert message.receiver == self.machine
        payload = self.world.network.pop(message)
        store = self._store(message)
        for region, value in zip(message.regions, payload, strict=True):
            if message.kind in {"state", "parameter", "partial_gradient"}:
                store.put(message.name, region, value)
            elif message.kind == "partial":
                self._put_together(self.world.graph[message.name], region, value)
            else:
                store.add(message.name, region, value)

    def _have(self, name: str, region: Region, output: torch.Tensor) -> None:
        """Know a region of a layer; of a model's output also its gradient."""
        self.states.put(name, region, output)
        if name in self.world.graph.outputs and name in self.world.compiled.gradients:
            self.gradients.add(name, region, slope(output.detach()))

    def _contribute(self, layer: Layer, part: Region) -> None:
        partial = kind_of(layer).partial
        assert partial is not None
        output = self._compute(layer, part, partial=True)
        self._put_together(layer, partial.writes(layer, part), output)

    def _put_together(self, layer: Layer, region: Region, value: torch.Tensor) -> None:
        partial = kind_of(layer).partial
        assert partial is not None
        if partial.combine == "sum":
            self.contributions.add(layer.name, region, value)
        else:
            self.contributions.largest(layer.name, region, value)

    def _compute(self, layer: Layer, region: Region, *, partial: bool) -> torch.Tensor:
        needs = needed(layer, region, partial=partial)
        reads = [
            (name, read, _leaf(self._state(name, read))) for name, read in needs.reads
        ]
        uses = [
            (name, used, _leaf(self.parameters.cut(name, used)))
            for name, used in needs.uses
        ]
        kind = kind_of(layer)
        words = (kind.partial if partial and kind.partial else kind).uses(layer, region)
        tensors = dict(zip(words, [leaf for _, _, leaf in uses], strict=True))
        compute = kind.partial.compute if partial and kind.partial else kind.compute
        inputs = [leaf for _, _, leaf in reads]
        output = compute(layer, region, inputs, tensors, self.world.step)
        self.tape[layer.name, region, partial] = Taped(output, reads, uses)
        return output

    def _state(self, name: str, region: Region) -> torch.Tensor:
        if region.n_elements or name in self.states.values:
            return self.states.cut(name, region)
        # Nothing is read of it, so nothing came: not even how many samples it has.
        n = len(next(iter(self.world.inputs.values())))
        return torch.zeros((n, *region.shape), dtype=torch.float64)

    def _backward(self, layer: Layer, region: Region, *, partial: bool) -> None:
        taped = self.tape.pop((layer.name, region, partial))
        if partial:
            gradient = self._gradient_of_contribution(layer, region, taped.output)
        else:
            gradient = self.gradients.or_zeros(layer.name, region, taped.output)
        leaves = [(self.gradients, *read) for read in taped.reads]
        leaves += [(self.parameter_gradients, *used) for used in taped.uses]
        leaves = [each for each in leaves if each[3].requires_grad]
        found = torch.autograd.grad(
            taped.output,
            [leaf for _, _, _, leaf in leaves],
            gradient,
            allow_unused=True,
        )
        for (store, name, where, _), value in zip(leaves, found, strict=True):
            if value is not None:
                store.add(name, where, value)

    def _gradient_of_contribution(
        self, layer: Layer, part: Region, like: torch.Tensor
    ) -> torch.Tensor:
        partial = kind_of(layer).partial
        assert partial is not None
        for region in self.combined.pop(layer.name, []):
            own = self.gradients.or_zeros(layer.name, region, like)
            self.contributions_gradients.put(layer.name, region, own)
        return self.contributions_gradients.cut(layer.name, partial.writes(layer, part))


def objective(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A number that depends on all of them."""
    return torch.stack([(value * value.atan()).sum() for value in outputs]).sum()


def slope(output: torch.Tensor) -> torch.Tensor:
    """The gradient of the objective with respect to one output."""
    leaf = output.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective([leaf]), [leaf])
    return gradient


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.requires_grad_() if value.is_floating_point() else value


def _tensor_shapes(graph: LayerGraph) -> dict[str, tuple[int, ...]]:
    return {name: use.shape for name, use in graph.tensors.items()}
