"""Workers whose pushes leave marks (`workers`), shards of one copy or two, every invariant."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import pytest
from typing_extensions import override

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.parameter_server import replication
from distbelief.parameter_server.layout import ElementType, Layout
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig, copy_names
from distbelief.protocol import SaveCheckpoint, role as rl
from distbelief.protocol.role import Address
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Supersede
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Link
from distbelief.supervisor.failover import PrimaryElection
from tests.simulation.invariants import (
    ALL,
    Invariant,
    Observer,
    Seen,
    StalenessIsTrue,
    WholeVersions,
    shard_in,
)
from tests.simulation.overseer import Beating, Overseer
from tests.simulation.scene import Check, Scene
from tests.simulation.workers import N_MARKS, PLAIN, Ledger, Worker, layout_of, shard_of


SHARD_BYTES = 8 * N_MARKS
CLIENT, MACHINE, LINK = ClientConfig(pushes=True), SimulatedMachine(jitter=0.5), Link()


def together(_: Address) -> str:
    """Let all roles share memory."""
    return "one"


def apart(_: Address) -> str:
    """Let no one share memory."""
    return ""


def each_copy_apart(name: Address) -> str:
    """Let the first copies share memory with the workers, the others with no one."""
    return "" if name.endswith("b") else "one"


@dataclass(kw_only=True, eq=False)
class Marks(Scene):
    n_workers: int = 3
    n_partial: int = 0  # of the workers: they hold a part of the tensor
    n_wanted: int = 12  # pushes of each worker
    n_shards: int = 1
    n_twins: int = 1  # copies of each shard
    hosts: Callable[[Address], str] = together
    rule: UpdateRule = PLAIN
    policy: ExchangePolicy = DOWNPOUR
    client: ClientConfig = CLIENT
    shard_settings: Mapping[str, float] = field(default_factory=dict)  # of `ShardConfig`
    machine: SimulatedMachine = MACHINE
    shard_bytes_per_second: float = 1e10  # how long applying takes
    link: Link = LINK
    port_reuse: float = 0.0
    launch_seconds: rl.Seconds = 0.2
    takeover_seconds: rl.Seconds = 1.0
    late_seconds: rl.Seconds = 0.0  # from the fall of a primary to its end
    kinds: Sequence[type[Invariant]] = ALL
    ledger: Ledger = field(default_factory=Ledger, init=False)

    # --- what there is ---

    @property
    def copies(self) -> list[tuple[Address, ...]]:
        """The copies of each shard."""
        return [copy_names(index, self.n_twins) for index in range(self.n_shards)]

    @property
    def shards(self) -> list[Address]:
        return [name for names in self.copies for name in names]

    @property
    def workers(self) -> list[Address]:
        return [Address(f"worker-{k}") for k in range(self.n_workers)]

    @cached_property
    def layout(self) -> Layout:
        # Words of bfloat16 are of float32.
        dtype: ElementType = "float64" if self.policy.numbers == "float32" else "float32"
        return layout_of(self.n_shards, dtype=dtype)

    @cached_property
    def overseer(self) -> Overseer:
        return Overseer(
            self.n_shards, takeover_seconds=self.takeover_seconds, late_seconds=self.late_seconds
        )

    @property
    def host_bytes_max(self) -> int:
        """Return memory for values and two push buffers per worker, in several incarnations.

        Two incarnations, because clients release the memory of a dead shard as soon as they know
        the next one. A replaced worker never releases any, and each client keeps the memory of
        its last session. Clients that never heard of the next incarnation keep values of
        different ones.
        """
        n_superseded = sum(isinstance(fault, Supersede) for fault in self.faults)
        n_generations = (2 + n_superseded) * len(self.shards)
        n_vectors = n_generations * (1 + 2 * self.n_workers)
        n_vectors += self.n_shards * (self.n_workers - 1)
        return n_vectors * (SHARD_BYTES + 64)

    @override
    def roles(self) -> Mapping[Address, Builder]:
        builders: dict[Address, Builder] = {
            name: partial(self._shard, index, name)
            for index, names in enumerate(self.copies)
            for name in names
        }
        if self.n_twins > 1:
            builders[rl.SUPERVISOR] = lambda _: self.overseer
        return builders | {
            name: partial(self._worker, k < self.n_partial) for k, name in enumerate(self.workers)
        }

    def _shard(self, index: int, name: Address, memory: Memory) -> rl.Role:
        is_replicated = self.n_twins > 1
        config = ShardConfig(
            index=index,
            layout=self.layout,
            rule=self.rule,
            policy=self.policy,
            name=name,
            is_replicated=is_replicated,
            **self.shard_settings,  # type: ignore[arg-type]
        )
        shard = shard_of(index, self.layout, memory, config)
        return Beating(shard) if is_replicated else shard

    def _worker(self, is_partial: bool, memory: Memory) -> Worker:  # noqa: FBT001 -- by partial
        return Worker(
            self.layout,
            memory,
            ledger=self.ledger,
            n_wanted=self.n_wanted,
            config=replace(self.client, push=self.policy.push_codec, fetch=self.policy.fetched),
            shard_copies=self.n_twins,
            partial=is_partial,
            policy=self.policy,
        )

    @override
    def options(self) -> ClusterOptions:
        of_worker, of_shard = self.machine, self.shard_bytes_per_second
        machines = {
            name: replace(
                of_worker,
                host=self.hosts(name),
                bytes_per_second=of_shard if name in self.shards else 1e10,
            )
            for name in (*self.shards, rl.SUPERVISOR, *self.workers)
        }
        return ClusterOptions(
            introduce=True,
            start=(rl.SUPERVISOR, *self.workers) if self.n_twins > 1 else None,
            launch_seconds=self.launch_seconds,
            machines=machines,
            link=self.link,
            port_reuse=self.port_reuse,
        )

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        # A worker that holds a part cannot tell which version it has of a whole shard.
        of_whole = {WholeVersions, StalenessIsTrue} if self.n_partial else set()
        self.seen = Seen(
            cluster=cluster,
            shards={name: index for index, names in enumerate(self.copies) for name in names},
            workers=self.workers,
            ledger=self.ledger,
            host_bytes_max=self.host_bytes_max,
            elections=self.overseer.elections,
        )
        kinds = [kind for kind in self.kinds if kind not in of_whole]
        self.observer = Observer(self.seen, kinds=kinds)
        return (self.observer,)

    # --- what happens ---

    def finish(self, *, within: rl.Seconds = 300.0, max_events: int = 1_000_000) -> None:
        """Let all workers end, and look at the totals."""
        self.cluster.run_until(self.done, within=within, max_events=max_events)
        self.observer.at_end()

    def done(self, *, but: Address | None = None) -> bool:
        """Return whether all workers but this one have ended, and every shard has its primary.

        One that has just fallen is no longer there to be asked what it kept, and the
        next incarnation of its name has begun with a snapshot at best.
        """
        cluster = self.cluster
        return all(
            getattr(cluster.role(name), "state", "") == "done" and cluster.is_alive(name)
            for name in self.workers
            if name != but
        ) and all(
            cluster.is_alive(name) and cluster.incarnation(name) == life
            for name, life in self.seen.serves.values()
        )

    def until_whole(self, index: int = 0) -> None:
        self.run_until(lambda: self.election(index).in_sync, within=10.0)

    def save(self, label: str, index: int = 0) -> None:
        leader = self.overseer.leader(self.copies[index])
        if leader is not None:
            self.tell(leader, SaveCheckpoint(label=label))

    # --- roles, by what they are now ---

    def election(self, index: int = 0) -> PrimaryElection:
        return self.overseer.elections[self.copies[index][0]]

    def leader(self, index: int = 0) -> Address:
        leader = self.overseer.leader(self.copies[index])
        assert leader is not None
        return leader

    def second(self, index: int = 0) -> Address:
        one, other = self.copies[index]
        return other if self.leader(index) == one else one

    def shard(self, name: Address) -> Shard:
        shard = shard_in(self.cluster.role(name))
        assert shard is not None
        return shard

    def worker(self, name: Address) -> Worker:
        return self.role(name, Worker)


@contextmanager
def small(*, block_bytes: int = 1024, window_pieces: int = 1) -> Iterator[pytest.MonkeyPatch]:
    """Use blocks and windows so small that a shard of marks has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "BLOCK_BYTES", block_bytes)
        patch.setattr(replication, "WINDOW_STATE_BLOCKS", window_pieces)
        yield patch
