"""A push to one shard after the other, and a fetch that follows it (PO-1)."""

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
import torch

from distbelief.core import vectors
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.codecs import TopK
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol import Message, push_fetch as pf
from distbelief.protocol.role import (
    Action,
    Address,
    PeerJoined,
    PeerLost,
    Persist,
    Persisted,
    Received,
    Send,
    SetTimer,
    TimerFired,
)
from tests.distbelief.parameter_server.pair import full_of, layout_of, sent, zeros_of


N_SHARDS, N_BLOCKS, CREDIT = 3, 18, 8
FIRST = (1 << 32) + 1  # sequence of the first push of incarnation 1
LAYOUT = layout_of([TensorSpec(name="w", shape=(N_SHARDS * N_BLOCKS * 64,))], n_shards=N_SHARDS)
SHARDS = [Address(f"shard-{index}") for index in range(N_SHARDS)]
TOGETHER = dict.fromkeys(SHARDS, "a")


class Bench:
    """A client of shards that the test plays: they answer in the order of what was sent."""

    def __init__(self, patch: pytest.MonkeyPatch, hosts: Mapping[Address, str] = TOGETHER) -> None:
        patch.setattr(vectors, "BLOCK_BYTES", 512)
        config = ClientConfig(pushes=True, credit_blocks=CREDIT, silence_seconds_max=20.0)
        self.client = ParameterClient(config, PartialView(LAYOUT), memory=PrivateMemory(host=""))
        self.now = 0.0
        self.due: deque[tuple[Address, Message]] = deque()  # sent, and not answered
        self.sent: list[tuple[int, str, int]] = []  # to which shard, what, which block
        self.timers: dict[str, float] = {}
        self.lasts: dict[Address, Message] = {}  # pushes to acknowledge
        self.perform(self.client.start(1, self.now))
        for shard in SHARDS:
            self.perform(
                self.client.handle(
                    PeerJoined(peer=shard, incarnation=1, host=hosts[shard]), self.now
                )
            )
            self.open(shard)

    def open(self, shard: Address, *, floor: int | None = None) -> None:
        ticks = {} if floor is None else {"floor": floor, "behind": "", "entries": 1, "tick": floor}
        opened = pf.SessionOpened(
            term=1,
            clock=0,
            samples=0,
            watermark=FIRST - 1,
            applied=0,
            parameters_region="",
            push_buffers_region="",
            **ticks,  # type: ignore[arg-type] # as if they were given one by one
        )
        self.receive(shard, opened)

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SetTimer):
                self.timers[action.name] = action.at
            if not isinstance(action, Send):
                continue
            message = action.message
            if isinstance(message, pf.PushBlock | pf.Push | pf.Fetch):
                index = message.block_index if isinstance(message, pf.PushBlock) else -1
                kind = type(message).__name__
                self.sent.append((SHARDS.index(action.receiver), kind, index))
                self.due.append((action.receiver, message))

    def receive(self, shard: Address, message: Message) -> None:
        event = Received(sender=shard, incarnation=1, message=message)
        self.perform(self.client.handle(event, self.now))

    def push(self, *, in_turn: bool = True) -> None:
        outcome = self.client.draft().put_all(full_of(LAYOUT, 1.0), zeros_of(LAYOUT))
        self.perform(
            self.client.staged(outcome, n_gradients=1, samples=1, now=self.now, in_turn=in_turn)
        )

    def fetch(self) -> None:
        self.perform(self.client.begin_fetch(self.now, follows=True))

    def answer(self) -> None:
        """Answer the message that was sent first."""
        shard, message = self.due.popleft()
        if isinstance(message, pf.PushBlock) and message.answer:
            count = message.block_index + 1
            self.receive(shard, pf.PushBlockAck(sequence=message.sequence, term=1, received=count))
        if isinstance(message, pf.Push):
            self.apply(shard, message.sequence)

    def apply(self, shard: Address, sequence: int = FIRST, floor: pf.Ticks = msgspec.UNSET) -> None:
        applied = pf.PushApplied(sequence=sequence, term=1, clock=1, staleness=0, floor=floor)
        self.receive(shard, applied)

    def blocks_to(self, *shards: int) -> list[tuple[int, int]]:
        return [(k, i) for k, kind, i in self.sent if kind == "PushBlock" and k in shards]

    def asked(self) -> list[int]:
        return [k for k, kind, _ in self.sent if kind == "Fetch"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_blocks_of_one_shard_go_before_those_of_the_next(bench: Bench) -> None:
    bench.push()
    while bench.due:
        assert len([one for one in bench.due if isinstance(one[1], pf.PushBlock)]) <= CREDIT + 2
        bench.answer()
    blocks = bench.blocks_to(0, 1, 2)
    assert blocks == [(k, i) for k in range(N_SHARDS) for i in range(N_BLOCKS)]
    assert bench.client.unacknowledged == 0


def test_otherwise_blocks_go_to_all_shards_at_once(bench: Bench) -> None:
    bench.push(in_turn=False)
    assert bench.blocks_to(1, 2) == [(k, i) for k in (1, 2) for i in range(CREDIT)]


def test_each_shard_is_asked_for_its_values_as_soon_as_it_has_its_push(bench: Bench) -> None:
    """PO-1; the values fetched contain the own push (SSP-4)."""
    bench.push()
    bench.fetch()
    assert bench.asked() == []
    while bench.asked() == []:
        bench.answer()
    assert bench.asked() == [0]
    assert bench.blocks_to(0) == [(0, i) for i in range(N_BLOCKS)]
    assert len(bench.blocks_to(2)) == 0, "the link carries values while pushes are under way"
    while bench.due:
        bench.answer()
    assert bench.asked() == [0, 1, 2]
    assert bench.client.fetches_own_pushes


def test_a_second_push_waits_for_the_first_one_to_all_shards(bench: Bench) -> None:
    bench.push()
    bench.push()
    order = []
    while bench.due:
        shard, message = bench.due[0]
        if isinstance(message, pf.PushBlock):
            order.append((message.sequence, SHARDS.index(shard), message.block_index))
        bench.answer()
    assert order == sorted(order)
    assert len(order) == 2 * N_SHARDS * N_BLOCKS
    assert bench.client.unacknowledged == 0


def test_shards_on_other_hosts_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, dict(zip(SHARDS, ["a", "b", "b"], strict=True)))
    bench.push()
    assert {k for k, _ in bench.blocks_to(0, 1, 2)} == {0, 1}
    while bench.due:
        bench.answer()
    assert bench.client.unacknowledged == 0


