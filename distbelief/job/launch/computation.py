"""Runs the ranks of one plan as a job without shards: fork server, supervisor, heartbeats.

The files of the run lie in the folder of the `Computation`, beside its results.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from distbelief.config.job import Job
from distbelief.core.errors import DistBeliefError
from distbelief.graph.region import Shape
from distbelief.job.launch.local import IMPORT_SECONDS_MAX, LocalLauncher
from distbelief.job.launch.role_process import RoleSpec
from distbelief.parameter_server.layout import Layout
from distbelief.plans.plan import Plan
from distbelief.protocol.role import SUPERVISOR
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.task.data import Batch
from distbelief.task.forward import Sample
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.worker.build import roster
from distbelief.worker.computation import Computation, output_name, outputs_of


def compute(
    job: Job,
    computation: Computation,
    *,
    plan: Plan,
    inputs: Batch,
    launcher: LocalLauncher,
    gradients: Sequence[Shape] = (),
    tell: Callable[[str], None] = lambda _: None,
    show: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, torch.Tensor], list[Mapping[str, float]]]:
    """Run all ranks until they end; return the outputs by name, and the last counters of each rank.

    Gradients of these shapes are left in files. `tell` receives a line about a rank that is silent,
    or back; `show` what the ranks are doing, four times a second. The caller closes the launcher.
    """
    folder, run = Path(computation.folder), secrets.token_hex(16)
    for index, tensor in enumerate(inputs.tensors().values()):
        np.save(computation.file("input", index), tensor.numpy())
    plan.save(folder / "plan.json")
    graph = plan.captured_graph()
    layers = outputs_of(graph, has_loss=computation.trains)
    computation.make_room([graph[name].shape for name in layers], gradients)
    reach = ListenConfig(directory=str(folder))
    # A rank that fails once would fail again.
    supervisor = Supervisor(
        SupervisorConfig(
            roster=tuple(
                roster(n_replicas=1, n_shards=0, evaluates=False, ranks=(plan.cluster.n_machines,))
            ),
            stop=None,
            import_seconds_max=IMPORT_SECONDS_MAX,
            replica_restarts_max=0,
        )
    )

    def log(level: str, text: str) -> None:
        with (folder / "supervisor.log").open("a") as file:
            file.write(f"{level}: {text}\n")
        if level != "info":
            tell(text)

    transport = reach.transport(name=SUPERVISOR, incarnation=1, run=run, log=log)
    with transport:
        spec = RoleSpec(
            job=msgspec.Raw(job.to_json()),
            run=run,
            supervisor=transport.endpoint,
            snapshots=str(folder),
            layout=Layout.of([], n_shards=1).spec,
            plans={plan.cluster.n_machines: str(folder / "plan.json")},
            sample=Sample.of(inputs),
            reach=reach,
            computation=computation,
        )
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        launcher.start()
        launcher.serve(
            spec=folder / "spec.json", log_of=lambda name: folder / f"{name}.log", has_ranks=True
        )
        error = RoleRunner(supervisor, transport=transport, log=log, launcher=launcher).run(
            on_tick=lambda: show(_states(supervisor))
        )
    if error is not None:
        raise DistBeliefError(error)
    outputs = {
        output_name(path): computation.load("output", layers.index(name))
        for path, name in zip(graph.fields, graph.outputs, strict=False)  # the loss is the last
    }
    return outputs, [role.counters for role in supervisor.view(time.monotonic()).roles]


def _states(supervisor: Supervisor) -> str:
    roles = supervisor.view(time.monotonic()).roles
    return ", ".join(f"{role.name} {role.state or 'importing'}" for role in roles)
