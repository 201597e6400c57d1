"""A client of shards with two copies: a push is applied once or counted as lost.

The test plays both copies, first by hand, then as `Pair`: a model that loses, repeats and delays
messages, fails over to the other copy, and dies and restores snapshots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.errors import JobError, PeerLostError, RemoteProtocolError
from distbelief.parameter_server.client.client import ClientConfig, ParameterClient
from distbelief.parameter_server.slices import HEADER_BYTES, push_buffer_bytes, push_buffer_views
from distbelief.protocol import (
    Fetch,
    Message,
    OpenSession,
    PrimaryChanged,
    Push,
    PushApplied,
    PushBlock,
    PushBlockAck,
    SessionOpened,
    SessionRefused,
)
from distbelief.roles.role import (
    Action,
    Address,
    PeerJoined,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
    TimerFired,
)
from distbelief.simulation.storage import HostMemory, LentMemory
from tests.distbelief.parameter_server.client.test_client import FIRST, LAYOUT, Alone, N, sent
from tests.distbelief.parameter_server.pair import SHARD, full_of, zeros_of


SECOND = Address("shard-0b")
BUSY = SessionRefused(reason="busy", for_good=False)


def alone_of(*, memory: Memory | None = None, welcome: bool = True) -> Alone:
    """A client that the first copy has welcomed as primary number 3, in its life 1."""
    alone = Alone(backups=[SECOND], memory=memory, welcome=False)
    if welcome:
        welcomed(alone, 3, SHARD)
    return alone


def welcomed(
    alone: Alone,
    number: int,
    sender: Address,
    *,
    life: int = 1,
    watermark: int = FIRST - 1,
    applied: int = 0,
    clock: int = 0,
    push_buffers_region: str = "",
    parameters_region: str = "",
) -> list[Action]:
    message = SessionOpened(
        shard_incarnation=number,
        clock=clock,
        samples=0,
        watermark=watermark,
        applied=applied,
        parameters_region=parameters_region,
        push_buffers_region=push_buffers_region,
    )
    return alone.receive(message, life=life, sender=sender)


def acknowledge(alone: Alone, sequence: int, number: int, *, sender: Address = SHARD) -> None:
    message = PushApplied(sequence=sequence, shard_incarnation=number, clock=1, staleness=0)
    assert alone.receive(message, sender=sender) == []


def receivers(actions: Sequence[Action], kind: type[Message]) -> list[Address]:
    return [
        action.receiver
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, kind)
    ]


def pushed(actions: Sequence[Action]) -> list[tuple[Address, int, int, float]]:
    """Receiver, sequence, number and largest value of each block that is sent."""
    return [
        (a.receiver, m.sequence, m.shard_incarnation, float(m.values.max()))
        for a in actions
        if isinstance(a, Send) and isinstance(m := a.message, PushBlock)
    ]


# ------------------------------------------------------------------------- by hand


def test_each_shard_has_a_backup_or_none_has() -> None:
    with pytest.raises(ValueError, match="2 backups are given for 1 shards"):
        Alone(backups=[SECOND, Address("shard-1b")])


def test_open_session_goes_to_both_copies_and_the_rest_to_the_primary() -> None:
    alone = alone_of(welcome=False)
    assert receivers(alone.greeting, OpenSession) == [SHARD, SECOND]
    assert receivers(alone.timer(0.5), OpenSession) == [SHARD, SECOND]
    welcomed(alone, 4, SECOND)
    assert alone.ready()
    actions = [*alone.push(), *alone.client.begin_fetch(0.0)]
    for kind in (PushBlock, Push, Fetch):
        assert receivers(actions, kind) == [SECOND]
    for copy in (SHARD, SECOND):
        assert alone.client.owns(Received(sender=copy, incarnation=1, message=BUSY))
        assert alone.client.owns(PeerJoined(peer=copy, incarnation=1))


def test_incarnations_of_copies_do_not_order_primaries() -> None:
    alone = alone_of()
    alone.push(7.0)
    actions = welcomed(alone, 4, SECOND, life=1, clock=2)
    assert pushed(actions) == [(SECOND, FIRST, 4, 7.0)]
    # A higher incarnation, a lower term.
    assert welcomed(alone, 3, SHARD, life=9) == []
    assert pushed(alone.push()) == [(SECOND, FIRST + 1, 4, 1.0)]


def test_messages_of_a_demoted_primary_have_no_effect() -> None:
    alone = alone_of()
    alone.push()
    alone.push()
    welcomed(alone, 5, SECOND)
    late: list[Message] = [
        PushApplied(sequence=FIRST, shard_incarnation=3, clock=9, staleness=0),
        PushBlockAck(sequence=FIRST, shard_incarnation=3, received=1),
        PrimaryChanged(shard_incarnation=3),
        PrimaryChanged(shard_incarnation=4),
        BUSY,
    ]
    for message in late:
        assert alone.receive(message, sender=SHARD) == []
    assert welcomed(alone, 3, SHARD, watermark=FIRST, applied=1) == []
    lost = PeerLost(peer=SHARD, incarnation=1, reason="killed")
    assert alone.client.handle(lost, 0.0) == []
    joined = PeerJoined(peer=SHARD, incarnation=2)
    assert alone.client.handle(joined, 0.0) == []
    assert alone.ready()
    assert alone.unacknowledged() == 2
    assert not alone.can_push()


def test_a_refusal_for_good_by_any_copy_counts() -> None:
    with pytest.raises(JobError, match="shard-0b refuses this client: other layout"):
        alone_of().receive(SessionRefused(reason="other layout", for_good=True), sender=SECOND)


def test_primary_changed_is_answered_with_one_open_session() -> None:
    alone = alone_of()
    alone.push()
    acknowledge(alone, FIRST, 3)
    alone.push()
    leading = PrimaryChanged(shard_incarnation=5)
    actions = alone.receive(leading, sender=SECOND)
    assert receivers(actions, OpenSession) == [SHARD, SECOND]
    assert [h.next_sequence for h in sent(actions, OpenSession)] == [FIRST + 1] * 2
    assert not alone.can_push()
    assert alone.receive(leading, sender=SECOND) == []
    # The old primary's SessionOpened comes too late, and so does its acknowledgement.
    assert welcomed(alone, 3, SHARD, watermark=FIRST, applied=1) == []
    acknowledge(alone, FIRST + 1, 3)
    assert not alone.ready()
    assert alone.unacknowledged() == 1
    welcomed(alone, 5, SECOND, watermark=FIRST, applied=1)
    assert alone.ready()
    assert alone.receive(leading, sender=SECOND) == []
    assert alone.client.counters()["pushes_lost"] == 0


def test_a_primary_whose_message_was_lost_is_found_by_the_timer() -> None:
    alone = alone_of()
    alone.push(2.0)
    actions = alone.timer(0.5)
    assert receivers(actions, PushBlock) == [SHARD]
    assert receivers(actions, OpenSession) == [SECOND]
    assert pushed(welcomed(alone, 5, SECOND)) == [(SECOND, FIRST, 5, 2.0)]


def test_a_primary_that_restarts_is_no_longer_primary() -> None:
    alone = alone_of()
    alone.push()
    actions = alone.client.handle(PeerJoined(peer=SHARD, incarnation=2), 0.0)
    assert receivers(actions, OpenSession) == [SHARD, SECOND]
    assert alone.receive(BUSY, sender=SECOND) == []
    assert welcomed(alone, 3, SHARD, life=1) == []  # of its former incarnation
    assert not alone.ready()
    welcomed(alone, 6, SHARD, life=2)
    assert alone.ready()


def test_a_shard_with_two_silent_copies_is_given_up_by_both_names() -> None:
    alone = alone_of(welcome=False)
    with pytest.raises(PeerLostError, match="shard-0 and shard-0b has been silent"):
        alone.wait(until=100.0)


@pytest.mark.parametrize("to_blocks", [True, False])
def test_pushes_in_flight_in_a_dead_primarys_buffers_are_copied_and_sent_again(
    *, to_blocks: bool
) -> None:
    host = HostMemory("h", n_bytes_max=1 << 20)
    first, second, mine = host.lend(), host.lend(), host.lend()
    first.create("slots-a", n_bytes=push_buffer_bytes(N, itemsize=8))
    slots_b = second.create("slots-b", n_bytes=push_buffer_bytes(N, itemsize=8))
    alone = alone_of(memory=mine, welcome=False)
    welcomed(alone, 3, SHARD, push_buffers_region="slots-a")
    alone.push(4.0)
    work = alone.client.stage(full_of(LAYOUT, 6.0), zeros_of(LAYOUT))
    first.release_all()  # it is dead, and the next incarnation has begun
    alone.receive(PrimaryChanged(shard_incarnation=4), sender=SECOND)
    region = "" if to_blocks else "slots-b"
    actions = welcomed(alone, 4, SECOND, push_buffers_region=region)
    assert [push.sequence for push in sent(actions, Push)] == [FIRST]
    assert not alone.can_push()
    assert host.n_bytes == 2 * push_buffer_bytes(N, itemsize=8)  # one is still being filled
    actions += alone.client.staged(work(), n_gradients=2, samples=8, now=0.0)
    assert host.n_bytes == push_buffer_bytes(N, itemsize=8)
    pushes = sent(actions, Push)
    assert [p.sequence for p in pushes] == [FIRST, FIRST + 1]
    assert {p.shard_incarnation for p in pushes} == {4}
    assert (pushes[1].n_gradients, pushes[1].samples) == (2, 8)
    if to_blocks:
        assert [values for *_, values in pushed(actions)] == [4.0, 6.0]
    else:
        views = push_buffer_views(slots_b, n_elements=N, dtype=LAYOUT.dtype)
        assert [views[s % 2].max() for s in (FIRST, FIRST + 1)] == [4.0, 6.0]
        assert alone.client.counters()["bytes_out"] == 2 * 8 * N


def test_memory_with_pushes_in_it_is_kept_until_there_is_somewhere_else() -> None:
    """The next primary's memory is not there at first, and then only half of it."""
    host = HostMemory("h", n_bytes_max=1 << 20)
    first, second, mine = host.lend(), host.lend(), host.lend()
    first.create("slots-a", n_bytes=push_buffer_bytes(N, itemsize=8))
    alone = alone_of(memory=mine, welcome=False)
    welcomed(alone, 3, SHARD, push_buffers_region="slots-a")
    alone.push(4.0)
    first.release_all()
    assert welcomed(alone, 4, SECOND, push_buffers_region="slots-b") == []
    n_bytes = HEADER_BYTES + 8 * N
    second.create("values-b", n_bytes=n_bytes)
    regions = {"parameters_region": "values-b", "push_buffers_region": "slots-b"}
    assert welcomed(alone, 4, SECOND, **regions) == []  # type: ignore[arg-type]
    assert not alone.ready()
    second.create("slots-c", n_bytes=8)
    with pytest.raises(RemoteProtocolError, match="a region of push buffers has 8 bytes"):
        welcomed(alone, 4, SECOND, push_buffers_region="slots-c")
    slots = second.create("slots-b", n_bytes=push_buffer_bytes(N, itemsize=8))
    (push,) = sent(welcomed(alone, 4, SECOND, **regions), Push)  # type: ignore[arg-type]
    assert (push.sequence, push.shard_incarnation) == (FIRST, 4)
    views = push_buffer_views(slots, n_elements=N, dtype=LAYOUT.dtype)
    assert views[FIRST % 2].max() == 4.0
    assert host.n_bytes == n_bytes + 8 + push_buffer_bytes(N, itemsize=8)


