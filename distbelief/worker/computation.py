"""A job without shards: ranks compute fixed samples with values from a file, and write results.

`distbelief partition --verify` trains so for some steps, `distbelief predict` only runs forward.

    folder/output.npy        outputs, each rank its own regions
    folder/gradient-K.npy    gradient of tensor K of the weights, after the last step
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from typing_extensions import override

from distbelief.core.memory import PrivateMemory
from distbelief.data import Indices
from distbelief.execution.dataflow import dataflow
from distbelief.execution.executor import Put, StepResult
from distbelief.execution.operations import Dataflow
from distbelief.parameter_server.client.client import ClientConfig, ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.program.compiler import compile_plan
from distbelief.protocol import Evaluate, StartTraining, Stop
from distbelief.roles.role import Action, Address, Role, Seconds
from distbelief.task.task import BuildContext
from distbelief.worker.batches import (
    BatchIndices,
    BatchPlan,
    BatchSlice,
    EvaluationPlan,
    SliceReader,
)
from distbelief.worker.build import RankBuild, Split, assemble, rank_in
from distbelief.worker.group import GroupLeader, Outgoing
from distbelief.worker.objective import Objective


OUTPUT: Final = "output.npy"
SEED: Final = (0, 0)  # of all steps

Array = NDArray[np.float32 | np.float64 | np.int64]


def gradient_file(tensor: int) -> str:
    return f"gradient-{tensor}.npy"


@final
class Computation(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one replica compute."""

    folder: str  # for results
    weights: str  # path of whole tensors by name (.safetensors)
    inputs: str  # path of (n_samples, *shape), .npy
    targets: str = ""  # path; "" to run forward only
    n_samples: int
    n_steps: int
    n_warm: int = 0  # steps at the start whose time does not count
    dtype: str = "float32"

    @property
    def trains(self) -> bool:
        return bool(self.targets)

    def path(self, name: str) -> Path:
        return Path(self.folder) / name


@final
class SavedSamples:
    """Arrays as a data set; targets are zeros if there are none."""

    def __init__(self, computation: Computation) -> None:
        self._inputs: Array = np.load(computation.inputs, mmap_mode="r", allow_pickle=False)
        self._targets: Array | None = None
        if computation.trains:
            self._targets = np.load(computation.targets, mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: list[int], /) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.from_numpy(np.array(self._inputs[indices]))
        if self._targets is None:
            return inputs, torch.zeros(len(indices))
        return inputs, torch.from_numpy(np.array(self._targets[indices]))


@final
class FixedBatchPlan:
    """All samples in every step."""

    def __init__(self, n_samples: int) -> None:
        self._indices: Indices = np.arange(n_samples, dtype=np.int64)

    def start(self, position: int) -> None:
        pass  # all steps are equal

    def batch(self, step: int) -> BatchIndices:
        return BatchIndices(position=step * len(self._indices), indices=self._indices)


