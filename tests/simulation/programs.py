"""A small cluster that runs a program of rounds, under faults.

Checked: tables and results have the bits of `program.run` in one process, whatever breaks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import itemgetter
from typing import Final, Literal, get_args

import numpy as np
from scipy import sparse
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rows import Values
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ShardConfig, copy_names, other_copy
from distbelief.protocol import SaveCheckpoint, Stop
from distbelief.protocol.role import Address, Exit, Role, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.faults import Fault, Supersede, TornSnapshot
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Link
from sandblaster import LatentDirichletAllocation, MatrixFactorization
from sandblaster.chunks import COORDINATOR, ChunkSizes
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.workers import CoordinatorConfig
from sandblaster.optimizers.termination import Reason
from sandblaster.strads.columns import checked_matrix
from sandblaster.strads.descent import Descent
from sandblaster.strads.losses import Squares
from sandblaster.strads.method import AnyProgram, Scheduled
from sandblaster.strads.program import run
from sandblaster.strads.worker import BlockWorker
from tests.sandblaster.strads.mixing import Mixing
from tests.simulation.random_faults import random_faults
from tests.simulation.scene import Check, Scene


Which = Literal["lasso", "planned lasso", "path", "factors", "topics", "topics in flight", "mixing"]

HORIZON: Seconds = 0.1  # by then everything has healed
FIRST_OF_TOPICS: Final = 1_000_000  # seeds below have the other programs
FIRST_OF_FLIGHTS: Final = 2_000_000  # from here on, programs with rounds in flight
FIRST_OF_ALL: Final = 3_000_000  # from here on, any program
FIRST_OF_RESUMED: Final = 4_000_000  # from here on, jobs that are interrupted and resumed

BOUNDS: Final = (4, 8)
"""Passes after which topics and factors begin anew: there a job ends as if it had gone on."""


@cache
def data() -> tuple[Values, Values]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(140, 60)) + 0.3 * rng.normal(size=(140, 1))
    return x, x[:, ::7].sum(axis=1) + 0.1 * rng.normal(size=140)


def program_of(which: Which, max_iter: int | None = None) -> AnyProgram:
    """Return a program; topics and factors end after so many passes."""
    if which == "factors":
        rng = np.random.default_rng(4)
        rows, columns = np.nonzero(rng.random((70, 40)) < 0.3)
        entries = sparse.csr_array((rng.normal(size=len(rows)), (rows, columns)), shape=(70, 40))
        model = MatrixFactorization(2, biases=True, regularization=0.3, n_blocks=5)
        model.set_params(max_iter=max_iter or 10)
        return model.program(entries)
    if which == "mixing":
        return Mixing(staleness=2, n_rounds=8)
    if which in {"topics", "topics in flight"}:
        rng = np.random.default_rng(5)
        counts = rng.poisson(0.4, (30, 17))  # two of which have no words
        counts[[3, -1]] = 0
        return LatentDirichletAllocation(
            5,  # rows of five numbers, which shards cut
            learn_doc_topic_prior=True,
            max_iter=max_iter or 11,
            tol=-1.0,
            evaluate_every=3,
            patience=9,
            n_blocks=5,
            staleness=2 if which == "topics in flight" else 0,
        ).program(counts[:24], held_out=counts[24:])
    x, y = data()
    if which == "path":
        return Descent(
            x[:100],
            y[:100],
            Squares(),
            alphas=[1.0, 0.3, 0.1, 1e-4],
            relative=True,
            n_blocks=4,
            tolerance=1e-6,
            held_out=(x[100:], y[100:]),
            keeps_best=True,
        )
    return Descent(
        checked_matrix(x, user="test"),
        y,
        Squares(),
        alphas=[0.3, 0.1],
        n_blocks=4,
        tolerance=1e-8,
        gather=0.0 if which == "planned lasso" else 4.0,
        interference=0.4,
    )


@cache
def plain(which: Which) -> tuple[dict[str, bytes], int]:
    """Return the tables' bits after `run`, and the number of rounds."""
    n_rounds: list[int] = []
    _, tables = run(program_of(which), watch=lambda _: n_rounds.append(1))
    return {name: values.tobytes() for name, values in tables.items()}, len(n_rounds)


