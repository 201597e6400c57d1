"""A small Sandblaster cluster with model-parallel replicas, and what must hold.

checked                                               against
the gradient that every shard seals, to 1e-10         one plain process
whose parts are counted under a token                 all ranks of one replica
where a run ends, bit by bit                          the run that nothing disturbs
"""

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from distbelief.core.memory import Memory
from distbelief.execution.dataflow import dataflow
from distbelief.execution.executor import with_counts
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.program.plan import Plan, Target
from distbelief.roles.role import Address, Role, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Link
from distbelief.task.task import (
    BuildContext,
    Captured,
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_model,
    capture_task,
)
from distbelief.worker.build import Split
from distbelief.worker.group import group_rank_of, rank_name
from sandblaster.algorithm import SANDBLASTER
from sandblaster.build import build_rank
from sandblaster.chunks import COORDINATOR
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.workers import CoordinatorConfig
from sandblaster.settings import SandblasterSettings
from tests.distbelief.examples import a_sample, initials_of
from tests.distbelief.program.plans import random_plan
from tests.simulation.sandblasts import (
    RunChecker,
    Tensors,
    bits_of,
    coordinator_of,
    held_by,
    play_to_end,
)


HERE = "tests.simulation.split_sandblasts"
N_SAMPLES = 26
SETTINGS = SandblasterSettings(
    loss="cross_entropy",
    history=3,
    max_iterations=3,
    tolerance=1e-12,
    portion=4,
    portions_per_set=2,
)


def net() -> nn.Module:
    """Layers that can each be partitioned, one with averages that are pushed."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


class Points:
    """Inputs (6,), and a class of three."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(N_SAMPLES, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(3, (N_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


TASK = TaskSpec(
    model=ModelSpec(factory=f"{HERE}:net", initial="seed"),
    train=DataSpec(factory=f"{HERE}:Points"),
    loss="cross_entropy",
)


@cache
def captured() -> Captured:
    return capture_task(TASK, a_sample((6,), labels=True))


@cache
def split_of(plan_seed: int, n_machines: int, micro_batches: int = 1) -> Split:
    graph = captured().graph
    generator = np.random.default_rng([plan_seed, 77])
    plan = Plan(
        graph=graph.fingerprint,
        inputs={},
        batch=SETTINGS.portion,
        loss=TASK.loss,
        cluster=Target(name="here", fingerprint="", n_machines=n_machines),
        placements=random_plan(graph, generator, n_machines=n_machines),
        micro_batches=micro_batches,
    )
    return Split(plan=plan, graph=graph, modules=captured().modules)


def layout_of(n_shards: int) -> Layout:
    return Layout.of(captured().specs, n_shards=n_shards, dtype="float64")


