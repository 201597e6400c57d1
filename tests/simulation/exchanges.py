"""What must hold where workers wait for each other or shards fold rounds, and broken variants.

Gated        nobody begins a tick more than `staleness` ahead of the others    SSP-1, E3
ReadsOwn     what a gated worker reads contains all its own pushes             SSP-4, E4
ReadsOld     and all pushes that the others made `staleness` ticks ago         SSP-3
FloorRises   the floor falls in no incarnation of a primary                    SSP-8
OneShare     each local step counts once; the shares of a round add up to one  E2, PA-3
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import numpy as np
from typing_extensions import override

from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ParameterClient, ShardLink
from distbelief.parameter_server.codecs import Threshold, TopK
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.replication import Backup, Primary, Replicated
from distbelief.parameter_server.sessions import Session, Sessions
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.ticks import Floor, ShardTicks
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Action, Address, PeerLost, Seconds
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Duplicate, Fault, Slow
from distbelief.simulation.machines import TraceKind
from distbelief.simulation.network import Link
from distbelief.worker.exchange import LocalSteps
from tests.simulation import invariants as iv
from tests.simulation.invariants import Invariant, Seen
from tests.simulation.marks import together
from tests.simulation.scenarios import Scenario, play, scenario_of
from tests.simulation.variants import Patch, Variants, Whole
from tests.simulation.workers import N_MARKS, PLACES, PLAIN, Worker, marks_of


# Marks are ones, which these codecs send at once, and as they are.
ON_MARKS: Final = (None, Threshold(tau=1.0), TopK(share=0.2), TopK(share=0.2, bits=2))


def policy_of(seed: int) -> ExchangePolicy:
    """Return a random valid policy: local steps, waits, rounds, weights, damping, codecs."""
    stream = np.random.default_rng([seed, 25])

    def pick(*values: object) -> object:
        return values[int(stream.integers(len(values)))]

    while True:
        # AD-4: three of four are enough.
        some = {"quorum": pick(0.75, 0.5, 0.01), "grace_seconds": pick(0.0, 0.0, 0.01, 0.1)}
        drawn = {
            "every": pick(1, 2, 3),
            "send": pick("gradient", "delta"),
            "staleness": pick(None, None, 0, 0, 1, 3),
            "round": pick(None, None, {}, {}, some, some),
            "weight": pick("sum", "sum", "mean", "samples"),
            "damping": pick("none", "none", "none", "inverse", "excess"),
            "numbers": pick("float32", "float32", "bfloat16"),
        }
        try:
            policy = msgspec.convert(drawn, ExchangePolicy)
        except msgspec.ValidationError:
            continue
        if policy.numbers == "float32":
            return policy
        more = np.random.default_rng([seed, 39])  # the scenarios of former seeds stay
        codec = ON_MARKS[int(more.integers(len(ON_MARKS)))]
        fetch = "changed" if more.integers(2) else None
        return msgspec.structs.replace(policy, push=codec, fetch=fetch)


def is_plain(policy: ExchangePolicy) -> bool:
    """Whether each push is applied as it is, so that marks tell how often."""
    return policy.weight == "sum" and policy.damping == "none"


# ------------------------------------------------------------------------- invariants


class Gated(Invariant):
    """Nobody begins a tick more than `staleness` ahead of another that is in.

    What a worker reads then contains every push that ended a tick `staleness` or more ago.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._begun: dict[tuple[Address, int], int] = {}
        # Lives without which others went on: their pushes may be late, at any tick.
        self._left_out: set[tuple[Address, int]] = set()

    @override
    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        index, cluster = self.seen.shards[happening.name], self.seen.cluster
        for session in shard._sessions._clients.values():
            worker = cluster.role(session.name)
            if not session.is_in or cluster.incarnation(session.name) != session.incarnation:
                continue
            assert isinstance(worker, Worker)
            link = worker.client._links[index]
            ended = link.ticks.ended
            is_known = ended is not None and session.confirmed <= link.pushing.settled
            if is_known and (session.tick or 0) > (ended or 0):
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
        is_current = happening.incarnation == self.seen.cluster.incarnation(happening.name)
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
        is_current = happening.incarnation == self.seen.cluster.incarnation(happening.name)
        return worker.begun > before and worker._policy.staleness is not None and is_current

    def _others(self, name: Address) -> Iterator[Worker]:
        """Yield the other workers that all serving shards know to be in, from no earlier life."""
        seen = self.seen
        if seen.forgetful or len(seen.serves) < len(seen.versions):
            return  # a shard that has lost pushes has lost their ticks
        for other in seen.workers:
            if other != name and all(
                self._is_in(other, leader) for leader in seen.leaders.values()
            ):
                role = seen.cluster.role(other)
                assert isinstance(role, Worker)
                life = other, seen.cluster.incarnation(other)
                is_placed = role.client._ticks.ended is not None and life not in self._left_out
                if is_placed and self._has_heard(role):
                    yield role

    def _has_heard(self, worker: Worker) -> bool:
        """Return whether it knows what the shards know; of a takeover it may hear late."""
        return all(
            link.is_open and link.primary.term == self.seen.leads_as[index][-1]
            for index, link in worker.client._links.items()
        )

    def _is_in(self, name: Address, leader: Address) -> bool:
        cluster = self.seen.cluster
        if not (cluster.is_alive(leader) and cluster.is_alive(name)):
            return False
        session = self.seen.shard(leader)._sessions.get(name)
        return (
            session is not None
            and session.is_in
            and session.incarnation == cluster.incarnation(name)
        )


