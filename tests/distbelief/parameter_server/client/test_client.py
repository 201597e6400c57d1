"""One client against shards that the test plays, or against real ones."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from distbelief.core.errors import JobError, LocalProtocolError, PeerLostError, RemoteProtocolError
from distbelief.core.memory import HEADER_BYTES, Memory, PrivateMemory
from distbelief.core.vectors import block_bounds
from distbelief.graph.region import Region
from distbelief.parameter_server.client import fetches
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.lost_pushes import Lost, lost_after, n_lost
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol import HeartbeatAck, Message, push_fetch as pf
from distbelief.protocol.role import (
    Action,
    Address,
    Computed,
    Event,
    PeerJoined,
    PeerLost,
    Persisted,
    Received,
    Report,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from tests.distbelief.parameter_server.pair import (
    LARGE,
    SHARD,
    TEST,
    full_of,
    layout_of,
    sent,
    zeros_of,
)


LAYOUT = layout_of()
N = LAYOUT.shard_size(0)
FIRST = (1 << 32) + 1  # sequence of the first push of incarnation 1
M = TypeVar("M", bound=Message)


class Alone:
    """A client alone on the bench: the test plays the shard."""

    def __init__(
        self,
        layout: Layout = LAYOUT,
        *,
        memory: Memory | None = None,
        config: ClientConfig | None = None,
        welcome: bool = True,
        shard_copies: int = 1,
        view: PartialView | None = None,
    ) -> None:
        self.layout = layout
        self.client = ParameterClient(
            config or ClientConfig(pushes=True, credit_blocks=2),
            view or PartialView(layout),
            memory=memory or PrivateMemory(host=""),
            shard_copies=shard_copies,
        )
        self.now = 0.0
        self.greeting = self.client.start(1, self.now)
        if welcome:
            self.welcome()

    def receive(self, message: Message, *, life: int = 1, sender: Address = SHARD) -> list[Action]:
        event = Received(sender=sender, incarnation=life, message=message)
        return self.client.handle(event, self.now)

    def welcome(
        self,
        *,
        life: int = 1,
        term: int | None = None,
        clock: int = 0,
        samples: int = 0,
        watermark: int = FIRST - 1,
        applied: int = 0,
        parameters_region: str = "",
        push_buffers_region: str = "",
        sender: Address = SHARD,
    ) -> list[Action]:
        message = pf.SessionOpened(
            term=life if term is None else term,
            clock=clock,
            samples=samples,
            watermark=watermark,
            applied=applied,
            parameters_region=parameters_region,
            push_buffers_region=push_buffers_region,
        )
        return self.receive(message, life=life, sender=sender)

    # The client's properties as methods: mypy narrows properties for good.

    def ready(self) -> bool:
        return self.client.ready

    def can_push(self) -> bool:
        return self.client.can_push

    def complete(self) -> bool:
        return self.client.fetch_complete

    def installable(self) -> bool:
        return self.client.installable

    def unacknowledged(self) -> int:
        return self.client.unacknowledged

    def waiting_for(self) -> Address | None:
        return self.client.waiting_for

    def samples(self) -> int:
        return self.client.samples

    def clocks(self) -> tuple[int, ...]:
        return self.client.clocks

    def timer(self, at: Seconds, name: str = "client:0") -> list[Action]:
        self.now = at
        return self.client.handle(TimerFired(name=name), at)

    def wait(self, *, until: Seconds, signs_of_life: bool = False) -> None:
        """Fire the timer, again and again, beginning half a second from now."""
        at = self.now + 0.5
        while at < until:
            (at,) = timers(self.timer(at))
            if signs_of_life:
                self.welcome()

    def push(self, value: float = 1.0) -> list[Action]:
        work = partial(
            self.client.draft().put_all, full_of(self.layout, value), full_of(self.layout, 0.0)
        )
        return self.client.staged(work(), n_gradients=1, samples=1, now=self.now)

    def block(
        self,
        index: int,
        *,
        request: int,
        value: float = 0.0,
        clock: int = 0,
        life: int = 1,
        size: int | None = None,
        dtype: str = "f8",
    ) -> list[Action]:
        n = self.layout.shard_size(0)
        bounds = tuple(block_bounds(n, itemsize=8))
        start, stop = bounds[min(index, len(bounds) - 1)]
        message = pf.ParameterBlock(
            request=request,
            term=life,
            block_index=index,
            clock=clock,
            values=np.full(stop - start if size is None else size, value, dtype),
        )
        return self.receive(message, life=life)

    def acknowledge(self, sequence: int, *, staleness: int = 0, life: int = 1) -> list[Action]:
        message = pf.PushApplied(sequence=sequence, term=life, clock=1, staleness=staleness)
        return self.receive(message, life=life)


def messages(actions: Sequence[Action]) -> list[str]:
    return [type(action.message).__name__ for action in actions if isinstance(action, Send)]


def timers(actions: Sequence[Action]) -> list[Seconds]:
    return [action.at for action in actions if isinstance(action, SetTimer)]


def test_it_owns_what_comes_from_shards_and_its_timers() -> None:
    client = Alone().client
    refused = pf.SessionRefused(reason="", for_good=False)
    owned: list[Event] = [
        Received(sender=SHARD, incarnation=1, message=refused),
        TimerFired(name="client:0"),
        PeerJoined(peer=SHARD, incarnation=1),
        PeerLost(peer=SHARD, incarnation=1, reason=""),
    ]
    others: list[Event] = [
        Received(sender=TEST, incarnation=1, message=refused),
        Received(sender=SHARD, incarnation=1, message=HeartbeatAck()),
        TimerFired(name="progress"),
        PeerJoined(peer=TEST, incarnation=1),
        Started(incarnation=1),
        Computed(name="step"),
        Persisted(label="1"),
    ]
    assert all(client.owns(event) for event in owned)
    assert not any(client.owns(event) for event in others)
    for event in others:
        assert client.handle(event, 0.0) == []


def test_it_repeats_open_session_until_the_session_opens() -> None:
    alone = Alone(welcome=False)
    (hello,) = sent(alone.greeting, pf.OpenSession)
    assert hello.layout == LAYOUT.fingerprint
    assert hello.next_sequence == FIRST
    assert timers(alone.greeting) == [0.5]
    assert not alone.ready()
    at = 0.5
    for delay in (1.0, 2.0, 4.0, 4.0):  # seconds, doubling up to 4
        actions = alone.timer(at)
        assert messages(actions) == ["OpenSession"]
        at += delay
        assert timers(actions) == [at]
    alone.welcome(samples=7)
    assert alone.ready()
    assert alone.samples() == 7
    assert alone.timer(at) == []  # nothing is awaited: the timer is over


def test_a_peer_that_joins_gets_open_session_at_once() -> None:
    alone = Alone(welcome=False)
    joined = PeerJoined(peer=SHARD, incarnation=1)
    assert messages(alone.client.handle(joined, 0.1)) == ["OpenSession"]
    alone.welcome()
    assert alone.client.handle(joined, 0.2) == []


def test_it_resumes_where_the_values_of_every_shard_have_it() -> None:
    alone = Alone(layout_of(n_shards=2), welcome=False)
    alone.welcome(samples=7)
    assert not alone.ready()
    alone.welcome(samples=5, sender=Address("shard-1"))
    assert alone.ready()
    assert alone.samples() == 5


def test_a_shard_that_refuses_for_good_is_named_with_its_reason() -> None:
    with pytest.raises(JobError, match="shard-0 refuses this client: other layout"):
        Alone().receive(pf.SessionRefused(reason="other layout", for_good=True))


def test_the_first_tensor_in_which_two_layouts_differ_is_shown() -> None:
    """It was two hashes."""
    alone = Alone()
    first = str(alone.client.view.tensors[0])
    for tensors, said in [
        ((first, "buffer x of shape [7]"), "client: it has buffer x of shape [7], not parameter "),
        ((first,), "client: it has nothing more, not parameter .*; your layout is another$"),
        (tuple(map(str, alone.client.view.tensors)), "client: your layout is another$"),
    ]:
        refused = pf.SessionRefused(reason="your layout is another", for_good=True, tensors=tensors)
        with pytest.raises(JobError, match=said.replace("[7]", r"\[7\]")):
            alone.receive(refused)


def test_a_shard_that_does_not_know_the_client_gets_open_session_again() -> None:
    alone = Alone()
    refused = pf.SessionRefused(reason="open a session first", for_good=False)
    assert messages(alone.receive(refused)) == ["OpenSession"]
    assert not alone.ready()
    assert alone.receive(refused) == []  # said once is enough


def test_messages_of_a_dead_incarnation_are_dropped() -> None:
    alone = Alone()
    alone.welcome(life=3)
    refused = pf.SessionRefused(reason="", for_good=True)
    assert alone.receive(refused, life=2) == []
    lost = PeerLost(peer=SHARD, incarnation=2, reason="killed")
    assert alone.client.handle(lost, 0.0) == []
    assert alone.ready()


def test_a_shard_that_is_gone_gets_open_session_until_it_is_back() -> None:
    alone = Alone()
    lost = PeerLost(peer=SHARD, incarnation=1, reason="killed")
    assert messages(alone.client.handle(lost, 0.0)) == ["OpenSession"]
    assert messages(alone.timer(0.5)) == ["OpenSession"]
    assert not alone.can_push()
    alone.welcome(life=2)
    assert alone.can_push()


@pytest.mark.parametrize("told_by", ["PeerJoined", "SessionRefused", "SessionOpened"])
def test_pushes_in_flight_when_a_shard_restarts_go_to_its_next_incarnation(told_by: str) -> None:
    alone = Alone()
    alone.push()
    alone.acknowledge(FIRST)
    alone.push(5.0)
    match told_by:
        case "PeerJoined":
            joined = PeerJoined(peer=SHARD, incarnation=2)
            actions = alone.client.handle(joined, 0.0)
        case "SessionRefused":
            refused = pf.SessionRefused(reason="open a session first", for_good=False)
            actions = alone.receive(refused, life=2)
        case _:  # it answers an OpenSession of before
            actions = alone.welcome(life=2, watermark=FIRST - 1)
    (hello,) = sent(actions, pf.OpenSession)
    assert hello.next_sequence == FIRST + 1
    assert not alone.ready()
    assert not alone.can_push()
    assert alone.unacknowledged() == 1
    # The snapshot had nothing: only what was acknowledged is lost.
    (block,) = sent(alone.welcome(life=2, watermark=FIRST), pf.PushBlock)
    assert (block.sequence, block.term) == (FIRST + 1, 2)
    assert block.values.max() == 5.0
    assert alone.ready()
    assert alone.client.counters()["pushes_lost"] == 1
    assert alone.can_push()
    alone.push()
    assert not alone.can_push()
    alone.acknowledge(FIRST + 2, life=2)
    assert alone.unacknowledged() == 0
    assert alone.client.counters()["pushes_lost"] == 1


def test_what_was_acknowledged_beyond_the_snapshot_is_counted_as_lost_once() -> None:
    alone = Alone()
    for sequence in range(FIRST, FIRST + 3):
        alone.push()
        alone.acknowledge(sequence)
    assert alone.client.counters()["pushes_lost"] == 0
    alone.welcome(life=2, watermark=FIRST + 2, applied=1)
    assert alone.client.counters()["pushes_lost"] == 2
    alone.welcome(life=3, watermark=FIRST + 2, applied=1)
    assert alone.client.counters()["pushes_lost"] == 2
    alone.welcome(life=4, watermark=FIRST + 2, applied=0)  # an older snapshot
    assert alone.client.counters()["pushes_lost"] == 3


@pytest.mark.parametrize("welcome_first", [True, False])
def test_a_push_being_staged_when_the_shard_restarts_goes_to_its_next_incarnation(
    *, welcome_first: bool
) -> None:
    alone = Alone()
    work = partial(alone.client.draft().put_all, full_of(LAYOUT, 3.0), zeros_of(LAYOUT))
    alone.client.handle(PeerJoined(peer=SHARD, incarnation=2), 0.0)
    actions: list[Action] = []
    if welcome_first:
        actions += alone.welcome(life=2)
        assert not alone.can_push()  # the push buffer is being filled
    actions += alone.client.staged(work(), n_gradients=1, samples=1, now=0.0)
    if not welcome_first:
        assert messages(actions) == []
        assert alone.unacknowledged() == 1
        actions = alone.welcome(life=2)
    (block,) = sent(actions, pf.PushBlock)
    (push,) = sent(actions, pf.Push)
    assert (block.sequence, block.term) == (FIRST, 2)
    assert (push.sequence, push.term) == (FIRST, 2)
    assert block.values.max() == 3.0
    assert alone.can_push()
    alone.acknowledge(FIRST, life=2)
    counters = alone.client.counters()
    assert (counters["pushes_sent"], counters["pushes_lost"]) == (1, 0)
    assert alone.unacknowledged() == 0


def test_a_push_has_no_clock_beyond_that_of_the_restarted_shard() -> None:
    """Such a push would be refused, for ever."""
    alone = Alone(welcome=False)
    alone.welcome(clock=9)
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    alone.block(0, request=fetch.request, clock=9)
    alone.client.installed(alone.client.install(zeros_of(LAYOUT))(), 0.0)
    old = alone.clocks()
    alone.push()
    work = partial(alone.client.draft().put_all, zeros_of(LAYOUT), zeros_of(LAYOUT))
    (again,) = sent(alone.welcome(life=2, clock=4), pf.Push)
    assert again.fetched_clock == 4
    actions = alone.client.staged(work(), n_gradients=1, samples=1, now=0.0)
    (push,) = sent(actions, pf.Push)
    assert push.fetched_clock == 4
    alone.acknowledge(FIRST + 1, life=2)
    # Gradients that have accrued since that incarnation.
    work = partial(
        alone.client.draft(fetched_clocks=old).put_all, zeros_of(LAYOUT), zeros_of(LAYOUT)
    )
    actions = alone.client.staged(work(), n_gradients=1, samples=1, now=0.0)
    (push,) = sent(actions, pf.Push)
    assert push.fetched_clock == 4


def test_a_shard_that_was_only_thought_gone_keeps_what_is_in_flight() -> None:
    alone = Alone()
    alone.push()
    alone.push()
    alone.client.handle(PeerLost(peer=SHARD, incarnation=1, reason="cut off"), 0.0)
    actions = alone.welcome(watermark=FIRST, applied=1)  # its answer was lost
    assert [b.sequence for b in sent(actions, pf.PushBlock)] == [FIRST + 1]
    assert alone.unacknowledged() == 1
    assert alone.client.counters()["pushes_lost"] == 0


def test_a_shard_that_knows_pushes_never_made_ends_the_client() -> None:
    """As if a resumed run had begun to count incarnations anew."""
    with pytest.raises(LocalProtocolError, match="incarnations must rise"):
        Alone(welcome=False).welcome(watermark=FIRST + 3)


def test_a_silent_shard_is_given_up_by_name() -> None:
    alone = Alone(welcome=False)
    with pytest.raises(PeerLostError, match=r"shard-0 has been silent for 60.* SessionOpened"):
        alone.wait(until=100.0)
    assert 60.0 <= alone.now < 65.0


def test_a_shard_that_answers_without_progress_is_given_up_in_the_end() -> None:
    alone = Alone()
    alone.push()
    with pytest.raises(PeerLostError, match="shard-0 answers, but an acknowledgement"):
        alone.wait(until=1000.0, signs_of_life=True)
    assert 600.0 <= alone.now < 605.0


def test_a_fetch_that_does_not_come_is_named_in_the_error() -> None:
    alone = Alone()
    alone.client.begin_fetch(0.0)
    with pytest.raises(PeerLostError, match="with a fetch due"):
        alone.wait(until=100.0)


def test_time_in_which_nobody_drove_the_client_does_not_count() -> None:
    """A loop of the user's that computes for an hour between two calls."""
    alone = Alone()
    alone.push()
    (at,) = timers(alone.timer(3600.0))
    assert at == 3601.0


