"""A small Sandblaster cluster under faults, and what must hold whatever happens.

    checked                                               against
    the gradient that every shard finishes, bit by bit      a plain loop and a plain tree
    which attempt counts for a chunk                      the other shards; once each
    where a run ends, bit by bit                          the run that nothing disturbs

The third holds while no shard and no journal loses its state: a run that resumes from
parameters alone has dropped its history. Losses, duplicates, pauses and restarts of
replicas and of the coordinator change nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import numpy as np
import torch
from msgspec.structs import replace as replace_settings
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import (
    ClientConfig,
    ShardConfig,
    copy_names,
    other_copy,
)
from distbelief.protocol import (
    BeginEvaluation,
    Checkpoint,
    CheckpointSaved,
    CommandDone,
    Commit,
    FinishEvaluation,
    Message,
    Progress,
    SaveCheckpoint,
    ShardCommand,
    Task,
)
from distbelief.protocol.role import (
    SUPERVISOR,
    Address,
    Compute,
    Event,
    Persist,
    Persisted,
    Role,
    Seconds,
    Started,
)
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.faults import CutOff, Kill, Supersede, TornSnapshot
from distbelief.simulation.machines import ClusterOptions, CostScale, SimulatedMachine
from distbelief.simulation.network import Link
from distbelief.task import dry_run
from distbelief.task.data import DataShard, Samples, read_batch
from distbelief.task.losses import Loss
from distbelief.worker.batches import TrainingPlan
from distbelief.worker.build import whole_replica
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.group import group_rank_of
from distbelief.worker.local_executor import FlatModel, LocalExecutor, summed
from distbelief.worker.replica import Replica
from sandblaster.build import whole_worker
from sandblaster.chunks import COORDINATOR, ChunkSizes
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.workers import CoordinatorConfig
from sandblaster.group_tasks import WorkerConfig
from sandblaster.optimizers.base import Runnable
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.warm_start_worker import WarmStartWorker
from tests.distbelief.parameter_server.pair import scatter
from tests.simulation.invariants import shard_in
from tests.simulation.overseer import Beating, Overseer
from tests.simulation.random_faults import random_faults
from tests.simulation.scene import Check, Scene, heard, sends


N_SAMPLES = 30
N_INPUTS = 5
SECONDS_PER_MINI_BATCH: Seconds = 2e-3
METHOD = LBFGS(history=3, max_iterations=3, tolerance=1e-12)
BOUNDED = replace_settings(METHOD, bounds="of the test")
ORDER_SEED = 11
CHUNK_SIZES = ChunkSizes(mini_batch_size=2, mini_batches_per_chunk=2)


def bounds_of(n: int, method: Runnable) -> dict[str, Vector]:
    """Return bounds that some elements of the minimum reach; none if the method has none."""
    if not getattr(method, "bounds", ""):
        return {}
    return {"lower": np.full(n, -0.3), "upper": np.full(n, 0.5)}


class Points:
    """A data set to fit: (n_samples, n_inputs) inputs, as many targets in {0, 1}."""

    def __init__(self, n_samples: int, n_inputs: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(n_samples, n_inputs, generator=generator, dtype=torch.float64)
        noise = torch.randn(n_samples, generator=generator, dtype=torch.float64)
        self.targets = (self.inputs[:, 0] - self.inputs[:, 1] + noise > 0).to(torch.float64)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[indices], self.targets[indices]


@cache
def points(n_samples: int, n_inputs: int = N_INPUTS) -> Points:
    """Return the data set of that size."""
    return Points(n_samples, n_inputs)


def logistic(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean logistic loss."""
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets)


