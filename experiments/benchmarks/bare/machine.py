"""One machine of a replica as in a job, but without a parameter server.

    python -m experiments.benchmarks.bare.machine SETTING.json MACHINE ADDRESS

Steps, messages, node and network are the runtime's; parameters are made at the start
and stay, the batch is always the same, and gradients are left where they are. So what
is measured is a step's computation, and what its machines say to each other.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np
import torch

from distbelief.core.memory import keep_memory
from distbelief.execution.dataflow import dataflow
from distbelief.execution.executor import PartitionExecutor, StepResult
from distbelief.program import plan as plans
from distbelief.program.compiler import Compiled, compile_plan
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.roles.role import (
    ALL_MESSAGES,
    Action,
    Address,
    Computed,
    Event,
    Received,
    Seconds,
    SetTimer,
    Started,
    TimerFired,
)
from distbelief.worker.batches import BatchIndices, BatchSlice, micro_sizes
from distbelief.worker.objective import StepOutcome
from distbelief.worker.steps import StepRunner
from distbelief.worker.transfers import RankLink
from experiments.benchmarks.measuring import paced
from experiments.benchmarks.measuring.meeting import attached, take_step
from experiments.benchmarks.measuring.workload import Workload


LIFE: Final = 1
REMIND_SECONDS: Final = 0.25
_REMIND: Final = "remind"


@final
class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What machines compute.

    Attributes:
        workload: The net and the batch.
        plan: The file of the plan.
        folder: Where they tell each other their addresses.
    """

    workload: Workload
    plan: str
    folder: str


@final
class _SameBatch:
    """The course of steps that all have the same samples."""

    def __init__(self, n_samples: int) -> None:
        self._chosen = BatchIndices(position=0, indices=np.arange(n_samples))

    def start(self, position: int) -> None:
        """Do nothing."""

    def batch(self, step: int) -> BatchIndices:
        """Return the samples."""
        del step
        return self._chosen


@final
class BareMachine:
    """Takes a step whenever it is told to: `STEP`.

    Args:
        compiled: The plan, for one micro-batch.
        machine: Which one this is.
        workload: The net and the batch.
        micro_batches: Parts of a batch.
        tensors: The net's, whole, if the process has them already.
        generation: What its messages are marked with.

    Attributes:
        n_done: Steps that are done.
        loss: Sum over the samples in the last one, if it is computed here.
        gradients: Per tensor and region, those of the last step.
    """

    accepts = ALL_MESSAGES

    def __init__(
        self,
        compiled: Compiled,
        machine: int,
        *,
        workload: Workload,
        micro_batches: int,
        tensors: Mapping[str, torch.Tensor] | None = None,
        generation: int = LIFE,
    ) -> None:
        flow = dataflow(compiled, machine, loss=workload.loss_layer)
        self.n_done = 0
        self.loss: float | None = None
        self.gradients: dict[int, torch.Tensor] = {}
        self.items = flow.items
        self.names = [Address(f"machine-{m}") for m in range(compiled.n_machines)]
        self._couriers = {
            peer: RankLink(name) for peer, name in enumerate(self.names) if peer != machine
        }
        self._stepping = StepRunner(
            PartitionExecutor(flow),
            links=self._couriers,
            batch_plan=_SameBatch(workload.batch_size),
            micro_batches=micro_batches,
            training=True,
            seed=(0,),
        )
        self._generation = generation
        values = tensors or workload.tensors()
        self._parameters = [values[name][region.slices].clone() for name, region in flow.items]
        samples = workload.inputs()
        self._inputs = {
            name: [samples[name][(slice(None), *region.slices)].contiguous() for region in regions]
            for name, regions in flow.reads.items()
        }
        self._computing = False

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        actions: list[Action] = []
        match event:
            case Started():
                self._stepping.begin(self._generation)
                actions = [*self._stepping.place(now), *self._remind(now)]
            case TimerFired(name=name) if name == _REMIND:
                actions = self._remind(now)
            case TimerFired():
                self._open()
            case Received(sender=sender, message=TransferBlock() as message):
                peer = self.names.index(sender)
                actions = self._stepping.take(peer, message, now)
            case Received(sender=sender, message=TransferAck() as message):
                peer = self.names.index(sender)
                actions = self._couriers[peer].acked(message.taken, now)
            case Computed():
                actions = self._computed(event, now)
            case _:
                pass
        if self._computing:
            return actions
        begun = self._stepping.chain()
        self._computing = bool(begun)
        return [*begun, *actions]  # it computes on while the driver sends

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it does."""
        return "computing" if self._computing else "waiting", {}

    def _open(self) -> None:
        self.gradients.clear()
        self._stepping.open(
            BatchSlice(generation=self._generation, step=self._stepping.step, inputs=self._inputs),
            self._parameters,
            put=self.gradients.__setitem__,
            close=_close,
        )

    def _computed(self, event: Computed, now: Seconds) -> list[Action]:
        if event.error is not None:
            raise event.error
        self._computing = False
        assert isinstance(event.result, StepOutcome)
        actions = self._stepping.ran(event.result, now)
        if event.result.found is not None:
            self.loss = event.result.found.loss
            self.n_done += 1
        return actions

    def _remind(self, now: Seconds) -> list[Action]:
        actions = [a for c in self._couriers.values() for a in c.remind(now)]
        return [*actions, SetTimer(name=_REMIND, at=now + REMIND_SECONDS)]


def main(path: str, machine: int, address: str) -> None:
    keep_memory()
    torch.set_num_threads(1)
    setting = msgspec.json.decode(Path(path).read_bytes(), type=Setting)
    plan = plans.load(setting.plan)
    workload = setting.workload
    compiled = compile_plan(
        workload.graph(),
        plan.placements,
        batch=micro_sizes(workload.batch_size, plan.micro_batches)[0],
        n_machines=plan.cluster.n_machines,
    )
    role = BareMachine(compiled, machine, workload=workload, micro_batches=plan.micro_batches)
    with attached(role, machine, role.names, address=address, folder=Path(setting.folder)) as node:
        paced.obey(lambda: take_step(node, role))


def _close(found: StepResult) -> None:
    """Do nothing: gradients stay where they are."""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