class ReadsOwn(Invariant):
    """An installed fetch of a gated worker contains all its own pushes."""

    @override
    def installed(self, worker: Worker, happening: HandledEvent) -> None:
        if worker._policy.staleness is None or self.seen.forgetful:
            return
        if happening.incarnation < self.seen.cluster.incarnation(happening.name):
            return
        _check_read(worker, [mark for _, mark in worker.marks], f"{happening.name}'s own")


def _check_read(worker: Worker, marks: list[int], whose: str) -> None:
    for part in np.split(worker.fetched.numpy(), worker._layout.n_shards):
        assert len(part) == N_MARKS
        missing = [mark for mark in marks if part[PLACES[mark]] == 0.0]
        assert not missing, f"read without pushes {missing}, {whose}"


class FloorRises(Invariant):
    """The floor falls in no incarnation of a primary, and is at most the least tick."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._floors: dict[tuple[Address, int], int] = {}

    @override
    def shard(self, shard: Shard, happening: HandledEvent) -> None:
        sessions = shard._sessions
        life = happening.name, happening.incarnation
        floor, before = sessions.floor.value, self._floors.get(life, 0)
        assert floor >= before, f"the floor of {life} fell from {before} to {floor}"
        self._floors[life] = floor


class OneShare(Invariant):
    """A mark, once in the values of a primary, stays as it is: no push counts twice.

    All marks of a push have one share. Those of a round that is averaged add up to one.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self._before: dict[tuple[Address, int], Vector] = {}

    @override
    def computed(self, shard: Shard, happening: HandledEvent) -> None:
        if self.seen.serving(happening) is None:
            return
        life, marks = (happening.name, happening.incarnation), marks_of(shard)
        before = self._before.get(life)
        self._before[life] = marks.copy()
        if before is None:
            return
        again = np.flatnonzero((before != 0.0) & (before != marks))
        assert not len(again), f"{happening.name} applies the push of mark {again[0]} again"
        if not (marks != before).any():
            return
        shares: list[float] = []
        for of_push in self.seen.ledger.pushes:
            new = {float(marks[mark]) for mark in of_push if marks[mark] != before[mark]}
            assert len(new) <= 1, f"{happening.name} applies parts of a push: {new}"
            shares += new
        policy = shard._sessions._config.policy
        if policy.round and policy.weight != "sum" and not shard.values.state:
            assert abs(sum(shares) - 1.0) < 1e-5, f"a round of {happening.name}: {shares}"


VARIANTS: Final = Variants[int]()
WAITING: Final = (Gated, ReadsOwn, FloorRises, OneShare)


def kinds_for(policy: ExchangePolicy) -> list[type[Invariant]]:
    # Whole pushes only: the marks are 0 or 1.
    return [kind for kind in (*iv.ALL, *WAITING) if is_plain(policy) or kind is not iv.ExactlyOnce]


def play_any(seed: int, *, trace: TraceKind = "order") -> Scenario:
    """Play the scenario of a seed under a policy drawn from it, perhaps with more roles.

    Shards fold different rounds only where some workers are late here, and others there.
    """
    scenario = scenario_of(seed)
    stream = np.random.default_rng([seed, 26])
    scenario = replace(
        scenario,
        n_workers=scenario.n_workers + int(stream.choice([0, 0, 1, 2])),
        n_shards=scenario.n_shards + int(stream.choice([0, 0, 0, 1])),
    )
    return play_under(policy_of(seed), scenario, trace=trace)


def play_under(
    policy: ExchangePolicy, scenario: Scenario, *, trace: TraceKind = "order"
) -> Scenario:
    return play(replace(scenario, policy=policy, kinds=kinds_for(policy)), trace=trace)