def test_it_reports_which_shard_it_waits_for() -> None:
    alone = Alone(welcome=False)
    assert alone.waiting_for() == SHARD
    alone.welcome()
    assert alone.waiting_for() is None
    alone.push()
    alone.push()
    assert alone.waiting_for() == SHARD


def test_a_timer_that_was_not_set_does_no_harm() -> None:
    alone = Alone()
    assert alone.timer(0.5) == []
    assert alone.timer(0.6) == []


def test_the_limits_restart_with_each_wait() -> None:
    alone = Alone()
    alone.push()
    alone.acknowledge(FIRST)
    alone.now = 0.4
    actions = alone.push()
    assert timers(actions) == []  # the timer of the first still runs
    (at,) = timers(alone.timer(0.5))
    assert at == pytest.approx(0.9)
    (at,) = timers(alone.timer(at))
    assert at == pytest.approx(1.9)
    alone.acknowledge(FIRST + 1)
    alone.now = 1.0
    assert timers(alone.push()) == []  # after a repetition the pause stays long for a while
    for n in range(2, 5):
        alone.acknowledge(FIRST + n)
        alone.now = float(n)
        actions = alone.push()
    assert timers([*actions, *alone.timer(alone.now)]) == [4.5]


def test_a_fetch_by_blocks_acknowledges_blocks_as_they_come() -> None:
    alone = Alone(layout_of(LARGE))
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    assert fetch.credit == 2
    assert not alone.complete()
    request = fetch.request
    (credit,) = sent(alone.block(0, request=request, clock=4), pf.FetchAck)
    assert (credit.received, credit.limit, credit.again) == (1, 3, False)
    assert alone.block(2, request=request, clock=4) == []  # one before it is missing
    assert alone.block(0, request=request, clock=4) == []  # a copy
    assert alone.block(1, request=request - 1, clock=4) == []  # of a former fetch
    alone.block(1, request=request, clock=4, value=1.0)
    (credit,) = sent(alone.block(2, request=request, clock=4), pf.FetchAck)
    assert credit.received == 3  # the pin may end
    assert alone.complete()
    tensors = full_of(alone.layout, 9.0)
    outcome = alone.client.install(tensors)()
    assert (outcome.torn, outcome.clocks) == ((), (4,))
    assert alone.client.installed(outcome, 0.0) == []
    assert alone.clocks() == (4,)
    assert torch.unique(tensors[0]).tolist() == [0.0, 1.0]
    assert alone.block(2, request=request, clock=4) == []


