"""One shard: events in, actions out."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pytest
from msgspec.structs import replace
from typing_extensions import override

from distbelief.core.errors import LocalProtocolError, RemoteProtocolError, StorageError
from distbelief.core.memory import PrivateMemory, Region
from distbelief.core.vectors import block_bounds
from distbelief.parameter_server import pinned_versions
from distbelief.parameter_server.checkpoint import N_SAVES_MAX
from distbelief.parameter_server.layout import Kind, Layout, TensorSpec
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, Adagrad, Momentum
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ABSENCE_SECONDS_MAX, ShardConfig
from distbelief.parameter_server.tensor_copies import Pushed
from distbelief.protocol import (
    CheckpointSaved,
    Finished,
    Message,
    SaveCheckpoint,
    Stop,
    push_fetch as pf,
)
from distbelief.protocol.role import (
    NEWEST,
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Exit,
    PeerJoined,
    PeerLost,
    Persist,
    Persisted,
    Report,
    Seconds,
    Send,
    SetTimer,
    Snapshot,
    Started,
    TimerFired,
)
from tests.distbelief.parameter_server.pair import (
    CLIENT,
    LARGE,
    OTHER,
    READER,
    TEST,
    layout_of,
    sent,
    shard_of,
)
from tests.distbelief.parameter_server.shard_copies import LAYOUT, A, N, OneCopy, block, said


M = TypeVar("M", bound=Message)


class Alone(OneCopy):
    """A shard with one copy; messages come from a client unless another sender is named."""

    def __init__(
        self, layout: Layout = LAYOUT, *, memory: PrivateMemory | None = None, **settings: object
    ) -> None:
        memory = memory or PrivateMemory(poison=True)
        super().__init__(
            A,
            layout=layout,
            memory=memory,
            is_replicated=False,
            **settings,  # type: ignore[arg-type]
        )

    @override
    def receive(self, message: Message, sender: Address = CLIENT, *, life: int = 1) -> list[Action]:
        return super().receive(message, sender, life=life)


def opened(layout: Layout = LAYOUT, **settings: object) -> Alone:
    """Return a shard with which a client elsewhere has opened its session."""
    alone = Alone(layout, **settings)  # type: ignore[arg-type]
    alone.hello()
    return alone


def fetch(request: int = 1, *, credit: int = 16) -> pf.Fetch:
    return pf.Fetch(request=request, term=1, credit=credit)


def credit(received: int, *, request: int = 1, limit: int = 64, again: bool = False) -> pf.FetchAck:
    return pf.FetchAck(request=request, term=1, received=received, limit=limit, again=again)


def only(actions: Sequence[Action], kind: type[M]) -> M:
    """Return the message that is the only action."""
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.message, kind)
    return action.message


def indices(actions: Sequence[Action]) -> list[int]:
    return [block.block_index for block in sent(actions, pf.ParameterBlock)]


def test_an_early_open_session_is_answered_when_the_values_are_there() -> None:
    alone = Alone(ready=False)
    assert alone.shard.status()[0] == "starting"
    refused = only(alone.hello(), pf.SessionRefused)
    assert not refused.for_good
    alone.hello()  # asked again
    welcome = only(alone.work(alone.started), pf.SessionOpened)
    assert (welcome.term, welcome.clock, welcome.samples) == (1, 0, 0)
    assert alone.shard.status()[0] == "serving"


def test_of_two_early_open_sessions_the_newer_incarnation_counts() -> None:
    alone = Alone(ready=False)
    alone.hello(life=2)
    alone.hello(life=1)
    actions = alone.work(alone.started)
    only(actions, pf.SessionOpened)
    assert alone.push(1, life=1) == []


def test_early_open_sessions_are_deferred_for_a_limited_number_of_clients() -> None:
    alone = Alone(ready=False, n_clients_max=1)
    alone.hello()
    only(alone.hello(OTHER), pf.SessionRefused)
    only(alone.work(alone.started), pf.SessionOpened)


def test_initial_values_of_the_wrong_size_name_both_sizes() -> None:
    alone = Alone(ready=False, initialise=lambda: np.zeros(3))
    with pytest.raises(LocalProtocolError, match=rf"\(3,\) values, not \({N},\)"):
        alone.work(alone.started)


def test_with_damaged_snapshots_a_restarted_shard_does_not_start_over() -> None:
    """It came back with its initial values, and the job went on training those."""
    shard = shard_of(LAYOUT, PrivateMemory())
    started = Started(incarnation=2, unrestored="no snapshot of shard-0 is whole")
    with pytest.raises(StorageError, match="no snapshot of shard-0 is whole"):
        shard.handle(started, 0.0)


def test_work_that_fails_ends_the_role() -> None:
    alone = Alone(ready=False)
    error = StorageError("disk on fire")
    with pytest.raises(StorageError, match="on fire"):
        alone.shard.handle(Computed(name="initialise", error=error), 0.0)


def test_a_result_of_unknown_work_is_a_bug() -> None:
    alone = Alone()
    with pytest.raises(AssertionError, match="unexpected result of apply"):
        alone.shard.handle(Computed(name="apply"), 0.0)


class Full(PrivateMemory):
    """Memory in which only `n_regions` have room."""

    def __init__(self, n_regions: int) -> None:
        super().__init__()
        self.n_left = n_regions

    @override
    def create(self, name: str, *, n_bytes: int) -> Region:
        if not self.n_left:
            raise StorageError("no room")
        self.n_left -= 1
        return super().create(name, n_bytes=n_bytes)


def test_without_room_for_shared_values_clients_are_served_by_blocks() -> None:
    alone = Alone(memory=Full(0), ready=False)
    (report,) = [a for a in alone.started if isinstance(a, Report)]
    assert report.level == "warning"
    assert "no room" in report.text
    alone.work(alone.started)
    actions = alone.hello(host="here")
    (welcome,) = sent(actions, pf.SessionOpened)
    assert (welcome.parameters_region, welcome.push_buffers_region) == ("", "")
    (report,) = [a for a in actions if isinstance(a, Report)]
    assert "pushes by messages, not shared memory: no room" in report.text
    assert sent(alone.work_all(alone.push(1)), pf.PushApplied)


def test_a_host_that_shares_nothing_needs_no_warning() -> None:
    alone = Alone(memory=PrivateMemory(host=""), ready=False)
    assert len(alone.started) == 1
    alone.work(alone.started)
    welcome = only(alone.hello(host=""), pf.SessionOpened)
    assert (welcome.parameters_region, welcome.push_buffers_region) == ("", "")


def test_another_layout_is_refused_for_good_and_shown_what_is_here() -> None:
    alone = Alone()
    hello = pf.OpenSession(layout="abc", pushes=True, host="", next_sequence=1)
    refused = only(alone.receive(hello), pf.SessionRefused)
    assert refused.for_good
    assert "your layout is another" in refused.reason
    assert refused.tensors == LAYOUT.shown()


def test_no_more_clients_are_known_than_allowed() -> None:
    alone = Alone(n_clients_max=1)
    only(alone.hello(), pf.SessionOpened)
    refused = only(alone.hello(OTHER), pf.SessionRefused)
    assert refused.for_good
    assert "n_clients_max" in refused.reason
    only(alone.hello(life=2), pf.SessionOpened)  # a new incarnation is not a new client


def test_an_absent_client_makes_room_when_the_table_is_full() -> None:
    """After 4,096 loops, however short, a standing server served no other."""
    alone = opened(n_clients_max=1)
    alone.work(alone.push(1))
    lost = PeerLost(peer=CLIENT, incarnation=1, reason="gone")
    (timer,) = alone.shard.handle(lost, 0.0)
    assert isinstance(timer, SetTimer)
    only(alone.hello(OTHER), pf.SessionRefused)  # it may only have been cut off
    alone.shard.handle(TimerFired(name=timer.name), timer.at)
    only(alone.hello(OTHER), pf.SessionOpened)
    assert only(alone.hello(), pf.SessionRefused).for_good


def test_clients_of_the_same_host_are_lent_shared_memory_and_others_none() -> None:
    alone = Alone()
    here = only(alone.hello(host="here"), pf.SessionOpened)
    assert here.parameters_region == "shard-0.1.values"
    assert here.push_buffers_region.startswith("shard-0.1.slots")
    assert alone.memory.attach(here.push_buffers_region).nbytes == 2 * 8 * N
    there = only(alone.hello(OTHER), pf.SessionOpened)
    assert (there.parameters_region, there.push_buffers_region) == ("", "")
    reader = only(alone.hello(READER, host="here", pushes=False), pf.SessionOpened)
    assert reader.parameters_region
    assert reader.push_buffers_region == ""


def test_a_repeated_open_session_changes_nothing() -> None:
    alone = Alone()
    first = only(alone.hello(host="here"), pf.SessionOpened)
    again = only(alone.hello(host="here"), pf.SessionOpened)
    assert first.push_buffers_region == again.push_buffers_region


def test_a_client_that_cannot_attach_its_push_buffers_gets_others() -> None:
    alone = Alone()
    first = only(alone.hello(host="here"), pf.SessionOpened)
    only(alone.hello(host=""), pf.SessionOpened)
    with pytest.raises(Exception, match="no region"):
        alone.memory.attach(first.push_buffers_region)
    # A late copy of its first OpenSession does not take them away again.
    assert only(alone.hello(host="here"), pf.SessionOpened).push_buffers_region == ""
    assert sent(alone.work_all(alone.push(1)), pf.PushApplied)


def test_a_new_incarnation_starts_over_but_keeps_its_samples() -> None:
    alone = Alone()
    first = only(alone.hello(host="here"), pf.SessionOpened)
    alone.work(alone.receive(said(1, samples=32)))
    welcome = only(alone.hello(host="here", life=2, next_sequence=7), pf.SessionOpened)
    assert (welcome.samples, welcome.watermark, welcome.applied) == (32, 6, 0)
    assert welcome.push_buffers_region != first.push_buffers_region
    assert alone.receive(said(2), life=1) == []  # the old incarnation is not heard
    assert alone.receive(said(2), life=1) == []  # it says it again: one push
    assert alone.hello(life=1) == []
    assert alone.counters()["pushes_refused"] == 1


def test_a_complete_push_of_an_older_incarnation_is_never_applied() -> None:
    alone = opened()
    alone.hello(OTHER)
    applying = alone.push(1, sender=OTHER)
    assert alone.push(1) == []  # waits in the queue
    alone.hello(life=2)
    actions = alone.work(applying)
    assert not any(isinstance(a, Compute) for a in actions)
    assert alone.counters()["clock"] == 1


def test_a_new_incarnation_that_only_reads_does_not_apply_the_former_ones_push() -> None:
    alone = opened()
    alone.hello(OTHER)
    applying = alone.push(1, sender=OTHER)
    alone.push(1)
    alone.hello(life=2, pushes=False)
    actions = alone.work(applying)
    assert not any(isinstance(a, Compute) for a in actions)


def test_a_new_incarnation_waits_until_the_push_of_the_former_one_is_applied() -> None:
    alone = Alone()
    alone.hello(host="here")
    applying = alone.receive(said(1, samples=8))
    assert not only(alone.hello(host="here", life=2), pf.SessionRefused).for_good
    only(alone.hello(OTHER), pf.SessionOpened)  # others do not wait
    actions = alone.work(applying)
    (acknowledge,) = sent(actions, pf.PushApplied)
    (welcome,) = sent(actions, pf.SessionOpened)
    assert acknowledge.sequence == 1
    assert (welcome.samples, welcome.applied) == (8, 0)


def test_a_repeated_open_session_does_not_wait_for_the_clients_own_push() -> None:
    alone = opened()
    alone.push(1)
    only(alone.hello(), pf.SessionOpened)
    only(alone.hello(next_sequence=2), pf.SessionRefused)  # this one says something new


@pytest.mark.parametrize("message", [fetch(), credit(0), said(1)])
def test_unknown_clients_must_open_a_session(message: Message) -> None:
    refused = only(Alone().receive(message), pf.SessionRefused)
    assert not refused.for_good
    assert "open a session first" in refused.reason


def test_messages_for_another_incarnation_of_the_shard_are_refused() -> None:
    alone = Alone(life=2)
    alone.hello()
    assert not only(alone.receive(said(1)), pf.SessionRefused).for_good
    only(alone.receive(said(1, number=2), life=2), pf.SessionRefused)
    assert alone.counters()["pushes_refused"] == 0  # they are pushed again


def test_a_push_is_applied_once_and_acknowledged_again() -> None:
    alone = opened()
    actions = alone.work(alone.push(1))
    acknowledge = only(actions, pf.PushApplied)
    assert (acknowledge.sequence, acknowledge.clock) == (1, 1)
    for message in (said(1), block(1, 0, np.ones(N))):
        assert only(alone.receive(message), pf.PushApplied).sequence == 1
    counters = alone.counters()
    assert counters["clock"] == counters["pushes_applied"] == 1
    assert counters["duplicates"] == 1


def test_a_push_sent_again_before_it_is_applied_is_a_sign_of_life() -> None:
    alone = opened()
    applying = alone.push(1)
    assert only(alone.receive(said(1)), pf.PushBlockAck).received == 1
    assert alone.counters()["duplicates"] == 1
    only(alone.work(applying), pf.PushApplied)
    assert alone.counters()["clock"] == 1


def test_the_later_push_waits_in_its_buffer() -> None:
    alone = opened()
    assert alone.push(2) == []
    applying = alone.push(1)
    actions = alone.work_all(applying)
    assert [a.sequence for a in sent(actions, pf.PushApplied)] == [1, 2]


def test_there_is_room_for_two_pushes_and_no_more() -> None:
    alone = opened()
    for sequence in (0, 3):
        if sequence == 0:
            only(alone.receive(said(0)), pf.PushApplied)  # nothing awaits an answer
            continue
        with pytest.raises(RemoteProtocolError, match="room for pushes 1 to 2"):
            alone.receive(said(sequence))
        with pytest.raises(RemoteProtocolError, match="sent push 3"):
            alone.receive(block(sequence, 0, np.ones(N)))


def test_clients_take_turns() -> None:
    """Both of the first client's pushes come before the other's one."""
    alone = opened()
    alone.hello(OTHER)
    applying = alone.push(1)
    alone.push(2)
    alone.push(1, sender=OTHER)
    receivers = [action.receiver for action in alone.work_all(applying) if isinstance(action, Send)]
    assert receivers == [CLIENT, OTHER, CLIENT]


def test_staleness_is_the_clock_at_application_minus_that_at_fetch() -> None:
    alone = opened()
    alone.hello(OTHER)
    applying = alone.push(1)
    alone.push(1, sender=OTHER)
    actions = alone.work_all(applying)
    assert [a.staleness for a in sent(actions, pf.PushApplied)] == [0, 1]
    fresh = alone.work(alone.push(2, fetched_clock=2))
    assert only(fresh, pf.PushApplied).staleness == 0
    assert alone.counters()["staleness_max"] == 1


def test_a_fetched_clock_in_the_future_is_refused() -> None:
    alone = opened()
    with pytest.raises(RemoteProtocolError, match="fetched_clock 5 at 0"):
        alone.receive(said(1, fetched_clock=5))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (block(1, 1, np.ones(N)), "sent block 1 of a push of 1"),
        (block(1, 0, np.ones(N - 1)), f"{N - 1} elements of float64.*has {N} of"),
        (block(1, 0, np.ones(N, np.float32)), f"{N} elements of float32"),
    ],
)
def test_invalid_blocks_are_refused_with_the_expected_size(
    message: pf.PushBlock, complaint: str
) -> None:
    alone = opened()
    with pytest.raises(RemoteProtocolError, match=complaint):
        alone.receive(message)


def test_clients_with_shared_memory_send_no_blocks_and_readers_do_not_push() -> None:
    alone = Alone()
    alone.hello(host="here")
    alone.hello(READER, pushes=False)
    with pytest.raises(RemoteProtocolError, match="with buffers in shared memory"):
        alone.receive(block(1, 0, np.ones(N)))
    with pytest.raises(RemoteProtocolError, match="its OpenSession has pushes = false"):
        alone.receive(said(1), READER)


def test_blocks_out_of_order_are_dropped_and_the_push_says_what_is_missing() -> None:
    alone = Alone(layout_of(LARGE))
    bounds = tuple(block_bounds(alone.layout.shard_size(0), itemsize=8))
    assert len(bounds) == 3
    blocks = [block(1, i, -np.ones(b - a)) for i, (a, b) in enumerate(bounds)]
    alone.hello()
    assert only(alone.receive(blocks[0]), pf.PushBlockAck).received == 1
    assert alone.receive(blocks[2]) == []
    assert only(alone.receive(said(1)), pf.PushBlockAck).received == 1
    assert only(alone.receive(blocks[0]), pf.PushBlockAck).received == 1  # a late copy
    alone.receive(blocks[1])
    actions = alone.receive(blocks[2])  # complete: its Push came before
    assert sent(actions, pf.PushBlockAck)[0].received == 3
    only(alone.work(actions), pf.PushApplied)


def test_pushes_that_the_client_gave_up_are_not_awaited() -> None:
    alone = Alone()
    welcome = only(alone.hello(next_sequence=5), pf.SessionOpened)
    assert (welcome.watermark, welcome.applied) == (4, 0)
    only(alone.work(alone.push(5)), pf.PushApplied)
    late = only(alone.hello(next_sequence=2), pf.SessionOpened)  # lowers nothing
    assert (late.watermark, late.applied) == (5, 1)


def test_a_push_buffer_stays_unchanged_for_a_repeated_push() -> None:
    alone = Alone()
    region = only(alone.hello(host="here"), pf.SessionOpened).push_buffers_region
    slot = alone.memory.attach(region).view(np.float64)[N:]  # of sequence 1
    slot[:] = -1.0
    only(alone.work(alone.receive(said(1))), pf.PushApplied)
    assert (slot == -1.0).all()


def test_buffers_of_one_client_are_what_it_pushed_to_the_bit() -> None:
    layout = layout_of(n_buffers=1)
    start = layout.n_gradient(0)
    alone = opened(layout)
    stream = np.random.default_rng(0)
    for sequence in (1, 2):
        pushed = stream.standard_normal(layout.shard_size(0)) * 1e-3
        alone.receive(block(sequence, 0, pushed))
        alone.work(alone.receive(said(sequence)))
        values = alone.shard.values.vector[start:]
        assert values.tobytes() == pushed[start:].tobytes()


def test_what_clients_have_counted_is_added_whatever_others_have_counted_since() -> None:
    tensors = [TensorSpec(name="w", shape=(100,)), TensorSpec(name="n", shape=(), kind="counter")]
    layout = Layout.of(tensors, n_shards=1, dtype="float64")
    alone = opened(layout)
    alone.hello(OTHER)
    values, counter = alone.shard.values.vector, layout.n_averaged(0)
    for sequence in (1, 2):
        alone.work(alone.push(sequence, value=8.0))
        assert values[counter] == 4.0 * sequence


@pytest.mark.parametrize("policy", [DOWNPOUR, ExchangePolicy(staleness=0, round=Round())])
def test_a_push_that_sets_values_does_so_whatever_the_rule_and_the_rounds(
    policy: ExchangePolicy,
) -> None:
    rule = Momentum(learning_rate=0.1, groups={"m": SGD(learning_rate=0.5)})
    kinds: dict[str, Kind] = {"m": "parameter", "n": "counter", "r": "buffer", "w": "parameter"}
    tensors = [TensorSpec(name=name, shape=(70,), kind=kind) for name, kind in kinds.items()]
    alone = opened(Layout.of(tensors, n_shards=1, dtype="float64"), rule=rule, policy=policy)
    alone.hello(OTHER, tick=0)
    pushed = np.random.default_rng(0).standard_normal(alone.shard.values.vector.size)
    alone.receive(block(1, 0, pushed))
    alone.work(alone.receive(replace(said(1), sets=True)))
    assert alone.shard.values.vector.tobytes() == pushed.tobytes()


def test_buffers_of_several_clients_are_averaged_and_the_gone_do_not_count() -> None:
    layout = layout_of(n_buffers=1)
    alone = opened(layout)
    alone.hello(OTHER)
    alone.hello(READER, pushes=False)
    values = alone.shard.values.vector
    buffer = layout.n_gradient(0)
    alone.work(alone.push(1, value=8.0))
    assert values[buffer] == 4.0  # 0 + (8 - 0) / 2
    alone.shard.handle(PeerLost(peer=OTHER, incarnation=1, reason="killed"), 0.0)
    alone.work(alone.push(2, value=8.0))
    assert values[buffer] == 8.0
    assert alone.counters()["clients"] == 2


LATE = Address("worker-late")


def test_the_kth_pushes_of_all_are_averaged_though_some_clients_have_ended() -> None:
    """Regression: those left counted whole, so that two of 50 steps counted 65."""
    layout = layout_of(n_buffers=1)
    alone = opened(layout)
    alone.hello(OTHER)
    buffer = layout.n_gradient(0)
    found: list[float] = []

    def push(name: Address, sequence: int, value: float, *, since: int) -> None:
        alone.receive(block(sequence, 0, np.full(layout.shard_size(0), value)), name)
        alone.work(alone.receive(replace(said(sequence), fetched_clock=since), name))
        found.append(float(alone.shard.values.vector[buffer]))

    push(OTHER, 1, 8.0, since=0)
    push(OTHER, 2, 8.0, since=1)
    alone.shard.handle(PeerLost(peer=OTHER, incarnation=1, reason="over"), 0.0)
    push(CLIENT, 1, 0.0, since=2)
    push(CLIENT, 2, 0.0, since=3)
    push(CLIENT, 3, 5.0, since=4)  # nobody else has a third one
    assert found == [4.0, 6.0, 3.0, 1.5, 5.0]
    alone.hello(LATE)  # after four others: at the turn of the one that is here
    push(LATE, 1, 9.0, since=5)
    alone.shard.handle(PeerLost(peer=LATE, incarnation=1, reason="over"), 0.0)
    push(CLIENT, 4, 1.0, since=5)
    push(CLIENT, 5, 1.0, since=5)  # without what the other has pushed since: no overwriting it
    push(CLIENT, 6, 2.0, since=8)
    assert found[5:] == [7.0, 4.0, 2.5, 2.0]


def test_a_client_that_comes_after_another_has_ended_counts_whole() -> None:
    layout = layout_of(n_buffers=1)
    alone = opened(layout)
    alone.work(alone.push(1, value=8.0))
    alone.shard.handle(LOST, 0.0)
    alone.hello(OTHER)
    alone.receive(block(1, 0, np.full(layout.shard_size(0), 2.0)), OTHER)
    alone.work(alone.receive(replace(said(1), fetched_clock=1), OTHER))
    assert alone.shard.values.vector[layout.n_gradient(0)] == 2.0


LOST = PeerLost(peer=CLIENT, incarnation=1, reason="killed")


def absence(alone: Alone, at: Seconds) -> Seconds:
    """Return when the shard checks the push buffers of a client lost at that time."""
    (timer,) = alone.shard.handle(LOST, at)
    assert isinstance(timer, SetTimer)
    assert timer.name == f"absent:{CLIENT}"
    return timer.at


def test_push_buffers_of_an_absent_client_are_released_after_minutes() -> None:
    alone = opened()
    alone.work(alone.push(1))
    n_bytes = alone.counters()["push_buffer_bytes"]
    assert n_bytes == 8 * LAYOUT.shard_size(0)  # one push has come, and takes memory
    at = absence(alone, 7.0)
    assert at == 7.0 + ABSENCE_SECONDS_MAX
    assert alone.counters()["push_buffer_bytes"] == n_bytes
    (report,) = alone.shard.handle(TimerFired(name=f"absent:{CLIENT}"), at)
    assert isinstance(report, Report)
    assert "replica-0 is gone for 300 s" in report.text
    assert alone.counters()["push_buffer_bytes"] == 0
    assert alone.shard.handle(TimerFired(name=f"absent:{CLIENT}"), at) == []
    only(alone.push(2), pf.SessionRefused)
    welcome = only(alone.hello(), pf.SessionOpened)
    assert (welcome.watermark, welcome.applied) == (1, 1)  # it is still known


def test_the_loss_of_a_former_incarnation_is_not_that_of_the_current_one() -> None:
    """The news of it may come late: its buffers would count no more."""
    alone = Alone()
    alone.hello(life=2)
    alone.shard.handle(PeerLost(peer=CLIENT, incarnation=1, reason="killed"), 0.0)
    assert alone.shard.status()[1]["clients"] == 1
    alone.shard.handle(PeerLost(peer=CLIENT, incarnation=2, reason="killed"), 0.0)
    assert alone.shard.status()[1]["clients"] == 0


def test_a_client_back_in_time_keeps_its_push_buffers() -> None:
    alone = opened()
    at = absence(alone, 0.0)
    alone.work(alone.push(1))
    assert alone.shard.handle(TimerFired(name=f"absent:{CLIENT}"), at) == []
    assert alone.shard.handle(TimerFired(name=f"absent:{OTHER}"), at) == []
    alone.work(alone.push(2))
    assert alone.counters()["pushes_applied"] == 2


def test_a_push_being_applied_keeps_its_buffer() -> None:
    alone = opened()
    applying = alone.push(1)
    at = absence(alone, 0.0)
    (again,) = alone.shard.handle(TimerFired(name=f"absent:{CLIENT}"), at)
    assert again == SetTimer(name=f"absent:{CLIENT}", at=at + ABSENCE_SECONDS_MAX)
    alone.work(applying)
    alone.shard.handle(TimerFired(name=f"absent:{CLIENT}"), at)
    assert alone.counters()["push_buffer_bytes"] == 0
    assert alone.counters()["pushes_applied"] == 1


def test_a_reader_has_no_push_buffers_to_release() -> None:
    alone = Alone()
    alone.hello(pushes=False)
    assert alone.shard.handle(LOST, 0.0) == []


def large(*, n_copies: int = 2) -> Alone:
    """A shard of three blocks and a client elsewhere."""
    return opened(layout_of(LARGE), n_copies=n_copies)


def test_a_fetch_is_served_by_blocks_of_one_version_within_a_window() -> None:
    alone = large()
    actions = alone.work(alone.receive(fetch(credit=1)))
    assert indices(actions) == [0]
    (timer,) = [a for a in actions if isinstance(a, SetTimer)]
    assert timer == SetTimer(name="pins", at=10.0)
    alone.hello(OTHER)
    alone.work(alone.push(1, sender=OTHER))  # updates do not wait for the reader
    actions = alone.receive(credit(1, limit=2))
    assert indices(actions) == [1]
    (sent_block,) = sent(actions, pf.ParameterBlock)
    assert sent_block.clock == 0
    assert not sent_block.values.any()
    assert indices(alone.receive(credit(2, limit=99))) == [2]
    assert alone.receive(credit(3)) == []
    assert alone.counters()["bytes_out"] == alone.layout.shard_size(0) * 8


def test_blocks_reported_missing_are_sent_again() -> None:
    alone = large()
    actions = alone.work(alone.receive(fetch()))
    assert indices(actions) == [0, 1, 2]
    assert indices(alone.receive(fetch())) == [0, 1, 2]  # nothing arrived
    assert indices(alone.receive(credit(1, again=True))) == [1, 2]
    assert alone.receive(fetch()) == []  # a late copy: something has arrived
    assert alone.receive(credit(0, again=True)) == []  # the same
    assert alone.receive(credit(2)) == []  # all is sent


def test_an_acknowledgement_beyond_the_last_block_is_refused() -> None:
    alone = large()
    alone.work(alone.receive(fetch()))
    with pytest.raises(RemoteProtocolError, match="acknowledged 4 blocks of a transfer of 3"):
        alone.receive(credit(4))


def test_a_pin_ended_early_frees_its_version_and_nothing_more_is_sent() -> None:
    alone = large(n_copies=1)
    actions = alone.work(alone.receive(fetch(credit=1)))
    (first,) = sent(actions, pf.ParameterBlock)
    assert alone.receive(credit(3)) == []
    assert np.isnan(first.values).all()  # retired: a late reader is caught
    assert alone.receive(credit(1)) == []
    assert alone.receive(fetch()) == []  # of the same request: never served twice


def test_an_idle_pin_expires_and_the_client_must_fetch_again() -> None:
    alone = large(n_copies=1)
    actions = alone.work(alone.receive(fetch(credit=1)))
    (first,) = sent(actions, pf.ParameterBlock)
    alone.now = 6.0
    alone.receive(credit(1, limit=1))
    alone.now = 10.0
    timer = TimerFired(name="pins")
    assert alone.shard.handle(timer, 10.0) == [SetTimer(name="pins", at=16.0)]
    assert alone.receive(credit(1, limit=1)) == []  # words without progress
    assert alone.shard.handle(timer, 16.0) == []
    # The client may still take what is on its way to it: no one writes there any more.
    assert not np.isnan(first.values).any()
    assert not np.shares_memory(first.values, alone.shard._versions._versions[0].values)
    for message in (credit(1), fetch()):
        refused = only(alone.receive(message), pf.SessionRefused)
        assert not refused.for_good
        assert "fetch again" in refused.reason
    assert indices(alone.work(alone.receive(fetch(2)))) == [0, 1, 2]
    alone.receive(credit(3, request=2))
    assert alone.shard.handle(timer, 20.0) == []  # without a pin the timer stops


def test_the_pin_that_expires_first_is_watched() -> None:
    alone = large()
    alone.hello(OTHER)
    alone.work(alone.receive(fetch(credit=1)))
    alone.now = 2.0
    alone.receive(fetch(credit=1), OTHER)
    alone.now = 5.0
    alone.receive(credit(1, limit=1))
    timer = TimerFired(name="pins")
    assert alone.shard.handle(timer, 10.0) == [SetTimer(name="pins", at=12.0)]
    assert alone.shard.handle(timer, 12.0) == [SetTimer(name="pins", at=15.0)]


def test_fetches_share_a_version_of_the_current_clock() -> None:
    alone = large(n_copies=1)
    alone.hello(OTHER)
    alone.hello(READER, pushes=False)
    copying = alone.receive(fetch())
    assert alone.receive(fetch(), OTHER) == []  # shares the copy being made
    actions = alone.work(copying)
    assert indices(actions) == [0, 1, 2, 0, 1, 2]
    assert indices(alone.receive(fetch(), READER)) == [0, 1, 2]  # still the same clock
    assert len(alone.shard._versions._versions) == 1


def test_averages_and_values_of_the_same_clock_are_two_versions() -> None:
    alone = opened(layout_of(LARGE), rule=SGD(learning_rate=1.0, ema=0.5))
    alone.hello(READER, pushes=False)
    for sequence in (1, 2):
        alone.work_all(alone.push(sequence))
    averages = replace(fetch(), payload="averaged")
    own = sent(alone.work(alone.receive(averages, READER)), pf.ParameterBlock)
    values = sent(alone.work(alone.receive(fetch())), pf.ParameterBlock)
    assert {one.clock for one in (*own, *values)} == {2}
    store = alone.shard._values
    for found, expected in ((own, store.state["ema"]), (values, store.vector)):
        numbers = np.concatenate([block.values for block in found])
        assert np.array_equal(numbers[: len(expected)], expected)
    assert not np.array_equal(own[0].values, values[0].values)


def test_averages_that_nobody_keeps_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="has no ema"):
        opened().receive(replace(fetch(), payload="averaged"))


def test_a_fetch_waits_if_no_version_is_free_and_all_waiting_share_the_next() -> None:
    alone = large(n_copies=1)
    alone.hello(OTHER)
    alone.hello(READER, pushes=False)
    alone.work(alone.receive(fetch()))
    alone.work(alone.push(1))
    assert alone.receive(fetch(), OTHER) == []
    assert alone.receive(fetch(), READER) == []
    only(alone.receive(fetch(), OTHER), pf.SessionOpened)  # asked again: a sign of life
    copying = alone.receive(credit(3))
    actions = alone.work(copying)
    assert indices(actions) == [0, 1, 2, 0, 1, 2]
    assert {b.clock for b in sent(actions, pf.ParameterBlock)} == {1}
    assert len(alone.shard._versions._versions) == 1


def test_a_new_fetch_ends_the_pin_of_the_last_one() -> None:
    alone = large(n_copies=1)
    alone.work(alone.receive(fetch()))
    alone.work(alone.push(1))
    actions = alone.work(alone.receive(fetch(2)))
    assert {b.clock for b in sent(actions, pf.ParameterBlock)} == {1}
    assert alone.receive(fetch(1)) == []
    assert alone.receive(credit(1)) == []


def test_a_reader_that_is_gone_frees_its_version() -> None:
    alone = large(n_copies=1)
    alone.work(alone.receive(fetch()))
    lost = PeerLost(peer=CLIENT, incarnation=1, reason="killed")
    assert sent(alone.shard.handle(lost, 0.0), pf.ParameterBlock) == []
    only(alone.receive(credit(1)), pf.SessionRefused)  # it was not gone after all
    alone.shard.handle(PeerLost(peer=TEST, incarnation=1, reason="killed"), 0.0)
    assert alone.shard.handle(PeerJoined(peer=CLIENT, incarnation=1), 0.0) == []


def test_a_reader_that_is_gone_before_its_version_is_filled_leaves_it_free() -> None:
    alone = large(n_copies=1)
    copying = alone.receive(fetch())
    alone.hello(life=2)
    assert alone.work(copying) == []
    actions = alone.work(alone.receive(fetch(2), life=2))
    assert indices(actions) == [0, 1, 2]


def test_a_block_on_its_way_to_a_replaced_incarnation_keeps_its_values() -> None:
    """Regression: seed 23753 of `tests/simulation/test_seeds.py` computed with NaN.

    A worker was cut off and restarted elsewhere. The session of its new incarnation freed the
    version that a block was still being sent from, so the old one installed what came next there.
    Its pushes are refused only by shards that know the new one.
    """
    alone = large(n_copies=1)
    (first, *_) = sent(alone.work(alone.receive(fetch(credit=1))), pf.ParameterBlock)
    alone.hello(life=2)
    alone.work(alone.push(1, life=2))
    (following, *_) = sent(alone.work(alone.receive(fetch(2), life=2)), pf.ParameterBlock)
    assert following.clock == 1
    assert not first.values.any()  # the values of clock 0, not NaN or those of clock 1


def test_pushes_and_copies_take_turns() -> None:
    """Two readers ask by turns for ever newer versions; a push is never kept waiting
    for more than one copy, nor a reader for more than one push."""
    alone = large(n_copies=2)
    alone.hello(OTHER)
    applying = alone.push(1)
    alone.push(2)
    alone.receive(fetch(), OTHER)
    names = []
    actions = applying
    for request in range(2, 6):
        (work,) = [a for a in actions if isinstance(a, Compute)]
        names.append(work.name)
        actions = alone.work(actions)
        if not any(isinstance(a, Compute) for a in actions):
            break
        alone.receive(fetch(request), OTHER)
    assert names == ["apply", "copy", "apply", "copy"]


def test_a_reader_of_blocks_is_sent_so_many_at_once_whatever_it_asks_for() -> None:
    tensors = (TensorSpec(name="w", shape=(70 * 131072,)),)
    alone = opened(layout_of(tensors))
    actions = alone.work_all(alone.receive(fetch(credit=1 << 40)))
    assert indices(actions) == list(range(64))


@pytest.fixture
def by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are copied block by block."""
    monkeypatch.setattr(pinned_versions, "PIECE_BYTES", 1 << 20)