# ------------------------------------------------------------------- broken variants


LOST_SECONDS: Final = 0.05  # until the shards hear of a death
FIRST: Final = Address("worker-0")


def quartet(policy: ExchangePolicy, *faults: Fault, seed: int = 0, n_wanted: int = 8) -> Scenario:
    """Return four workers, two shards, no fault but those given."""
    return replace(
        scenario_of(seed),
        policy=policy,
        kinds=kinds_for(policy),
        n_workers=4,
        n_shards=2,
        n_twins=1,
        n_wanted=n_wanted,
        hosts=together,
        rule=PLAIN,
        shard_bytes_per_second=1e10,
        link=Link(latency_seconds=50e-6, jitter=1.0),
        faults=faults,
        saves=(),
        trace="order",
    )


def lose_first(scene: Scenario, *, at: Seconds) -> None:
    """Kill the first worker, and tell the shards as a supervisor would."""
    scene.cluster.run(until=at)
    scene.cluster.kill(FIRST)
    scene.wait(LOST_SECONDS)
    for name in scene.shards:
        scene.cluster.post(name, PeerLost(peer=FIRST, incarnation=1, reason="it is dead"))


def end(scene: Scenario, *, but: Address | None = None) -> None:
    """Run until all workers but this one have ended."""
    scene.run_until(partial(scene.done, but=but), within=5.0)


def without_one(policy: ExchangePolicy, *, at: Seconds = 0.032) -> None:
    """Let one of four workers die for good, in mid-step; the others end."""
    scene = quartet(policy)
    lose_first(scene, at=at)
    end(scene, but=FIRST)


def with_late_messages() -> None:
    """Let three of four workers end early, while what they said comes twice, and late."""
    late = Duplicate(probability=0.7, seconds_max=0.3)
    slow = Slow(at=0.0, role=FIRST, factor=6.0, seconds=1e6)
    end(quartet(ExchangePolicy(send="delta", staleness=1), late, slow))


@VARIANTS()
def the_gone_hold_the_floor(patch: Patch) -> None:
    """A worker that is gone counts like one that is there."""
    patch.setattr(Session, "is_in", property(lambda self: self.tick is not msgspec.UNSET))


@VARIANTS(caught_by=15)
def idle_workers_hold_the_floor(patch: Patch) -> None:
    """A worker that has nothing to do does not say so."""
    patch.setattr(ParameterClient, "leave", lambda *_: [])


@VARIANTS(caught_by=1)
def own_pushes_are_not_awaited(patch: Patch) -> None:
    """A tick begins before the worker's own last push is applied."""
    links = property(
        lambda self: all(
            link.is_open and link.ticks.agrees and not link.ticks.waits_for_floor
            for link in self._counting
        )
    )
    patch.setattr(ParameterClient, "may_begin", links)


@VARIANTS(caught_by=1)
def no_gate(patch: Patch) -> None:
    """A worker begins whatever the floor is."""
    patch.setattr(ShardTicks, "waits_for_floor", False)


@VARIANTS.replacing(Sessions, "_enter", caught_by=1)
def reopened_sessions_tell_no_tick(
    whole: Whole[None], self: Sessions, client: Session, request: pf.OpenSession, now: Seconds
) -> None:
    """A shard that has restarted takes a worker's tick from its snapshot."""
    whole(self, client, msgspec.structs.replace(request, tick=client.tick), now)


@VARIANTS(caught_by=25)
def floor_rises_before_clients_are_back(patch: Patch) -> None:
    """After a takeover the floor is that of the clients that came first."""
    never = property(lambda _: False, lambda *_: None)
    patch.setattr(Floor, "awaits_clients", never, raising=False)


@VARIANTS.replacing(Sessions, "_enter")
def late_open_session_enters_again(
    whole: Whole[None], self: Sessions, client: Session, request: pf.OpenSession, now: Seconds
) -> None:
    """A client that has left is in again when an old message arrives."""
    client.attendance.changes = 0
    whole(self, client, request, now)


@VARIANTS(caught_by=1)
def floor_is_told_once(patch: Patch) -> None:
    """A client does not ask again for a floor that it was never told."""
    waits = property(
        lambda self: not self.is_open or not self.fetching.complete or bool(self.pushing.in_flight)
    )
    patch.setattr(ShardLink, "_is_waiting", waits)


@VARIANTS(caught_by=176)
def round_waits_for_gated_clients(patch: Patch) -> None:
    """A round waits for clients that wait for a push in it."""
    patch.setattr(Floor, "is_gated", lambda *_: False)


