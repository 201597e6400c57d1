"""A small Sandblaster cluster with model-parallel replicas, and what must hold.

checked                                               against
the gradient that every shard seals, to 1e-10         one plain process
whose parts are counted under a token                 all ranks of one replica
where a run ends, bit by bit                          the run that nothing disturbs
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.execution.dataflow import dataflow
from distbelief.execution.executor import with_counts
from distbelief.graph.capture import InputSpec
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.shard import Shard
from distbelief.program.plan import Plan, Target
from distbelief.protocol import (
    BeginEvaluation,
    CommandDone,
    Commit,
    FinishEvaluation,
    Progress,
    ShardCommand,
    Task,
)
from distbelief.roles.role import SUPERVISOR, Address, Compute, Received, Role, Seconds, Send
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions, Machine
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
from distbelief.worker.local_executor import FlatModel
from sandblaster.algorithm import SANDBLASTER
from sandblaster.build import build_rank
from sandblaster.chunks import COORDINATOR
from sandblaster.config import SandblasterSettings
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.workers import CoordinatorConfig
from tests.distbelief.program.plans import random_plan


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
    return capture_task(TASK, inputs=[InputSpec(shape=(6,))], targets=())


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
    """One run of a scene, under every check.

    Attributes:
        losses: Of the points accepted.
        n_sealed: Gradients that were checked.
        sights: How often things happened.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.layout = layout_of(scene.n_shards)
        self.losses: list[float] = []
        self.n_sealed = 0
        self.sights: Counter[str] = Counter()
        self._tasks: dict[tuple[int, int], Task] = {}
        self._points: dict[tuple[int, int], dict[int, Vector]] = {}
        self._sealed: dict[tuple[int, int], dict[int, Vector]] = {}
        self._opened: dict[tuple[int, int], int] = {}
        self._staged: defaultdict[tuple[Address, int, int], dict[Address, int]] = defaultdict(dict)
        self._lives: dict[tuple[int, Address], int] = {}  # by token: whose part
        self._touched = self._who_touches()
        names = [COORDINATOR, *scene.shards, *scene.replicas]
        self.cluster = SimulatedCluster(
            {name: partial(self._build, name) for name in names},
            seed=scene.seed,
            options=ClusterOptions(
                introduce=True,
                machines={
                    name: Machine(
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
        self.cluster.observe(self.see)

    def _build(self, name: Address, memory: Memory) -> Role:
        scene = self.scene
        context = BuildContext(
            task=TASK,
            layout=self.layout,
            n_replicas=scene.n_replicas,
            n_shards=scene.n_shards,
            seed=0,
            memory=memory,
            initials=FlatModel(build_model(TASK.model)).initials(),
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

    def _who_touches(self) -> dict[int, set[int]]:
        """Return which ranks of a replica hold something of each shard."""
        found: dict[int, set[int]] = {k: set() for k in range(self.scene.n_shards)}
        for machine in range(self.scene.n_machines or 0):
            split = self._split
            flow = with_counts(
                dataflow(split.compiled(), machine, loss=split.graph.outputs[-1]),
                {spec.name for spec in captured().specs},
            )
            for shard in PartialView(self.layout, flow.items).shards:
                found[shard].add(machine)
        return found

    # ---------------------------------------------------------------------- the checks

    def see(self, happening: HandledEvent) -> None:
        event = happening.event
        if isinstance(event, Received) and isinstance(event.message, ShardCommand):
            order = event.message
            self._tasks.setdefault((order.epoch, order.number), order.task)
        for action in happening.actions:
            if isinstance(action, Compute) and action.name == "collect":
                self._staging(happening)
            if not isinstance(action, Send):
                continue
            if isinstance(action.message, CommandDone):
                self._performed(happening, action.message)
            elif action.receiver == SUPERVISOR and isinstance(action.message, Progress):
                self.losses.append(action.message.loss)

    def _staging(self, happening: HandledEvent) -> None:
        shard = happening.role
        assert isinstance(shard, Shard)
        applying = shard._sessions.applying
        assert applying is not None
        commit_token, client = applying.push.commit_token, applying.client
        generation = happening.name, happening.incarnation, commit_token
        self._staged[generation].setdefault(client.name, client.incarnation)
        known = self._lives.setdefault((commit_token, client.name), client.incarnation)
        assert known == client.incarnation, f"{client.name} pushes {commit_token} in two lives"

    def _performed(self, happening: HandledEvent, message: CommandDone) -> None:
        key = message.epoch, message.number
        task = self._tasks.get(key)
        assert message.error is None, message.error
        name, shard = happening.name, happening.role
        assert isinstance(shard, Shard)
        index = int(name.removeprefix("shard-"))
        match task:
            case BeginEvaluation():
                self._opened[message.epoch, index] = message.number
                self._points.setdefault(key, {})[index] = shard._values.vector.copy()
            case Commit():
                for one in task.sets:
                    self._check_parts(name, happening.incarnation, index, one.commit_token)
            case FinishEvaluation() if task.n_examples:
                opened = message.epoch, self._opened[message.epoch, index]
                vectors = shard._commands._vector_store.export((task.gradient,))
                known = self._sealed.setdefault(key, {})
                if index not in known:
                    known[index] = vectors[task.gradient].copy()
                    self._check_gradient(opened, key)
            case _:
                pass

    def _check_parts(self, shard: Address, incarnation: int, index: int, commit_token: int) -> None:
        """A chunk counts once all ranks of one replica have staged their parts."""
        if self.scene.n_machines is None:
            return
        names = self._staged[shard, incarnation, commit_token]
        places = [group_rank_of(name) for name in names]
        assert len({place.group for place in places if place}) == 1, names
        machines = {place.machine for place in places if place}
        assert machines == self._touched[index], (names, self._touched)

    def _check_gradient(self, opened: tuple[int, int], key: tuple[int, int]) -> None:
        sealed = self._sealed[key]
        if len(sealed) < self.scene.n_shards:
            return
        self.n_sealed += 1
        if self.scene.micro_batches > 1:
            return  # each of them has statistics of its own
        expected = plain_gradient(self._whole(self._points[opened]))
        got = self._whole(sealed)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-13)

    def _whole(self, vectors: dict[int, Vector]) -> dict[str, torch.Tensor]:
        specs = self.layout.tensors
        tensors = [torch.zeros(spec.n_elements, dtype=torch.float64) for spec in specs]
        for index, vector in vectors.items():
            n = self.layout.shard_size(index)
            whole = np.zeros(n)
            whole[: len(vector)] = vector
            self.layout.scatter(index, whole, tensors)
        return {spec.name: t for spec, t in zip(specs, tensors, strict=True)}

    # ------------------------------------------------------------------------- the end

    @property
    def coordinator(self) -> Coordinator:
        role = self.cluster.role(COORDINATOR)
        assert isinstance(role, Coordinator)
        return role

    def play(self, *, within: Seconds = 300.0) -> None:
        """Run until the coordinator has ended."""
        self.cluster.run_until(lambda: COORDINATOR in self.cluster.halted, within=within)
        error = self.cluster.halted[COORDINATOR]
        assert error is None, error
        assert self.coordinator.reason is not None

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Everything that the shards hold at the end, by name."""
        vectors: dict[int, Vector] = {}
        for index, name in enumerate(self.scene.shards):
            shard = self.cluster.role(name)
            assert isinstance(shard, Shard)
            vectors[index] = shard._values.vector
        return self._whole(vectors)

    def bits_of(self, *, buffers: bool) -> bytes:
        """Return what the shards hold at the end.

        Args:
            buffers: And buffers: an evaluation that is begun again, by another life of
                the coordinator, begins with those that it left.
        """
        kinds = {spec.name: spec.kind for spec in self.layout.tensors}
        return b"".join(
            tensor.numpy().tobytes()
            for name, tensor in self.values.items()
            if buffers or kinds[name] == "parameter"
        )


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