@pytest.mark.usefixtures("by_pieces")
def test_blocks_are_sent_while_the_rest_is_copied_and_a_push_waits() -> None:
    alone = large()
    alone.hello(OTHER)
    alone.hello(READER, pushes=False)
    end = np.array([262_080, 128, 128, 1])  # of the second block, and the start of the third
    alone.hello(TEST, pushes=False, holds=end)
    actions = alone.work(alone.receive(fetch()))
    first = sent(actions, pf.ParameterBlock)
    assert alone.push(1, sender=OTHER) == []  # it would change what is not copied yet
    shared = alone.receive(fetch(), READER)  # the same version, as far as it is there
    assert [indices(actions), indices(shared)] == [[0], [0]]
    assert indices(alone.receive(fetch(), TEST)) == []
    actions = alone.work(actions)
    assert indices(actions) == [1, 1]
    assert alone.receive(credit(2)) == []  # the third is still being copied
    actions = alone.work(actions)
    assert indices(actions) == [2, 2, 0]
    assert alone.counters()["clock"] == 0.0
    alone.work(actions)  # the push
    assert alone.counters()["clock"] == 1.0
    blocks = [*first, *sent(actions, pf.ParameterBlock)]
    assert {one.clock for one in blocks} == {0}
    assert not any(one.values.any() for one in blocks)