@VARIANTS.replacing(Sessions, "_take_queued", caught_by=4)
def push_counts_twice_in_a_round(whole: Whole[None], self: Sessions, now: Seconds) -> None:
    """The first push of a round is in it twice."""
    whole(self, now)
    if len(self._round) > 1:
        self._round.insert(1, self._round[0])


@VARIANTS(caught_by=9)
def round_is_acknowledged_push_by_push(patch: Patch) -> None:
    """A push is acknowledged when it is added to its round, which is not applied yet."""

    def confirm(self: Primary, *, here: bool = False) -> list[Action]:
        actions: list[Action] = []
        while self._outstanding:
            first = self._outstanding[0]
            if not (first.applied and (here or first.acknowledged)):
                break
            self._outstanding.popleft()
            assert first.push is not None
            client = first.push.client
            client.n_unconfirmed += not first.is_last  # it is not counted yet
            actions.append(self._sessions.confirm(first.push))
        return actions

    patch.setattr(Primary, "_confirm_finished", confirm)


@VARIANTS(caught_by=17)
def half_a_round_is_taken_over(patch: Patch) -> None:
    """A new primary goes on with the round that the former one had begun."""
    patch.setattr(ShardStore, "drop_round", lambda _: None)


@VARIANTS.replacing(Backup, "end_push", caught_by=17)
def backup_counts_half_a_round(whole: Whole[list[Action]], self: Backup) -> list[Action]:
    """The backup notes each push of a round as applied when it is added."""
    assert isinstance(self._applying, Replicated)
    record = self._applying.message.client
    self.clients[record.name] = record
    return whole(self)


@VARIANTS(caught_by=107)
def other_work_comes_between_the_pushes_of_a_round(patch: Patch) -> None:
    """A round is not finished before a snapshot or a state block is taken."""
    patch.setattr(Sessions, "is_in_round", False)


@VARIANTS(caught_by=107)
def backup_joins_in_mid_round(patch: Patch) -> None:
    """The backup gets the rest of a round whose first push it has missed."""
    always = property(lambda _: True, lambda *_: None)
    patch.setattr(Primary, "_replicates_round", always, raising=False)


@VARIANTS.replacing(Sessions, "_take_queued", caught_by=4)
def round_is_folded_in_order_of_arrival(whole: Whole[None], self: Sessions, now: Seconds) -> None:
    """The pushes of a round are added as they came."""
    arrived = list(self.queue)
    whole(self, now)
    if self._config.policy.round is not None:
        taken = sorted(self._round, key=lambda one: arrived.index(one.client.name))
        shares = [push.share for push in self._round]
        self._round.clear()
        self._round += [
            replace(one, share=msgspec.structs.replace(one.share, n_to_follow=share.n_to_follow))
            for one, share in zip(taken, shares, strict=True)
        ]


@VARIANTS.replacing(Sessions, "take_push", caught_by=4)
def late_push_is_dropped(
    whole: Whole[list[Action]], self: Sessions, client: Session, message: pf.Push
) -> list[Action]:
    """A push that comes after its round has ended is acknowledged, and not applied."""
    others = [one.tick or 0 for one in self._clients.values() if one.is_in]
    is_late = message.tick is not msgspec.UNSET and (message.tick or 0) <= max(others, default=0)
    if self._config.policy.round is None or not is_late or client.n_unconfirmed:
        return whole(self, client, message)
    client.watermark = max(client.watermark, message.sequence)
    client.count_confirmed(message, staleness=0)
    self._note(client)
    return [self._push_applied(client)]


@VARIANTS(caught_by=2)
def delta_is_sent_again(patch: Patch) -> None:
    """The anchor stays at a push, so that the next one contains its steps, too."""
    patch.setattr(LocalSteps, "pushed", lambda *_, **__: None)


@VARIANTS.replacing(LocalSteps, "hold", caught_by=13)
def torn_install_holds_anew(whole: Whole[None], self: LocalSteps) -> None:
    """What is kept of local steps is taken again from the mixture that a torn fetch leaves."""
    self._is_held = False
    whole(self)


@VARIANTS.replacing(LocalSteps, "merge", caught_by=8)
def fetch_overwrites_local_steps(whole: Whole[None], self: LocalSteps) -> None:
    """Steps since the push are lost at the next fetch: a fault of Dpplee3."""
    self._has_moved = False
    whole(self)


@VARIANTS.replacing(LocalSteps, "restart")
def inner_state_is_kept_across_a_lost_anchor(whole: Whole[None], self: LocalSteps) -> None:
    """Velocity and moments outlive the steps that are dropped with the values they began from."""
    inner = self._inner
    assert inner is not None
    state = inner._optimizer
    whole(self)
    inner._optimizer = state