def test_a_push_that_waits_for_others_is_asked_for_seldom_and_without_its_numbers() -> None:
    alone = Alone()
    assert messages(alone.push()) == ["PushBlock", "Push"]
    alone.now = 0.1
    alone.receive(pf.PushBlockAck(sequence=FIRST, term=1, received=1, waits=True))
    assert messages(alone.timer(0.5)) == []
    assert messages(alone.timer(4.1)) == ["Push"]  # the answer may be lost
    alone.acknowledge(FIRST)
    assert messages(alone.push()) == ["PushBlock", "Push"]
    assert messages(alone.timer(8.7)) == ["PushBlock", "Push"]


def test_a_push_before_the_last_that_waits_changes_no_pause() -> None:
    """Its acknowledgement may be late, and the last push be lost."""
    alone = Alone()
    alone.push()
    alone.push()
    alone.receive(pf.PushBlockAck(sequence=FIRST, term=1, received=1, waits=True))
    assert messages(alone.timer(0.5)) == ["Push", "PushBlock", "Push"]


@pytest.mark.parametrize("seconds", [0.4, 0.8, 1.3, 3.0, 5.0])
def test_a_push_that_is_applied_late_is_soon_sent_once(seconds: float) -> None:
    """A client that only pushes, to a busy shard, sent each push twice, later every second one."""
    alone = Alone()
    due = timers(alone.greeting)

    def fire(*, until: Seconds) -> int:
        n_pushes = 0
        while due and min(due) < until:
            at = min(due)
            due.remove(at)
            actions = alone.timer(at)
            due.extend(timers(actions))
            n_pushes += len(sent(actions, pf.Push))
        alone.now = until
        return n_pushes

    n_again = []
    for number in range(30):
        due += timers(alone.push())
        n_again.append(fire(until=alone.now + seconds))
        due += timers(alone.acknowledge(FIRST + number))
        assert fire(until=alone.now + 0.1) == 0
    assert sum(n_again[:5]) <= 5
    assert sum(n_again[5:]) == 0