def test_a_fetch_from_a_dead_primarys_values_continues_with_the_next() -> None:
    host = HostMemory("h", n_bytes_max=1 << 20)
    first, second, mine = host.lend(), host.lend(), host.lend()
    for owner, name, clock in ((first, "a", 9), (second, "b", 7)):
        region = owner.create(name, n_bytes=HEADER_BYTES + 8 * N)
        region[:HEADER_BYTES].view(np.int64)[:2] = 2, clock
        region[HEADER_BYTES:].view(np.float64)[:] = clock
    alone = alone_of(memory=mine, welcome=False)
    welcomed(alone, 3, SHARD, clock=9, parameters_region="a")
    alone.client.begin_fetch(0.0)
    first.release_all()
    tensors = zeros_of(LAYOUT)
    outcome = alone.client.install(tensors)()  # as good as any older version
    assert (outcome.torn, outcome.clocks) == ((), (9,))
    welcomed(alone, 4, SECOND, clock=7, parameters_region="b")
    alone.client.installed(outcome, 0.0)
    assert alone.clocks() == (7,)  # staleness is counted by the clock of who leads
    assert host.n_bytes == HEADER_BYTES + 8 * N
    alone.client.begin_fetch(0.0)
    assert alone.client.install(tensors)().clocks == (7,)
    assert tensors[0].unique().tolist() == [7.0]


