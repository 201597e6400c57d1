"""A job without shards: ranks compute fixed samples with values from a file, and write results.

`distbelief partition --verify` trains so for some steps, `distbelief predict` only runs forward.

    folder/input-K.npy       tensor K of the samples
    folder/output-K.npy      output K of the graph, each rank its own regions
    folder/gradient-K.npy    gradient of tensor K of the weights, after the last step
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, Literal, final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from typing_extensions import override

from distbelief.core.memory import PrivateMemory
from distbelief.graph.graph import LayerGraph, as_real
from distbelief.graph.region import Shape
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol import Evaluate, StartTraining, Stop
from distbelief.protocol.role import Role, Seconds
from distbelief.task.data import Batch, Indices, Path as Keys, shown_path
from distbelief.task.task import BuildContext
from distbelief.worker.batches import BatchIndices, BatchPlan, EvaluationPlan, Limits, SliceReader
from distbelief.worker.build import RankBuild, Split, assemble, rank_in
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.executor import StepResult
from distbelief.worker.execution.operations import Dataflow
from distbelief.worker.group import Outgoing
from distbelief.worker.replica import Leader, Program, Steps, Waiting


SEED: Final = (0, 0)  # of all steps

Array = NDArray[np.float32 | np.float64 | np.int64]


@final
class Computation(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one replica compute."""

    folder: str  # for samples and results
    weights: str  # path of whole tensors by name (.safetensors)
    trains: bool = False  # or runs forward only
    n_samples: int
    n_steps: int
    n_warm: int = 0  # steps at the start whose time does not count
    dtype: str = "float32"

    def file(self, kind: Literal["input", "output", "gradient"], index: int) -> Path:
        return Path(self.folder) / f"{kind}-{index}.npy"

    def load(self, kind: Literal["input", "output", "gradient"], index: int) -> torch.Tensor:
        array: Array = np.load(self.file(kind, index))
        return torch.from_numpy(array)

    def make_room(self, outputs: Sequence[Shape], gradients: Sequence[Shape] = ()) -> None:
        """Make the files of the results; `outputs` are shapes of one sample."""
        rows = [(self.n_samples, *shape) for shape in outputs]
        places = [(self.file("output", index), shape) for index, shape in enumerate(rows)]
        places += [(self.file("gradient", index), shape) for index, shape in enumerate(gradients)]
        for path, shape in places:
            np.lib.format.open_memmap(path, mode="w+", dtype=self.dtype, shape=shape)


@final
class SavedSamples:
    """Arrays as a data set; targets are zeros if there are none."""

    def __init__(self, computation: Computation, paths: Sequence[Keys]) -> None:
        self._paths = paths
        self._arrays: list[Array] = [
            np.load(computation.file("input", index), mmap_mode="r", allow_pickle=False)
            for index in range(len(paths))
        ]

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int, /) -> object:
        raise NotImplementedError("batches are read at once")

    def __getitems__(self, indices: list[int], /) -> object:
        tensors = {
            path: torch.from_numpy(np.array(array[indices]))
            for path, array in zip(self._paths, self._arrays, strict=True)
        }
        batch = Batch.of(tensors)
        if batch.is_dictionary:
            return batch.inputs
        targets = torch.zeros(len(indices)) if batch.targets is None else batch.targets
        return batch.inputs, targets


@final
class FixedBatchPlan:
    def __init__(self, n_samples: int) -> None:
        self._indices: Indices = np.arange(n_samples, dtype=np.int64)

    def start(self, position: int) -> None:
        pass  # all steps are equal

    def batch(self, step: int) -> BatchIndices:
        return BatchIndices(position=step * len(self._indices), indices=self._indices)