def test_a_shard_that_is_gone_holds_nobody_up(bench: Bench) -> None:
    bench.push()
    assert bench.blocks_to(1) == []
    lost = PeerLost(peer=SHARDS[0], incarnation=1, reason="killed")
    bench.perform(bench.client.handle(lost, bench.now))
    assert bench.blocks_to(1) == [(1, i) for i in range(CREDIT)]


def test_a_shard_is_not_blamed_while_its_blocks_wait_for_their_turn(bench: Bench) -> None:
    """Regression: it owes nothing, but its silence was counted."""
    bench.push()
    bench.fetch()
    for at in np.arange(0.5, 100.0, 0.5):
        bench.now = float(at)
        bench.receive(SHARDS[0], pf.PushBlockAck(sequence=FIRST, term=1, received=0))
        for name in [name for name, due in bench.timers.items() if due <= at]:
            del bench.timers[name]
            if name == "client:0":
                bench.open(SHARDS[0])  # a sign of life
            bench.perform(bench.client.handle(TimerFired(name=name), bench.now))
    assert bench.blocks_to(1, 2) == []


def test_late_blocks_of_the_fetch_before_are_not_of_one_that_waits(bench: Bench) -> None:
    """Regression: a repeated block completed a fetch for which its shard was not asked yet."""
    bench.fetch()
    request = next(one.request for _, one in bench.due if isinstance(one, pf.Fetch))
    blocks = [
        pf.ParameterBlock(
            request=request, term=1, block_index=index, clock=0, values=np.zeros(64, np.float64)
        )
        for index in range(N_BLOCKS)
    ]
    for shard in SHARDS:
        for block in blocks:
            bench.receive(shard, block)
    outcome = bench.client.install(zeros_of(LAYOUT))()
    bench.perform(bench.client.installed(outcome, bench.now))
    bench.push()
    bench.fetch()
    for block in blocks:
        bench.receive(SHARDS[0], block)
    assert not bench.client.fetch_complete
    assert not bench.client.installable