@pytest.mark.usefixtures("by_pieces")
def test_a_version_whose_last_reader_is_gone_is_not_copied_to_the_end() -> None:
    alone = large(n_copies=1)
    copying = alone.work(alone.receive(fetch()))
    lost = PeerLost(peer=CLIENT, incarnation=1, reason="killed")
    alone.shard.handle(lost, 0.0)
    alone.receive(fetch(2))  # it was not gone; its memory may still be read
    actions = alone.work(copying)
    assert indices(actions) == []
    actions = alone.work_all(actions)  # from the first block again
    assert indices(actions) == [0, 1, 2]
    assert not any(one.values.any() for one in sent(actions, pf.ParameterBlock))


@pytest.mark.usefixtures("by_pieces")
def test_stop_does_not_wait_for_the_rest_of_a_version() -> None:
    alone = large()
    copying = alone.work(alone.receive(fetch()))
    alone.receive(Stop(reason="test"), TEST)
    assert isinstance(alone.work(copying)[-1], Exit)


def test_values_are_marked_from_the_request_of_an_update_to_its_answer() -> None:
    alone = opened()
    published = alone.shard.values._published
    assert published.version % 2 == 0
    applying = alone.push(1)
    assert published.version % 2 == 1
    alone.work(applying)
    assert (published.version % 2, published.clock) == (0, 1)