def test_missing_blocks_are_requested_again() -> None:
    alone = Alone(layout_of(LARGE))
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    (again,) = sent(alone.timer(0.5), pf.Fetch)
    assert again.request == fetch.request
    alone.now = 0.6
    alone.block(0, request=fetch.request)
    (at,) = timers(alone.timer(1.5))
    (credit,) = sent(alone.timer(at), pf.FetchAck)
    assert (credit.received, credit.again) == (1, True)


def test_each_block_is_progress_though_few_are_answered() -> None:
    # Found by a simulation of 200 replicas: their card had no four blocks for any of
    # them within `retry_seconds`, so all was asked for, and sent, half as often again.
    alone = Alone(
        layout_of((TensorSpec(name="w", shape=(9 * 131072,)),)),
        config=ClientConfig(pushes=False, credit_blocks=16),
    )
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    for index in range(3):
        alone.now = 0.4 * (index + 1)
        assert sent(alone.block(index, request=fetch.request), pf.FetchAck) == []
    waiting = alone.timer(1.5)  # 0.3 s after a block
    assert messages(waiting) == []
    (at,) = timers(waiting)
    (credit,) = sent(alone.timer(at), pf.FetchAck)
    assert (credit.received, credit.again) == (3, True)


def test_every_quarter_of_a_window_is_acknowledged() -> None:
    alone = Alone(
        layout_of((TensorSpec(name="w", shape=(9 * 131072,)),)),
        config=ClientConfig(pushes=False, credit_blocks=16),
    )
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    credits_of = [
        [c.received for c in sent(alone.block(i, request=fetch.request), pf.FetchAck)]
        for i in range(9)
    ]
    assert credits_of == [[], [], [], [4], [], [], [], [8], [9]]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"index": 3}, "sent block 3 of a vector of 3"),
        ({"index": 1, "size": 5}, "sent 5 elements of float64 as block 1"),
        ({"index": 1, "dtype": "f4"}, "131072 elements of float32"),
        ({"index": 1, "clock": 5}, "mixes blocks of clocks 4 and 5"),
    ],
)
def test_invalid_blocks_are_refused(changes: Mapping[str, Any], complaint: str) -> None:
    alone = Alone(layout_of(LARGE))
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    alone.block(0, request=fetch.request, clock=4)
    options = {"clock": 4, **changes}
    with pytest.raises(RemoteProtocolError, match=complaint):
        alone.block(request=fetch.request, **options)


