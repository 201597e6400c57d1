"""Runs the operations of one rank; compiles forward-only plans for inference.

Values lie in slots, are written once and freed after their last reader. They are passed on
without copies: where a layer is not partitioned it reads a view and gives its gradient away.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, assert_never, final

import numpy as np
import torch
from torch import nn

from distbelief.core.errors import DistBeliefError, JobError, LocalProtocolError
from distbelief.core.vectors import ELEMENT_TYPES, Element, Vector
from distbelief.graph.graph import INPUT, Builder, GraphError, LayerGraph
from distbelief.graph.operator import Call, Step
from distbelief.graph.region import Region
from distbelief.plans.compiler import Compiled, compile_plan
from distbelief.plans.placement import Placement
from distbelief.plans.tasks import Message, rule_of
from distbelief.worker.execution import operations as ops
from distbelief.worker.execution.schedule import MicroBatchSchedule
from distbelief.worker.execution.slots import Activations


_MEAN: Final = "running_mean"
_COUNT: Final = "num_batches_tracked"


def with_counts(flow: ops.Dataflow, saved: Collection[str]) -> ops.Dataflow:
    """Return the dataflow with BatchNorm's step counters as additional items.

    torch counts steps in `num_batches_tracked`, which no layer computes. The rank that keeps the
    first channel of the running mean keeps, fetches and pushes that counter too; a layer that is
    computed whole reads it already.
    """
    items, counts = list(flow.items), {}
    known = {name: item for item, (name, _) in enumerate(items)}
    for item in sorted(flow.averages):
        name, region = flow.items[item]
        stem, word = name[: -len(_MEAN)], name[-len(_MEAN) :]
        begins = all(interval[0] == 0 for interval in region.intervals)
        if word == _MEAN and begins and stem + _COUNT in saved:
            counts[item] = known.get(stem + _COUNT, len(items))
            if counts[item] == len(items):
                items.append((stem + _COUNT, Region.of()))
    return replace(flow, items=tuple(items), counts=counts)


# seed(layer, output, n_samples of the step) -> gradient of the objective; None: 0
Seed = Callable[[str, torch.Tensor, int], torch.Tensor | None]

Put = Callable[[int, torch.Tensor], None]  # put(item, gradient), once it is complete


def mean_over_samples(layer: str, output: torch.Tensor, n_samples: int) -> torch.Tensor:
    del layer
    return output.new_full((), 1.0 / n_samples).expand_as(output)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    parameters: Sequence[torch.Tensor]  # per item, (*region.shape); must not change during the step
    # Per input layer, one tensor per region: (n_samples, *shape).
    inputs: Mapping[str, Sequence[torch.Tensor]]
    sizes: Sequence[int]  # samples of each micro-batch
    training: bool = True
    seed: int = 0  # of the step's random numbers

    @property
    def n_samples(self) -> int:
        return sum(self.sizes)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    loss: float | None  # sum over the samples, if this rank computes the loss
    averages: Mapping[int, torch.Tensor]  # new running averages, by item
    # Per layer and region wanted: (n_samples, *shape).
    outputs: Sequence[tuple[str, Region, torch.Tensor]]
    scores: Sequence[float] | None = None  # loss and metrics, if a whole model is evaluated
    n_skipped: int = 0  # small batches with a gradient that is not finite


@final
@dataclass(slots=True)
class _Taped:
    output: torch.Tensor
    leaves: list[torch.Tensor]
    gradient: torch.Tensor | None = None  # of the output


@final
@dataclass(slots=True)
class _State:
    step_inputs: StepInputs
    steps: list[Step]
    slots: Activations
    tape: dict[int, _Taped] = field(default_factory=dict)
    received: set[int] = field(default_factory=set)  # addresses of what came in messages

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value for use after the step: the memory of a message may then be reused."""
        is_received = value.untyped_storage().data_ptr() in self.received
        return value.clone() if is_received else value


