"""A plan without its loss: forward only, and what the model returns on machine 0.

    ... --> fc8, cut over 4 machines --> fc8 (whole), on machine 0

What only the loss needs is left out; of an output that is cut, the parts are brought
together by one more layer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, assert_never, final

import numpy as np
import torch
from torch import nn

from distbelief.core.vectors import Vector
from distbelief.errors import DistBeliefError, JobError, LocalProtocolError
from distbelief.execution.operations import (
    BackwardOp,
    CombineOp,
    Dataflow,
    ForwardOp,
    InputOp,
    OutputOp,
)
from distbelief.execution.schedule import MicroBatchSchedule
from distbelief.execution.slots import Activations
from distbelief.graph.graph import INPUT, Builder, GraphError, Layer, LayerGraph
from distbelief.graph.operator import Operator, PartialSums, Step, operator_of
from distbelief.graph.region import Region
from distbelief.program.compiler import Compiled, compile_plan
from distbelief.program.instructions import Fetch, Message, Read, Receive
from distbelief.program.placement import Placement


# BatchNorm's count of its steps, which no layer computes: kept beside its averages.
#
# torch counts in `num_batches_tracked`. A machine that replaces the running mean from its
# first channel on keeps that count too, as one more item: fetched and pushed as running
# averages are, and one higher after every step that replaced them.

_MEAN: Final = "running_mean"
_COUNT: Final = "num_batches_tracked"


def with_counts(flow: Dataflow, saved: Collection[str]) -> Dataflow:
    """Return the dataflow of a machine that counts what it averages.

    Args:
        flow: Without that.
        saved: Names of the tensors that the shards hold.
    """
    items, counts = list(flow.items), {}
    for item in sorted(flow.averages):
        name, region = flow.items[item]
        stem, word = name[: -len(_MEAN)], name[-len(_MEAN) :]
        begins = all(interval[0] == 0 for interval in region.intervals)
        if word == _MEAN and begins and stem + _COUNT in saved:
            counts[item] = len(items)
            items.append((stem + _COUNT, Region.of()))
    return replace(flow, items=tuple(items), counts=counts)


# One machine's part of a step, computed: what the compute lane runs, chain by chain.
#
# Values lie in slots, are written once, and leave as soon as they have been read for the
# last time. What is handed on is handed on as it is: a tile whose layer is not cut reads
# a view, gives its gradient away, and copies nothing.

Seed = Callable[[str, torch.Tensor, int], torch.Tensor | None]
"""seed(layer, output, n_samples of the step) -> gradient of the objective; None: 0."""

Put = Callable[[int, torch.Tensor], None]
"""put(item, gradient): takes a gradient as soon as it is complete."""


def mean_over_samples(layer: str, output: torch.Tensor, n_samples: int) -> torch.Tensor:
    """Return the gradient of the mean over all samples of the step."""
    del layer
    return output.new_full((), 1.0 / n_samples).expand_as(output)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a step begins with.

    Attributes:
        parameters: Per item, (*region.shape): not to be changed until the step is over.
        inputs: Per input layer, of each region that is read: (n_samples, *shape).
        sizes: Samples of each micro-batch.
        training: Or inference.
        seed: Of its randomness.
    """

    parameters: Sequence[torch.Tensor]
    inputs: Mapping[str, Sequence[torch.Tensor]]
    sizes: Sequence[int]
    training: bool = True
    seed: int = 0

    @property
    def n_samples(self) -> int:
        """Of all micro-batches."""
        return sum(self.sizes)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a machine has at the end of a step.

    Attributes:
        loss: Sum over the samples of the loss, if this machine computes it.
        averages: New running statistics, by item.
        outputs: Per layer and region wanted: (n_samples, *shape).
    """

    loss: float | None
    averages: Mapping[int, torch.Tensor]
    outputs: Sequence[tuple[str, Region, torch.Tensor]]


@final
@dataclass(slots=True)
class _Taped:
    output: torch.Tensor
    leaves: list[torch.Tensor]
    gradient: torch.Tensor | None = None  # of the output


@final
@dataclass(slots=True)
class _State:
    """Of the step under way."""

    given: StepInputs
    table: MicroBatchSchedule
    steps: list[Step]
    slots: Activations
    tape: dict[int, _Taped] = field(default_factory=dict)


@final
class PartitionExecutor:
    """Runs the operations of one machine.

    Args:
        flow: Its dataflow.
        dtype: float32 or float64: of all that is no whole number.
        modules: For layers that are computed whole.
        device: Where tensors are while they are computed with.
        seed_gradient: Where gradients begin.
    """

    def __init__(
        self,
        flow: Dataflow,
        *,
        dtype: torch.dtype = torch.float32,
        modules: Mapping[str, nn.Module] | None = None,
        device: str = "cpu",
        seed_gradient: Seed = mean_over_samples,
    ) -> None:
        self.flow = flow
        self.dtype = dtype
        self._modules = modules or {}
        self._device = torch.device(device)
        self._seed_gradient = seed_gradient
        self._like = torch.zeros((), dtype=dtype, device=self._device)
        self._state: _State | None = None

    def begin(self, table: MicroBatchSchedule, given: StepInputs) -> None:
        """Begin a step; what there was of another one is dropped."""
        firsts = np.cumsum([0, *given.sizes])
        steps = [
            Step(
                training=given.training,
                seed=given.seed,
                first_sample=int(first),
                modules=self._modules,
            )
            for first in firsts[:-1]
        ]
        slots = Activations(self.flow.once, table.n_readers, sizes=given.sizes, like=self._like)
        self._state = _State(given, table, steps, slots)

    def drop(self) -> None:
        """Forget the step under way."""
        self._state = None

    def run(
        self, chain: Sequence[int], arrived: Mapping[int, Vector], put: Put
    ) -> list[tuple[int, Vector]]:
        """Do what the chain says; return what is to be sent: instances and numbers.

        Args:
            chain: Instances, in this order.
            arrived: What has come, by instance.
            put: Takes the gradients of items.
        """
        sends: list[tuple[int, Vector]] = []
        n = len(self.flow.operations)
        for instance in chain:
            copy, index = divmod(instance, n)
            operation = self.flow.operations[index]
            match operation:
                case InputOp():
                    self._enter(operation, copy, arrived.get(instance))
                case ForwardOp():
                    self._task(operation, copy, instance)
                case CombineOp():
                    (joined,) = self._now().slots.read(operation.reads, copy)
                    self._have(operation.writes, operation.seed, copy, joined, operation.layer.name)
                case BackwardOp():
                    self._back(operation, copy, copy * n + operation.task)
                case OutputOp():
                    self._leave(operation, copy, instance, sends, put)
                case _:
                    assert_never(operation)
        return sends

    def finish(self) -> StepResult:
        """Return what there is at the end of the step, and forget the rest."""
        state, self._state = self._now(), None
        flow = self.flow
        copies = range(len(state.steps))

        def found(slot: int) -> list[torch.Tensor]:
            return [state.slots.at(slot, copy) for copy in copies]

        def output(name: str, slot: int) -> torch.Tensor:
            parts = found(slot)
            # One sample for the whole batch is the same one for every part of it.
            return parts[0] if name in flow.joined else torch.cat(parts)

        loss: float | None = None
        for slot in flow.losses:
            total = sum(float(value.sum(dtype=torch.float64)) for value in found(slot))
            loss = total + (loss or 0.0)
        return StepResult(
            loss=loss,
            averages={item: found(slot)[-1][0] for item, slot in flow.averages.items()},
            outputs=[
                (name, region, output(name, slot).cpu()) for name, region, slot in flow.outputs
            ],
        )

    # ---------------------------------------------------------------------- operations

    def _enter(self, operation: InputOp, copy: int, arrived: Vector | None) -> None:
        state = self._now()
        given, instruction = state.given, operation.instruction
        match instruction:
            case Fetch():
                for item, slot in zip(operation.items, operation.writes, strict=True):
                    state.slots.write(slot, copy, given.parameters[item].to(self._device))
            case Read():
                start = state.steps[copy].first_sample
                for slot, value in zip(
                    operation.writes, given.inputs[instruction.layer], strict=True
                ):
                    part = value.narrow(0, start, given.sizes[copy])
                    state.slots.write(slot, copy, part.to(self._device))
            case Receive():
                assert arrived is not None, instruction
                self._unpack(operation, instruction.message, copy, arrived)
            case _:
                assert_never(instruction)

    def _unpack(self, operation: InputOp, message: Message, copy: int, arrived: Vector) -> None:
        flat = as_tensor(arrived).to(self._device)
        start = 0
        for slot, region in zip(operation.writes, message.regions, strict=True):
            shape: tuple[int, ...] = region.shape
            if not operation.once:
                n = 1 if message.name in self.flow.joined else self._size(copy)
                shape = (n, *shape)
            stop = start + int(np.prod(shape))
            self._now().slots.write(slot, copy, flat[start:stop].view(shape))
            start = stop

    def _task(self, task: ForwardOp, copy: int, instance: int) -> None:
        state = self._now()
        leaves = []
        for value, back in zip(state.slots.read(task.reads, copy), task.goes_back, strict=True):
            assert value is not None, task.layer.name
            leaf = value.detach()
            leaves.append(leaf.requires_grad_() if back and leaf.is_floating_point() else leaf)
        kind = operator_of(task.layer)
        computing: Operator | PartialSums = kind
        if task.partial:
            assert kind.partial is not None, task.layer.name
            computing = kind.partial
        goes_back = any(leaf.requires_grad for leaf in leaves)
        tensors = dict(zip(task.words, leaves[task.n_inputs :], strict=True))
        inputs = leaves[: task.n_inputs]
        try:
            with torch.set_grad_enabled(goes_back):
                output = computing.compute(
                    task.layer, task.region, inputs, tensors, state.steps[copy]
                )
        except Exception as error:  # of the user's module, or of what it was given
            raise _failed(task, inputs, error) from error
        if goes_back and output.requires_grad:
            state.tape[instance] = _Taped(output, leaves)
        self._have(task.writes, task.seed, copy, output.detach(), task.layer.name)

    def _back(self, operation: BackwardOp, copy: int, task: int) -> None:
        state = self._now()
        taped = state.tape.get(task)
        if operation.is_last:
            state.tape.pop(task, None)
        for gradient in state.slots.read(operation.reads, copy):
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
                state.slots.write(slot, copy, value, adds=slot in self.flow.added)

    def _leave(
        self,
        operation: OutputOp,
        copy: int,
        instance: int,
        sends: list[tuple[int, Vector]],
        put: Put,
    ) -> None:
        found = self._now().slots.read(operation.reads, copy)
        if operation.message is None:
            for item, value in zip(operation.items, found, strict=True):
                if value is not None:
                    put(item, value.cpu().reshape(-1))
            return
        sends.append((instance, self._packed(operation, copy, found)))

    def _packed(
        self, operation: OutputOp, copy: int, found: Sequence[torch.Tensor | None]
    ) -> Vector:
        """Return what is sent as one flat array."""
        message = operation.message
        assert message is not None
        n = 1 if message.name in self.flow.joined else self._size(copy)
        parts = []
        for read, value in zip(operation.reads, found, strict=True):
            shape = read.shape if operation.once else (n, *read.shape)
            there = self._like.new_zeros(shape) if value is None else value
            parts.append(there.reshape(-1))
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        if message.kind == "parameter" and len(parts) == 1:
            flat = flat.clone()  # it may have to be sent again when these have changed
        if not flat.is_floating_point():
            flat = flat.to(torch.int64)
        array: Vector = flat.cpu().numpy()
        return array

    # --------------------------------------------------------------------------- slots

    def _now(self) -> _State:
        if self._state is None:
            raise LocalProtocolError("no step is under way")
        return self._state

    def _size(self, copy: int) -> int:
        return self._now().given.sizes[copy]

    def _have(
        self, slot: int, seed: int | None, copy: int, value: torch.Tensor | None, layer: str
    ) -> None:
        if value is None:
            return
        self._now().slots.write(slot, copy, value)
        if seed is not None:
            n = self._now().given.n_samples
            gradient = self._seed_gradient(layer, value, n)
            if gradient is not None:
                self._now().slots.write(seed, copy, gradient)


def _failed(task: ForwardOp, inputs: Sequence[torch.Tensor], error: Exception) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    shapes = ", ".join(f"{list(value.shape)}" for value in inputs)
    return JobError(
        f"layer {task.layer.name!r} ({task.layer.kind}) failed on inputs of shape "
        f"{shapes}: {type(error).__name__}: {error}"
    )


def as_tensor(array: Vector) -> torch.Tensor:
    """Return the same memory as a tensor; of a read-only array a copy."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def inference_of(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    outputs: Sequence[str],
    batch: int,
    n_machines: int,
) -> Compiled:
    """Return the plan that computes these outputs; each is whole on machine 0.

    The outputs of its graph are in this order, under other names.

    Args:
        graph: With or without a loss.
        placements: Of its layers but inputs.
        outputs: Layers.
        batch: Samples of a step.
        n_machines: They are counted from 0.

    Raises:
        GraphError: there is no such layer.
    """
    unknown = [name for name in outputs if name not in graph.by_name]
    if unknown or not outputs:
        raise GraphError(f"no layer {unknown[0]!r}" if unknown else "no output is named")
    wanted = set(outputs)
    for layer in reversed(graph.layers):
        if layer.name in wanted:
            wanted.update(layer.inputs)
    layers = [layer for layer in graph.layers if layer.name in wanted]
    builder = Builder.of(LayerGraph(tuple(layers), tuple(outputs)))
    places = {layer.name: placements[layer.name] for layer in layers if layer.kind != INPUT}
    ends = []
    for name in outputs:
        layer = graph[name]
        end = builder.free_name(f"{name}.whole")
        builder.add_layer(
            Layer(
                name=end,
                kind="reshape",
                inputs=(name,),
                input_shapes=(layer.shape,),
                shape=layer.shape,
                is_integer=layer.is_integer,
            )
        )
        places[end] = Placement.whole(len(layer.shape), 0)
        ends.append(end)
    return compile_plan(builder.finish(ends), places, batch=batch, n_machines=n_machines)


def model_output(graph: LayerGraph) -> str:
    """Return the one output of the model, whose graph ends in its loss.

    Raises:
        GraphError: it has several.
    """
    *outputs, _ = graph.outputs
    if len(outputs) != 1:
        raise GraphError(f"the model has outputs {', '.join(outputs)}: only one can be measured")
    return outputs[0]
