"""Sandblaster on shards with two copies: primaries die, and the same series goes on.

checked                                             against
each copy's vectors, bit by bit, at equal positions  the other copy
where a run ends, bit by bit                        shards of one copy that nothing disturbs
the series                                          the first: nothing was begun again
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from msgspec.structs import replace as replace_settings
from typing_extensions import override

from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import copy_names, other_copy
from distbelief.protocol import StartTraining
from distbelief.protocol.role import Address, Computed, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import CutOff, Fault, Kill
from sandblaster.chunks import COORDINATOR
from sandblaster.optimizers.base import Runnable
from sandblaster.optimizers.lbfgs import LBFGS
from tests.simulation.invariants import is_whole, shard_in
from tests.simulation.random_faults import message_faults
from tests.simulation.sandblasts import Sandblast, bits_of, tensors_of
from tests.simulation.scene import Check


METHOD = LBFGS(history=3, max_iterations=8, tolerance=1e-12)
BOUNDED = replace_settings(METHOD, bounds="of the test")


@dataclass(kw_only=True, eq=False)
class CopiedSandblast(Sandblast):
    """Attributes: `kills`, when and how a copy dies; each once all copies are in sync again."""

    n_copies: int = 2
    method: Runnable = METHOD
    await_begin: bool = True
    kills: Sequence[tuple[Seconds, int, bool, int | None]] = ()
    restarts_coordinator: bool = False  # afterwards; a primary dies with it
    n_compared: int = field(default=0, init=False)

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        return (*super().checks(cluster), self._compare_copies)

    def copies(self, index: int) -> list[Shard]:
        names = copy_names(index, 2)
        shards = [
            shard_in(self.cluster.role(name)) for name in names if self.cluster.is_alive(name)
        ]
        return [shard for shard in shards if shard is not None]

    def primary(self, index: int) -> Shard:
        name = self.overseer.elections[self.shards[index]].primary
        assert name is not None
        shard = shard_in(self.cluster.role(name))
        assert shard is not None
        return shard

    def _compare_copies(self, happening: HandledEvent) -> None:
        shard = shard_in(happening.role)
        if shard is None or shard._work is not None:
            return
        for other in self.copies(shard._config.index):
            election = self.overseer.elections[Address(other._name)]
            is_pair = other is not shard and election.in_sync and is_whole(other)
            if not is_pair or other._work or other._values.position != shard._values.position:
                continue
            one, two = (each._commands._vector_store.export() for each in (shard, other))
            assert one.keys() == two.keys()
            for name, vector in one.items():
                assert vector.tobytes() == two[name].tobytes(), f"copies differ in {name}"
            assert shard.values.vector.tobytes() == other.values.vector.tobytes()
            self.n_compared += 1

    @property
    def is_in_sync(self) -> bool:
        return all(election.in_sync for election in self.overseer.elections.values())

    def _ended(self) -> bool:
        return COORDINATOR in self.cluster.halted

    @override
    def play(self, *, within: Seconds = 120.0) -> None:
        self.run_until(lambda: self.is_in_sync, within=5.0)
        self._begin()
        for wait, index, hits_primary, after_actions in self.kills:
            self.wait(wait)
            if self._ended():
                break
            names = copy_names(index % self.n_shards, 2)
            primary = self.overseer.elections[names[0]].primary
            victim = next(name for name in names if (name == primary) is hits_primary)
            kill = Kill(at=self.now, role=victim, after_actions=after_actions)
            self.cluster.inject(kill)
            life = self.cluster.incarnation(victim)
            self.run_until(
                lambda v=victim, n=life: self.cluster.incarnation(v) > n or self._ended(),  # type: ignore[misc]
                within=10.0,
            )
            self.checker.sights["primaries killed" if hits_primary else "backups killed"] += 1
            self.run_until(lambda: self.is_in_sync or self._ended(), within=10.0)
        if self.restarts_coordinator and not self._ended():
            kill = Kill(at=self.now, role=COORDINATOR, restart_after=0.02)
            self.cluster.inject(kill)
            primary = self.overseer.elections[self.shards[0]].primary
            assert primary is not None
            self.cluster.inject(Kill(at=self.now, role=primary))
            self.run_until(lambda: self.cluster.incarnation(COORDINATOR) > 1, within=10.0)
            self.checker.sights["coordinators restarted"] += 1
            self._begin()
        super().play(within=within)

    def _begin(self) -> None:
        for name in (COORDINATOR, *self.replicas):
            self.tell(name, StartTraining())

    @property
    @override
    def bits(self) -> bytes:
        vectors = {k: self.primary(k).values.vector for k in range(self.n_shards)}
        return bits_of(tensors_of(self.layout, vectors))


@cache
def alone(n_shards: int, *, bounded: bool = False) -> tuple[bytes, tuple[float, ...]]:
    """Return where a run on shards of one copy ends, and its losses."""
    run = Sandblast(n_shards=n_shards, n_replicas=1, method=BOUNDED if bounded else METHOD)
    run.play()
    return run.bits, tuple(run.checker.losses)


def drawn(seed: int) -> CopiedSandblast:
    """Return what a seed stands for."""
    stream = np.random.default_rng([seed, 0xC0B1E])
    n_shards, n_replicas = int(stream.integers(1, 3)), int(stream.integers(1, 4))
    kills = [
        (
            float(stream.uniform(0.0, 0.1)),
            int(stream.integers(2)),
            bool(stream.random() < 0.75),
            int(stream.integers(5)) if stream.random() < 0.6 else None,
        )
        for _ in range(int(stream.integers(1, 5)))
    ]
    faults: Sequence[Fault] = ()
    if stream.random() < 0.3:
        faults = tuple(message_faults(stream, horizon=1.0, intensity=0.3))
    return CopiedSandblast(
        seed=seed,
        n_shards=n_shards,
        n_replicas=n_replicas,
        hosts=str(stream.choice(["one", "own"])),
        speeds=tuple(float(s) for s in stream.choice([1.0, 0.5, 0.2], size=n_replicas)),
        latency_seconds=float(stream.choice([2e-5, 2e-4, 2e-3])),
        suspect_seconds=0.3,
        kills=kills,
        restarts_coordinator=bool(stream.random() < 0.25),
        faults=faults,
        saves=(0.3,) if stream.random() < 0.3 else (),
    )


def play(scene: CopiedSandblast) -> CopiedSandblast:
    """Play a scenario under every check; return the run."""
    run = replace(scene)
    run.play()
    values, losses = alone(run.n_shards, bounded=run.method == BOUNDED)
    first = (run.cluster.incarnation(COORDINATOR) << 12) + 1
    assert run.coordinator.status()[1]["series"] == first, "the run was begun again"
    assert run.bits == values, "it has ended somewhere else"
    assert list(dict.fromkeys(run.checker.losses)) == list(losses), "losses of another run"
    assert run.n_compared, "no copies were compared"
    return run


# ---------------------------------------------------------------------------- directed


def executes(happening: HandledEvent) -> bool:
    done = isinstance(happening.event, Computed) and happening.event.name == "command"
    return done and happening.name == "shard-0"


def stages(happening: HandledEvent) -> bool:
    done = isinstance(happening.event, Computed) and happening.event.name == "collect"
    return done and happening.name == "shard-0"


SMALL = CopiedSandblast(n_shards=1, n_replicas=2)
SHARD = Address("shard-0")


@cache
def dies_with_a_command() -> CopiedSandblast:
    """The primary dies as soon as it has executed a command that only it has."""
    return replace(SMALL, faults=(Kill(at=SMALL.moments(executes)[2] + 1e-6, role=SHARD),))


@cache
def dies_with_a_chunk() -> CopiedSandblast:
    """The primary dies as soon as it has staged a chunk that only it has."""
    return replace(SMALL, faults=(Kill(at=SMALL.moments(stages)[2] + 1e-6, role=SHARD),))


@cache
def dies_with_what_it_sent() -> CopiedSandblast:
    """The primary dies soon after commands that never reached its backup."""
    at = SMALL.moments(executes)[0] - 1e-6
    cut = CutOff(at=at, a=SHARD, b=other_copy(SHARD), seconds=0.05, loses=True)
    return replace(SMALL, faults=(cut, Kill(at=at + 5e-3, role=SHARD)))


@cache
def resumes_after_a_takeover() -> CopiedSandblast:
    """A backup joins in the series and takes over, while the coordinator restarts."""
    return CopiedSandblast(
        n_shards=1,
        n_replicas=2,
        speeds=(0.2, 0.2),
        kills=((0.1, 0, False, None),),
        restarts_coordinator=True,
    )


DIRECTED = (
    dies_with_a_command,
    dies_with_what_it_sent,
    dies_with_a_chunk,
    resumes_after_a_takeover,
)