def test_a_fetch_that_the_shard_has_forgotten_begins_anew() -> None:
    alone = Alone(layout_of(LARGE))
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    alone.block(0, request=fetch.request, value=1.0)
    alone.receive(pf.SessionRefused(reason="without progress", for_good=False))
    (again,) = sent(alone.welcome(), pf.Fetch)
    assert again.request == fetch.request + 1
    assert alone.block(1, request=fetch.request) == []
    for index in range(3):
        alone.block(index, request=again.request, value=2.0)
    tensors = zeros_of(alone.layout)
    assert alone.client.install(tensors)().torn == ()
    assert torch.unique(tensors[0]).tolist() == [2.0]


def test_blocks_are_installed_while_others_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetches, "INSTALL_BLOCKS", 2)
    alone = Alone(layout_of(LARGE))
    tensors = full_of(alone.layout, 9.0)
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    alone.block(0, request=fetch.request, clock=4, value=1.0)
    assert not alone.installable()  # too little
    alone.block(1, request=fetch.request, clock=4, value=1.0)
    assert alone.installable()
    work = alone.client.install(tensors)
    alone.block(2, request=fetch.request, clock=4, value=1.0)  # comes meanwhile
    outcome = work()
    assert (outcome.torn, outcome.clocks) == ((0,), (-1,))
    assert alone.client.installed(outcome, 0.0) == []
    assert tensors[0].unique().tolist() == [1.0, 9.0]
    tensors[0][:2] = 5.0  # what is installed is not copied again
    outcome = alone.client.install(tensors)()
    assert (outcome.torn, outcome.clocks) == ((), (4,))
    alone.client.installed(outcome, 0.0)
    assert tensors[0].unique().tolist() == [1.0, 5.0]
    assert alone.clocks() == (4,)
    assert alone.client.counters()["torn_reads"] == 0


def test_a_fetch_that_begins_anew_installs_everything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetches, "INSTALL_BLOCKS", 1)
    alone = Alone(layout_of(LARGE))
    tensors = full_of(alone.layout, 9.0)
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    alone.block(0, request=fetch.request, clock=4, value=1.0)
    work = alone.client.install(tensors)
    alone.receive(pf.SessionRefused(reason="without progress", for_good=False))
    (fetch,) = sent(alone.welcome(), pf.Fetch)
    alone.block(0, request=fetch.request, clock=5, value=2.0)
    alone.client.installed(work(), 0.0)
    alone.client.installed(alone.client.install(tensors)(), 0.0)
    assert tensors[0][0] == 2.0
    for index in (1, 2):
        alone.block(index, request=fetch.request, clock=5, value=2.0)
    assert alone.client.install(tensors)().torn == ()
    assert tensors[0].unique().tolist() == [2.0]


def test_a_client_that_holds_a_part_installs_it_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetches, "INSTALL_BLOCKS", 1)
    layout = layout_of(LARGE)
    selection = PartialView(layout, [("w", Region(((0, 299_968),)))])
    alone = Alone(layout, view=selection)
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    for index in range(2):
        alone.block(index, request=fetch.request, value=1.0)
        assert not alone.installable()
    alone.block(2, request=fetch.request, value=1.0, size=299_968 - 2 * 131_072)
    assert alone.installable()
    tensors = [torch.zeros(299_968).double()]
    assert alone.client.install(tensors)().torn == ()
    assert tensors[0].unique().tolist() == [1.0]


def test_a_fetch_begun_while_a_shard_is_away_starts_when_its_session_opens() -> None:
    alone = Alone(welcome=False)
    assert alone.client.begin_fetch(0.0) == []
    assert not alone.complete()
    (fetch,) = sent(alone.welcome(), pf.Fetch)
    # A block is what it is, even if the install comes too early.
    outcome = alone.client.install(zeros_of(LAYOUT))()
    assert outcome.torn == (0,)
    assert outcome.clocks == (-1,)
    alone.client.installed(outcome, 0.0)
    alone.block(0, request=fetch.request)
    assert alone.client.install(zeros_of(LAYOUT))().clocks == (0,)


def test_a_whole_fetch_survives_the_shard_and_its_clock_does_not() -> None:
    """Staleness is counted within one incarnation of a shard."""
    alone = Alone()
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    alone.block(0, request=fetch.request, clock=9, value=3.0)
    work = alone.client.install(zeros_of(LAYOUT))
    assert sent(alone.welcome(life=2, clock=4), pf.Fetch) == []
    outcome = work()
    assert outcome.clocks == (9,)
    alone.client.installed(outcome, 0.0)
    assert alone.clocks() == (4,)
    alone.welcome(life=3, clock=2)
    assert alone.clocks() == (2,)


def shared(*, slots: bool = True) -> tuple[Alone, PrivateMemory, NDArray[np.int64]]:
    """A client, and the memory in which the test plays the shard's part."""
    memory = PrivateMemory(poison=True)
    region = memory.create("values", n_bytes=HEADER_BYTES + 8 * N)
    memory.create("slots", n_bytes=2 * 8 * N)
    alone = Alone(memory=memory, welcome=False)
    alone.welcome(parameters_region="values", push_buffers_region="slots" if slots else "")
    return alone, memory, region[:HEADER_BYTES].view(np.int64)


