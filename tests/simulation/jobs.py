"""A whole job on a simulated cluster: supervisor, members and a user."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import pytest
import torch
from _pytest.mark import ParameterSet

from distbelief.algorithms.downpour import DOWNPOUR
from distbelief.config.job import PATIENCE_SECONDS, StopTable
from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.rules import Adagrad
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import copy_names
from distbelief.protocol import Evaluate, Message, StartTraining, Stop
from distbelief.roles.role import SUPERVISOR, USER, Address, Received, Role
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.supervisor.hosts import ClusterConfig
from distbelief.supervisor.job_view import state_of
from distbelief.supervisor.membership import RoleRecord
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import JobView
from distbelief.task.task import (
    BuildContext,
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
    build_model,
)
from distbelief.worker import build as wb
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.group import group_rank_of
from distbelief.worker.local_executor import FlatModel
from distbelief.worker.member import JobMember, JobMemberConfig, heartbeat_seconds
from distbelief.worker.replica import Replica
from tests.distbelief.examples import initials_of
from tests.distbelief.parameter_server.pair import scatter


EXAMPLES = "tests.distbelief.examples"
TASK = TaskSpec(
    model=ModelSpec(
        factory=f"{EXAMPLES}:net", arguments={"width": 40, "hidden": [70]}, initial="seed", seed=3
    ),
    train=DataSpec(factory=f"{EXAMPLES}:frames", arguments={"width": 40, "n_samples": 60}),
    test=DataSpec(factory=f"{EXAMPLES}:frames", arguments={"width": 40, "n_samples": 50}),
    loss="cross_entropy",
)
M = TypeVar("M", bound=Message)
STEP_SECONDS = 0.05  # about, of a step of a replica


class Direct:
    """Roles on a simulated cluster that the test itself directs, in place of a supervisor."""

    simulation: SimulatedCluster
    layout: Layout
    shards: list[Address]

    def values(self) -> dict[str, torch.Tensor]:
        """Return the shards' values: flat tensors by name."""
        vectors = []
        for name in self.shards:
            shard = self.simulation.role(name)
            assert isinstance(shard, Shard)
            vectors.append(shard._values.vector)
        return self.scattered(vectors)

    def scattered(self, vectors: Sequence[Vector]) -> dict[str, torch.Tensor]:
        dtype = torch.float64 if self.layout.dtype.itemsize == 8 else torch.float32
        specs = self.layout.tensors
        tensors = [torch.zeros(spec.n_elements, dtype=dtype) for spec in specs]
        for k, vector in enumerate(vectors):
            scatter(self.layout, k, vector, tensors)
        return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}

    def replica(self, name: Address) -> Replica:
        role = self.simulation.role(name)
        assert isinstance(role, Replica)
        return role

    def status(self, name: str) -> dict[str, float]:
        return dict(self.simulation.role(Address(name)).status()[1])

    def tell(self, name: str, message: StartTraining | Stop | Evaluate) -> None:
        event = Received(sender=SUPERVISOR, incarnation=1, message=message)
        self.simulation.post(Address(name), event)

    def told(self, kind: type[M]) -> list[M]:
        """Return the messages to the supervisor, of one type."""
        heard = self.simulation.sent_to(SUPERVISOR)
        return [event.message for event in heard if isinstance(event.message, kind)]