def module(n_inputs: int = N_INPUTS) -> nn.Module:
    """Return a model of two tensors, which two shards share."""
    net = nn.Linear(n_inputs, 1, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def layout_of(n_shards: int, n_inputs: int = N_INPUTS) -> Layout:
    specs = FlatModel(module(n_inputs)).specs()
    return Layout.of(specs, n_shards=n_shards, dtype="float64")


# -------------------------------------------------------------------------- plain sums


@cache
def plain_gradient(
    point: bytes, chunk_sizes: ChunkSizes, n_samples: int, n_inputs: int
) -> tuple[torch.Tensor, ...]:
    """Return the batch gradient at a point, flat per tensor: loops, and a tree."""
    model = FlatModel(module(n_inputs))
    values = np.frombuffer(point).copy()
    for tensor in model.values:
        n = tensor.numel()
        tensor.copy_(torch.from_numpy(values[:n]))
        values = values[n:]
    samples = Samples(n_samples, seed=ORDER_SEED)
    sets = []
    for start in range(0, n_samples, chunk_sizes.chunk_size):
        stop = min(start + chunk_sizes.chunk_size, n_samples)
        total: list[torch.Tensor] = []
        for begin in range(start, stop, chunk_sizes.mini_batch_size):
            indices = samples.at(begin, min(begin + chunk_sizes.mini_batch_size, stop))
            model.gradient(
                read_batch(points(n_samples, n_inputs), indices.tolist()), summed(logistic)
            )
            gradients = [g.clone() for g in model.gradients if g is not None]
            total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
        sets.append(total)
    return tuple(tensor / n_samples for tensor in _tree(sets))


def _tree(sets: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the sum, as in `GradientSums`: whole subtrees first, from left to right."""
    n = len(sets)
    size = 1 << (n.bit_length() - 1)  # of the largest whole subtree
    total = _whole(sets[:size])
    begin = size
    while begin < n:
        size = 1 << ((n - begin).bit_length() - 1)
        total = _plus(total, _whole(sets[begin : begin + size]))
        begin += size
    return total


def _whole(sets: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    if len(sets) == 1:
        return list(sets[0])
    half = len(sets) // 2
    return _plus(_whole(sets[:half]), _whole(sets[half:]))


def _plus(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x + y for x, y in zip(a, b, strict=True)]


# ---------------------------------------------------------------------------- checkers


Tensors = dict[str, torch.Tensor]
"""The tensors of a model, flat, by name."""


@dataclass
class RunChecker:
    """What an all-knowing observer has seen.

    Attributes:
        compare: Checks a batch gradient at a point.
        ranks: Of a replica, those that push to each shard.
        n_sealed: Gradients that every shard left, and that were checked.
        sights: How often things happened.
    """

    layout: Layout
    compare: Callable[[Tensors, Tensors], None]
    ranks: Callable[[int], set[int]] = lambda _: {0}
    n_copies: int = 1  # of each shard
    tasks: dict[tuple[int, int], Task] = field(default_factory=dict)
    opened: dict[tuple[int, Address], int] = field(default_factory=dict)
    committed: dict[tuple[int, int, int], int] = field(default_factory=dict)
    counted: dict[tuple[Address, int, int, int], int] = field(default_factory=dict)
    points: dict[tuple[int, int], dict[int, Vector]] = field(default_factory=dict)
    sealed: dict[tuple[int, int], dict[int, Vector]] = field(default_factory=dict)
    staged_by: dict[tuple[Address, int, int], set[Address]] = field(default_factory=dict)
    pushers: dict[tuple[int, Address], int] = field(default_factory=dict)  # by token: incarnation
    n_sealed: int = 0
    n_void: int = 0
    losses: list[float] = field(default_factory=list)
    on_saved: Callable[[str], None] | None = None
    saved: list[CheckpointSaved] = field(default_factory=list)
    journal: str = ""  # the newest that is on disk
    sights: Counter[str] = field(default_factory=Counter)

    def see(self, happening: HandledEvent) -> None:
        """Note, and check, what a shard or the coordinator has just done."""
        event = happening.event
        if happening.name == COORDINATOR:
            self._coordinator_lives(event)
            assert isinstance(happening.role, Coordinator)
            happening.role.validate()
        command = heard(event, ShardCommand)
        if command is not None:
            known = self.tasks.setdefault((command.series, command.number), command.task)
            assert known == command.task, "shards get different commands"
        for action in happening.actions:
            if isinstance(action, Compute) and action.name == "collect":
                self._staging(happening)
        for receiver, message in sends(happening, Message):
            self._sent(happening, receiver, message)

    def _coordinator_lives(self, event: Event) -> None:
        """Note what is on its disk, and whether a restart finds it there."""
        if isinstance(event, Persisted) and event.error is None:
            self.journal = max(self.journal, event.label)
        elif isinstance(event, Started):
            found = "" if event.restored is None else event.restored.label
            self.sights["journals lost"] += found < self.journal

    def _staging(self, happening: HandledEvent) -> None:
        """Note whose gradient is staged under which token."""
        shard = shard_in(happening.role)
        assert shard is not None
        applying = shard._sessions.applying
        if applying is None:
            return  # a backup repeats what its primary has noted
        commit_token, client = applying.push.commit_token, applying.client
        generation = (
            Address(happening.name.removesuffix("b")),
            self._life_of(happening),
            commit_token,
        )
        self.staged_by.setdefault(generation, set()).add(client.name)
        known = self.pushers.setdefault((commit_token, client.name), client.incarnation)
        assert known == client.incarnation, f"{client.name} pushes {commit_token} in two lives"

    def _life_of(self, happening: HandledEvent) -> int:
        """Return what a shard's state is of: the second copy goes on with that of the first."""
        return happening.incarnation if self.n_copies == 1 else 0

    def _sent(self, happening: HandledEvent, receiver: Address, message: Message) -> None:
        if isinstance(message, CommandDone):
            self._performed(happening, message)
        elif receiver == SUPERVISOR and isinstance(message, Progress):
            self.losses.append(message.loss)
        elif receiver == SUPERVISOR and isinstance(message, CheckpointSaved):
            self.saved.append(message)
            if message.error is None and self.on_saved is not None:
                self.on_saved(message.label)

    def _performed(self, happening: HandledEvent, message: CommandDone) -> None:
        task = self.tasks.get((message.series, message.number))
        if message.error is not None:
            self.sights["orders that failed"] += 1
            return
        name, shard = Address(happening.name.removesuffix("b")), shard_in(happening.role)
        assert shard is not None
        index = int(name.removeprefix("shard-"))
        key = message.series, message.number
        match task:
            case BeginEvaluation():
                self.opened[message.series, name] = message.number
                self.points.setdefault(key, {})[index] = shard.values.vector.copy()
            case Commit():
                evaluation = self.opened[message.series, name]
                self.n_void += len(task.void)
                for one in task.chunks:
                    place = message.series, evaluation, one.chunk_index
                    commit_token = self.committed.setdefault(place, one.commit_token)
                    assert commit_token == one.commit_token, "shards count different attempts"
                    self._check_parts(name, self._life_of(happening), commit_token)
                    before = self.counted.setdefault((name, *place), key[1])
                    assert before == key[1], f"{name} counts {place} twice"
            case FinishEvaluation() if task.n_examples:
                opened = message.series, self.opened[message.series, name]
                vectors = shard._commands._vector_store.export((task.gradient,))
                known = self.sealed.setdefault(key, {})
                if index not in known:
                    known[index] = vectors[task.gradient].copy()
                    self._check_gradient(opened, known)
            case _:
                pass

    def _check_parts(self, shard: Address, incarnation: int, commit_token: int) -> None:
        """A chunk counts once all ranks of one replica have staged their parts."""
        names = self.staged_by[shard, incarnation, commit_token]
        places = [group_rank_of(name) for name in names]
        groups = {place.group if place else name for name, place in zip(names, places, strict=True)}
        assert len(groups) == 1, f"shards count different replicas: {names}"
        ranks = self.ranks(int(shard.removeprefix("shard-")))
        assert {place.index if place else 0 for place in places} == ranks, (names, ranks)

    def _check_gradient(self, opened: tuple[int, int], sealed: dict[int, Vector]) -> None:
        """Compare what is sealed, once every shard has."""
        if len(sealed) == self.layout.n_shards:
            point, gradient = (tensors_of(self.layout, v) for v in (self.points[opened], sealed))
            self.compare(point, gradient)
            self.n_sealed += 1


def tensors_of(layout: Layout, vectors: Mapping[int, Vector]) -> Tensors:
    """Return what shards hold, by name; 0 for buffers that a vector does not have."""
    tensors = [torch.zeros(spec.n_elements, dtype=torch.float64) for spec in layout.tensors]
    for index, vector in vectors.items():
        whole = np.zeros(layout.shard_size(index))
        whole[: len(vector)] = vector
        scatter(layout, index, whole, tensors)
    return {spec.name: tensor for spec, tensor in zip(layout.tensors, tensors, strict=True)}


def bits_of(tensors: Tensors) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in tensors.values())


# --- scenes ---


@dataclass(kw_only=True, eq=False)
class Batch(Scene):
    """A coordinator, shards and replicas, under every check."""

    n_shards: int = 2
    n_replicas: int = 3
    backups: bool = True
    hosts: str = "one"  # or "own": block messages; "told": one, where ranks share memory too
    latency_seconds: Seconds = 5e-5
    bytes_per_second: float = 1e9

    @property
    def shards(self) -> list[Address]:
        return [Address(f"shard-{k}") for k in range(self.n_shards)]

    @property
    def replicas(self) -> list[Address]:
        return [Address(f"replica-{r}") for r in range(self.n_replicas)]

    @cached_property
    def layout(self) -> Layout:
        raise NotImplementedError

    @cached_property
    def checker(self) -> RunChecker:
        raise NotImplementedError

    def flops(self, name: Address) -> float:
        """Return how fast this role computes."""
        raise NotImplementedError

    @override
    def options(self) -> ClusterOptions:
        machines = {
            name: SimulatedMachine(
                host="" if self.hosts == "own" else "host-0",
                flops_per_second=self.flops(name),
                bytes_per_second=self.bytes_per_second,
            )
            for name in (COORDINATOR, *self.shards, *self.replicas)
        }
        link = Link(latency_seconds=self.latency_seconds)
        return ClusterOptions(
            introduce=True,
            tells_hosts=self.hosts == "told",
            machines=machines,
            link=link,
            link_within_host=link,
        )

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        return (self.checker.see,)

    @property
    def coordinator(self) -> Coordinator:
        return self.role(COORDINATOR, Coordinator)

    def play(self, *, within: Seconds = 300.0) -> None:
        """Run until the coordinator has ended as planned."""
        self.run_until(lambda: COORDINATOR in self.cluster.halted, within=within)
        error = self.cluster.halted[COORDINATOR]
        assert error is None, error
        assert self.coordinator.reason is not None

    @property
    def values(self) -> Tensors:
        """Everything that the shards hold, by name."""
        shards = (self.role(name, Shard) for name in self.shards)
        return tensors_of(self.layout, {k: shard.values.vector for k, shard in enumerate(shards)})

    def moments(self, happens: Callable[[HandledEvent], bool]) -> list[Seconds]:
        """Play another such run; return when something happens in it."""
        run, times = replace(self), list[Seconds]()

        def see(happening: HandledEvent) -> None:
            if happens(happening):
                times.append(run.now)

        run.cluster.observe(see)
        run.play()
        return times


@dataclass(kw_only=True, eq=False)
class Sandblast(Batch):
    chunk_sizes: ChunkSizes = CHUNK_SIZES
    n_samples: int = N_SAMPLES
    n_inputs: int = N_INPUTS
    window_chunks: int = 64
    speeds: tuple[float, ...] = ()  # of the replicas; 1 where not given
    method: Runnable = METHOD
    loss: Loss = logistic
    silence_seconds_max: Seconds = 60.0
    starved_seconds_max: Seconds = 600.0
    await_begin: bool = False
    suspect_seconds: Seconds = 0.2
    saves: tuple[Seconds, ...] = ()
    warm_steps: int = 0  # of SGD before, of each replica that takes part
    warm_replicas: int | None = None  # that take part; None: all
    warm_once: bool = False  # as in jobs: a restarted replica takes only the rest of them
    shard_flops: float = 0.0  # operations per second of each shard; 0: as replicas
    n_copies: int = 1  # of each shard; a simulated supervisor elects the primary of two
    n_priced: float = 0.0  # parameters at whose price it runs; 0: as many as there are
    leisure: float = 1.0  # by which all time-outs are longer

    @property
    def n_warm(self) -> int:
        n = self.n_replicas if self.warm_replicas is None else self.warm_replicas
        return n if self.warm_steps else 0

    @cached_property
    @override
    def layout(self) -> Layout:
        return layout_of(self.n_shards, self.n_inputs)

    @cached_property
    @override
    def checker(self) -> RunChecker:
        return RunChecker(
            self.layout, self._compare, on_saved=self._check_saved, n_copies=self.n_copies
        )

    @cached_property
    def overseer(self) -> Overseer:
        return Overseer(self.n_shards, takeover_seconds=1.0, late_seconds=0.0)

    @override
    def roles(self) -> Mapping[Address, Builder]:
        roles: dict[Address, Builder] = {
            COORDINATOR: self._coordinator,
            **{
                name: partial(self._shard, k, name)
                for k in range(self.n_shards)
                for name in copy_names(k, self.n_copies)
            },
            **{name: partial(self._replica, r) for r, name in enumerate(self.replicas)},
        }
        return roles | ({SUPERVISOR: lambda _: self.overseer} if self.n_copies > 1 else {})

    @override
    def options(self) -> ClusterOptions:
        options = super().options()
        if self.n_copies > 1:
            machines = {**options.machines, SUPERVISOR: options.machines[COORDINATOR]}
            machines |= {other_copy(name): machines[name] for name in self.shards}
            start = SUPERVISOR, COORDINATOR, *self.replicas
            return replace(options, machines=machines, start=start, launch_seconds=0.02)
        if not self.n_priced:
            return options
        # Of a model of `n_priced` parameters; computing a mini-batch takes as long.
        ratio = self.n_priced / sum(self.layout.shard_size(k) for k in range(self.n_shards))
        scale = CostScale(n_bytes=ratio, frame_bytes=ratio)
        return replace(options, scales=dict.fromkeys(options.machines, scale))

    def _compare(self, point: Tensors, gradient: Tensors) -> None:
        expected = plain_gradient(bits_of(point), self.chunk_sizes, self.n_samples, self.n_inputs)
        for got, wanted in zip(gradient.values(), expected, strict=True):
            assert torch.equal(got, wanted), f"the gradient is {got}, not {wanted}"

    def _check_saved(self, label: str) -> None:
        for name in self.shards:
            newest = self.newest(name)
            assert newest.label == label, (name, newest.label, label)

    @override
    def flops(self, name: Address) -> float:
        if self.shard_flops and name in self.shards:
            return self.shard_flops
        flops = flops_of_mini_batch(self.n_inputs, self.chunk_sizes.mini_batch_size)
        speed = 1.0
        if name in self.replicas:
            index = self.replicas.index(name)
            speed = self.speeds[index] if index < len(self.speeds) else 1.0
        return speed * flops / SECONDS_PER_MINI_BATCH

    def _shard(self, index: int, name: Address, memory: Memory) -> Role:
        config = ShardConfig(
            index=index,
            layout=self.layout,
            rule=SGD(learning_rate=0.1),
            name=name,
            is_replicated=self.n_copies > 1,
            constants=bounds_of(self.layout.n_gradient(index), self.method),
        )
        shard = Shard(
            config, memory=memory, initialise=lambda: np.zeros(self.layout.shard_size(index))
        )
        return Beating(shard) if self.n_copies > 1 else shard

    def _replica(self, index: int, memory: Memory) -> Role:
        client = ParameterClient(
            ClientConfig(
                pushes=True,
                retry_seconds=0.02 * self.leisure,
                retry_seconds_max=0.1 * self.leisure,
                torn_seconds_max=0.05 * self.leisure,
            ),
            PartialView(self.layout),
            memory=memory,
            shard_copies=self.n_copies,
        )
        model = FlatModel(module(self.n_inputs))
        executor = LocalExecutor(
            model,
            points(self.n_samples, self.n_inputs),
            loss=self.loss,
            sums=True,
            names=dry_run.Names(model="test:module", loss="logistic", data="data.train"),
            clip_norm=None,
            seed=(3, 0),
        )
        replica = whole_worker(
            WorkerConfig(
                chunk_sizes=self.chunk_sizes,
                retry_seconds=0.03 * self.leisure,
                retry_seconds_max=0.1 * self.leisure,
            ),
            client=client,
            executor=executor,
            samples=Samples(self.n_samples, seed=ORDER_SEED),
            await_begin=self.await_begin and index >= self.n_warm,
        )
        if index >= self.n_warm:
            return replica
        return WarmStartWorker(
            downpour=self._first_part(index, client=client, model=model),
            chunks=replica,
            await_begin=self.await_begin,
            retry_seconds=0.02,
        )

    def _first_part(self, index: int, *, client: ParameterClient, model: FlatModel) -> Replica:
        executor = LocalExecutor(
            model,
            points(self.n_samples, self.n_inputs),
            loss=self.loss,
            names=dry_run.Names(model="test:module", loss="logistic", data="data.train"),
            clip_norm=None,
            seed=(3, index),
        )
        part = DataShard(self.n_samples, replica_index=index, n_replicas=self.n_warm, seed=3)
        last = TrainingPlan(part, batch_size=4).batch(self.warm_steps - 1)
        return whole_replica(
            DownpourSettings(
                loss="",
                batch_size=4,
                rule=SGD(learning_rate=0.1),
                max_steps=None if self.warm_once else self.warm_steps,
                blocking=self.warm_replicas is not None,
                order="parts",
            ),
            client=client,
            executor=executor,
            data_shard=part,
            samples_max=last.stop if self.warm_once else None,
        )

    def _coordinator(self, memory: Memory) -> Role:
        del memory
        config = CoordinatorConfig(
            chunk_sizes=self.chunk_sizes,
            window_chunks=self.window_chunks,
            backups=self.backups,
            backup_seconds_min=1e-3,
            retry_seconds=0.02 * self.leisure,
            retry_seconds_max=0.1 * self.leisure,
            suspect_seconds=self.suspect_seconds * self.leisure,
            silence_seconds_max=self.silence_seconds_max,
            starved_seconds_max=self.starved_seconds_max,
            n_warm=self.n_warm,
            await_begin=self.await_begin,
        )
        return Coordinator(
            config,
            method=self.method,
            shards=self.shards,
            n_examples=self.n_samples,
            second_copies={k: other_copy(k) for k in self.shards if self.n_copies > 1},
        )

    @override
    def play(self, *, within: Seconds = 60.0) -> None:
        for at in self.saves:
            self.cluster.run(until=at)
            if self.cluster.is_alive(COORDINATOR):
                self.tell(COORDINATOR, SaveCheckpoint(label=f"{int(at * 1e6):09d}"))
        super().play(within=within)

    @property
    def bits(self) -> bytes:
        """The published parameters of all shards."""
        return bits_of(self.values)


@cache
def flops_of_mini_batch(n_inputs: int, mini_batch_size: int) -> float:
    return FlatModel(module(n_inputs)).flops(mini_batch_size)


@cache
def undisturbed(
    chunk_sizes: ChunkSizes, n_shards: int, *, bounded: bool = False
) -> tuple[bytes, tuple[float, ...]]:
    """Return where a run ends that nothing disturbs, and its losses."""
    run = Sandblast(
        n_replicas=1,
        n_shards=n_shards,
        chunk_sizes=chunk_sizes,
        method=BOUNDED if bounded else METHOD,
    )
    run.play()
    return run.bits, tuple(run.checker.losses)


# --------------------------------------------------------------------------- scenarios


HORIZON: Seconds = 0.15  # by then everything has healed


def drawn(seed: int) -> Sandblast:
    """Return what a seed stands for."""
    stream = np.random.default_rng([seed, 0x5A17D])
    n_shards, n_replicas = int(stream.integers(1, 4)), int(stream.integers(1, 5))
    replicas = [Address(f"replica-{r}") for r in range(n_replicas)]
    shards = [Address(f"shard-{k}") for k in range(n_shards)]
    hit = [*replicas, COORDINATOR]
    if stream.random() < 0.4:
        hit += shards
    faults = random_faults(seed, hit, horizon=HORIZON, intensity=float(stream.uniform(0.2, 1.5)))
    if stream.random() < 0.3:
        role, at = hit[int(stream.integers(len(hit)))], stream.uniform(0.0, HORIZON)
        faults = (*faults, Supersede(at=float(at), role=role))
    # A disk that loses a snapshot of one shard only ends the run.
    faults = tuple(f for f in faults if not isinstance(f, TornSnapshot) or f.role not in shards)
    saves = stream.uniform(0.0, HORIZON, size=int(stream.integers(0, 4)))
    sizes = [(2, 2), (4, 1), (3, 2), (1, 5), (11, 1)]
    mini_batch_size, portions_per_set = sizes[int(stream.integers(len(sizes)))]
    return Sandblast(
        seed=seed,
        n_shards=n_shards,
        n_replicas=n_replicas,
        chunk_sizes=ChunkSizes(
            mini_batch_size=mini_batch_size, mini_batches_per_chunk=portions_per_set
        ),
        window_chunks=int(stream.choice([1, 2, 5, 64])),
        backups=bool(stream.random() < 0.8),
        hosts=str(stream.choice(["one", "own"])),
        faults=faults,
        speeds=tuple(float(s) for s in stream.choice([1.0, 0.2, 3.0], size=n_replicas)),
        latency_seconds=float(stream.choice([2e-5, 2e-4, 2e-3])),
        suspect_seconds=float(stream.choice([0.05, 0.3])),
        saves=tuple(sorted(float(at) for at in saves)),
    )


def play(scene: Sandblast) -> Sandblast:
    """Play a scenario under every check; return the run."""
    run = replace(scene)
    run.play()
    sights, coordinator = run.checker.sights, run.coordinator
    figures = coordinator.metrics
    incarnation = run.cluster.incarnation
    sights["backups"] = figures.n_backups
    sights["wasted"] = figures.n_wasted
    sights["grants void"] = run.checker.n_void
    sights["saved"] = sum(saved.error is None for saved in run.checker.saved)
    sights["coordinators restarted"] = incarnation(COORDINATOR) - 1
    sights["shards restarted"] = sum(incarnation(s) - 1 for s in scene.shards)
    sights["replicas restarted"] = sum(incarnation(r) - 1 for r in scene.replicas)
    values, losses = undisturbed(scene.chunk_sizes, scene.n_shards, bounded=scene.method == BOUNDED)
    if not sights["shards restarted"] and not sights["journals lost"]:
        assert run.bits == values, "it has ended somewhere else"
        assert set(run.checker.losses) <= set(losses), "losses of another run"
    else:
        assert run.checker.losses[-1] <= losses[0]
    return run


# ---------------------------------------------------------------------------- directed


@cache
def half_pushed() -> Sandblast:
    """A winner reaches one shard of two, then dies; others stand in for it."""
    replica, shard = Address("replica-0"), Address("shard-1")
    return Sandblast(
        n_replicas=2,
        hosts="own",
        faults=(
            CutOff(at=3e-3, a=replica, b=shard, seconds=1.0, loses=True, one_way=True),
            Kill(at=0.03, role=replica, restart_after=2.0),
        ),
        suspect_seconds=0.1,
    )


@cache
def journal_not_on_disk() -> Sandblast:
    """The coordinator dies while it saves a savepoint that the shards have."""

    def writes(happening: HandledEvent) -> bool:
        return happening.name == COORDINATOR and any(
            isinstance(action, Persist) for action in happening.actions
        )

    times = Sandblast().moments(writes)
    kill = Kill(at=times[3] + 1e-6, role=COORDINATOR, restart_after=0.02)
    return Sandblast(faults=(kill,))


@cache
def shard_dies_while_saving() -> Sandblast:
    """One shard has saved a checkpoint, another dies before it has."""
    scene, shard = Sandblast(saves=(0.02, 0.1)), Address("shard-1")

    def is_told_to_save(happening: HandledEvent) -> bool:
        command = heard(happening.event, ShardCommand)
        is_save = command is not None and isinstance(command.task, Checkpoint)
        return happening.name == shard and is_save

    times = scene.moments(is_told_to_save)
    kill = Kill(at=times[1] + 1e-6, role=shard, restart_after=0.02)
    return replace(scene, faults=(kill,))


DIRECTED = (half_pushed, journal_not_on_disk, shard_dies_while_saving)
