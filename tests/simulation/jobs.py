"""A whole job on a simulated cluster: supervisor, members and a user."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial

import pytest
import torch
from _pytest.mark import ParameterSet
from typing_extensions import override

from distbelief.config.job import PATIENCE_SECONDS, StopTable
from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import ElementType, Layout
from distbelief.parameter_server.rules import Adagrad
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import copy_names
from distbelief.protocol import Stop
from distbelief.protocol.role import SUPERVISOR, USER, Address, Received, Role
from distbelief.simulation.driver import Builder
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.supervisor.hosts import ClusterConfig
from distbelief.supervisor.make_view import state_of
from distbelief.supervisor.membership import RoleRecord
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import JobView
from distbelief.task.data import pieces_of
from distbelief.task.task import (
    BuildContext,
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
    build_model,
)
from distbelief.worker import build as wb
from distbelief.worker.downpour import DOWNPOUR
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.group import group_rank_of
from distbelief.worker.local_executor import FlatModel
from distbelief.worker.member import JobMember, JobMemberConfig, heartbeat_seconds
from distbelief.worker.replica import Replica
from tests.distbelief.examples import initials_of
from tests.distbelief.parameter_server.pair import scatter
from tests.simulation.scene import Scene


EXAMPLES = "tests.distbelief.examples"
TASK = TaskSpec(
    model=ModelSpec(
        factory=f"{EXAMPLES}:net", arguments={"width": 40, "hidden": [70]}, initial="seed", seed=3
    ),
    train=DataSpec(factory=f"{EXAMPLES}:frames", arguments={"width": 40, "n_samples": 60}),
    test=DataSpec(factory=f"{EXAMPLES}:frames", arguments={"width": 40, "n_samples": 50}),
    loss="cross_entropy",
)
STEP_SECONDS = 0.05  # about, of a step of a replica


def scattered(layout: Layout, vectors: Iterable[Vector]) -> dict[str, torch.Tensor]:
    """Return what shards hold: flat tensors by name."""
    dtype = torch.float64 if layout.dtype.itemsize == 8 else torch.float32
    tensors = [torch.zeros(spec.n_elements, dtype=dtype) for spec in layout.tensors]
    for k, vector in enumerate(vectors):
        scatter(layout, k, vector, tensors)
    return {spec.name: tensor for spec, tensor in zip(layout.tensors, tensors, strict=True)}


@dataclass(kw_only=True, eq=False)
class Downpour(Scene):
    """Replicas that train a model, and its shards."""

    task: TaskSpec
    n_replicas: int = 1
    n_shards: int = 1
    shard_copies: int = 1
    host: str = "host-0"
    dtype: ElementType = "float32"

    @cached_property
    def model(self) -> FlatModel:
        return FlatModel(build_model(self.task.model))

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.model.specs(), n_shards=self.n_shards, dtype=self.dtype)

    @property
    def replicas(self) -> list[Address]:
        return [Address(f"replica-{r}") for r in range(self.n_replicas)]

    @property
    def shards(self) -> list[Address]:
        return [Address(f"shard-{k}") for k in range(self.n_shards)]

    @property
    def copies(self) -> list[Address]:
        return [name for k in range(self.n_shards) for name in copy_names(k, self.shard_copies)]

    def context(self, memory: Memory, task: TaskSpec | None = None) -> BuildContext:
        return BuildContext(
            task=task or self.task,
            memory=memory,
            layout=self.layout,
            n_replicas=self.n_replicas,
            n_shards=self.n_shards,
            shard_copies=self.shard_copies,
            seed=0,
            initials=initials_of(self.model.module),
            evaluation_subset=20,
        )

    def saved(self) -> dict[str, torch.Tensor]:
        """Return the values in the newest checkpoints: flat tensors by name."""
        vectors = (self.newest(name).arrays["values"] for name in self.shards)
        return scattered(self.layout, vectors)


@dataclass(eq=False)
class Direct(Downpour):
    """Roles that the test itself directs, in place of a supervisor."""

    task: TaskSpec
    settings: DownpourSettings
    _: KW_ONLY
    flops_per_second: float = 1e10
    await_begin: bool = False
    tells_hosts: bool = False  # ranks of one host share memory

    @property
    def names(self) -> list[Address]:
        """The roles, in the order in which they start."""
        evaluates = self.task.test is not None
        roster = wb.roster(n_replicas=self.n_replicas, n_shards=self.n_shards, evaluates=evaluates)
        return [Address(entry.name) for entry in roster]

    @override
    def roles(self) -> Mapping[Address, Builder]:
        return {name: partial(self.build, name) for name in self.names}

    @override
    def options(self) -> ClusterOptions:
        machine = SimulatedMachine(host=self.host, flops_per_second=self.flops_per_second)
        return ClusterOptions(introduce=True, machine=machine, tells_hosts=self.tells_hosts)

    def build(self, name: Address, memory: Memory) -> Role:
        context = replace(self.context(memory), await_begin=self.await_begin)
        return self.built(name, context)

    def built(self, name: Address, context: BuildContext) -> Role:
        return DOWNPOUR.build(name, config=self.settings, context=context)

    def values(self) -> dict[str, torch.Tensor]:
        """Return the shards' values: flat tensors by name."""
        shards = (self.role(name, Shard) for name in self.shards)
        return scattered(self.layout, (shard.values.vector for shard in shards))

    def replica(self, name: Address) -> Replica:
        role = self.cluster.role(name)
        assert isinstance(role, Replica)
        return role


