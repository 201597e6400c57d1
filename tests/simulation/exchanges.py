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

from distbelief.parameter_server.client.client import ParameterClient, ShardLink
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.replication import Backup, Primary
from distbelief.parameter_server.sessions import Session, Sessions
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.store import ShardStore
from distbelief.protocol import push_fetch as pf
from distbelief.roles.role import Action, Address
from distbelief.simulation.driver import HandledEvent
from tests.simulation import invariants as iv
from tests.simulation.invariants import Invariant, Scene
from tests.simulation.variants import Patch, Variant
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


class Gated(Invariant):
    """Nobody begins a tick more than `staleness` ahead of another that is in.

    What a worker reads then contains every push that ended a tick `staleness` or more ago.
    """

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._begun: dict[tuple[Address, int], int] = {}
        # Lives without which others went on: their pushes may be late, at any tick.
        self._left_out: set[tuple[Address, int]] = set()

    @override
    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        index, cluster = self.scene.shards[happening.name], self.scene.cluster
        for session in shard._sessions._clients.values():
            worker = cluster.role(session.name)
            if not session.is_in or cluster.incarnation(session.name) != session.incarnation:
                continue
            assert isinstance(worker, Worker)
            pushing = worker.client._links[index].pushing
            is_known = pushing.tick is not None and session.confirmed <= pushing.settled
            if is_known and (session.tick or 0) > (pushing.tick or 0):
                self._left_out.add((session.name, session.incarnation))

    @override
    def worker(self, worker: Worker, happening: HandledEvent) -> None:
        if not self._begins(worker, happening):
            return
        staleness = worker._policy.staleness or 0
        for other in self._others(happening.name):
            behind = worker.client.tick - other.client.tick
            assert behind <= staleness, f"{happening.name} begins, {behind} ahead of another"

    @override
    def installed(self, worker: Worker, happening: HandledEvent) -> None:
        staleness = worker._policy.staleness
        is_current = happening.incarnation == self.scene.cluster.incarnation(happening.name)
        if staleness is None or not is_current:
            return
        for other in self._others(happening.name):
            floor = worker.client.tick - staleness
            old = [mark for mark, tick in other.ticks.items() if 0 < tick <= floor]
            _check_read(worker, old, f"another's, at tick {worker.client.tick}")

    def _begins(self, worker: Worker, happening: HandledEvent) -> bool:
        """Return whether it has just begun a tick that others can hold up."""
        life = happening.name, happening.incarnation
        before = self._begun.setdefault(life, 0)
        self._begun[life] = worker.begun
        is_current = happening.incarnation == self.scene.cluster.incarnation(happening.name)
        return worker.begun > before and worker._policy.staleness is not None and is_current

    def _others(self, name: Address) -> Iterator[Worker]:
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
                life = other, scene.cluster.incarnation(other)
                is_placed = role.client._tick is not None and life not in self._left_out
                if is_placed and self._has_heard(role):
                    yield role

    def _has_heard(self, worker: Worker) -> bool:
        """Return whether it knows what the shards know; of a takeover it may hear late."""
        return all(
            link.is_open and link.term == self.scene.leads_as[index][-1]
            for index, link in worker.client._links.items()
        )

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


class ReadsOwn(Invariant):
    """An installed fetch of a gated worker contains all its own pushes."""

    @override
    def installed(self, worker: Worker, happening: HandledEvent) -> None:
        if worker._policy.staleness is None or self.scene.forgetful:
            return
        if happening.incarnation < self.scene.cluster.incarnation(happening.name):
            return
        _check_read(worker, [mark for _, mark in worker.marks], f"{happening.name}'s own")


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


WAITING: Final = (Gated, ReadsOwn, FloorRises, OneEach)

_BY_MARKS: Final = {iv.ExactlyOnce, iv.AcknowledgedIsKept, iv.MissingIsCounted}
"""They count marks, each of which must be a whole push."""


def kinds_for(policy: ExchangePolicy) -> list[type[Invariant]]:
    return [kind for kind in (*iv.ALL, *WAITING) if is_plain(policy) or kind not in _BY_MARKS]


# ------------------------------------------------------------------- broken variants


def the_gone_hold_the_floor(patch: Patch) -> None:
    """A worker that is gone counts like one that is there."""
    patch.setattr(Session, "is_in", property(lambda self: self.tick is not msgspec.UNSET))


def idle_workers_hold_the_floor(patch: Patch) -> None:
    """A worker that has nothing to do does not say so."""
    patch.setattr(ParameterClient, "leave", lambda *_: [])


def own_pushes_are_not_awaited(patch: Patch) -> None:
    """A tick begins before the worker's own last push is applied."""
    links = property(
        lambda self: all(link.agrees and not link.waits_for_floor for link in self._counting)
    )
    patch.setattr(ParameterClient, "may_begin", links)


