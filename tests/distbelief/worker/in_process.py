"""All machines of a plan in one process: their programs, and messages between them.

Not how a job runs, but what it computes: for inference by a plan in one process, for
checking a plan before it is used, and for tests. Each machine has its own executor, and
knows what it read, received or computed, nothing else.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from distbelief.core.vectors import Vector
from distbelief.execution.dataflow import dataflow
from distbelief.execution.executor import PartitionExecutor, Seed, StepInputs, mean_over_samples
from distbelief.execution.schedule import MicroBatchSchedule, ReadyQueue
from distbelief.graph.region import Region
from distbelief.program.compiler import Compiled
from distbelief.worker.batches import micro_sizes


@final
@dataclass(frozen=True, kw_only=True)
class Together:
    """What a step of all machines comes to.

    Attributes:
        loss: Mean over the samples; None if there is none.
        outputs: Of the layers that are wanted: (n_samples, *shape), whole.
        gradients: Per tensor, whole; zeros where none was pushed.
        pushed: Per tensor, the regions that were pushed, once each.
        averages: New running statistics, per tensor, whole.
        n_bytes: Sent, by sender and receiver.
    """

    loss: float | None
    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    pushed: Mapping[str, Sequence[Region]]
    averages: Mapping[str, torch.Tensor]
    n_bytes: Mapping[tuple[int, int], int]


@final
@dataclass(frozen=True, kw_only=True)
class Crew:
    """How machines compute together.

    Attributes:
        compiled: The plan.
        dtype: float32 or float64.
        micro_batches: Into how many parts a batch is cut.
        modules: For layers that are computed whole.
        training: With the backward pass, or without.
        loss: The layer whose mean over the samples is the objective.
        outputs: Layers whose outputs are wanted.
        seeds: Layers whose gradients begin there; by default that of the loss.
        seed_gradient: How.
        device: Where tensors are.
    """

    compiled: Compiled
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    modules: Mapping[str, nn.Module] | None = None
    training: bool = True
    loss: str | None = None
    outputs: frozenset[str] = frozenset()
    seeds: frozenset[str] | None = None
    seed_gradient: Seed = mean_over_samples
    device: str = "cpu"

    def step(
        self,
        inputs: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        *,
        seed: int = 0,
    ) -> Together:
        """Return what a step on this batch comes to.

        Args:
            inputs: Per input layer: (n_samples, *shape).
            tensors: The model's, by name, whole.
            seed: Of the step's randomness.
        """
        n_samples = len(next(iter(inputs.values())))
        sizes = micro_sizes(n_samples, self.micro_batches)
        machines = [
            _Machine(self, index, inputs=inputs, tensors=tensors, sizes=sizes, seed=seed)
            for index in range(self.compiled.n_machines)
        ]
        n_bytes: defaultdict[tuple[int, int], int] = defaultdict(int)
        left = [machine.agenda.n_left for machine in machines]
        while any(left):
            before = left
            for index, machine in enumerate(machines):
                for copy, way, receiver, values in machine.go_on():
                    n_bytes[index, receiver] += values.nbytes
                    machines[receiver].take(copy, way, index, values)
            left = [machine.agenda.n_left for machine in machines]
            assert left != before, "all machines wait for each other"
        return self._put_together(machines, tensors, n_bytes)

    def _put_together(
        self,
        machines: "Sequence[_Machine]",
        tensors: Mapping[str, torch.Tensor],
        n_bytes: Mapping[tuple[int, int], int],
    ) -> Together:
        gradients: dict[str, torch.Tensor] = {}
        averages: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        pushed: defaultdict[str, list[Region]] = defaultdict(list)
        losses = []
        for machine in machines:
            found = machine.execution.finish()
            items = machine.execution.flow.items
            for item in machine.execution.flow.trained:
                name, region = items[item]
                pushed[name].append(region)
                whole = gradients.setdefault(name, torch.zeros_like(tensors[name]))
                if item in machine.gradients:
                    whole[region.slices] = machine.gradients[item].view(region.shape)
            for item, value in found.averages.items():
                name, region = items[item]
                whole = averages.setdefault(name, torch.zeros_like(tensors[name]))
                whole[region.slices] = value.cpu()
            for name, region, value in found.outputs:
                shape = self.compiled.graph[name].shape
                if name not in outputs:
                    outputs[name] = value.new_zeros((len(value), *shape))
                outputs[name][(slice(None), *region.slices)] = value
            if found.loss is not None:
                losses.append(found.loss / machine.n_samples)
        return Together(
            loss=sum(losses) if losses else None,
            outputs=outputs,
            gradients=gradients,
            pushed=pushed,
            averages=averages,
            n_bytes=dict(n_bytes),
        )


@final
class _Machine:
    def __init__(
        self,
        crew: Crew,
        index: int,
        *,
        inputs: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        sizes: Sequence[int],
        seed: int,
    ) -> None:
        flow = dataflow(
            crew.compiled,
            index,
            training=crew.training,
            loss=crew.loss,
            outputs=crew.outputs,
            seeds=crew.seeds,
        )
        self.n_samples = sum(sizes)
        self.gradients: dict[int, torch.Tensor] = {}
        self.execution = PartitionExecutor(
            flow,
            dtype=crew.dtype,
            modules=crew.modules,
            device=crew.device,
            seed_gradient=crew.seed_gradient,
        )
        table = MicroBatchSchedule.of(flow, len(sizes))
        self.agenda = ReadyQueue(table, sizes)
        self._arrived: dict[int, Vector] = {}
        self._sent = {operation: place for place, operation in flow.sent.items()}
        given = StepInputs(
            parameters=[
                tensors[name][region.slices].detach().clone() for name, region in flow.items
            ],
            inputs={
                name: [inputs[name][(slice(None), *r.slices)] for r in regions]
                for name, regions in flow.reads.items()
            },
            sizes=sizes,
            training=crew.training,
            seed=seed,
        )
        self.execution.begin(table, given)

    def go_on(self) -> list[tuple[int, int, int, Vector]]:
        """Do what can be done; return what is sent: micro-batch, way, receiver."""
        chain, _ = self.agenda.chain()
        n = len(self.execution.flow.operations)
        sends = self.execution.run(chain, self._arrived, self._put)
        found = []
        for instance, values in sends:
            copy, operation = divmod(instance, n)
            way, receiver = self._sent[operation]
            found.append((copy, way, receiver, values))
        return found

    def take(self, copy: int, way: int, sender: int, values: Vector) -> None:
        """Have what another machine has sent."""
        flow = self.execution.flow
        instance = copy * len(flow.operations) + flow.received[way, sender]
        self._arrived[instance] = values
        self.agenda.arrive(instance)

    def _put(self, item: int, gradient: torch.Tensor) -> None:
        assert item not in self.gradients, item
        self.gradients[item] = gradient
