"""One machine of a rehearsal: a process that computes its part of some steps, and ends.

python -m distbelief.job.rehearsal.hand SPEC.json MACHINE N_MACHINES
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from safetensors import safe_open

from distbelief import files
from distbelief.allocator import keep_memory
from distbelief.errors import DistBeliefError, JobError
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.layer import LayerGraph
from distbelief.job.rehearsal.pulse import beat
from distbelief.job.rehearsal.rehearsal import SEED, Rehearsal, Seen
from distbelief.job.rehearsal.rehearsing import Pairs, Rehearsing, SameCourse
from distbelief.memory import PrivateMemory
from distbelief.node import Node
from distbelief.parameter_server.client.client import ClientConfig, ParameterClient
from distbelief.parameter_server.layout.layout import Layout
from distbelief.parameter_server.layout.selection import Selection
from distbelief.program.compilation import Compiled, compile_plan
from distbelief.program.plan import Plan, load
from distbelief.roles import Address, PeerJoined
from distbelief.runtime.execution.dataflow import dataflow
from distbelief.runtime.execution.execution import Execution
from distbelief.runtime.execution.operations import Dataflow
from distbelief.runtime.machine.courier import Courier
from distbelief.runtime.machine.course import Course, MeasuringCourse
from distbelief.runtime.machine.leading import Leader
from distbelief.runtime.machine.machine import Machine, MachineConfig
from distbelief.runtime.machine.machine_names import member_names
from distbelief.runtime.machine.portions import PortionReader, PortionsAhead
from distbelief.runtime.machine.stepping import Stepping
from distbelief.runtime.task.capturing import capture_for, modules_of
from distbelief.runtime.task.task import build_model
from distbelief.transport.reach import Reach


GROUP: Final = "replica-0"
MEET_SECONDS: Final = 120.0


def main(spec: str, machine: int, n_machines: int) -> int:
    """Be this machine; return the process's exit status."""
    rehearsal = msgspec.json.decode(Path(spec).read_bytes(), type=Rehearsal)
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
    """End as soon as the process that started this one is gone."""

    def wait() -> None:
        while os.read(0, 1):  # not by `sys.stdin`, whose lock it would hold at the end
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run(rehearsal: Rehearsal, machine: int, n_machines: int) -> str | None:
    names = member_names(GROUP, n_machines)
    links = Reach(directory=rehearsal.folder).transport(
        name=names[machine], incarnation=1, run=rehearsal.run, log=_log
    )
    with links as transport:
        _tell_endpoint(rehearsal, machine, transport.endpoint)
        plan = load(rehearsal.plan)
        role, duty = _role(rehearsal, plan, machine)
        node = Node(role, transport=transport, log=_log)
        for other, name in enumerate(names):
            if other != machine:
                transport.connect(name, 1, _endpoint(rehearsal, other))
                node.post(PeerJoined(peer=name, incarnation=1))
        error = node.run()
        _, figures = role.status()
    n_bytes = {m: int(figures.get(f"bytes_to_{m}", 0)) for m in range(n_machines)}
    ends = duty.ends[rehearsal.n_warm :]
    seen = Seen(
        seconds=tuple(b - a for a, b in pairwise(ends)),
        n_bytes={m: n for m, n in n_bytes.items() if n},
        loss=duty.loss,
    )
    files.write(rehearsal.path(f"{machine}.json"), msgspec.json.encode(seen))
    return error


def _log(level: str, text: str) -> None:
    sys.stdout.write(f"{level}: {text}\n")  # a file of its own
    sys.stdout.flush()


def _tell_endpoint(rehearsal: Rehearsal, machine: int, endpoint: str) -> None:
    files.write(rehearsal.path(f"{machine}.endpoint"), endpoint.encode())


def _endpoint(rehearsal: Rehearsal, machine: int) -> str:
    """Wait until another machine says where it is."""
    path = rehearsal.path(f"{machine}.endpoint")
    deadline = time.monotonic() + MEET_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            raise DistBeliefError(f"machine {machine} is not there: see its log")
        time.sleep(0.01)
    return path.read_text()


def _role(rehearsal: Rehearsal, plan: Plan, machine: int) -> tuple[Machine, Rehearsing]:
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
    course: Course = SameCourse(rehearsal.n_samples)
    if not rehearsal.trains:
        course = MeasuringCourse([np.arange(rehearsal.n_samples, dtype=np.int64)], chunk=plan.batch)
    n_machines = plan.cluster.n_machines
    names = member_names(GROUP, n_machines)
    peers = sorted({peer for _, peer in (*flow.sent, *flow.received)})
    couriers = {peer: Courier(names[peer]) for peer in peers}
    duty = Rehearsing(rehearsal, flow, values)
    leader = Leader(n_machines, plan="rehearsal", steps_max=rehearsal.n_steps)
    leader.begin(0.0)
    role = Machine(
        MachineConfig(group=GROUP, machine=machine, n_machines=n_machines, plan="rehearsal"),
        client=_no_client(),
        stepping=Stepping(
            Execution(flow, dtype=dtype, modules=modules, device=rehearsal.device),
            couriers=couriers,
            course=course,
            micro_batches=plan.micro_batches,
            training=rehearsal.trains,
            seed=SEED,
        ),
        couriers=couriers,
        course=course,
        portions=PortionsAhead(
            PortionReader(Pairs(inputs, targets), graph=graph, reads=flow.reads, dtype=dtype),
            course,
        ),
        duty=duty,
        shapes=[region.shape for _, region in flow.items],
        leader=leader if machine == 0 else None,
    )
    return role, duty


def graph_of(rehearsal: Rehearsal) -> tuple[LayerGraph, Mapping[str, torch.nn.Module], str]:
    """Return the layer graph, modules that are called whole, and the output layer."""
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


def _values(rehearsal: Rehearsal, flow: Dataflow, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what this machine keeps of each tensor, read from the file."""
    with safe_open(rehearsal.weights, framework="pt") as file:
        found: list[torch.Tensor] = []
        for name, region in flow.items:
            # A slice cannot be taken of a tensor without dimensions.
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
        selection=Selection.of(layout, []),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
