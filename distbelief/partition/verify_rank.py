"""One rank of a plan verification: a process that computes its part of some steps.

python -m distbelief.partition.verify_rank SPEC.json MACHINE N_MACHINES
"""

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from typing_extensions import override

from distbelief.core import files
from distbelief.core.memory import PrivateMemory, keep_memory
from distbelief.data.sharding import Indices
from distbelief.errors import DistBeliefError, JobError
from distbelief.execution.dataflow import dataflow
from distbelief.execution.executor import PartitionExecutor, Put, StepResult
from distbelief.execution.operations import Dataflow
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import LayerGraph
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.link import ClientConfig
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.partition.verify_run import SEED, Seen, VerificationRun, beat
from distbelief.program.compiler import Compiled, compile_plan
from distbelief.program.plan import Plan, load
from distbelief.roles.role import Action, Address, PeerJoined, Seconds
from distbelief.task.task import build_model, capture_for, modules_of
from distbelief.transport.config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.worker.batches import (
    BatchIndices,
    BatchPlan,
    BatchSlice,
    EvaluationPlan,
    SlicePrefetch,
    SliceReader,
)
from distbelief.worker.group import GroupLeader, member_names
from distbelief.worker.objective import Objective
from distbelief.worker.replica import RankConfig, Replica
from distbelief.worker.steps import StepRunner
from distbelief.worker.transfers import RankLink


OUTPUT: Final = "output.npy"

Array = NDArray[np.float32 | np.float64 | np.int64]


def gradient_file(tensor: int) -> str:
    return f"gradient-{tensor}.npy"