def test_a_fetch_from_shared_memory_is_complete_at_once() -> None:
    alone, memory, header = shared()
    header[:2] = 2, 7
    memory.attach("values")[HEADER_BYTES:].view(np.float64)[:] = 5.0
    assert alone.client.begin_fetch(0.0) == []
    assert alone.complete()
    tensors = zeros_of(LAYOUT)
    outcome = alone.client.install(tensors)()
    assert (outcome.torn, outcome.clocks) == ((), (7,))
    alone.client.installed(outcome, 0.0)
    assert tensors[0].unique().tolist() == [5.0]
    assert alone.client.counters()["bytes_in"] == 8 * N


def test_a_torn_read_is_repeated_and_only_that() -> None:
    memory = PrivateMemory()
    layout = layout_of(n_shards=2)
    headers = []
    alone = Alone(layout, memory=memory, welcome=False)
    for k in range(2):
        n_bytes = HEADER_BYTES + 8 * layout.shard_size(k)
        region = memory.create(f"values-{k}", n_bytes=n_bytes)
        headers.append(region[:HEADER_BYTES].view(np.int64))
        alone.welcome(parameters_region=f"values-{k}", sender=Address(f"shard-{k}"))
    headers[0][:2] = 2, 5
    headers[1][:2] = 1, 6
    alone.client.begin_fetch(0.0)
    tensors = zeros_of(layout)
    outcome = alone.client.install(tensors)()
    assert (outcome.torn, outcome.clocks) == ((1,), (5, -1))
    assert alone.client.installed(outcome, 0.0) == []
    headers[0][:2] = 4, 9  # goes on, but was copied already
    headers[1][:2] = 2, 7
    outcome = alone.client.install(tensors)()
    assert (outcome.torn, outcome.clocks) == ((), (5, 7))
    alone.client.installed(outcome, 0.001)
    assert alone.client.counters()["torn_reads"] == 1


def test_reads_that_stay_torn_give_way_to_blocks() -> None:
    alone, _, header = shared()
    header[0] = 1
    alone.client.begin_fetch(0.0)

    def torn(now: Seconds) -> list[Action]:
        outcome = alone.client.install(zeros_of(LAYOUT))()
        assert outcome.torn == (0,)
        return alone.client.installed(outcome, now)

    assert torn(0.0) == []
    assert torn(0.9) == []
    assert alone.complete()
    (fetch,) = sent(torn(1.0), pf.Fetch)
    assert not alone.complete()
    alone.block(0, request=fetch.request, clock=3, value=6.0)
    assert alone.complete()
    tensors = zeros_of(LAYOUT)
    outcome = alone.client.install(tensors)()
    alone.client.installed(outcome, 1.1)
    assert outcome.clocks == (3,)
    assert tensors[0].unique().tolist() == [6.0]
    alone.client.begin_fetch(2.0)  # the next one tries shared memory again
    assert alone.complete()


def test_a_shard_that_dies_under_an_install_is_waited_for() -> None:
    alone, memory, header = shared()
    header[:2] = 2, 7
    alone.client.begin_fetch(0.0)
    work = alone.client.install(zeros_of(LAYOUT))
    refused = pf.SessionRefused(reason="open a session first", for_good=False)
    alone.receive(refused, life=2)
    header[0] = -1  # as the poison that the end of the old incarnation leaves
    outcome = work()
    assert outcome.torn == (0,)
    assert alone.client.installed(outcome, 0.0) == []
    assert not alone.complete()
    region = memory.create("values-2", n_bytes=HEADER_BYTES + 8 * N)
    region[:HEADER_BYTES].view(np.int64)[:2] = 2, 1
    assert alone.welcome(life=2, parameters_region="values-2") == []
    assert alone.complete()
    assert alone.client.install(zeros_of(LAYOUT))().clocks == (1,)


def test_a_shard_that_has_no_more_memory_to_share_sends_blocks() -> None:
    alone, _, header = shared()
    header[:2] = 2, 7
    alone.client.begin_fetch(0.0)
    (fetch,) = sent(alone.welcome(life=2), pf.Fetch)
    alone.block(0, request=fetch.request, clock=1, life=2)
    assert alone.client.install(zeros_of(LAYOUT))().clocks == (1,)


def test_a_restart_after_an_install_leaves_nothing_to_fetch() -> None:
    alone, _, header = shared()
    header[:2] = 2, 7
    alone.client.begin_fetch(0.0)
    outcome = alone.client.install(zeros_of(LAYOUT))()
    alone.client.installed(outcome, 0.0)
    assert alone.welcome(life=2) == []
    assert alone.complete()
    assert alone.timer(0.5) == []


def test_memory_of_a_former_incarnation_is_released_when_no_work_touches_it() -> None:
    alone, memory, header = shared()
    header[:2] = 2, 7
    memory.create("values-2", n_bytes=HEADER_BYTES + 8 * N)
    memory.create("slots-2", n_bytes=2 * 8 * N)
    staging = partial(alone.client.draft().put_all, zeros_of(LAYOUT), zeros_of(LAYOUT))
    alone.welcome(life=2, parameters_region="values-2", push_buffers_region="slots-2")
    memory.attach("values")
    memory.attach("slots")
    alone.client.staged(staging(), n_gradients=1, samples=1, now=0.0)
    for name in ("values", "slots"):
        with pytest.raises(Exception, match="no region"):
            memory.attach(name)