@final
class SampleProgram(Program):
    """Writes outputs, and the gradients of the last step, to files."""

    def __init__(
        self,
        computation: Computation,
        flow: Dataflow,
        values: Sequence[torch.Tensor],
        outputs: Sequence[str],
    ) -> None:
        self.values = values
        self._outputs = outputs
        self._computation = computation
        self._flow = flow
        self._n_done = 0
        self._ends: list[Seconds] = []  # of all steps; the first is the begin
        self._loss = 0.0  # sum over the samples of a step, where it is known

    @override
    def steps(self, steps: Steps) -> Waiting[None]:
        yield from steps.gather()
        self._ends = [steps.now]
        while (yield from steps.next_step()):
            assert steps.slice is not None
            indices, gradients = steps.slice.samples.indices, dict[int, torch.Tensor]()
            # Rows are consecutive; two lists of indices would be paired.
            rows = slice(int(indices[0]), int(indices[-1]) + 1)
            steps.begin_step(gradients.__setitem__, partial(self._write, rows, gradients))
            taken = yield from steps.taken()
            assert taken is not None  # nothing is fetched
            self._n_done += 1
            self._ends.append(steps.now)
            if taken.result.loss is not None:
                self._loss = taken.result.loss
            yield

    def _write(
        self, rows: "slice[int, int]", gradients: Mapping[int, torch.Tensor], found: StepResult
    ) -> None:
        # Runs in the compute executor.
        computation = self._computation
        is_last = self._n_done + 1 == computation.n_steps
        if found.outputs and (is_last or not computation.trains):
            for name, region, value in found.outputs:
                path = computation.file("output", self._outputs.index(name))
                output = np.load(path, mmap_mode="r+")
                output[(rows, *region.slices)] = value.detach().cpu().numpy()
                output.flush()
        if is_last and computation.trains:
            self._write_gradients(gradients)

    def _write_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        with safe_open(self._computation.weights, framework="pt") as file:
            order = {name: index for index, name in enumerate(sorted(file.keys()))}
        for item, gradient in gradients.items():
            name, region = self._flow.items[item]
            path = self._computation.file("gradient", order[name])
            whole = np.load(path, mmap_mode="r+")
            whole[region.slices] = gradient.detach().cpu().view(region.shape).numpy()
            whole.flush()

    @override
    def command(
        self, leader: Leader, message: StartTraining | Evaluate | Stop, now: Seconds
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
    assert context.sample is not None
    sample, trains = context.sample, computation.trains
    split = Split.of(context, has_loss=trains)
    plan, graph = split.plan, split.graph
    rank = rank_in(name, context=context, split=split)
    outputs = outputs_of(graph, has_loss=trains)
    flow = dataflow(
        split.compiled(),
        rank.index,
        training=trains,
        loss=graph.outputs[-1] if trains else None,
        outputs=frozenset(outputs),
    )
    dtype = torch.float64 if computation.dtype == "float64" else torch.float32
    batch_plan: BatchPlan = FixedBatchPlan(computation.n_samples)
    if not trains:
        indices = np.arange(computation.n_samples, dtype=np.int64)
        batch_plan = EvaluationPlan([indices], chunk=plan.batch)
    entries = sample.entries if trains else sample.inputs
    dataset = SavedSamples(computation, [entry.path for entry in entries])
    reader = SliceReader(dataset, graph=graph, reads=flow.reads, dtype=dtype)
    nothing = PartialView(Layout.of([], n_shards=1), [])
    client = ParameterClient(ClientConfig(pushes=False), nothing, memory=PrivateMemory(host=""))
    return assemble(
        rank,
        split,
        RankBuild(flow=flow, dtype=dtype, client=client, reader=reader),
        memory=context.memory,
        batch_plan=batch_plan,
        program=SampleProgram(computation, flow, _values(computation, flow, dtype), outputs),
        limits=Limits(steps_max=computation.n_steps),
        begins=False,
        seed=SEED,
        training=trains,
    )


def outputs_of(graph: LayerGraph, *, has_loss: bool) -> tuple[str, ...]:
    return tuple(dict.fromkeys(graph.outputs[:-1] if has_loss else graph.outputs))


def output_name(path: Keys) -> str:
    """Return what an output is called: "logits"; "outputs" if it is the only one."""
    return shown_path(path) or "outputs"


def _values(computation: Computation, flow: Dataflow, dtype: torch.dtype) -> list[torch.Tensor]:
    with safe_open(computation.weights, framework="pt") as file:
        found: list[torch.Tensor] = []
        for name, region in flow.items:
            part = file.get_slice(name)
            # Of complex numbers, and of a tensor without dimensions, there are no slices.
            if region.intervals and part.get_dtype() != "C64":
                value = part[region.slices]
            else:
                value = as_real(file.get_tensor(name))[region.slices]
            found.append(value.to(dtype).reshape(-1).contiguous())
        return found
