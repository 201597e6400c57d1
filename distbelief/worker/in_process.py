"""All ranks of a plan in one process: their dataflows and the messages between them.

Computes what a partitioned job computes, without network and roles. Each rank has its own
executor and sees only what it has read, received or computed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import nn

from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.plans.compiler import Compiled
from distbelief.worker.batches import micro_sizes
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.executor import (
    PartitionExecutor,
    Seed,
    StepInputs,
    mean_over_samples,
)
from distbelief.worker.execution.operations import Dataflow
from distbelief.worker.execution.schedule import MicroBatchSchedule, ReadyQueue


@final
@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The results of a step on all ranks."""

    loss: float | None  # mean over the samples
    outputs: Mapping[str, torch.Tensor]  # of the wanted layers: (n_samples, *shape), whole
    gradients: Mapping[str, torch.Tensor]  # whole; zeros where none was pushed
    pushed: Mapping[str, Sequence[Region]]  # the regions that were pushed, once each
    averages: Mapping[str, torch.Tensor]  # new running averages, whole
    n_bytes: Mapping[tuple[int, int], int]  # sent, by sender and receiver


@final
@dataclass(frozen=True, kw_only=True)
class LocalGroup:
    """The ranks of a plan."""

    compiled: Compiled
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    modules: Mapping[str, nn.Module] | None = None  # layers that are computed whole
    training: bool = True  # with the backward pass
    loss: str | None = None  # the layer whose mean over the samples is the objective
    outputs: frozenset[str] = frozenset()  # layers whose outputs are wanted
    seeds: frozenset[str] | None = None  # where gradients begin; by default the loss
    seed_gradient: Seed = mean_over_samples
    device: str = "cpu"

    @cached_property
    def flows(self) -> Sequence[Dataflow]:
        return [
            dataflow(
                self.compiled,
                rank,
                training=self.training,
                loss=self.loss,
                outputs=self.outputs,
                seeds=self.seeds,
            )
            for rank in range(self.compiled.n_machines)
        ]

    def step(
        self,
        inputs: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        *,
        seed: int = 0,
    ) -> StepOutput:
        """Return the results of a step on (n_samples, *shape) per input layer."""
        n_samples = len(next(iter(inputs.values())))
        sizes = micro_sizes(n_samples, self.micro_batches)
        ranks = [
            _Rank(self, index, inputs=inputs, tensors=tensors, sizes=sizes, seed=seed)
            for index in range(self.compiled.n_machines)
        ]
        n_bytes: defaultdict[tuple[int, int], int] = defaultdict(int)
        left = [rank.ready.n_left for rank in ranks]
        while any(left):
            before = left
            for index, rank in enumerate(ranks):
                for micro_batch, message_index, receiver, values in rank.run_ready():
                    n_bytes[index, receiver] += values.nbytes
                    ranks[receiver].take(micro_batch, message_index, index, values)
            left = [rank.ready.n_left for rank in ranks]
            assert left != before, "all ranks wait for each other"
        return self._assemble(ranks, tensors, n_bytes)

    def _assemble(
        self,
        ranks: "Sequence[_Rank]",
        tensors: Mapping[str, torch.Tensor],
        n_bytes: Mapping[tuple[int, int], int],
    ) -> StepOutput:
        gradients: dict[str, torch.Tensor] = {}
        averages: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        pushed: defaultdict[str, list[Region]] = defaultdict(list)
        losses = []
        for rank in ranks:
            found = rank.execution.finish()
            items = rank.execution.flow.items
            for item in rank.execution.flow.trained:
                name, region = items[item]
                pushed[name].append(region)
                whole = gradients.setdefault(name, torch.zeros_like(tensors[name]))
                if item in rank.gradients:
                    whole[region.slices] = rank.gradients[item].view(region.shape)
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
                losses.append(found.loss / rank.n_samples)
        return StepOutput(
            loss=sum(losses) if losses else None,
            outputs=outputs,
            gradients=gradients,
            pushed=pushed,
            averages=averages,
            n_bytes=dict(n_bytes),
        )


@final
class _Rank:
    def __init__(
        self,
        group: LocalGroup,
        index: int,
        *,
        inputs: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        sizes: Sequence[int],
        seed: int,
    ) -> None:
        flow = group.flows[index]
        self.n_samples = sum(sizes)
        self.gradients: dict[int, torch.Tensor] = {}
        self.execution = PartitionExecutor(
            flow,
            dtype=group.dtype,
            modules=group.modules,
            device=group.device,
            seed_gradient=group.seed_gradient,
        )
        schedule = MicroBatchSchedule.of(flow, len(sizes))
        self.ready = ReadyQueue(schedule, sizes)
        self._arrived: dict[int, Vector] = {}
        self._sent = {operation: place for place, operation in flow.sent.items()}
        step_inputs = StepInputs(
            parameters=[
                tensors[name][region.slices].detach().clone() for name, region in flow.items
            ],
            inputs={
                name: [inputs[name][(slice(None), *r.slices)] for r in regions]
                for name, regions in flow.reads.items()
            },
            sizes=sizes,
            training=group.training,
            seed=seed,
        )
        self.execution.begin(schedule, step_inputs)

    def run_ready(self) -> list[tuple[int, int, int, Vector]]:
        """Run what can run; return (micro-batch, message index, receiver, values) to send."""
        chain, _ = self.ready.chain()
        n = len(self.execution.flow.operations)
        sends = self.execution.run(chain, self._arrived, self._put)
        found = []
        for instance, values in sends:
            micro_batch, operation = divmod(instance, n)
            message_index, receiver = self._sent[operation]
            found.append((micro_batch, message_index, receiver, values))
        return found

    def take(self, micro_batch: int, message_index: int, sender: int, values: Vector) -> None:
        flow = self.execution.flow
        instance = micro_batch * len(flow.operations) + flow.received[message_index, sender]
        self._arrived[instance] = values
        self.ready.arrive(instance)

    def _put(self, item: int, gradient: torch.Tensor) -> None:
        assert item not in self.gradients, item
        self.gradients[item] = gradient