def test_a_snapshot_is_taken_while_pushes_queue() -> None:
    alone = opened()
    alone.work(alone.push(1, samples=9))
    saving = alone.receive(SaveCheckpoint(label="1"), TEST)
    (persist,) = saving
    assert isinstance(persist, Persist)
    assert alone.shard.status()[0] == "saving"
    assert persist.snapshot.facts["clock"] == "1"
    assert alone.push(2) == []
    actions = alone.work_all(saving)
    assert sent(actions, CheckpointSaved)[0].error is None
    assert sent(actions, CheckpointSaved)[0].clock == 1
    assert sent(actions, pf.PushApplied)[0].sequence == 2
    assert (
        only(alone.receive(SaveCheckpoint(label="1"), TEST), CheckpointSaved).error is None
    )  # repeated


def test_snapshots_wait_for_the_work_and_not_for_ever_many() -> None:
    alone = opened()
    applying = alone.push(1)
    for n in range(N_SAVES_MAX):
        assert alone.receive(SaveCheckpoint(label=str(n)), TEST) == []
        assert alone.receive(SaveCheckpoint(label=str(n)), TEST) == []  # asked again
    error = only(alone.receive(SaveCheckpoint(label="more"), TEST), CheckpointSaved).error
    assert error is not None
    assert "checkpoints are waiting already" in error
    saved = sent(alone.work_all(applying), CheckpointSaved)
    assert [s.label for s in saved] == [str(n) for n in range(N_SAVES_MAX)]