# ------------------------------------------------------------------------- a model


@dataclass
class Pair:
    """Both copies of a shard, as far as a client can observe them.

    `told` is how far pushes were acknowledged: both copies have those. A takeover keeps at least
    that; a restored snapshot may be older.
    """

    host: HostMemory
    shared: bool
    stream: np.random.Generator
    number: int = 1
    lives: dict[Address, int] = field(default_factory=lambda: {SHARD: 1, SECOND: 1})
    leader: Address = SHARD
    applied: list[tuple[int, float]] = field(default_factory=list)
    watermark: int = FIRST - 1
    told: int = 0  # how many of `applied`
    snapshot: int = 0  # the same

    def __post_init__(self) -> None:
        self.become_primary()

    def become_primary(self) -> None:
        self.memory: LentMemory = self.host.lend()
        self.values: dict[int, Vector] = {}  # by push buffer
        self.waits: set[int] = set()
        self.region = ""
        self.opened = False
        if self.shared:
            self.region = f"slots-{self.number}"
            n_bytes = push_buffer_bytes(N, itemsize=8)
            region = self.memory.create(self.region, n_bytes=n_bytes)
            views = push_buffer_views(region, n_elements=N, dtype=LAYOUT.dtype)
            self.values = dict(enumerate(views))

    def take_over(self) -> None:
        """The other copy leads: it has what was told, and perhaps more."""
        self._cut(int(self.stream.integers(self.told, len(self.applied) + 1)))
        self.lives[self.leader] += 1
        self.leader = SECOND if self.leader == SHARD else SHARD
        self._succeed()

    def restore(self) -> None:
        """Both died: a fresh life of either leads, from the newest snapshot."""
        self._cut(self.snapshot)
        self.lives[SHARD] += 1
        self.lives[SECOND] += 1
        if self.stream.random() < 0.5:
            self.leader = SECOND if self.leader == SHARD else SHARD
        self._succeed()

    def _cut(self, n_kept: int) -> None:
        del self.applied[n_kept:]
        self.told = min(self.told, n_kept)
        self.snapshot = min(self.snapshot, n_kept)
        self.watermark = self.applied[-1][0] if self.applied else FIRST - 1

    def _succeed(self) -> None:
        self.number += int(self.stream.integers(1, 3))
        self.shared = bool(self.stream.random() < 0.5)
        self.memory.release_all()  # as of a killed process
        self.become_primary()

    def answer(self, receiver: Address, message: Message) -> Message | None:
        if receiver != self.leader:
            return None
        if isinstance(message, OpenSession):
            self.opened = True
            self.watermark = max(self.watermark, message.next_sequence - 1)
            return self.welcome()
        assert isinstance(message, PushBlock | Push)
        if message.shard_incarnation != self.number or not self.opened:
            return SessionRefused(reason="open a session first", for_good=False)
        if message.sequence <= self.watermark:
            return self.acknowledge()
        assert message.sequence <= self.watermark + 2
        if isinstance(message, PushBlock):
            return self.take_block(message)
        return self.take(message.sequence)

    def take_block(self, block: PushBlock) -> Message:
        self.values[block.sequence % 2] = block.values.copy()
        return PushBlockAck(sequence=block.sequence, shard_incarnation=self.number, received=1)

    def take(self, sequence: int) -> Message | None:
        if sequence % 2 in self.values:  # else its block was lost
            self.waits.add(sequence)
        n_before = len(self.applied)
        while self.watermark + 1 in self.waits:
            self.watermark += 1
            values = self.values[self.watermark % 2]
            if not self.region:
                del self.values[self.watermark % 2]
            (value,) = set(np.unique(values)) - {0.0}  # padding is zero
            self.applied.append((self.watermark, float(value)))
        if len(self.applied) == n_before or self.stream.random() < 0.5:
            return None  # held: the other copy has not got it
        return self.acknowledge()

    def acknowledge(self) -> Message:
        self.told = len(self.applied)
        return PushApplied(
            sequence=self.watermark,
            shard_incarnation=self.number,
            clock=len(self.applied),
            staleness=0,
        )

    def welcome(self) -> Message:
        self.told = len(self.applied)
        return SessionOpened(
            shard_incarnation=self.number,
            clock=len(self.applied),
            samples=0,
            watermark=self.watermark,
            applied=len(self.applied),
            parameters_region="",
            push_buffers_region=self.region,
        )