@final
class PartitionExecutor:
    """Runs the operations of one rank."""

    def __init__(
        self,
        flow: ops.Dataflow,
        *,
        dtype: torch.dtype = torch.float32,  # of floating-point numbers
        modules: Mapping[str, nn.Module] | None = None,  # layers that are computed whole
        device: str = "cpu",
        seed_gradient: Seed = mean_over_samples,  # where the backward pass begins
    ) -> None:
        self.flow = flow
        self.dtype = dtype
        self._modules = modules or {}
        self._device = torch.device(device)
        self._seed_gradient = seed_gradient
        self._like = torch.zeros((), dtype=dtype, device=self._device)
        self._state: _State | None = None

    def size_of(self, operation: int, n_samples: int) -> tuple[int, "np.dtype[Element]"]:
        """Return count and type of the numbers in this operation's message, for so many samples."""
        found, flow = self.flow.operations[operation], self.flow
        assert isinstance(found, ops.InputOp | ops.OutputOp)
        message = found.message
        assert message is not None
        is_one = found.once or message.name in flow.joined
        n = sum(region.n_elements for region in message.regions) * (1 if is_one else n_samples)
        is_integer = message.name in flow.integers and message.kind == "state"
        is_double = self.dtype == torch.float64
        return n, ELEMENT_TYPES["i8" if is_integer else "f8" if is_double else "f4"]

    def begin(self, schedule: MicroBatchSchedule, step_inputs: StepInputs) -> None:
        """Begin a step; drop what is left of another one."""
        firsts = np.cumsum([0, *step_inputs.sizes])
        steps = [
            Step(
                training=step_inputs.training,
                seed=step_inputs.seed,
                first_sample=int(first),
                modules=self._modules,
            )
            for first in firsts[:-1]
        ]
        slots = Activations(
            self.flow.once, schedule.n_readers, sizes=step_inputs.sizes, like=self._like
        )
        self._state = _State(step_inputs, steps, slots)

    def run(
        self,
        chain: Sequence[int],
        arrived: Mapping[int, Vector],
        put: Put,
        rooms: Mapping[int, Vector] = MappingProxyType({}),
    ) -> list[tuple[int, Vector]]:
        """Run operations; return what must be sent: instances and their values.

        What is `arrived` is read until the end of the step. What is sent lies in the `rooms` of its
        instances, if they have one.
        """
        sends: list[tuple[int, Vector]] = []
        n = len(self.flow.operations)
        for instance in chain:
            micro_batch, index = divmod(instance, n)
            operation = self.flow.operations[index]
            match operation:
                case ops.InputOp():
                    self._input(operation, micro_batch, arrived.get(instance))
                case ops.ForwardOp():
                    self._forward(operation, micro_batch, instance)
                case ops.CombineOp():
                    (joined,) = self._current().slots.read(operation.reads, micro_batch)
                    self._write_output(
                        operation.writes, operation.seed, micro_batch, joined, operation.layer.name
                    )
                case ops.BackwardOp():
                    self._backward(operation, micro_batch, micro_batch * n + operation.forward)
                case ops.OutputOp():
                    found = self._current().slots.read(operation.reads, micro_batch)
                    if operation.message is None:
                        self._put(operation, found, put)
                    else:
                        room = rooms.get(instance)
                        values = self._packed(operation, micro_batch, found, room)
                        sends.append((instance, values))
                case _:
                    assert_never(operation)
        return sends

    def finish(self) -> StepResult:
        """Return the results of the step and free everything else."""
        state, self._state = self._current(), None
        flow = self.flow
        copies = range(len(state.steps))

        def found(slot: int) -> list[torch.Tensor]:
            return [state.slots.at(slot, micro_batch) for micro_batch in copies]

        def output(name: str, slot: int) -> torch.Tensor:
            parts = found(slot)
            # Every micro-batch has the same single sample.
            return state.kept(parts[0]) if name in flow.joined else torch.cat(parts)

        loss: float | None = None
        for slot in flow.losses:
            # Summed in float64: many float32 losses would lose digits.
            total = sum(float(value.sum(dtype=torch.float64)) for value in found(slot))
            loss = total + (loss or 0.0)
        return StepResult(
            loss=loss,
            averages={item: state.kept(found(slot)[-1][0]) for item, slot in flow.averages.items()},
            outputs=[
                (name, region, output(name, slot).cpu()) for name, region, slot in flow.outputs
            ],
        )

    # ---------------------------------------------------------------------- operations

    def _input(self, operation: ops.InputOp, micro_batch: int, arrived: Vector | None) -> None:
        state = self._current()
        if operation.message is not None:
            assert arrived is not None, operation.message
            values = self._unpacked(operation, operation.message, micro_batch, arrived)
        elif operation.layer is not None:
            start, size = state.steps[micro_batch].first_sample, self._size(micro_batch)
            whole = state.step_inputs.inputs[operation.layer]
            values = [value.narrow(0, start, size) for value in whole]
        else:
            values = [state.step_inputs.parameters[item] for item in operation.items]
        for slot, value in zip(operation.writes, values, strict=True):
            state.slots.write(slot, micro_batch, value.to(self._device))

    def _unpacked(
        self, operation: ops.InputOp, message: Message, micro_batch: int, arrived: Vector
    ) -> list[torch.Tensor]:
        n = 1 if message.name in self.flow.joined else self._size(micro_batch)
        shapes = [r.shape if operation.once else (n, *r.shape) for r in message.regions]
        flat = as_tensor(arrived).to(self._device)
        self._current().received.add(flat.untyped_storage().data_ptr())
        parts = flat[: sum(map(math.prod, shapes))].split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _forward(self, op: ops.ForwardOp, micro_batch: int, instance: int) -> None:
        state = self._current()
        leaves = []
        for value, back in zip(
            state.slots.read(op.reads, micro_batch), op.needs_gradient, strict=True
        ):
            assert value is not None, op.layer.name
            # Each layer has an autograd graph of its own, so layers run backward one at a time.
            leaf = value.detach()
            leaves.append(leaf.requires_grad_() if back and leaf.is_floating_point() else leaf)
        rule = rule_of(op.layer, partial=op.partial)
        needs_gradient = any(leaf.requires_grad for leaf in leaves)
        tensors = dict(zip(op.tensor_names, leaves[op.n_inputs :], strict=True))
        inputs = leaves[: op.n_inputs]
        try:
            with torch.set_grad_enabled(needs_gradient):
                step = state.steps[micro_batch]
                output = rule.compute(Call(op.layer, op.region, inputs, tensors, step))
                if output.is_floating_point():  # a graph is computed in one precision
                    output = output.to(self.dtype)
        except Exception as error:  # of the user's module, or of its inputs
            raise _failed(op, inputs, error) from error
        if needs_gradient and output.requires_grad:
            state.tape[instance] = _Taped(output, leaves)
        self._write_output(op.writes, op.seed, micro_batch, output.detach(), op.layer.name)

    def _backward(self, operation: ops.BackwardOp, micro_batch: int, forward: int) -> None:
        state = self._current()
        taped = state.tape.get(forward)
        # The saved graph is freed with its last reader.
        if operation.is_last:
            state.tape.pop(forward, None)
        for gradient in state.slots.read(operation.reads, micro_batch):
            if taped is not None:
                taped.gradient = gradient
        if taped is None or taped.gradient is None:
            return
        leaves = [taped.leaves[place] for place in operation.places]
        found = iter(
            torch.autograd.grad(
                taped.output,
                [leaf for leaf in leaves if leaf.requires_grad],
                taped.gradient,
                allow_unused=True,
                retain_graph=not operation.is_last,
            )
        )
        for leaf, slot in zip(leaves, operation.writes, strict=True):
            value = next(found) if leaf.requires_grad else None
            if value is not None:
                state.slots.write(slot, micro_batch, value, adds=slot in self.flow.added)

    def _put(self, operation: ops.OutputOp, found: Sequence[torch.Tensor | None], put: Put) -> None:
        for item, value in zip(operation.items, found, strict=True):
            if value is not None:
                put(item, self._current().kept(value).cpu().reshape(-1))

    def _packed(
        self,
        operation: ops.OutputOp,
        micro_batch: int,
        found: Sequence[torch.Tensor | None],
        room: Vector | None,
    ) -> Vector:
        message = operation.message
        assert message is not None
        n = 1 if message.name in self.flow.joined else self._size(micro_batch)
        parts = []
        for read, value in zip(operation.reads, found, strict=True):
            shape = read.shape if operation.once else (n, *read.shape)
            # A missing gradient is zero.
            there = self._like.new_zeros(shape) if value is None else value
            if there.numel() != math.prod(shape):  # the receiver would never get the rest
                raise GraphError(
                    f"the {message.kind} {message.name!r} has shape {tuple(there.shape)}, but "
                    f"its receiver expects {shape}"
                )
            parts.append(there)
        if room is not None:
            whole = torch.from_numpy(room)
            if all(part.dtype == whole.dtype for part in parts):
                sizes = [part.numel() for part in parts]
                for part, place in zip(parts, whole.split(sizes), strict=True):
                    place.view(part.shape).copy_(part)
                return room
        parts = [part.reshape(-1) for part in parts]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        if message.kind == "parameter" and len(parts) == 1:
            flat = flat.clone()  # a resend must not see later values
        if not flat.is_floating_point():
            flat = flat.to(torch.int64)
        array: Vector = flat.cpu().numpy()
        return array

    # --------------------------------------------------------------------------- slots

    def _current(self) -> _State:
        if self._state is None:
            raise LocalProtocolError("no step is running")
        return self._state

    def _size(self, micro_batch: int) -> int:
        return self._current().step_inputs.sizes[micro_batch]

    def _write_output(
        self, slot: int, seed: int | None, micro_batch: int, value: torch.Tensor | None, layer: str
    ) -> None:
        if value is None:
            return
        self._current().slots.write(slot, micro_batch, value)
        if seed is not None:
            n = self._current().step_inputs.n_samples
            gradient = self._seed_gradient(layer, value, n)
            if gradient is not None:
                self._current().slots.write(seed, micro_batch, gradient)