def test_a_full_disk_is_reported_to_the_requester() -> None:
    alone = Alone()
    alone.receive(SaveCheckpoint(label="1"), TEST)
    persisted = Persisted(label="1", error="no space left")
    saved = only(alone.shard.handle(persisted, 0.0), CheckpointSaved)
    assert saved.error == "no space left"
    (again,) = alone.receive(SaveCheckpoint(label="1"), TEST)  # not saved: tried again
    assert isinstance(again, Persist)


def test_a_restart_goes_on_with_the_same_bits() -> None:
    rule = Adagrad(learning_rate=0.5)
    layout = LAYOUT

    def begin(restored: Snapshot | None, incarnation: int) -> Shard:
        shard = Shard(
            ShardConfig(index=0, layout=layout, rule=rule),
            memory=PrivateMemory(),
            initialise=lambda: np.ones(N),
        )
        alone.shard = shard
        alone.life = incarnation
        started = Started(incarnation=incarnation, restored=restored)
        alone.work(shard.handle(started, 0.0))
        return shard

    alone = Alone()
    first = begin(None, 1)
    alone.hello()
    alone.work(alone.push(1, value=3.0, samples=5))
    (persist,) = alone.receive(SaveCheckpoint(label="1"), TEST)
    assert isinstance(persist, Persist)
    second = begin(persist.snapshot, 2)
    assert second.values.vector.tobytes() == first.values.vector.tobytes()
    welcome = only(alone.hello(next_sequence=2), pf.SessionOpened)
    assert (welcome.clock, welcome.samples, welcome.applied) == (1, 5, 1)
    # What the old incarnation would have done with the next push, the new one does.
    alone.receive(block(2, 0, np.full(N, 2.0), number=2))
    alone.work(alone.receive(said(2, number=2)))
    pushed = Pushed.of(np.full(N, 2.0), first.values.slice_table.whole)
    first.values.begin_push(pushed, n_clients=1)[0]()
    assert second.values.vector.tobytes() == first.values.vector.tobytes()