def test_a_gradient_goes_straight_into_the_shards_push_buffer() -> None:
    alone, memory, _ = shared()
    slots = memory.attach("slots").view(np.float64).reshape(2, N)
    (push,) = sent(alone.push(3.0), pf.Push)
    assert push.sequence == FIRST
    assert np.unique(slots[1]).tolist() == [0.0, 3.0]  # padding is zero
    assert not slots[0].any()
    alone.push(4.0)
    assert slots[0].max() == 4.0
    assert alone.client.counters()["bytes_out"] == 2 * 8 * N
    assert not alone.can_push()
    assert messages(alone.timer(0.5)) == ["Push", "Push"]
    credit = pf.PushBlockAck(sequence=FIRST, term=1, received=1)
    assert alone.receive(credit) == []


def test_without_attachable_memory_messages_are_used() -> None:
    alone = Alone(memory=PrivateMemory(host="here"), welcome=False)
    (hello,) = sent(alone.greeting, pf.OpenSession)
    assert hello.host == "here"
    at = 0.5
    hosts = []
    for _ in range(3):
        assert alone.welcome(parameters_region="gone", push_buffers_region="gone") == []
        actions = alone.timer(at)
        (hello,) = sent(actions, pf.OpenSession)
        hosts.append(hello.host)
        (at,) = timers(actions)
    assert hosts == ["here", "here", ""]
    alone.welcome()
    assert alone.can_push()
    actions = alone.client.handle(PeerJoined(peer=SHARD, incarnation=2), alone.now)
    (hello,) = sent(actions, pf.OpenSession)
    assert hello.host == "here"  # the next incarnation's may well be there


def test_push_buffers_of_another_size_are_refused_with_both_sizes() -> None:
    memory = PrivateMemory()
    memory.create("slots", n_bytes=64)
    with pytest.raises(RemoteProtocolError, match=f"64 bytes, not {16 * N}"):
        Alone(memory=memory, welcome=False).welcome(push_buffers_region="slots")


def test_two_pushes_may_be_in_flight_and_no_more() -> None:
    alone = Alone()
    for n in (1, 2):
        assert alone.can_push()
        alone.push()
        assert alone.unacknowledged() == n
    assert not alone.can_push()
    with pytest.raises(LocalProtocolError, match="draft while not can_push"):
        alone.push()
    alone.acknowledge(FIRST, staleness=4)
    assert alone.can_push()
    counters = alone.client.counters()
    assert (counters["pushes_sent"], counters["pushes_acknowledged"]) == (2, 1)
    assert counters["staleness_max"] == 4


def test_a_client_that_only_fetches_cannot_push() -> None:
    assert not Alone(config=ClientConfig(pushes=False)).client.can_push


def test_an_acknowledgement_counts_once() -> None:
    alone = Alone()
    alone.push()
    alone.push()
    alone.acknowledge(FIRST + 1, staleness=3)  # the first one's was lost
    alone.acknowledge(FIRST + 1, staleness=3)
    alone.acknowledge(FIRST, staleness=50)
    assert alone.unacknowledged() == 0
    counters = alone.client.counters()
    assert (counters["staleness_max"], counters["staleness_mean"]) == (3, 3)
    with pytest.raises(RemoteProtocolError, match="acknowledges push 4294967299 of 4294967298"):
        alone.acknowledge(FIRST + 2)


def test_late_answers_to_a_former_incarnation_are_ignored() -> None:
    """Both incarnations have made one push; the answer to the first one's comes late."""
    alone = Alone(welcome=False)
    client = alone.client
    client.start(2, 0.0)
    alone.welcome(watermark=2 << 32)
    alone.push()
    alone.acknowledge(FIRST)
    assert client.unacknowledged == 1
    assert messages(alone.receive(pf.SessionRefused(reason="", for_good=False))) == ["OpenSession"]
    assert messages(alone.welcome(watermark=FIRST)) == ["OpenSession"]  # a late SessionOpened
    assert not client.ready


def test_blocks_flow_within_a_window_and_the_push_follows_the_last() -> None:
    alone = Alone(layout_of(LARGE))
    actions = alone.push()
    assert messages(actions) == ["PushBlock", "PushBlock"]

    def credited(received: int, sequence: int = FIRST) -> list[str]:
        message = pf.PushBlockAck(sequence=sequence, term=1, received=received)
        return messages(alone.receive(message))

    assert credited(1) == ["PushBlock", "Push"]
    assert credited(1) == []
    assert credited(3) == []
    assert credited(2, FIRST + 7) == []  # of no push in flight
    assert messages(alone.timer(0.5)) == ["Push"]
    with pytest.raises(RemoteProtocolError, match="acknowledged 4 blocks of a transfer of 3"):
        credited(4)
    assert alone.client.counters()["bytes_out"] == 8 * alone.layout.shard_size(0)


def test_blocks_that_were_lost_are_sent_again_from_where_the_shard_is() -> None:
    alone = Alone(layout_of(LARGE))
    alone.push()
    alone.receive(pf.PushBlockAck(sequence=FIRST, term=1, received=1))
    (at,) = timers(alone.timer(0.4))
    actions = alone.timer(at)
    assert [b.block_index for b in sent(actions, pf.PushBlock)] == [1, 2]
    assert messages(actions)[-1] == "Push"


def test_the_push_has_the_clock_of_its_parameters() -> None:
    alone = Alone()
    (fetch,) = sent(alone.client.begin_fetch(0.0), pf.Fetch)
    alone.block(0, request=fetch.request, clock=9)
    outcome = alone.client.install(zeros_of(LAYOUT))()
    alone.client.installed(outcome, 0.0)
    (push,) = sent(alone.push(), pf.Push)
    assert push.fetched_clock == 9
    work = partial(
        alone.client.draft(fetched_clocks=(4,)).put_all, zeros_of(LAYOUT), zeros_of(LAYOUT)
    )
    actions = alone.client.staged(work(), n_gradients=3, samples=12, now=0.0)
    (push,) = sent(actions, pf.Push)
    assert (push.fetched_clock, push.n_gradients, push.samples) == (4, 3, 12)


