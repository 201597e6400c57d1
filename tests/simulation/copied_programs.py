"""Programs of rounds on shards with two copies: whichever copy dies, the series goes on.

checked                                              against
each copy's tables and staged rows, at equal positions  the other copy
where a run ends, bit by bit                          `program.run` in one process
the series                                            the first, unless a block is lost
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import copy_names, other_copy
from distbelief.protocol import SaveCheckpoint, StartTraining
from distbelief.protocol.role import SUPERVISOR, Address, Role, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.faults import Fault, Kill
from distbelief.simulation.machines import ClusterOptions
from sandblaster.chunks import COORDINATOR
from tests.simulation.invariants import is_whole, shard_in
from tests.simulation.overseer import Beating, Overseer
from tests.simulation.programs import FIRST_OF_FLIGHTS, Rounds, Which
from tests.simulation.random_faults import message_faults
from tests.simulation.scene import Check


SHARD = Address("shard-0")


@dataclass(kw_only=True, eq=False)
class CopiedRounds(Rounds):
    """Attributes: `kills`: how long after all are in sync, and what dies.

    That is the primary or backup of shard 0, both, a worker or the coordinator; with a number,
    after so many more actions. "save": a checkpoint is requested instead.
    """

    n_copies: int = 2
    has_begun: bool = False
    kills: Sequence[tuple[Seconds, str, int | None]] = ()
    n_compared: int = field(default=0, init=False)
    sights: Counter[str] = field(default_factory=Counter, init=False)

    @cached_property
    def overseer(self) -> Overseer:
        return Overseer(self.n_shards, takeover_seconds=1.0, late_seconds=0.0)

    @override
    def roles(self) -> Mapping[Address, Builder]:
        return {**super().roles(), SUPERVISOR: lambda _: self.overseer}

    @override
    def options(self) -> ClusterOptions:
        options = super().options()
        machines = {**options.machines, SUPERVISOR: options.machines[COORDINATOR]}
        machines |= {other_copy(name): machines[name] for name in self.shards}
        start = SUPERVISOR, COORDINATOR, *self.replicas
        return replace(options, machines=machines, start=start, launch_seconds=0.02)

    @override
    def _shard(self, index: int, name: Address, memory: Memory) -> Role:
        shard = super()._shard(index, name, memory)
        assert isinstance(shard, Shard)
        return Beating(shard)

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        return (*super().checks(cluster), self._compare_copies)

    @override
    def leader(self, shard: Address) -> Shard:
        name = self.overseer.elections[shard].primary
        assert name is not None
        found = shard_in(self.cluster.role(name))
        assert found is not None
        return found

    def _compare_copies(self, happening: HandledEvent) -> None:
        shard = shard_in(happening.role)
        if shard is None or shard._work is not None:
            return
        name = other_copy(shard._name)
        election = self.overseer.elections[name]
        other = shard_in(self.cluster.role(name)) if self.cluster.is_alive(name) else None
        if other is None or not election.in_sync or not is_whole(other) or other._work is not None:
            return
        if other._values.position != shard._values.position:
            return
        one, two = (each._commands._vector_store.export() for each in (shard, other))
        assert one.keys() == two.keys()
        for vector, values in one.items():
            assert values.tobytes() == two[vector].tobytes(), f"copies differ in {vector}"
        first, second = (
            sorted((one.token, one.part, one.values.tobytes()) for one in rows.staged)
            if (rows := each._commands._rows) is not None
            else []
            for each in (shard, other)
        )
        assert first == second, "copies have other rows staged"
        self.n_compared += 1

    @property
    def is_in_sync(self) -> bool:
        return all(election.in_sync for election in self.overseer.elections.values())

    def _ended(self) -> bool:
        return COORDINATOR in self.cluster.halted

    @override
    def play(self, *, within: Seconds = 60.0) -> None:
        self.run_until(lambda: self.is_in_sync, within=5.0)
        self.has_begun = True
        self.tell(COORDINATOR, StartTraining())
        for wait, kind, after_actions in self.kills:
            self.wait(wait)
            if self._ended():
                break
            self.sights[kind] += 1
            if kind == "save":
                if self.cluster.is_alive(COORDINATOR):
                    self.tell(COORDINATOR, SaveCheckpoint(label=f"{int(self.now * 1e6):09d}"))
                continue
            victims = self._victims(kind)
            lives = {name: self.cluster.incarnation(name) for name in victims}
            for name in victims:
                again = None if name.startswith("shard-") else 0.02
                one = Kill(at=self.now, role=name, after_actions=after_actions, restart_after=again)
                self.cluster.inject(one)
            self.run_until(
                lambda those=lives: (  # type: ignore[misc]
                    self._ended()
                    or all(self.cluster.incarnation(n) > life for n, life in those.items())
                ),
                within=10.0,
            )
            self.run_until(lambda: self.is_in_sync or self._ended(), within=10.0)
        super().play(within=within)
        texts = [one.text for _, one in self.cluster.reports]
        self.sights["blocks lost"] = sum("lost its block" in one for one in texts)
        if not self.sights["both"]:
            assert not any("has restarted: continuing" in one for one in texts), texts
        assert self.n_compared, "no copies were compared"

    def _victims(self, kind: str) -> tuple[Address, ...]:
        if kind == "worker":
            return (self.replicas[0],)
        if kind == "coordinator":
            return (COORDINATOR,)
        copies = copy_names(0, 2)
        if kind == "both":
            return copies
        primary = self.overseer.elections[SHARD].primary
        return tuple(name for name in copies if (name == primary) is (kind == "primary"))


KINDS: tuple[Which, ...] = ("lasso", "planned lasso", "factors")
IN_FLIGHT: tuple[Which, ...] = ("mixing", "topics in flight")  # from that seed on
VICTIMS = ("primary", "backup", "both", "worker", "coordinator", "save")


def drawn(seed: int) -> CopiedRounds:
    """Return what a seed stands for."""
    stream = np.random.default_rng([seed, 0xC0B1E])
    kinds = KINDS if seed < FIRST_OF_FLIGHTS else IN_FLIGHT
    n_shards, n_replicas = int(stream.integers(1, 3)), int(stream.integers(1, 4))
    likely = [0.35, 0.15, 0.1, 0.1, 0.1, 0.2]
    kills = [
        (
            float(stream.uniform(0.0, 0.03)),
            str(stream.choice(VICTIMS, p=likely)),
            int(stream.integers(6)) if stream.random() < 0.6 else None,
        )
        for _ in range(int(stream.integers(2, 7)))
    ]
    faults: Sequence[Fault] = ()
    if stream.random() < 0.3:
        faults = tuple(message_faults(stream, horizon=1.0, intensity=0.3))
    return CopiedRounds(
        seed=seed,
        which=kinds[int(stream.integers(len(kinds)))],
        n_shards=n_shards,
        n_replicas=n_replicas,
        kills=kills,
        faults=faults,
        latency_seconds=float(stream.choice([2e-5, 2e-4, 1e-3])),
        suspect_seconds=0.3,
    )