class JobScene(Scene):
    """A job with a supervisor, which launches its roles."""

    def run(self, *, within: float = 300.0) -> str | None:
        """Run the job to its end; return its error, if any."""
        # Its end stops the clock: nobody need look after each event.
        self.cluster.run_until(lambda: SUPERVISOR in self.cluster.halted, within=within, every=1000)
        self.wait(1.0)
        assert self.n_alive == 0
        return self.cluster.halted[SUPERVISOR]

    def train(self, n_samples: int = 100, *, within: float = 60.0) -> None:
        """Run until so many more samples are trained."""
        before = self.n_samples
        self.run_until(lambda: self.n_samples > before + n_samples, within=within)

    def interrupt(self) -> None:
        stop = Received(sender=USER, incarnation=0, message=Stop(reason="Ctrl+C"))
        self.cluster.post(SUPERVISOR, stop)

    @property
    def supervisor(self) -> Supervisor:
        return self.role(SUPERVISOR, Supervisor)

    @property
    def n_alive(self) -> int:
        return len(self.cluster.alive)

    @property
    def view(self) -> JobView:
        return self.supervisor.view(self.now)

    # Conditions of `run_until` ask for these after each event, which is sooner handled than the
    # view of the whole job is drawn up.

    @property
    def phase(self) -> str:
        return self.supervisor.status()[0]

    @property
    def n_samples(self) -> int:
        """How many samples the job has trained."""
        return self.supervisor.metrics.samples

    @property
    def messages(self) -> list[str]:
        return [message.text for message in self.supervisor.out.messages]

    def state(self, name: str) -> str:
        return state_of(self._record(name), self.supervisor.failover, self.now)

    def restarts(self, name: str) -> int:
        before = self.supervisor.metrics.before.roles
        earlier = sum(role.restarts for role in before if role.name == name)
        return earlier + self._record(name).restarts

    def _record(self, name: str) -> RoleRecord:
        record = self.supervisor.members.get(Address(name))
        assert record is not None
        return record

    def samples(self, name: str) -> int:
        return int(self.status(name).get("samples", 0))

    def member(self, name: str) -> JobMember:
        return self.role(name, JobMember)