@final
class SamplePairs:
    """Arrays as a data set; targets are zeros if there are none."""

    def __init__(self, inputs: Array, targets: Array | None) -> None:
        self._inputs, self._targets = inputs, targets

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
class VerificationObjective(Objective):
    """The objective of a rank in a plan verification: writes results to files."""

    def __init__(
        self, rehearsal: VerificationRun, flow: Dataflow, values: Sequence[torch.Tensor]
    ) -> None:
        self.values = values
        self.n_done = 0
        self.ends: list[Seconds] = []
        self.loss: float | None = None
        self._rehearsal = rehearsal
        self._flow = flow
        self._chosen: BatchIndices | None = None
        self._gradients: dict[int, torch.Tensor] = {}

    @override
    def begin(self, position: int, now: Seconds) -> None:
        # Time counts from here.
        del position
        self.ends = [now]

    @override
    def open(self, step: int, chosen: BatchIndices, portion: BatchSlice) -> Put:
        del step, portion
        self._chosen = chosen
        self._gradients = {}
        return self._put

    def _put(self, item: int, gradient: torch.Tensor) -> None:
        self._gradients[item] = gradient

    @override
    def close(self, found: StepResult) -> object:
        assert self._chosen is not None
        rehearsal, rows = self._rehearsal, self._chosen.indices
        is_last = self.n_done + 1 == rehearsal.n_steps
        if is_last or not rehearsal.trains:
            self._write(found, rows)
        if is_last and rehearsal.trains:
            self._write_gradients()
        return None

    def _write(self, found: StepResult, rows: Indices) -> None:
        if not found.outputs:
            return
        output = np.load(self._rehearsal.path(OUTPUT), mmap_mode="r+")
        for _, region, value in found.outputs:
            # Two lists of indices would be paired: rows are consecutive here.
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            output[(span, *region.slices)] = value.detach().cpu().numpy()
        output.flush()

    def _write_gradients(self) -> None:
        order = _order(self._rehearsal)
        for item, gradient in self._gradients.items():
            name, region = self._flow.items[item]
            path = self._rehearsal.path(gradient_file(order[name]))
            whole = np.load(path, mmap_mode="r+")
            whole[region.slices] = gradient.detach().cpu().view(region.shape).numpy()
            whole.flush()

    @override
    def closed(
        self, result: object, found: StepResult, chosen: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        del result, chosen
        self.n_done += 1
        self.ends.append(now)
        if found.loss is not None:
            self.loss = found.loss
        return []


def _order(rehearsal: VerificationRun) -> dict[str, int]:
    with safe_open(rehearsal.weights, framework="pt") as file:
        return {name: index for index, name in enumerate(sorted(file.keys()))}


GROUP: Final = "replica-0"
MEET_SECONDS: Final = 120.0


def main(spec: str, machine: int, n_machines: int) -> int:
    """Run this rank; return the exit status of the process."""
    rehearsal = msgspec.json.decode(Path(spec).read_bytes(), type=VerificationRun)
    _end_with_parent()
    beat(rehearsal.path(f"{machine}.alive"))
    sys.path[:0] = [p for p in rehearsal.import_paths if p not in sys.path]
    torch.set_num_threads(rehearsal.threads)
    keep_memory()
    try:
        error = _run(rehearsal, machine, n_machines)
    except JobError as found:
        files.write(rehearsal.path(f"{machine}.error"), str(found).encode())
        return 2
    except DistBeliefError as found:
        _log("error", str(found))
        return 1
    if error is not None:
        _log("error", error)
    return 0 if error is None else 1


def _end_with_parent() -> None:
    # Standard input closes when the parent process ends.
    def wait() -> None:
        while os.read(0, 1):  # not by `sys.stdin`, whose lock it would hold at the end
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run(rehearsal: VerificationRun, machine: int, n_machines: int) -> str | None:
    names = member_names(GROUP, n_machines)
    links = ListenConfig(directory=rehearsal.folder).transport(
        name=names[machine], incarnation=1, run=rehearsal.run, log=_log
    )
    with links as transport:
        _tell_endpoint(rehearsal, machine, transport.endpoint)
        plan = load(rehearsal.plan)
        role, objective = _role(rehearsal, plan, machine)
        node = RoleRunner(role, transport=transport, log=_log)
        for other, name in enumerate(names):
            if other != machine:
                transport.connect(name, 1, _endpoint(rehearsal, other))
                node.post(PeerJoined(peer=name, incarnation=1))
        error = node.run()
        _, figures = role.status()
    n_bytes = {m: int(figures.get(f"bytes_to_{m}", 0)) for m in range(n_machines)}
    ends = objective.ends[rehearsal.n_warm :]
    seen = Seen(
        seconds=tuple(b - a for a, b in pairwise(ends)),
        n_bytes={m: n for m, n in n_bytes.items() if n},
        loss=objective.loss,
    )
    files.write(rehearsal.path(f"{machine}.json"), msgspec.json.encode(seen))
    return error


def _log(level: str, text: str) -> None:
    sys.stdout.write(f"{level}: {text}\n")  # a file of its own
    sys.stdout.flush()


def _tell_endpoint(rehearsal: VerificationRun, machine: int, endpoint: str) -> None:
    files.write(rehearsal.path(f"{machine}.endpoint"), endpoint.encode())


def _endpoint(rehearsal: VerificationRun, machine: int) -> str:
    # Waits until the other rank has written its endpoint.
    path = rehearsal.path(f"{machine}.endpoint")
    deadline = time.monotonic() + MEET_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            raise DistBeliefError(f"machine {machine} has not started: see its log")
        time.sleep(0.01)
    return path.read_text()


def _role(
    rehearsal: VerificationRun, plan: Plan, machine: int
) -> tuple[Replica, VerificationObjective]:
    graph, modules, outputs = graph_of(rehearsal)
    compiled = compiled_for(plan, graph)
    flow = dataflow(
        compiled,
        machine,
        training=rehearsal.trains,
        loss=graph.outputs[-1] if rehearsal.trains else None,
        outputs=frozenset({outputs}),
    )
    dtype = torch.float64 if rehearsal.dtype == "float64" else torch.float32
    values = _values(rehearsal, flow, dtype)
    inputs = np.load(rehearsal.inputs, mmap_mode="r", allow_pickle=False)
    targets = None
    if rehearsal.trains:
        targets = np.load(rehearsal.targets, mmap_mode="r", allow_pickle=False)
    batch_plan: BatchPlan = FixedBatchPlan(rehearsal.n_samples)
    if not rehearsal.trains:
        batch_plan = EvaluationPlan(
            [np.arange(rehearsal.n_samples, dtype=np.int64)], chunk=plan.batch
        )
    n_machines = plan.cluster.n_machines
    names = member_names(GROUP, n_machines)
    peers = sorted({peer for _, peer in (*flow.sent, *flow.received)})
    links = {peer: RankLink(names[peer]) for peer in peers}
    objective = VerificationObjective(rehearsal, flow, values)
    leader = GroupLeader(n_machines, plan="rehearsal", steps_max=rehearsal.n_steps)
    leader.begin(0.0)
    role = Replica(
        RankConfig(group=GROUP, machine=machine, n_machines=n_machines, plan="rehearsal"),
        client=_no_client(),
        executor=StepRunner(
            PartitionExecutor(flow, dtype=dtype, modules=modules, device=rehearsal.device),
            links=links,
            batch_plan=batch_plan,
            micro_batches=plan.micro_batches,
            training=rehearsal.trains,
            seed=SEED,
        ),
        slices=SlicePrefetch(
            SliceReader(SamplePairs(inputs, targets), graph=graph, reads=flow.reads, dtype=dtype),
            batch_plan,
        ),
        objective=objective,
        shapes=[region.shape for _, region in flow.items],
        leader=leader if machine == 0 else None,
    )
    return role, objective


def graph_of(rehearsal: VerificationRun) -> tuple[LayerGraph, Mapping[str, torch.nn.Module], str]:
    """Return the layer graph, the modules of opaque layers, and the output layer."""
    if rehearsal.trains:
        captured = capture_for(rehearsal.task, rehearsal.sample)
        return captured.graph, captured.modules, captured.graph.outputs[0]
    with torch.device("meta"):
        module = build_model(rehearsal.task.model)
    sample = rehearsal.sample
    n_values = 1 if sample.input_is_integer else None
    graph = capture(module, [InputSpec(shape=sample.input_shape, n_values=n_values)])
    return graph, modules_of(graph, module, "mse"), graph.outputs[0]


def compiled_for(plan: Plan, graph: LayerGraph) -> Compiled:
    """Return the plan compiled for this graph, which may lack the loss."""
    return compile_plan(
        graph,
        {
            layer.name: plan.placements[layer.name]
            for layer in graph.layers
            if layer.name in plan.placements
        },
        batch=-(-plan.batch // plan.micro_batches),
        n_machines=plan.cluster.n_machines,
    )


def _values(rehearsal: VerificationRun, flow: Dataflow, dtype: torch.dtype) -> list[torch.Tensor]:
    with safe_open(rehearsal.weights, framework="pt") as file:
        found: list[torch.Tensor] = []
        for name, region in flow.items:
            # A tensor without dimensions has no slices.
            value = (
                file.get_slice(name)[region.slices] if region.intervals else file.get_tensor(name)
            )
            found.append(value.to(dtype).reshape(-1).contiguous())
        return found


def _no_client() -> ParameterClient:
    layout = Layout.of([], n_shards=1)
    return ParameterClient(
        ClientConfig(pushes=False),
        layout=layout,
        shards=[Address("shard-0")],
        memory=PrivateMemory(host=""),
        selection=PartialView(layout, []),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