def test_stop_finishes_complete_pushes_and_snapshots_then_exits() -> None:
    alone = Alone()
    alone.hello(host="here")
    alone.hello(OTHER)
    applying = alone.receive(said(1))
    alone.receive(said(2))
    alone.receive(SaveCheckpoint(label="1"), TEST)
    assert alone.receive(Stop(reason="enough"), TEST) == []
    assert alone.receive(said(3)) == []
    assert alone.hello(life=2) == []
    actions = alone.work_all(applying)
    assert len(sent(actions, pf.PushApplied)) == 2
    assert len(sent(actions, CheckpointSaved)) == 1
    (finished,) = sent(actions, Finished)
    assert finished.counters["clock"] == 2
    assert actions[-1] == Exit()
    with pytest.raises(Exception, match="no region"):
        alone.memory.attach("shard-0.1.values")
    assert alone.shard.status()[0] == "stopping"


def test_what_is_not_in_the_last_snapshot_is_not_acknowledged() -> None:
    """Of 1,670 pushes that a server acknowledged until it was ended, it kept 1,667."""
    alone = opened()
    alone.hello(OTHER)
    applying = alone.push(1)
    alone.push(1, sender=OTHER)
    alone.receive(SaveCheckpoint(label="1", last=True), TEST)
    actions = alone.work_all(applying)
    assert [saved.clock for saved in sent(actions, CheckpointSaved)] == [1]
    assert len(sent(actions, pf.PushApplied)) == 1
    assert not sent(alone.push(2), pf.PushApplied)
    assert sent(alone.work_all(alone.receive(fetch())), pf.ParameterBlock)
    actions = alone.work_all(alone.receive(Stop(reason="enough"), TEST))
    assert not sent(actions, pf.PushApplied)
    (finished,) = sent(actions, Finished)
    assert finished.counters["clock"] == 1