def _failed(
    forward: ops.ForwardOp, inputs: Sequence[torch.Tensor], error: Exception
) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    shapes = ", ".join(f"{list(value.shape)}" for value in inputs)
    return JobError(
        f"layer {forward.layer.name!r} ({forward.layer.kind}) failed on inputs of shape "
        f"{shapes}: {type(error).__name__}: {error}"
    )


def as_tensor(array: Vector) -> torch.Tensor:
    """Return the same memory as a tensor, which nobody may write; a copy if it is read-only."""
    seen = array.view()
    try:
        # Arrays of messages are marked read-only; most lie in memory that is not, and torch
        # knows no other.
        seen.flags.writeable = True
    except ValueError:
        seen = array.copy()
    return torch.from_numpy(seen)


def inference_of(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    outputs: Sequence[str],
    batch: int,
    n_machines: int,
) -> Compiled:
    """Return a plan that computes these outputs, each whole on rank 0.

        ... --> fc8, cut over 4 ranks --> fc8.whole, on rank 0

    The outputs of its graph are in this order, under other names. GraphError if a layer does not
    exist.
    """
    unknown = [name for name in outputs if name not in graph.by_name]
    if unknown or not outputs:
        raise GraphError(f"no layer {unknown[0]!r}" if unknown else "no output is named")
    needed = graph.only(outputs)
    builder = Builder.of(needed)
    places = {layer.name: placements[layer.name] for layer in needed.layers if layer.kind != INPUT}
    ends = []
    for name in outputs:
        layer = graph[name]
        end = builder.add(
            f"{name}.whole", "reshape", [layer], layer.shape, is_integer=layer.is_integer
        )
        places[end.name] = Placement.whole(len(layer.shape), 0)
        ends.append(end.name)
    return compile_plan(builder.finish(ends), places, batch=batch, n_machines=n_machines)