@dataclass(kw_only=True, eq=False)
class Rounds(Scene):
    which: Which = "lasso"
    n_shards: int = 2
    n_replicas: int = 3
    backups: bool = True
    latency_seconds: Seconds = 5e-5
    suspect_seconds: Seconds = 0.2
    saves: tuple[Seconds, ...] = ()
    n_copies: int = 1  # of each shard
    has_begun: bool = True  # whether a coordinator that starts begins by itself
    late: tuple[Address, ...] = ()  # a test starts these
    max_iter: int | None = None  # of topics and factors; None: that of `plain`

    @property
    def shards(self) -> list[Address]:
        return [Address(f"shard-{k}") for k in range(self.n_shards)]

    @property
    def replicas(self) -> list[Address]:
        return [Address(f"replica-{r}") for r in range(self.n_replicas)]

    @cached_property
    def program(self) -> AnyProgram:
        return program_of(self.which)

    @cached_property
    def layout(self) -> Layout:
        tables = self.program.tables
        specs = [TensorSpec(name=name, shape=values.shape) for name, values in tables.items()]
        return Layout.of(specs, n_shards=self.n_shards, dtype="float64")

    @override
    def roles(self) -> Mapping[Address, Builder]:
        return {
            COORDINATOR: self._coordinator,
            **{
                name: partial(self._shard, k, name)
                for k in range(self.n_shards)
                for name in copy_names(k, self.n_copies)
            },
            **dict.fromkeys(self.replicas, self._worker),
        }

    @override
    def options(self) -> ClusterOptions:
        names = (COORDINATOR, *self.shards, *self.replicas)
        machines = {name: SimulatedMachine(bytes_per_second=2e7) for name in names}
        link = Link(latency_seconds=self.latency_seconds)
        start = tuple(name for name in self.roles() if name not in self.late)
        return ClusterOptions(
            introduce=True, machines=machines, link=link, link_within_host=link, start=start
        )

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        return (_validate,)

    def initial(self, index: int) -> Vector:
        vector = np.zeros(self.layout.shard_size(index))
        for segment in self.layout.segments(index):
            values = self.program.tables[self.layout.tensors[segment.tensor_index].name]
            here = slice(segment.offset, segment.offset + segment.n_elements)
            vector[here] = values.ravel()[segment.start : segment.stop]
        return vector

    def _shard(self, index: int, name: Address, memory: Memory) -> Role:
        config = ShardConfig(
            index=index,
            layout=self.layout,
            rule=SGD(learning_rate=0.1),
            name=name,
            is_replicated=self.n_copies > 1,
        )
        return Shard(config, memory=memory, initialise=lambda: self.initial(index))

    def _worker(self, memory: Memory) -> Role:
        del memory
        return BlockWorker(
            program_of(self.which),
            layout=self.layout,
            shard_copies=self.n_copies,
            await_begin=False,
            retry_seconds=0.02,
            retry_seconds_max=0.1,
        )

    def _coordinator(self, memory: Memory) -> Role:
        del memory
        config = CoordinatorConfig(
            chunk_sizes=ChunkSizes(mini_batch_size=1),
            backups=self.backups,
            backup_seconds_min=1e-3,
            retry_seconds=0.02,
            retry_seconds_max=0.1,
            suspect_seconds=self.suspect_seconds,
            await_begin=not self.has_begun,
            in_rounds=True,
        )
        return Coordinator(
            config,
            method=Scheduled(program_of(self.which, self.max_iter)),
            shards=self.shards,
            n_examples=140,
            second_copies={k: other_copy(k) for k in self.shards if self.n_copies > 1},
        )

    @property
    def coordinator(self) -> Coordinator:
        return self.role(COORDINATOR, Coordinator)

    def play(self, *, within: Seconds = 60.0) -> None:
        """Run until the coordinator has ended as planned; compare the tables."""
        cluster, waiting = self.cluster, list(self.saves)

        def is_over() -> bool:
            while waiting and cluster.now >= waiting[0]:
                label = _label(waiting.pop(0))
                if cluster.is_alive(COORDINATOR):
                    self.tell(COORDINATOR, SaveCheckpoint(label=label))
            return COORDINATOR in cluster.halted

        self.run_until(is_over, within=within)
        error = self.cluster.halted[COORDINATOR]
        assert error is None, error
        assert self.coordinator.reason not in {None, Reason.STOPPED}
        self.check_bits()

    def check_bits(self) -> None:
        assert self.bits == plain(self.which)[0], "it has ended somewhere else"

    @property
    def bits(self) -> dict[str, bytes]:
        """The published tables."""
        shapes = {name: values.shape for name, values in self.program.tables.items()}
        tables = {name: np.full(shape, np.nan).ravel() for name, shape in shapes.items()}
        for k, name in enumerate(self.shards):
            vector = self.leader(name).values.vector
            for one in self.layout.segments(k):
                there = tables[self.layout.tensors[one.tensor_index].name]
                there[one.start : one.stop] = vector[one.offset : one.offset + one.n_elements]
        return {name: values.tobytes() for name, values in tables.items()}

    def leader(self, shard: Address) -> Shard:
        """Return the copy that serves."""
        return self.role(shard, Shard)

    def moments(self, happens: Callable[[HandledEvent], bool]) -> list[Seconds]:
        """Play another such run; return when something happens in it."""
        other, times = replace(self), list[Seconds]()
        other.cluster.observe(lambda one: times.append(other.now) if happens(one) else None)
        other.play()
        return times