def plain_gradient(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean gradient of all samples, by mini-batches, in one process."""
    model, data = net(), Points()
    shapes = dict(model.named_parameters())
    total: dict[str, torch.Tensor] = {}
    for start in range(0, N_SAMPLES, SETTINGS.portion):
        model.load_state_dict(
            {
                name: values[name].view(tensor.shape).to(tensor.dtype)
                for name, tensor in model.state_dict().items()
            }
        )
        part = slice(start, start + SETTINGS.portion)
        loss = functional.cross_entropy(
            model(data.inputs[part]), data.targets[part], reduction="sum"
        )
        found = torch.autograd.grad(loss, list(shapes.values()))
        for name, gradient in zip(shapes, found, strict=True):
            before = total.get(name)
            total[name] = gradient if before is None else before + gradient
    return {name: tensor.reshape(-1) / N_SAMPLES for name, tensor in total.items()}


# ------------------------------------------------------------------------------- scene


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a run consists of; without ranks a replica is one process."""

    seed: int = 0
    plan_seed: int = 0
    n_machines: int | None = 2
    n_shards: int = 2
    n_replicas: int = 2
    micro_batches: int = 1
    backups: bool = True
    hosts: str = "one"
    faults: tuple[Fault, ...] = ()
    latency_seconds: Seconds = 5e-5
    settings: SandblasterSettings = SETTINGS

    @property
    def replicas(self) -> list[Address]:
        if self.n_machines is None:
            return [Address(f"replica-{r}") for r in range(self.n_replicas)]
        return [rank_name(r, m) for r in range(self.n_replicas) for m in range(self.n_machines)]

    @property
    def shards(self) -> list[Address]:
        return [Address(f"shard-{k}") for k in range(self.n_shards)]

    @property
    def undisturbed(self) -> "Run":
        """A run of one such replica that nothing disturbs."""
        return undisturbed(self.plan_seed, self.n_machines, self.n_shards, self.micro_batches)


class Run:
    """One run of a scene, under every check."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.layout = layout_of(scene.n_shards)
        self.checker = RunChecker(self.layout, self._compare, self._ranks)
        names = [COORDINATOR, *scene.shards, *scene.replicas]
        self.cluster = SimulatedCluster(
            {name: partial(self._build, name) for name in names},
            seed=scene.seed,
            options=ClusterOptions(
                introduce=True,
                machines={
                    name: SimulatedMachine(
                        host="host-0" if scene.hosts == "one" else "",
                        flops_per_second=2e6,
                        bytes_per_second=1e9,
                    )
                    for name in names
                },
                link=Link(latency_seconds=scene.latency_seconds),
                link_within_host=Link(latency_seconds=scene.latency_seconds),
                faults=scene.faults,
            ),
        )
        self.cluster.observe(self.checker.see)

    def _build(self, name: Address, memory: Memory) -> Role:
        scene = self.scene
        context = BuildContext(
            task=TASK,
            layout=self.layout,
            n_replicas=scene.n_replicas,
            n_shards=scene.n_shards,
            seed=0,
            memory=memory,
            initials=initials_of(build_model(TASK.model)),
            await_begin=False,
        )
        if name == COORDINATOR:
            config = CoordinatorConfig(
                chunk_sizes=scene.settings.chunk_sizes(
                    n_examples=N_SAMPLES, n_replicas=scene.n_replicas
                ),
                backups=scene.backups,
                suspect_seconds=2.5,
                await_begin=False,
            )
            return Coordinator(
                config, method=scene.settings.chosen(), shards=scene.shards, n_examples=N_SAMPLES
            )
        if group_rank_of(name) is None:
            return SANDBLASTER.build(name, config=scene.settings, context=context)
        return build_rank(name, config=scene.settings, context=context, split=self._split)

    @property
    def _split(self) -> Split:
        scene = self.scene
        assert scene.n_machines is not None
        return split_of(scene.plan_seed, scene.n_machines, scene.micro_batches)

    @cache  # noqa: B019 -- runs are few
    def _ranks(self, shard: int) -> set[int]:
        """Return which ranks of a replica hold something of a shard."""
        if self.scene.n_machines is None:
            return {0}
        split, found = self._split, set()
        for machine in range(self.scene.n_machines):
            flow = with_counts(
                dataflow(split.compiled(), machine, loss=split.graph.outputs[-1]),
                {spec.name for spec in captured().specs},
            )
            if shard in PartialView(self.layout, flow.items).shards:
                found.add(machine)
        return found

    def _compare(self, point: Tensors, gradient: Tensors) -> None:
        if self.scene.micro_batches > 1:
            return  # each of them has statistics of its own
        for name, wanted in plain_gradient(point).items():
            torch.testing.assert_close(gradient[name], wanted, rtol=1e-10, atol=1e-13)

    @property
    def coordinator(self) -> Coordinator:
        return coordinator_of(self.cluster)

    def play(self, *, within: Seconds = 300.0) -> None:
        """Run until the coordinator has ended."""
        play_to_end(self.cluster, within=within)

    @property
    def values(self) -> Tensors:
        """Everything that the shards hold at the end, by name."""
        return held_by(self.cluster, self.layout)

    def bits_of(self, *, buffers: bool) -> bytes:
        """Return what the shards hold at the end.

        Args:
            buffers: And buffers: an evaluation that is begun again, by another life of
                the coordinator, begins with those that it left.
        """
        kinds = {spec.name: spec.kind for spec in self.layout.tensors}
        kept = {n: t for n, t in self.values.items() if buffers or kinds[n] == "parameter"}
        return bits_of(kept)


@cache
def undisturbed(plan_seed: int, n_machines: int | None, n_shards: int, micro_batches: int) -> Run:
    """Return a run of one replica that nothing disturbs."""
    run = Run(
        Scene(
            plan_seed=plan_seed,
            n_machines=n_machines,
            n_shards=n_shards,
            n_replicas=1,
            micro_batches=micro_batches,
        )
    )
    run.play()
    return run