class JobCluster:
    """One job; its supervisor launches the roles."""

    def __init__(  # one call describes a whole system
        self,
        *,
        stop: StopTable,
        task: TaskSpec = TASK,
        tasks: dict[str, TaskSpec] | None = None,
        n_replicas: int = 2,
        replicas_min: int = 1,
        n_shards: int = 2,
        shard_copies: int = 1,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        warm_start_steps: int = 0,
        max_steps: int | None = None,
        snapshot_every: float = 2.0,
        evaluate_every: float = 1.0,
        before: PreviousTotals | None = None,
        first_incarnation: int = 1,
        first_label: int = 1,
        host: str = "host-0",
        patience: float = PATIENCE_SECONDS,
        settings: DownpourSettings | None = None,
        cluster: ClusterConfig | None = None,
        hosts: Mapping[Address, Builder] | None = None,  # that may join
        machines: Mapping[Address, SimulatedMachine]
        | None = None,  # of roles with a machine of their own
        split: Callable[[], wb.Split] | None = None,  # of each replica
    ) -> None:
        self._split = split
        n_ranks = 0 if split is None else split().plan.cluster.n_machines
        model = FlatModel(build_model(task.model))
        self.layout = Layout.of(model.specs(), n_shards=n_shards)
        self.replicas = [Address(f"replica-{r}") for r in range(n_replicas)]
        self.shards = [Address(f"shard-{k}") for k in range(n_shards)]
        self.copies = [name for k in range(n_shards) for name in copy_names(k, shard_copies)]
        self._shard_copies = shard_copies
        self._host = host
        self._patience = patience
        self.settings = settings = settings or DownpourSettings(
            loss=task.loss,
            batch_size=4,
            rule=Adagrad(learning_rate=0.05),
            warm_start_steps=warm_start_steps,
            max_steps=max_steps,
        )
        self._tasks = tasks or {}
        self._context = partial(
            BuildContext,
            layout=self.layout,
            n_replicas=n_replicas,
            n_shards=n_shards,
            shard_copies=shard_copies,
            seed=0,
            initials=initials_of(model.module),
            evaluation_subset=20,
        )
        roster = wb.roster(
            n_replicas=n_replicas,
            n_shards=n_shards,
            shard_copies=shard_copies,
            evaluates=task.test is not None,
            ranks=(n_ranks,) * n_replicas if n_ranks else (),
        )
        n_train = len(build_dataset(task.train))
        before = before or PreviousTotals()
        warm = msgspec.structs.replace(
            settings, warm_start_steps=warm_start_steps or settings.warm_start_steps
        )
        config = SupervisorConfig(
            roster=tuple(roster),
            stop=StopRules(stop, n_train=n_train),
            dealt=settings.epochs(n_train) if settings.order == "dealt" else None,
            parts=None if split is None else wb.pushing_ranks(split(), self.layout),
            epoch_share=settings.epoch_share,
            replicas_min=replicas_min,
            warm_start_steps=warm.warm_start_left(
                sum(before.samples.values()), n_train, n_replicas
            ),
            evaluate_every=evaluate_every,
            snapshot_every=snapshot_every,
            report_every=0.5,
            first_incarnation=first_incarnation,
            first_label=first_label,
            before=before,
        )
        builders: dict[Address, Callable[[Memory], Role]] = {
            Address(entry.name): self._builder(entry.name, self._tasks.get(entry.name, task))
            for entry in roster
        }
        slow = SimulatedMachine(host=host, flops_per_second=self._flops(model))
        self.simulation = SimulatedCluster(
            {SUPERVISOR: lambda _memory: Supervisor(config, cluster)}
            | builders
            | dict(hosts or {}),
            seed=seed,
            options=ClusterOptions(
                start=(SUPERVISOR,), machine=slow, machines=machines or {}, faults=tuple(faults)
            ),
        )

    @staticmethod
    def _flops(model: FlatModel) -> float:
        return model.flops(4) / STEP_SECONDS

    def _build(self, name: str, context: BuildContext) -> Role:
        if self._split is None or group_rank_of(name) is None:
            return DOWNPOUR.build(name, config=self.settings, context=context)
        return wb.build_rank(name, config=self.settings, context=context, split=self._split())

    def _builder(self, name: str, task: TaskSpec) -> Callable[[Memory], Role]:
        def build(memory: Memory) -> Role:
            context = self._context(task=task, memory=memory)
            return JobMember(
                JobMemberConfig(
                    name=name,
                    host=memory.host,
                    heartbeat_seconds=heartbeat_seconds(name, self._shard_copies),
                    patience_seconds=self._patience,
                ),
                build=lambda: self._build(name, context),
            )

        return build

    # ----------------------------------------------------------------------- time

    def run(self, *, within: float = 300.0) -> str | None:
        """Run the job to its end; return its error, if any."""
        self.simulation.run_until(lambda: SUPERVISOR in self.simulation.halted, within=within)
        self.simulation.run(until=self.simulation.now + 1.0)
        assert self.n_alive == 0
        return self.simulation.halted[SUPERVISOR]

    def run_until(self, condition: Callable[[], bool], *, within: float = 60.0) -> None:
        self.simulation.run_until(condition, within=within)

    def interrupt(self) -> None:
        stop = Stop(reason="Ctrl+C")
        event = Received(sender=USER, incarnation=0, message=stop)
        self.simulation.post(SUPERVISOR, event)

    # -------------------------------------------------------------------- state

    @property
    def supervisor(self) -> Supervisor:
        role = self.simulation.role(SUPERVISOR)
        assert isinstance(role, Supervisor)
        return role

    @property
    def n_alive(self) -> int:
        return len(self.simulation.alive)

    @property
    def view(self) -> JobView:
        return self.supervisor.view(self.simulation.now)

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
    def told(self) -> list[str]:
        return [message.text for message in self.supervisor.out.messages]

    def state(self, name: str) -> str:
        return state_of(self._record(name), self.supervisor.failover, self.simulation.now)

    def copy_that_is(self, part: str, shard_index: int = 0) -> Address:
        """Return the copy of this shard that is "primary", or its "backup"."""
        names = copy_names(shard_index, self._shard_copies)
        return next(name for name in names if self.state(name) == part)

    def is_paired(self) -> bool:
        """Whether a backup of every shard could take over now."""
        pairs = (copy_names(k, self._shard_copies) for k in range(len(self.shards)))
        return all({self.state(name) for name in pair} == {"primary", "backup"} for pair in pairs)

    def restarts(self, name: str) -> int:
        before = self.supervisor.metrics.before.roles
        earlier = sum(role.restarts for role in before if role.name == name)
        return earlier + self._record(name).restarts

    def _record(self, name: str) -> RoleRecord:
        record = self.supervisor.members.get(Address(name))
        assert record is not None
        return record

    def samples(self, name: str) -> int:
        return int(self.member(name).status()[1].get("samples", 0))

    def member(self, name: str) -> JobMember:
        role = self.simulation.role(Address(name))
        assert isinstance(role, JobMember)
        return role


def seeds(n: int, *, of: int) -> list[ParameterSet]:
    """Return the first `n` seeds for every test run, the others for a soak test."""
    soak = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(n, of)]
    return [*(pytest.param(seed) for seed in range(n)), *soak]