@dataclass(frozen=True, kw_only=True)
class Part:
    """One job of several that resume each other.

    Attributes: as of `Rounds`, with times from the beginning of this job. `seconds`: when it is
    interrupted, unless it has ended; faults are over by then. `joins`: when late workers come.
    `kill_after`: so long after the interruption all processes are killed, before the shards are
    asked to save.
    """

    seconds: Seconds
    max_iter: int | None = None
    faults: tuple[Fault, ...] = ()
    saves: tuple[Seconds, ...] = ()
    joins: tuple[tuple[Seconds, Address], ...] = ()
    kill_after: Seconds | None = None


@dataclass(kw_only=True, eq=False)
class ResumedRounds(Rounds):
    """A job that is interrupted, and resumed by new processes, perhaps with other bounds.

    The last part is not interrupted. Shards have what they saved last.
    """

    parts: Sequence[Part] = ()
    n_interrupted: int = field(default=0, init=False)
    n_bounded: int = field(default=0, init=False)  # parts that have ended at another bound
    n_failed: int = field(default=0, init=False)  # parts whose coordinator ended with an error
    bits_at_end: dict[str, bytes] = field(default_factory=dict, init=False)

    @override
    def options(self) -> ClusterOptions:
        return replace(super().options(), start=())

    @override
    def play(self, *, within: Seconds = 60.0) -> None:
        *before, last = self.parts
        for part in before:
            self._pass(part)
            if COORDINATOR not in self.cluster.halted:
                self.tell(COORDINATOR, Stop(reason="Ctrl+C"))
                if part.kill_after is None:
                    self.run_until(lambda: COORDINATOR in self.cluster.halted, within=within)
            if part.kill_after is not None:
                self.cluster.run(until=self.now + part.kill_after)
                assert self.cluster.halted.get(COORDINATOR) is None, self.cluster.halted
                continue
            if self.cluster.halted[COORDINATOR] is not None:  # the supervisor starts it again
                self.n_failed += 1
                self.cluster.restart(COORDINATOR)
                self.run_until(lambda: COORDINATOR in self.cluster.halted, within=within)
            assert self.cluster.halted[COORDINATOR] is None, self.cluster.halted
            is_stopped = self.coordinator.reason is Reason.STOPPED
            self.n_interrupted += is_stopped
            self.n_bounded += not is_stopped and part.max_iter is not None
            self._save_shards(within=within)
        self.cluster.observe(self._note_end)
        self._pass(last)
        super().play(within=within)

    def _note_end(self, happening: HandledEvent) -> None:
        if happening.name == COORDINATOR and any(isinstance(a, Exit) for a in happening.actions):
            self.bits_at_end = self.bits

    @override
    def check_bits(self) -> None:
        # A shard that is killed after the end begins with what it saved before.
        assert self.bits_at_end == plain(self.which)[0], "it has ended somewhere else"

    def _pass(self, part: Part) -> None:
        """Begin a part, with new processes; run it for its seconds."""
        cluster, begun = self.cluster, self.now
        self.max_iter = part.max_iter
        late = {name for _, name in part.joins}
        for name in self.roles():
            if name in cluster.alive:
                cluster.kill(name)
        for name in self.roles():
            if name not in late:
                cluster.restart(name)
        for fault in part.faults:
            cluster.inject(replace(fault, at=begun + fault.at))
        saves: list[tuple[Seconds, Address | None]] = [(at, None) for at in part.saves]
        for at, comes in sorted([*part.joins, *saves], key=itemgetter(0)):
            cluster.run(until=begun + min(at, part.seconds))
            if comes is not None:
                cluster.restart(comes)
            elif cluster.is_alive(COORDINATOR):
                self.tell(COORDINATOR, SaveCheckpoint(label=_label(self.now)))
        cluster.run(until=begun + part.seconds)

    def _save_shards(self, *, within: Seconds) -> None:
        """Save what shards have, as the supervisor does at the end of a job."""
        label, disk = _label(self.now), self.cluster.disk
        for name in self.shards:
            self.tell(name, SaveCheckpoint(label=label))
        self.run_until(
            lambda: all((one := disk.newest(name)) and one.label == label for name in self.shards),
            within=within,
        )


