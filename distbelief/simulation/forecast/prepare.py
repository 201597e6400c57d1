"""Prepared jobs: checked in this process, with builders for all their roles.

`train` builds each role in a process of its own. Here the same builders put all roles into
one process, where they share what none of them changes: data sets, initial values, plan. The
check is not repeated for a job that differs only in its cluster (replicas, shards) or in how
often it fetches and pushes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import msgspec
import torch

from distbelief.config.algorithms import Algorithm, find, load, settled
from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.core.files import Scratch
from distbelief.core.memory import Memory, PrivateMemory
from distbelief.job.launch.preflight import PreflightResult, answer_to
from distbelief.job.launch.role_process import context_of, import_from
from distbelief.job.launch.supervised_job import check_data, supervisor_config
from distbelief.parameter_server.layout import Layout
from distbelief.protocol.role import SUPERVISOR, Action, Address, Compute, Event, Role, Seconds
from distbelief.simulation.driver import Builder
from distbelief.supervisor.membership import Membership
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.task.data import Dataset
from distbelief.task.task import BuildContext, DataSpec, RosterEntry, build_dataset, prepare_data
from distbelief.worker.build import roster_of
from distbelief.worker.member import JobMember, JobMemberConfig, heartbeat_seconds


# From the kind of a role and the work that it asks for to the work that is done instead.
Adapt = Callable[[str, Compute], Compute]


@final
@dataclass(slots=True, kw_only=True)
class CostedRole:
    """Wraps a role, to change the cost of its work or to measure it."""

    kind: str
    role: Role
    adapt: Adapt

    @property
    def accepts(self) -> frozenset[type]:
        return self.role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        actions = self.role.handle(event, now)
        if not any(isinstance(action, Compute) for action in actions):
            return actions
        return [
            self.adapt(self.kind, action) if isinstance(action, Compute) else action
            for action in actions
        ]

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self.role.status()


def costed(
    builders: Mapping[Address, Builder], kinds: Mapping[Address, str], *, adapt: Adapt
) -> dict[Address, Builder]:
    """Return builders of costed roles. The supervisor computes nothing and is not wrapped."""

    def build_with(name: Address, build: Builder) -> Builder:
        return lambda memory: CostedRole(kind=kinds[name], role=build(memory), adapt=adapt)

    return {
        name: build if kinds[name] == "supervisor" else build_with(name, build)
        for name, build in builders.items()
    }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job that can be simulated any number of times."""

    job: Job
    preflight: PreflightResult
    layout: Layout
    roster: tuple[RosterEntry, ...]
    datasets: Mapping[str, Dataset]  # by table of the job file; shared by all roles

    @property
    def kinds(self) -> Mapping[Address, str]:
        """The kind of each role, including the supervisor."""
        kinds = {Address(entry.name): str(entry.kind) for entry in self.roster}
        return {SUPERVISOR: "supervisor", **kinds}

    def config(self) -> SupervisorConfig:
        return supervisor_config(self.job, self.preflight)

    def builders(self, *, machines_go: bool = False) -> dict[Address, Builder]:
        config = self.config()
        if machines_go:  # a role whose machine is away is not slow to start, nor to build
            config = replace(config, start_seconds_max=math.inf, build_seconds_max=math.inf)
        algorithm = load(find(self.job.algorithm_name))
        spec = self.preflight.role_spec(self.job, self.layout)
        builders: dict[Address, Builder] = {SUPERVISOR: lambda _: Supervisor(config)}
        for record in Membership(self.roster):
            own = msgspec.structs.replace(spec, ranks=record.ranks)
            context = context_of(own, self.job, PrivateMemory())
            context = replace(context, layout=self.layout, datasets=self.datasets)
            builders[record.name] = self._member(record.name, algorithm, context)
        return builders

    def _member(
        self, name: str, algorithm: Algorithm[msgspec.Struct], context: BuildContext
    ) -> Builder:
        job = self.job

        def build(memory: Memory) -> Role:
            config = JobMemberConfig(
                name=name,
                host=memory.host,
                heartbeat_seconds=heartbeat_seconds(
                    name, job.cluster.shard_copies, job.cluster.n_replicas
                ),
                patience_seconds=job.cluster.patience,
            )
            here = replace(context, memory=memory)
            return JobMember(
                config, build=lambda: algorithm.build(name, config=job.algorithm, context=here)
            )

        return build


@final
class Preparation:
    """Prepares jobs, and caches what several of them share.

    A context manager: it removes its temporary files at the end.
    """

    def __init__(self) -> None:
        self._folder = Scratch.make()
        self._preflights: dict[bytes, PreflightResult] = {}
        self._datasets: dict[bytes, Dataset] = {}
        self._n_threads = torch.get_num_threads()

    def stage(self, job: Job) -> PreparedJob:
        """Check a job and prepare it for simulation; JobError if the job cannot be run."""
        import_from(job)
        job = settled(job)
        preflight = self._preflight(job)
        check_data(job, preflight)
        layout = Layout.of(preflight.tensors, n_shards=job.cluster.shards, dtype=preflight.dtype)
        return PreparedJob(
            job=job,
            preflight=preflight,
            layout=layout,
            roster=tuple(roster_of(job, ranks=preflight.ranks)),
            datasets=self._data(job),
        )

    def _preflight(self, job: Job) -> PreflightResult:
        key = msgspec.json.encode((job.task, job.batch_size, _splits(job)))
        if key not in self._preflights:
            if job.cluster.is_on_device:
                raise JobError(
                    f"[cluster] device is {job.cluster.device!r}, and a forecast measures the "
                    "processor of this host: leave device out, and give machines the flops of "
                    "a GPU"
                )
            prepare_data(job.task)
            stem = self._folder.path / f"job-{len(self._preflights)}"
            self._preflights[key] = answer_to(
                job,
                initial_file=str(stem.with_suffix(".safetensors")),
                plan=str(stem.with_suffix(".plan.json")),
                proves=False,
            )
        return self._preflights[key]

    def _data(self, job: Job) -> dict[str, Dataset]:
        return {table: self._dataset(spec, table) for table, spec in job.task.data.items()}

    def _dataset(self, spec: DataSpec, table: str) -> Dataset:
        key = msgspec.json.encode(spec)
        if key not in self._datasets:
            self._datasets[key] = build_dataset(spec, table=table)
        return self._datasets[key]

    def __enter__(self) -> Self:
        # With one thread, results do not depend on the number of cores.
        self._n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._n_threads)
        self._folder.remove()


def _splits(job: Job) -> tuple[object, ...]:
    # The keys that decide how replicas are split over machines: the ranks of each.
    cluster = job.cluster
    if not cluster.is_split:
        return ()
    return (cluster.replicas, cluster.partitions, cluster.plan, cluster.machines, cluster.device)