def enter(bench: Bench, staleness: int = 0) -> None:
    bench.perform(bench.client.enter(bench.now, staleness=staleness))


@pytest.fixture
def counting(bench: Bench) -> Bench:
    """Shards that count ticks."""
    for shard in SHARDS:
        bench.open(shard, floor=0)
    enter(bench)
    for shard in SHARDS:
        bench.open(shard, floor=0)
    enter(bench)
    assert bench.client.may_begin
    return bench


def test_a_fetch_that_follows_waits_for_the_floor_of_each_shard(counting: Bench) -> None:
    """SSP-3: a tick begins with values that have the pushes of the others."""
    bench = counting
    bench.push()
    enter(bench)
    bench.fetch()
    bench.apply(SHARDS[0], floor=0)
    bench.apply(SHARDS[1], floor=1)
    assert bench.asked() == [1]
    bench.receive(SHARDS[0], pf.Floor(term=1, floor=1, behind=""))
    assert bench.asked() == [1, 0]


def test_a_shard_is_asked_again_for_a_floor_that_a_fetch_waits_for(counting: Bench) -> None:
    """Regression: the timer sent nothing, and the shard was blamed for its silence."""
    bench = counting
    bench.push()
    enter(bench)
    bench.fetch()
    for shard in SHARDS:
        bench.apply(shard, floor=0)
    enter(bench)
    bench.now = 10.0
    again = bench.client.handle(TimerFired(name="client:0"), bench.now)
    opens = [one for one in again if isinstance(one, Send)]
    assert [(one.receiver, type(one.message)) for one in opens] == [(SHARDS[0], pf.OpenSession)]


def test_a_worker_that_was_left_behind_fetches_anew(counting: Bench) -> None:
    """Its values may lack what others have pushed since."""
    bench = counting
    bench.push()
    enter(bench)
    bench.fetch()
    for shard in SHARDS:
        bench.apply(shard, floor=1)
    assert bench.asked() == [0, 1, 2]
    for shard in SHARDS:
        bench.receive(shard, pf.Floor(term=1, floor=5, behind=""))
    enter(bench)
    for shard in SHARDS:
        bench.open(shard, floor=5)
    enter(bench)
    assert bench.asked() == [0, 1, 2, 0, 1, 2]


def test_a_fetch_does_not_overtake_a_push_that_is_still_being_saved() -> None:
    """Where residuals are durable, a push is sent once they are saved."""
    layout = Layout.of([TensorSpec(name="w", shape=(64,))], n_shards=1)
    config = ClientConfig(pushes=True, push=TopK(share=0.5), durable=True)
    client = ParameterClient(config, PartialView(layout), memory=PrivateMemory(host=""))
    client.start(1, 0.0)
    opened = pf.SessionOpened(
        term=1,
        clock=0,
        samples=0,
        watermark=FIRST - 1,
        applied=0,
        parameters_region="",
        push_buffers_region="",
    )
    client.handle(Received(sender=SHARDS[0], incarnation=1, message=opened), 0.0)
    ones = [torch.ones(64)]
    outcome = client.draft().put_all(ones, ones)
    (save,) = client.staged(outcome, n_gradients=1, samples=1, now=0.0, in_turn=True)
    assert isinstance(save, Persist)
    assert sent(client.begin_fetch(0.0, follows=True), pf.Fetch) == []
    pushes = sent(client.handle(Persisted(label=save.snapshot.label, error=None), 0.0), pf.Push)
    assert [one.sequence for one in pushes] == [FIRST]
    applied = pf.PushApplied(sequence=FIRST, term=1, clock=1, staleness=0)
    answer = client.handle(Received(sender=SHARDS[0], incarnation=1, message=applied), 0.0)
    assert len(sent(answer, pf.Fetch)) == 1