def _label(at: Seconds) -> str:
    return f"{int(at * 1e6):09d}"


def _validate(happening: HandledEvent) -> None:
    if isinstance(happening.role, Coordinator):
        happening.role.validate()


def drawn(seed: int) -> Rounds:
    """Return what a seed stands for."""
    stream = np.random.default_rng([seed, 0x57AD5])
    kinds: list[Which] = ["lasso", "planned lasso", "factors"]
    if seed >= FIRST_OF_TOPICS:
        kinds = ["topics"]
    if seed >= FIRST_OF_FLIGHTS:
        kinds = ["mixing", "topics in flight"]
    if seed >= FIRST_OF_ALL:
        kinds = list(get_args(Which))
    n_shards, n_replicas = int(stream.integers(1, 4)), int(stream.integers(1, 5))
    replicas = [Address(f"replica-{r}") for r in range(n_replicas)]
    shards = [Address(f"shard-{k}") for k in range(n_shards)]
    hit = [*replicas, COORDINATOR]
    if stream.random() < 0.5:
        hit += shards
    faults = random_faults(seed, hit, horizon=HORIZON, intensity=float(stream.uniform(0.2, 1.5)))
    if stream.random() < 0.3:
        role, at = hit[int(stream.integers(len(hit)))], stream.uniform(0.0, HORIZON)
        faults = (*faults, Supersede(at=float(at), role=role))
    # A disk that loses a snapshot of one role only ends the run.
    faults = tuple(one for one in faults if not isinstance(one, TornSnapshot))
    saves = stream.uniform(0.0, HORIZON, size=int(stream.integers(0, 4)))
    return Rounds(
        seed=seed,
        which=kinds[int(stream.integers(len(kinds)))],
        n_shards=n_shards,
        n_replicas=n_replicas,
        faults=faults,
        backups=bool(stream.random() < 0.8),
        latency_seconds=float(stream.choice([2e-5, 2e-4, 1e-3])),
        suspect_seconds=float(stream.choice([0.05, 0.3])),
        saves=tuple(sorted(float(at) for at in saves)),
    )


def drawn_resumed(seed: int) -> ResumedRounds:
    """Return what a seed from `FIRST_OF_RESUMED` on stands for."""
    stream = np.random.default_rng([seed, 0x4E5D])
    which = get_args(Which)[int(stream.integers(len(get_args(Which))))]
    n_shards, n_replicas = int(stream.integers(1, 4)), int(stream.integers(1, 5))
    replicas = [Address(f"replica-{r}") for r in range(n_replicas)]
    roles = [COORDINATOR, *replicas, *(Address(f"shard-{k}") for k in range(n_shards))]
    has_bounds = which in {"factors", "topics", "topics in flight"}
    parts: list[Part] = []
    ends = np.random.default_rng([seed, 0x711])
    n_parts = int(stream.integers(2, 5))
    for number in range(n_parts):
        seconds = float(stream.exponential(0.04)) + 1e-4
        intensity = float(stream.choice([0.0, 0.0, 0.5]))
        faults = random_faults(
            int(stream.integers(1 << 30)), roles, horizon=seconds, intensity=intensity
        )
        late = [name for name in replicas[1:] if stream.random() < 0.5]
        is_bounded = has_bounds and number < n_parts - 1 and stream.random() < 0.7
        part = Part(
            seconds=seconds + 0.5 * (is_bounded and ends.random() < 0.5),  # enough for its bound
            max_iter=int(stream.choice(BOUNDS)) if is_bounded else None,
            faults=tuple(one for one in faults if not isinstance(one, TornSnapshot)),
            saves=tuple(stream.uniform(0.0, seconds, size=int(stream.integers(0, 3))).tolist()),
            joins=tuple((float(stream.exponential(0.01)), name) for name in late),
            kill_after=float(ends.exponential(0.002)) if ends.random() < 0.2 else None,
        )
        parts.append(part)
    return ResumedRounds(
        seed=seed,
        which=which,
        n_shards=n_shards,
        n_replicas=n_replicas,
        backups=bool(stream.random() < 0.8),
        latency_seconds=float(stream.choice([2e-5, 2e-4, 1e-3])),
        suspect_seconds=float(stream.choice([0.05, 0.3])),
        parts=parts,
    )