@final
class ComputationObjective(Objective):
    """Writes outputs, and the gradients of the last step, to files."""

    def __init__(
        self, computation: Computation, flow: Dataflow, values: Sequence[torch.Tensor]
    ) -> None:
        self.values = values
        self._computation = computation
        self._flow = flow
        self._n_done = 0
        self._ends: list[Seconds] = []  # of all steps; the first is the begin
        self._loss = 0.0  # sum over the samples of a step, where it is known
        self._rows = slice(0)
        self._gradients: dict[int, torch.Tensor] = {}

    @override
    def begin(self, position: int, now: Seconds) -> None:
        self._ends = [now]

    @override
    def open(self, step: int, batch: BatchIndices, batch_slice: BatchSlice) -> Put:
        # Rows are consecutive; two lists of indices would be paired.
        self._rows = slice(int(batch.indices[0]), int(batch.indices[-1]) + 1)
        self._gradients = {}
        return self._gradients.__setitem__

    @override
    def close(self, step_result: StepResult) -> object:
        computation = self._computation
        is_last = self._n_done + 1 == computation.n_steps
        if step_result.outputs and (is_last or not computation.trains):
            output = np.load(computation.path(OUTPUT), mmap_mode="r+")
            for _, region, value in step_result.outputs:
                output[(self._rows, *region.slices)] = value.detach().cpu().numpy()
            output.flush()
        if is_last and computation.trains:
            self._write_gradients()
        return None

    def _write_gradients(self) -> None:
        with safe_open(self._computation.weights, framework="pt") as file:
            order = {name: index for index, name in enumerate(sorted(file.keys()))}
        for item, gradient in self._gradients.items():
            name, region = self._flow.items[item]
            path = self._computation.path(gradient_file(order[name]))
            whole = np.load(path, mmap_mode="r+")
            whole[region.slices] = gradient.detach().cpu().view(region.shape).numpy()
            whole.flush()

    @override
    def closed(
        self, result: object, step_result: StepResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        self._n_done += 1
        self._ends.append(now)
        if step_result.loss is not None:
            self._loss = step_result.loss
        return []

    @override
    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        if isinstance(message, StartTraining):
            return leader.begin(now)
        return super().command(leader, message, now)

    @override
    def figures(self) -> Mapping[str, float]:
        steps = [b - a for a, b in pairwise(self._ends[self._computation.n_warm :])]
        return {"loss": self._loss, "step_seconds": median(steps) if steps else 0.0}


def build_computing_rank(name: str, computation: Computation, context: BuildContext) -> Role:
    """Return the rank of this name: a part of the plan, with its values."""
    split = Split.of(context)
    if not computation.trains:  # the last output is the loss
        split = replace(split, graph=split.graph.only(split.graph.outputs[:-1]))
    plan, graph = split.plan, split.graph
    rank = rank_in(name, context=context, split=split)
    if computation.trains:
        compiled = split.compiled()
    else:  # the plan has the loss, too
        names = plan.placements.keys() & graph.by_name.keys()
        placements = {name: plan.placements[name] for name in names}
        n_machines = plan.cluster.n_machines
        compiled = compile_plan(graph, placements, batch=plan.batch, n_machines=n_machines)
    flow = dataflow(
        compiled,
        rank.machine,
        training=computation.trains,
        loss=graph.outputs[-1] if computation.trains else None,
        outputs=frozenset({graph.outputs[0]}),
    )
    dtype = torch.float64 if computation.dtype == "float64" else torch.float32
    batch_plan: BatchPlan = FixedBatchPlan(computation.n_samples)
    if not computation.trains:
        indices = np.arange(computation.n_samples, dtype=np.int64)
        batch_plan = EvaluationPlan([indices], chunk=plan.batch)
    reader = SliceReader(SavedSamples(computation), graph=graph, reads=flow.reads, dtype=dtype)
    layout = Layout.of([], n_shards=1)
    client = ParameterClient(  # of no shard
        ClientConfig(pushes=False),
        layout=layout,
        shards=[Address("shard-0")],
        memory=PrivateMemory(host=""),
        selection=PartialView(layout, []),
    )
    return assemble(
        rank,
        split,
        RankBuild(flow=flow, dtype=dtype, client=client, reader=reader),
        batch_plan=batch_plan,
        objective=ComputationObjective(computation, flow, _values(computation, flow, dtype)),
        leader=GroupLeader(
            plan.cluster.n_machines, plan=split.fingerprint, steps_max=computation.n_steps
        ),
        seed=SEED,
        training=computation.trains,
    )


def _values(computation: Computation, flow: Dataflow, dtype: torch.dtype) -> list[torch.Tensor]:
    with safe_open(computation.weights, framework="pt") as file:
        found: list[torch.Tensor] = []
        for name, region in flow.items:
            # A tensor without dimensions has no slices.
            value = (
                file.get_slice(name)[region.slices] if region.intervals else file.get_tensor(name)
            )
            found.append(value.to(dtype).reshape(-1).contiguous())
        return found