def test_nothing_that_is_not_finite_is_pushed_and_it_is_named() -> None:
    alone = Alone()
    gradients = zeros_of(LAYOUT)
    gradients[1][5] = np.inf  # tensors are sorted by name: m, w
    outcome = alone.client.draft().put_all(gradients, zeros_of(LAYOUT))
    assert (outcome.finite, outcome.culprits) == (False, ("w",))
    (report,) = alone.client.staged(outcome, n_gradients=1, samples=1, now=0.0)
    assert isinstance(report, Report)
    assert report.text == "not pushed: NaN or infinity in w"
    assert alone.client.counters()["non_finite"] == 1
    (push,) = sent(alone.push(), pf.Push)
    assert push.sequence == FIRST  # no sequence is wasted


def test_infinities_that_cancel_are_found() -> None:
    alone = Alone()
    gradients = zeros_of(LAYOUT)
    gradients[1][:2] = torch.tensor([np.inf, -np.inf])
    assert not alone.client.draft().put_all(gradients, zeros_of(LAYOUT)).finite


def test_a_sum_that_overflows_is_no_reason_to_refuse() -> None:
    alone = Alone()
    gradients = full_of(LAYOUT, 1e308)
    assert alone.client.draft().put_all(gradients, zeros_of(LAYOUT)).finite


def test_gradients_are_pushed_for_parameters_and_values_for_buffers() -> None:
    layout = layout_of(n_buffers=1)  # m is a buffer, and last
    alone = Alone(layout)
    work = partial(alone.client.draft().put_all, [None, None], full_of(layout, 7.0))
    actions = alone.client.staged(work(), n_gradients=1, samples=1, now=0.0)
    (block,) = sent(actions, pf.PushBlock)
    n_gradient = layout.n_gradient(0)
    assert not block.values[:n_gradient].any()
    assert block.values[n_gradient : n_gradient + 3].tolist() == [7.0] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_gradients_of_any_type_are_checked(dtype: torch.dtype) -> None:
    alone = Alone()
    gradients = [tensor.to(dtype) for tensor in full_of(LAYOUT, 60_000.0)]
    drafted = alone.client.draft()
    drafted.put(0, gradients[0])
    assert drafted.finish().finite
    alone.client.abandon()
    if dtype.is_floating_point:
        gradients[0][0] = torch.inf
        drafted = alone.client.draft()
        drafted.put(0, gradients[0])
        assert drafted.finish().culprits == ("m",)


def test_work_is_reported_before_it_is_asked_for_again() -> None:
    alone = Alone()
    staging = partial(alone.client.draft().put_all, zeros_of(LAYOUT), zeros_of(LAYOUT))
    assert not alone.can_push()
    outcome = staging()
    alone.client.staged(outcome, n_gradients=1, samples=1, now=0.0)
    with pytest.raises(LocalProtocolError, match="staged without a draft"):
        alone.client.staged(outcome, n_gradients=1, samples=1, now=0.0)
    installing = alone.client.install(zeros_of(LAYOUT))
    with pytest.raises(LocalProtocolError, match="install while an install"):
        alone.client.install(zeros_of(LAYOUT))
    with pytest.raises(LocalProtocolError, match="begin_fetch while an install"):
        alone.client.begin_fetch(0.0)
    alone.client.installed(installing(), 0.0)
    with pytest.raises(LocalProtocolError, match="installed without an install"):
        alone.client.installed(installing(), 0.0)


def test_what_two_shards_lose_is_counted_once_where_it_is_the_same() -> None:
    first, second = (range(8, 11),), (range(10, 13), range(20, 21))
    assert n_lost([first, second]) == 6
    assert n_lost([first, first]) == 3
    assert n_lost([]) == n_lost([()]) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), max_size=12))
def test_it_is_what_a_list_of_pushes_would_tell(lives: list[tuple[int, float]]) -> None:
    values: list[int] = []
    lost: Lost = ()
    seen = 0
    for n_new, share in lives:
        values += range(seen + 1, seen + n_new + 1)
        seen += n_new
        values = values[: int(share * len(values))]  # it restarts from a snapshot
        lost = lost_after(lost, seen=seen, kept=len(values))
        gone = {number for part in lost for number in part}
        assert gone == set(range(1, seen + 1)) - set(values)
        assert n_lost([lost]) == len(gone)


def test_an_answer_to_an_earlier_entry_does_not_tell_that_the_client_has_left() -> None:
    """Others would wait for it for ever: it would not say so again."""
    alone = Alone(welcome=False)

    def opened(entries: pf.Ticks, tick: pf.Ticks = msgspec.UNSET) -> pf.SessionOpened:
        return pf.SessionOpened(
            term=1,
            clock=0,
            samples=0,
            watermark=FIRST - 1,
            applied=0,
            parameters_region="",
            push_buffers_region="",
            floor=0,
            entries=entries,
            tick=tick,
        )

    alone.receive(opened(msgspec.UNSET))
    assert [one.entries for one in sent(alone.client.enter(0.0), pf.OpenSession)] == [1]
    alone.receive(opened(1, 0))
    alone.client.enter(0.0)
    assert alone.client.may_begin
    assert [one.entries for one in sent(alone.client.leave(0.0), pf.OpenSession)] == [2]
    alone.receive(opened(1, 0))  # late
    assert [one.entries for one in sent(alone.timer(5.0), pf.OpenSession)] == [2]
    alone.receive(opened(2))
    assert sent(alone.timer(60.0), pf.OpenSession) == []