def test_stop_ends_an_idle_shard_at_once_and_serves_no_waiting_fetch() -> None:
    alone = large(n_copies=1)
    copying = alone.receive(fetch())
    alone.receive(Stop(reason="enough"), TEST)
    actions = alone.work(copying)
    assert actions[-1] == Exit()
    idle = Alone()
    assert idle.receive(Stop(reason="enough"), TEST)[-1] == Exit()


def test_a_shard_stopped_while_it_starts_exits_when_it_has_started() -> None:
    alone = Alone(ready=False)
    assert alone.receive(Stop(reason="enough"), TEST) == []
    assert alone.work(alone.started)[-1] == Exit()


def test_the_shard_applies_its_learning_rate() -> None:
    """The shard, and not the client, multiplies by the rate (DB-7)."""
    alone = Alone()
    alone.shard = Shard(
        ShardConfig(index=0, layout=LAYOUT, rule=SGD(learning_rate=0.25)),
        memory=PrivateMemory(),
        initialise=lambda: np.zeros(N),
    )
    alone.work(alone.shard.handle(Started(incarnation=1), 0.0))
    alone.hello()
    alone.work(alone.push(1, value=4.0))
    assert (alone.shard.values.vector == -1.0).all()


# ------------------------------------------------------------- without a supervisor