@dataclass(eq=False)
class JobCluster(Downpour, JobScene):
    """One job; its supervisor launches the roles."""

    _: KW_ONLY
    stop: StopTable
    task: TaskSpec = TASK
    tasks: Mapping[str, TaskSpec] = field(default_factory=dict)  # of roles with another one
    n_replicas: int = 2
    replicas_min: int = 1
    n_shards: int = 2
    warm_start_steps: int = 0
    max_steps: int | None = None
    snapshot_every: float = 2.0
    evaluate_every: float = 1.0
    evaluate_samples: int | None = None
    before: PreviousTotals = field(default_factory=PreviousTotals)
    first_incarnation: int = 1
    first_label: int = 1
    patience: float = PATIENCE_SECONDS
    settings: DownpourSettings | None = None
    hosting: ClusterConfig | None = None
    machines: Mapping[Address, SimulatedMachine] = field(default_factory=dict)
    split: Callable[[], wb.Split] | None = None  # of each replica
    keeps_best: bool = False

    @cached_property
    def downpour(self) -> DownpourSettings:
        return self.settings or DownpourSettings(
            loss=self.task.loss,
            batch_size=4,
            rule=Adagrad(learning_rate=0.05),
            warm_start_steps=self.warm_start_steps,
            max_steps=self.max_steps,
        )

    @property
    def flops(self) -> float:
        return self.model.flops(4) / STEP_SECONDS

    @override
    def roles(self) -> Mapping[Address, Builder]:
        settings, split = self.downpour, self.split
        n_ranks = 0 if split is None else split().plan.cluster.n_machines
        roster = wb.roster(
            n_replicas=self.n_replicas,
            n_shards=self.n_shards,
            shard_copies=self.shard_copies,
            evaluates=self.task.test is not None,
            ranks=(n_ranks,) * self.n_replicas if n_ranks else (),
        )
        train = build_dataset(self.task.train)
        n_train, pieces = len(train), pieces_of(train)
        n_done = sum(self.before.samples.values())
        dealt = settings.epochs(n_train, pieces, self.n_replicas)
        config = SupervisorConfig(
            roster=tuple(roster),
            stop=StopRules(self.stop, n_train=n_train),
            dealt=dealt if settings.order == "dealt" else None,
            parts=None if split is None else wb.pushing_ranks(split(), self.layout),
            epoch_share=settings.epoch_share,
            in_ring=settings.exchange.route == "ring",
            replicas_min=self.replicas_min,
            warm_start_steps=settings.warm_start_left(n_done, n_train, self.n_replicas),
            evaluate_every=self.evaluate_every,
            evaluate_samples=self.evaluate_samples,
            snapshot_every=self.snapshot_every,
            report_every=0.5,
            first_incarnation=self.first_incarnation,
            first_label=self.first_label,
            before=self.before,
        )
        builders: dict[Address, Builder] = {SUPERVISOR: lambda _: Supervisor(config, self.hosting)}
        return builders | {
            Address(entry.name): partial(self._member, Address(entry.name)) for entry in roster
        }

    @override
    def options(self) -> ClusterOptions:
        slow = SimulatedMachine(host=self.host, flops_per_second=self.flops)
        return ClusterOptions(start=(SUPERVISOR,), machine=slow, machines=self.machines)

    def _member(self, name: Address, memory: Memory) -> JobMember:
        context = replace(self.context(memory, self.tasks.get(name)), keeps_best=self.keeps_best)
        config = JobMemberConfig(
            name=name,
            host=memory.host,
            heartbeat_seconds=heartbeat_seconds(name, self.shard_copies, self.n_replicas),
            patience_seconds=self.patience,
        )
        return JobMember(
            config, build=lambda: self._build(name, context), counted=lambda: self.counted(name)
        )

    def counted(self, name: Address) -> Mapping[str, float]:
        """Return the counters of a role's process."""
        del name
        return {}

    def _build(self, name: Address, context: BuildContext) -> Role:
        if self.split is None or group_rank_of(name) is None:
            return DOWNPOUR.build(name, config=self.downpour, context=context)
        return wb.build_rank(name, config=self.downpour, context=context, split=self.split())

    def copy_that_is(self, part: str, shard_index: int = 0) -> Address:
        """Return the copy of this shard that is "primary", or its "backup"."""
        names = copy_names(shard_index, self.shard_copies)
        return next(name for name in names if self.state(name) == part)

    def is_paired(self) -> bool:
        """Whether a backup of every shard could take over now."""
        pairs = (copy_names(k, self.shard_copies) for k in range(len(self.shards)))
        return all({self.state(name) for name in pair} == {"primary", "backup"} for pair in pairs)


def seeds(n: int, *, of: int) -> list[ParameterSet]:
    """Return the first `n` seeds for every test run, the others for a soak test."""
    soak = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(n, of)]
    return [*(pytest.param(seed) for seed in range(n)), *soak]