class Run:
    """One client, one pair, and a network that loses, repeats and delays."""

    def __init__(self, seed: int, *, loss: float) -> None:
        self.stream = np.random.default_rng(seed)
        self.loss = loss
        host = HostMemory("h", n_bytes_max=20 * push_buffer_bytes(N, itemsize=8))
        self.pair = Pair(host, bool(self.stream.random() < 0.5), self.stream)
        self.client = ParameterClient(
            ClientConfig(pushes=True),
            layout=LAYOUT,
            shards=[SHARD],
            memory=host.lend(),
            backups=[SECOND],
        )
        self.now: Seconds = 0.0
        self.timer_at: Seconds | None = None
        self.to_pair: list[tuple[Address, Message]] = []
        self.to_client: list[Received | PeerLost | PeerJoined] = []
        self.issued: dict[int, float] = {}
        self.perform(self.client.start(1, 0.0))

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SetTimer):
                self.timer_at = action.at
            elif isinstance(action, Send) and self.stream.random() >= self.loss:
                self.to_pair.append((action.receiver, action.message))

    def say(self, message: Message) -> None:
        life = self.pair.lives[self.pair.leader]
        event = Received(sender=self.pair.leader, incarnation=life, message=message)
        while self.stream.random() >= self.loss:
            self.to_client.append(event)
            if self.stream.random() >= self.loss:
                break  # else it arrives once more

    def step(self, *, takeovers: bool, deaths: bool) -> None:
        match int(self.stream.integers(12)):
            case 0 | 1 | 2:
                self.push()
            case 3 | 4 | 5:
                self.answer(4)
            case 6 | 7 | 8:
                self.deliver(4)
            case 9:
                self.fire()
            case 10 if takeovers:
                self.change(self.pair.take_over)
            case 11 if deaths:
                if self.stream.random() < 0.5:
                    self.pair.snapshot = len(self.pair.applied)
                else:
                    self.change(self.pair.restore)

    def answer(self, n_messages: int = 1) -> None:
        """What the client says arrives in order; some of it did not leave at all."""
        for _ in range(min(n_messages, len(self.to_pair))):
            answer = self.pair.answer(*self.to_pair.pop(0))
            if answer is not None:
                self.say(answer)

    def change(self, happen: Callable[[], None]) -> None:
        leader = self.pair.leader
        life = self.pair.lives[leader]
        happen()
        self.tell(leader, life)

    def tell(self, before: Address, life: int) -> None:
        """Whatever may tell the client that another leads; or nothing does."""
        if self.stream.random() < 0.3:
            lost = PeerLost(peer=before, incarnation=life, reason="killed")
            self.to_client.append(lost)
        if self.stream.random() < 0.3:
            leader = self.pair.leader
            joined = PeerJoined(peer=leader, incarnation=self.pair.lives[leader])
            self.to_client.append(joined)
        if self.stream.random() < 0.5:
            self.say(PrimaryChanged(shard_incarnation=self.pair.number))

    def deliver(self, n_events: int = 1) -> None:
        """Deliver any of what is under way: of two copies, nothing is in order."""
        for _ in range(min(n_events, len(self.to_client))):
            index = int(self.stream.integers(len(self.to_client)))
            event = self.to_client.pop(index)
            self.perform(self.client.handle(event, self.now))

    def fire(self) -> None:
        if self.timer_at is not None:
            self.now, self.timer_at = max(self.now, self.timer_at), None
            actions = self.client.handle(TimerFired(name="client:0"), self.now)
            self.perform(actions)

    def push(self) -> None:
        if not self.client.can_push:
            return
        value = float(len(self.issued) + 1)
        work = self.client.stage(full_of(LAYOUT, value), zeros_of(LAYOUT))
        before = self.stream.random() < 0.5
        outcome = work() if before else None
        for _ in range(int(self.stream.integers(5))):
            self.step(takeovers=True, deaths=False)
        outcome = outcome or work()
        self.issued[FIRST + len(self.issued)] = value
        assert outcome.finite, "it read memory that nobody may read"
        actions = self.client.staged(outcome, n_gradients=1, samples=int(value), now=self.now)
        self.perform(actions)

    def finish(self) -> None:
        """Break nothing more, and let the client look once more who leads."""
        self.loss = 0.0
        for copy, life in self.pair.lives.items():
            self.to_client.append(PeerLost(peer=copy, incarnation=life, reason="look"))
        for _ in range(2000):
            if self.to_pair or self.to_client:
                self.answer()
                self.deliver()
            elif self.client.ready and not self.client.unacknowledged:
                return
            else:
                self.fire()
        pytest.fail("the client does not get through")


@pytest.mark.untraced
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    takeovers=st.booleans(),
    deaths=st.booleans(),
)
@settings(max_examples=150)
def test_with_any_primary_each_push_is_applied_once_in_order_or_counted_as_lost(
    *, seed: int, loss: float, takeovers: bool, deaths: bool
) -> None:
    run = Run(seed, loss=loss)
    for _ in range(150):
        run.step(takeovers=takeovers, deaths=deaths)
        n_lost = run.client.counters()["pushes_lost"]
        assert n_lost == 0 or deaths
    run.finish()
    applied = run.pair.applied
    sequences = [sequence for sequence, _ in applied]
    assert sequences == sorted(set(sequences)), "twice, or out of order"
    assert all(run.issued[sequence] == value for sequence, value in applied)
    assert run.client.unacknowledged == 0
    n_missing = len(run.issued) - len(applied)
    assert run.client.counters()["pushes_lost"] == n_missing
    assert n_missing == 0 or deaths