GONE = PeerLost(peer=SUPERVISOR, incarnation=0, reason="no word for 600.1 s", for_good=True)


def labels(actions: Sequence[Action]) -> list[str]:
    return [a.snapshot.label for a in actions if isinstance(a, Persist)]


def test_without_a_supervisor_it_saves_what_is_in_no_snapshot_and_ends() -> None:
    """It ended without, and 9,773 pushes that it had acknowledged were lost."""
    alone = opened()
    alone.work(alone.push(1))
    actions = alone.shard.handle(GONE, alone.now)
    assert labels(actions) == [NEWEST]
    assert alone.push(2) == []  # not begun: it would not be in the snapshot
    ends = alone.work(actions)
    assert ends[-1] == Exit(error="no word for 600.1 s")  # to be started again
    assert not sent(ends, Finished)
    (saved,) = sent(ends, CheckpointSaved)
    assert (saved.label, saved.clock, saved.error) == (NEWEST, 1, None)


def test_a_push_that_is_being_applied_is_in_that_snapshot() -> None:
    alone = opened()
    applying = alone.push(1)
    assert alone.shard.handle(GONE, alone.now) == []
    applied = alone.work(applying)
    assert sent(applied, pf.PushApplied)
    assert labels(applied) == [NEWEST]


def test_what_is_saved_already_is_not_saved_again() -> None:
    alone = Alone()
    assert alone.shard.handle(GONE, 0.0)[-1] == Exit(error="no word for 600.1 s")
    alone = opened()
    alone.work(alone.push(1))
    save = alone.receive(SaveCheckpoint(label="00001"), SUPERVISOR)
    assert labels(alone.shard.handle(GONE, alone.now)) == []
    ends = alone.work_all(save)
    assert labels(ends) == ["00001"]
    assert ends[-1] == Exit(error="no word for 600.1 s")


def test_a_full_disk_is_tried_once() -> None:
    alone = opened()
    alone.work(alone.push(1))
    alone.shard.handle(GONE, alone.now)
    full = Persisted(label=NEWEST, error="no space left")
    ends = alone.shard.handle(full, alone.now)
    assert Report(text="could not save: no space left", level="error") in ends
    assert ends[-1] == Exit(error="no word for 600.1 s")


def test_a_supervisor_that_is_back_meanwhile_gets_its_own_snapshot() -> None:
    alone = opened()
    alone.work(alone.push(1))
    saving = alone.shard.handle(GONE, alone.now)
    alone.receive(SaveCheckpoint(label="00008"), SUPERVISOR)
    ends = alone.work_all(saving)
    assert labels(ends) == [NEWEST, "00008"]
    assert [saved.label for saved in sent(ends, CheckpointSaved)] == [NEWEST, "00008"]


def test_after_stop_a_lost_supervisor_changes_nothing() -> None:
    alone = opened()
    applying = alone.push(1)
    alone.receive(Stop(reason="enough"), SUPERVISOR)
    alone.shard.handle(GONE, alone.now)
    ends = alone.work_all(applying)
    assert labels(ends) == []
    assert sent(ends, Finished)
    assert ends[-1] == Exit()