def no_gate(patch: Patch) -> None:
    """A worker begins whatever the floor is."""
    patch.setattr(ShardLink, "waits_for_floor", False)


def ticks_count_on_arrival(patch: Patch) -> None:
    """A tick counts as ended before its push is applied."""
    whole = Sessions.take_push

    def take_push(self: Sessions, client: Session, message: pf.Push) -> list[Action]:
        if client.tick is not msgspec.UNSET:
            client.tick = max(client.tick, message.tick or 0)
        return whole(self, client, message)

    patch.setattr(Sessions, "take_push", take_push)


def reopened_sessions_tell_no_tick(patch: Patch) -> None:
    """A shard that has restarted takes a worker's tick from its snapshot."""
    whole = Sessions._enter

    def enter(self: Sessions, client: Session, request: pf.OpenSession) -> None:
        whole(self, client, msgspec.structs.replace(request, tick=client.tick))

    patch.setattr(Sessions, "_enter", enter)


def floor_rises_before_clients_are_back(patch: Patch) -> None:
    """After a takeover the floor is that of the clients that came first."""
    never = property(lambda _: False, lambda *_: None)
    patch.setattr(Sessions, "awaits_clients", never, raising=False)


def late_open_session_enters_again(patch: Patch) -> None:
    """A client that has left is in again when an old message arrives."""
    whole = Sessions._enter

    def enter(self: Sessions, client: Session, request: pf.OpenSession) -> None:
        client.entries = 0
        whole(self, client, request)

    patch.setattr(Sessions, "_enter", enter)


def floor_is_told_once(patch: Patch) -> None:
    """A client does not ask again for a floor that it was never told."""
    waits = property(
        lambda self: not self.is_open or not self.fetching.complete or self.pushing.waits
    )
    patch.setattr(ShardLink, "_is_waiting", waits)


def round_waits_for_gated_clients(patch: Patch) -> None:
    """A round waits for clients that wait for a push in it."""
    patch.setattr(Sessions, "_is_gated", lambda *_: False)


def push_counts_twice_in_a_round(patch: Patch) -> None:
    """The first push of a round is in it twice."""
    whole = Sessions._take_queued

    def take(self: Sessions) -> None:
        whole(self)
        if len(self._round) > 1:
            self._round.insert(1, self._round[0])

    patch.setattr(Sessions, "_take_queued", take)


def round_is_acknowledged_push_by_push(patch: Patch) -> None:
    """A push is acknowledged when it is added to its round, which is not applied yet."""

    def confirm(self: Primary, *, here: bool = False) -> list[Action]:
        actions: list[Action] = []
        while self._outstanding:
            first = self._outstanding[0]
            if not (first.applied and (here or first.acknowledged)):
                break
            self._outstanding.popleft()
            client = first.push.client
            client.n_unconfirmed += not first.is_last  # it is not counted yet
            actions.append(self._sessions.confirm(first.push))
        return actions

    patch.setattr(Primary, "_confirm_finished", confirm)


def half_a_round_is_taken_over(patch: Patch) -> None:
    """A new primary goes on with the round that the former one had begun."""
    patch.setattr(ShardStore, "drop_round", lambda _: None)


def backup_counts_half_a_round(patch: Patch) -> None:
    """The backup notes each push of a round as applied when it is added."""
    whole = Backup.end_push

    def end_push(self: Backup) -> list[Action]:
        assert self._applying is not None
        record = self._applying.message.client
        self.clients[record.name] = record
        return whole(self)

    patch.setattr(Backup, "end_push", end_push)


def other_work_comes_between_the_pushes_of_a_round(patch: Patch) -> None:
    """A round is not finished before a snapshot or a state block is taken."""
    patch.setattr(Sessions, "is_in_round", False)


def backup_joins_in_mid_round(patch: Patch) -> None:
    """The backup gets the rest of a round whose first push it has missed."""
    always = property(lambda _: True, lambda *_: None)
    patch.setattr(Primary, "_replicates_round", always, raising=False)


_ALL: Final[tuple[Variant, ...]] = (
    the_gone_hold_the_floor,
    idle_workers_hold_the_floor,
    own_pushes_are_not_awaited,
    no_gate,
    ticks_count_on_arrival,
    reopened_sessions_tell_no_tick,
    floor_rises_before_clients_are_back,
    late_open_session_enters_again,
    floor_is_told_once,
    round_waits_for_gated_clients,
    push_counts_twice_in_a_round,
    round_is_acknowledged_push_by_push,
    half_a_round_is_taken_over,
    backup_counts_half_a_round,
    other_work_comes_between_the_pushes_of_a_round,
    backup_joins_in_mid_round,
)

VARIANTS: Final = {variant.__name__.replace("_", " "): variant for variant in _ALL}
