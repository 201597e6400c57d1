"""What must hold where workers wait for each other or shards fold rounds, and broken variants.

Gated        nobody begins a tick more than `staleness` ahead of the others    SSP-1, E3
ReadsOwn     what a gated worker reads contains all its own pushes             SSP-4, E4
ReadsOld     and all pushes that the others made `staleness` ticks ago         SSP-3
FloorRises   the floor falls in no incarnation of a primary                    SSP-8
OneEach      a round has one push of each client, in the order of names        E5
"""

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from typing_extensions import override

from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.shard import Shard
from distbelief.roles.role import Address
from distbelief.simulation.driver import HandledEvent
from tests.simulation import invariants as iv
from tests.simulation.invariants import Invariant, Scene
from tests.simulation.workers import N_MARKS, PLACES, Worker


def policy_of(seed: int) -> ExchangePolicy:
    """Return a random policy that waits, folds rounds, weighs or damps."""
    draw = np.random.default_rng([seed, 25])
    staleness = (None, 0, 0, 1, 3)[draw.integers(5)]
    weight = ("sum", "sum", "mean", "samples")[draw.integers(4)]
    rounds, damping = None, "none"
    if draw.random() < 0.6:
        # AD-4: three of four are enough; without a gate nobody may wait for all.
        quorum = (0.75, 0.5, 0.01, 1.0, 1.0)[draw.integers(3 if staleness is None else 5)]
        rounds = {"quorum": quorum, "grace_seconds": (0.0, 0.0, 0.01, 0.1)[draw.integers(4)]}
    else:
        damping = ("none", "none", "inverse", "excess")[draw.integers(4)]
    table = {"staleness": staleness, "weight": weight, "damping": damping, "round": rounds}
    return msgspec.convert(table, ExchangePolicy)


def is_plain(policy: ExchangePolicy) -> bool:
    """Whether each push is applied as it is, so that marks tell how often."""
    return policy.weight == "sum" and policy.damping == "none"


# ------------------------------------------------------------------------- invariants


class Waiting(Invariant):
    """What the others look at."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._begun: dict[tuple[Address, int], int] = {}

    def begins(self, worker: Worker, happening: HandledEvent) -> bool:
        """Return whether it has just begun a tick that others can hold up."""
        life = happening.name, happening.incarnation
        before = self._begun.setdefault(life, 0)
        self._begun[life] = worker.begun
        is_current = happening.incarnation == self.scene.cluster.incarnation(happening.name)
        return worker.begun > before and worker._policy.staleness is not None and is_current

    def others(self, name: Address) -> Iterator[Worker]:
        """Yield the other workers that all serving shards know to be in, from no earlier life."""
        scene = self.scene
        if scene.forgetful or len(scene.serves) < len(scene.versions):
            return  # a shard that has lost pushes has lost their ticks
        for other in scene.workers:
            if other != name and all(
                self._is_in(other, leader) for leader in scene.leaders.values()
            ):
                role = scene.cluster.role(other)
                assert isinstance(role, Worker)
                yield role

    def _is_in(self, name: Address, leader: Address) -> bool:
        cluster = self.scene.cluster
        if not (cluster.is_alive(leader) and cluster.is_alive(name)):
            return False
        session = self.scene.shard(leader)._sessions.get(name)
        return (
            session is not None
            and session.is_in
            and session.incarnation == cluster.incarnation(name)
        )


class Gated(Waiting):
    """Nobody begins a tick more than `staleness` ahead of another that is in."""

    @override
    def worker(self, worker: Worker, happening: HandledEvent) -> None:
        if not self.begins(worker, happening):
            return
        staleness = worker._policy.staleness or 0
        for other in self.others(happening.name):
            behind = worker.client.tick - other.client.tick
            assert behind <= staleness, f"{happening.name} begins, {behind} ahead of another"


class ReadsOwn(Invariant):
    """An installed fetch of a gated worker contains all its own pushes."""

    @override
    def installed(self, worker: Worker, happening: HandledEvent) -> None:
        if worker._policy.staleness is None or self.scene.forgetful:
            return
        if happening.incarnation < self.scene.cluster.incarnation(happening.name):
            return
        _check_read(worker, [mark for _, mark in worker.marks], f"{happening.name}'s own")


class ReadsOld(Waiting):
    """An installed fetch contains every push that ended a tick `staleness` or more ago."""

    @override
    def installed(self, worker: Worker, happening: HandledEvent) -> None:
        staleness = worker._policy.staleness
        is_current = happening.incarnation == self.scene.cluster.incarnation(happening.name)
        if staleness is None or not is_current:
            return
        for other in self.others(happening.name):
            floor = worker.client.tick - staleness
            old = [mark for mark, tick in other.ticks.items() if 0 < tick <= floor]
            _check_read(worker, old, f"another's, at tick {worker.client.tick}")


def _check_read(worker: Worker, marks: list[int], whose: str) -> None:
    for part in np.split(worker.values.numpy(), worker._layout.n_shards):
        assert len(part) == N_MARKS
        missing = [mark for mark in marks if part[PLACES[mark]] == 0.0]
        assert not missing, f"read without pushes {missing}, {whose}"


class FloorRises(Invariant):
    """The floor falls in no incarnation of a primary, and is at most the least tick."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._floors: dict[tuple[Address, int], int] = {}

    @override
    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        sessions = shard._sessions
        life = happening.name, happening.incarnation
        floor, before = sessions._floor, self._floors.get(life, 0)
        assert floor >= before, f"the floor of {life} fell from {before} to {floor}"
        self._floors[life] = floor


class OneEach(Invariant):
    """A round has one push of each client at most, in the order of their names."""

    @override
    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        sessions = shard._sessions
        if not sessions._config.policy.round or sessions.applying is None:
            return
        busy = [*sessions._folded, sessions.applying, *sessions._round]
        names = [push.client.name for push in busy]
        assert names == sorted(set(names)), f"{happening.name} folds {names}"


WAITING: Final = (Gated, ReadsOwn, ReadsOld, FloorRises, OneEach)

_BY_MARKS: Final = {iv.ExactlyOnce, iv.AcknowledgedIsKept, iv.MissingIsCounted}
"""They count marks, each of which must be a whole push."""


def kinds_for(policy: ExchangePolicy) -> list[type[Invariant]]:
    return [kind for kind in (*iv.ALL, *WAITING) if is_plain(policy) or kind not in _BY_MARKS]
