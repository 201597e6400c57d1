"""A backup, message by message: what it accepts, what it drops, how it becomes primary."""

from collections.abc import Sequence

import numpy as np
import pytest

from distbelief.core.errors import DistBeliefError, RemoteProtocolError, StorageError
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server import shard_config
from distbelief.parameter_server.rules import Adagrad
from distbelief.parameter_server.shard_config import copy_names, other_copy
from distbelief.parameter_server.tensor_copies import push_buffer_bytes
from distbelief.protocol import (
    CheckpointSaved,
    Finished,
    Message,
    SaveCheckpoint,
    Stop,
    push_fetch as pf,
    replication as rp,
)
from distbelief.protocol.role import SUPERVISOR, Action, Address, Exit, PeerLost, Persist, Send
from distbelief.simulation.storage import HostMemory
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, TEST, sent, shard_of
from tests.distbelief.parameter_server.shard_copies import LAYOUT, A, B, N, OneCopy, kinds, only


def record_of(
    name: str = CLIENT, *, watermark: int = 1, applied: int = 1, life: int = 1
) -> rp.SessionRecord:
    return rp.SessionRecord(
        name=name,
        incarnation=life,
        watermark=watermark,
        applied=applied,
        samples=10 * applied,
        staleness=0,
    )


def following(
    term: int,
    *,
    clock: int,
    clients: Sequence[rp.SessionRecord] = (),
    life: int = 1,
    steps: Sequence[int] | None = None,
) -> rp.StartSync:
    return rp.StartSync(
        term=term,
        receiver_incarnation=life,
        clock=clock,
        clients=tuple(clients),
        steps=None if steps is None else np.array(steps, np.int64),
    )


def follow(
    copy: OneCopy, term: int = 2, *, clock: int = 5, clients: Sequence[rp.SessionRecord] = ()
) -> list[Action]:
    message = following(term, clock=clock, clients=clients)
    return copy.receive(message, A)


def piece(copy: OneCopy, *, term: int = 2, clock: int = 5, size: int = N) -> list[Action]:
    """Send all that the primary holds: sevens."""
    values = np.full(size, 7.0)
    message = rp.StateBlock(term=term, position=clock, index=0, values=values)
    return copy.receive(message, A)


def forward(
    clock: int,
    *,
    term: int = 2,
    region: str = "",
    watermark: int = 1,
    holds: Sequence[int] | None = None,
) -> rp.ReplicatePush:
    return rp.ReplicatePush(
        term=term,
        position=clock,
        client=record_of(watermark=watermark, applied=watermark),
        n_pushing=1,
        push_buffers_region=region,
        slot=watermark % 2,
        holds=None if holds is None else np.array(holds, np.int64),
    )


def block(clock: int, *, term: int = 2, size: int = N) -> pf.PushBlock:
    values = np.full(size, -1.0)
    return pf.PushBlock(sequence=clock + 1, term=term, block_index=0, values=values)


def whole_second() -> OneCopy:
    copy = OneCopy(B)
    follow(copy)
    piece(copy)
    return copy


def pushed(copy: OneCopy, clock: int, *, watermark: int = 1) -> list[Action]:
    """Forward a push in one block."""
    copy.receive(block(clock), A)
    return copy.receive(forward(clock, watermark=watermark), A)


def test_it_answers_no_client_until_it_is_primary_and_then_all() -> None:
    copy = OneCopy(B)
    assert copy.activity == "waiting"
    assert copy.hello() == []
    assert copy.push(1, number=1) == []
    follow(copy, clients=[record_of(), record_of(OTHER)])
    piece(copy)
    assert copy.activity == "following"
    assert copy.hello() == []
    actions = copy.lead(3)
    assert copy.activity == "serving"
    welcome = only(actions, pf.SessionOpened)
    assert (welcome.term, welcome.clock) == (3, 5)
    assert (welcome.watermark, welcome.applied, welcome.samples) == (1, 1, 10)
    assert only(actions, rp.PrimaryChanged).term == 3
    assert kinds(actions, OTHER) == ["PrimaryChanged"]


def test_with_all_state_blocks_it_reports_in_sync_to_primary_and_supervisor() -> None:
    copy = OneCopy(B)
    credit = only(follow(copy), rp.StateAck)
    assert (credit.term, credit.position, credit.received) == (2, 5, 0)
    assert copy.counters()["in_sync"] == 0
    actions = piece(copy)
    assert only(actions, rp.StateAck).received == 1
    assert only(actions, rp.BackupInSync).term == 2
    counters = copy.counters()
    assert (counters["term"], counters["in_sync"], counters["primary"]) == (2, 2, 0)
    assert (copy.values == 7.0).all()
    assert sent(piece(copy), rp.BackupInSync) == []


def test_a_state_block_of_another_clock_or_out_of_order_is_dropped() -> None:
    copy = OneCopy(B)
    follow(copy)
    assert only(piece(copy, clock=4), rp.StateAck).received == 0
    late = rp.StateBlock(term=2, position=5, index=1, values=np.zeros(N))
    assert only(copy.receive(late, A), rp.StateAck).received == 0
    assert (copy.values == 0.0).all()


def test_a_state_block_that_comes_while_a_push_is_applied_is_dropped() -> None:
    copy = OneCopy(B)
    follow(copy)
    pushed(copy, 5)
    assert only(piece(copy), rp.StateAck).received == 0
    assert only(copy.work(), pf.PushApplied).clock == 6
    assert only(piece(copy, clock=6), rp.StateAck).received == 1


def test_a_state_block_of_the_wrong_size_names_both_sizes() -> None:
    copy = OneCopy(B)
    follow(copy)
    with pytest.raises(RemoteProtocolError, match=f"has 64 elements.*not {N} of"):
        piece(copy, size=64)


def test_state_blocks_hold_values_and_state() -> None:
    copy = OneCopy(B, rule=Adagrad(learning_rate=1.0))
    follow(copy)
    n_state = LAYOUT.n_gradient(0)
    values = np.concatenate([np.full(N, 3.0), np.full(n_state, 4.0)])
    message = rp.StateBlock(term=2, position=5, index=0, values=values)
    only(copy.receive(message, A), rp.BackupInSync)
    assert (copy.values == 3.0).all()
    assert (copy.shard.values.state["sum_of_squares"] == 4.0).all()


def test_pushes_are_applied_in_the_order_of_clocks_each_once() -> None:
    copy = whole_second()
    assert pushed(copy, 6) == []  # the one before is missing
    pushed(copy, 5)
    answer = only(copy.work(), pf.PushApplied)
    assert (answer.sequence, answer.term, answer.clock) == (6, 2, 6)
    pushed(copy, 6, watermark=2)
    copy.work()
    assert (copy.values[:100] == 9.0).all()
    again = only(copy.receive(forward(5), A), pf.PushApplied)
    assert (again.sequence, again.clock) == (6, 7)
    assert not copy.executor


def test_a_waiting_push_is_answered_with_a_sign_of_life() -> None:
    copy = whole_second()
    pushed(copy, 5)
    answer = only(copy.receive(forward(5), A), pf.PushBlockAck)
    assert (answer.sequence, answer.received) == (6, 1)


def test_a_push_is_read_from_the_clients_own_push_buffer() -> None:
    host = HostMemory("here", n_bytes_max=1 << 20)
    leaders, seconds = host.lend(), host.lend()
    region = leaders.create("slots", n_bytes=push_buffer_bytes(N, itemsize=8))
    region.view(np.float64)[N:] = -2.0
    copy = OneCopy(B, memory=seconds)
    before = host.n_bytes
    follow(copy)
    piece(copy)
    copy.receive(forward(5, region="slots"), A)
    assert only(copy.work(), pf.PushApplied).sequence == 6
    assert (copy.values == 9.0).all()
    assert host.n_bytes == before


def test_pushes_in_unreachable_memory_are_requested_in_blocks() -> None:
    copy = whole_second()
    answer = only(copy.receive(forward(5, region="elsewhere"), A), pf.PushBlockAck)
    assert (answer.sequence, answer.received) == (6, 0)
    assert only(copy.receive(block(5), A), pf.PushBlockAck).received == 1
    assert copy.receive(block(7), A) == []  # there is room for two pushes
    copy.receive(forward(5), A)
    assert only(copy.work(), pf.PushApplied).sequence == 6
    assert only(copy.receive(block(5), A), pf.PushApplied).sequence == 6


@pytest.mark.parametrize("index", [0, 1])
def test_an_invalid_block_is_refused(index: int) -> None:
    copy = whole_second()
    message = pf.PushBlock(sequence=6, term=2, block_index=index, values=np.zeros(N + 1))
    with pytest.raises(RemoteProtocolError, match="shard-0 sent"):
        copy.receive(message, A)


def test_messages_of_a_lower_term_are_dropped() -> None:
    copy = whole_second()
    follow(copy, 4, clock=8)
    late: list[Message] = [
        forward(8),
        block(8),
        rp.StateBlock(term=2, position=8, index=0, values=np.zeros(N)),
        following(2, clock=9),
    ]
    for message in late:
        assert copy.receive(message, A) == []
    assert copy.receive(block(8, term=4), Address("shard-9")) == []
    assert copy.counters()["term"] == 4


def test_a_higher_term_starts_over_once_the_running_work_has_ended() -> None:
    copy = whole_second()
    pushed(copy, 5)
    assert follow(copy, 4, clock=8) == []
    assert copy.counters()["in_sync"] == 0
    credit = only(copy.work(), rp.StateAck)
    assert (credit.term, credit.position, credit.received) == (4, 8, 0)
    assert only(piece(copy, term=4, clock=8), rp.BackupInSync).term == 4


def test_a_repeated_start_sync_changes_nothing_once_a_state_block_is_held() -> None:
    copy = whole_second()
    pushed(copy, 5)
    copy.work()
    credit = only(follow(copy), rp.StateAck)
    assert (credit.position, credit.received) == (6, 1)
    # Before that the newest counts: the primary has gone on meanwhile.
    copy = OneCopy(B)
    follow(copy)
    assert only(follow(copy, clock=9), rp.StateAck).position == 9


def test_a_late_start_sync_does_not_undo_acknowledged_pushes() -> None:
    copy = OneCopy(B)
    follow(copy, clients=[record_of(watermark=0, applied=0)])
    pushed(copy, 5)
    assert only(copy.work(), pf.PushApplied).sequence == 6  # clients get it
    # The window of clock 5 comes late: it lacks that push.
    credit = only(follow(copy), rp.StateAck)
    assert (credit.position, credit.received) == (6, 0)
    assert sent(piece(copy), rp.BackupInSync) == []
    assert copy.counters()["in_sync"] == 0
    follow(copy, clock=6, clients=[record_of()])
    assert only(piece(copy, clock=6), rp.BackupInSync).term == 2
    welcome = only([*copy.lead(3), *copy.hello()], pf.SessionOpened)
    assert (welcome.clock, welcome.watermark, welcome.applied) == (6, 1, 1)


def test_of_two_waiting_start_syncs_the_later_one_counts() -> None:
    copy = OneCopy(B)
    follow(copy)
    pushed(copy, 5)
    assert follow(copy, clock=8) == []
    assert follow(copy, clock=7) == []
    assert only(copy.work(), rp.StateAck).position == 8


def test_a_start_sync_waits_for_the_initial_values() -> None:
    copy = OneCopy(B, ready=False)
    assert follow(copy) == []
    assert only(copy.work(), rp.StateAck).received == 0


def test_it_becomes_primary_once_all_accepted_pushes_are_applied() -> None:
    copy = whole_second()
    pushed(copy, 5, watermark=1)
    pushed(copy, 6, watermark=2)
    copy.receive(block(7), A)
    assert copy.lead(3) == []
    assert copy.receive(forward(7), A) == []
    assert copy.lead(3) == []
    assert sent(copy.work(), pf.PushApplied) == []
    actions = copy.work()
    assert only(actions, rp.PrimaryChanged).term == 3
    assert (copy.counters()["clock"], copy.counters()["primary"]) == (7, 1)
    welcome = only(copy.hello(), pf.SessionOpened)
    assert (welcome.watermark, welcome.applied) == (2, 2)


def test_without_a_supervisor_only_the_primary_saves() -> None:
    """Both copies keep their snapshots in one place, and the primary has everything."""
    gone = PeerLost(peer=SUPERVISOR, incarnation=0, reason="gone", for_good=True)
    copy = whole_second()
    pushed(copy, 5, watermark=1)
    copy.work_all()
    assert copy.shard.handle(gone, copy.now)[-1] == Exit(error="gone")
    copy = whole_second()
    pushed(copy, 5, watermark=1)
    copy.work_all()
    copy.lead(3)
    copy.work_all()
    (persist,) = copy.shard.handle(gone, copy.now)
    assert isinstance(persist, Persist)
    assert persist.snapshot.facts["clock"] == "6"


def test_a_copy_that_never_synced_serves_its_first_values() -> None:
    first = OneCopy(A, ready=False)
    assert first.lead(1) == []
    first.work()
    assert first.activity == "serving"
    first.receive(SaveCheckpoint(label="1"))
    assert only(first.work(), CheckpointSaved).error is None
    copy = OneCopy(B, restored=first.snapshots[0])
    copy.lead(2)
    assert copy.activity == "serving"


def test_a_snapshot_of_a_later_term_is_not_served() -> None:
    first = OneCopy(A)
    first.lead(7)
    first.receive(SaveCheckpoint(label="1"))
    first.work()
    copy = OneCopy(B, restored=first.snapshots[0])
    with pytest.raises(StorageError, match="has term 7, Promote 7"):
        copy.lead(7)


def test_with_damaged_snapshots_a_copy_becomes_a_backup_but_not_primary() -> None:
    """One whose primary lives needs none; without one it would begin anew."""
    copy = OneCopy(B, unrestored="no snapshot of shard-0 is whole")
    follow(copy)
    copy = OneCopy(B, unrestored="no snapshot of shard-0 is whole")
    with pytest.raises(StorageError, match="no snapshot of shard-0 is whole"):
        copy.lead(3)


def test_a_backup_that_is_not_in_sync_cannot_become_primary_and_exits() -> None:
    copy = OneCopy(B)
    follow(copy)
    with pytest.raises(DistBeliefError, match="with 0 of 1 state blocks of shard-0"):
        copy.lead(3)
    copy = whole_second()
    pushed(copy, 5)
    follow(copy, 4)
    with pytest.raises(DistBeliefError, match="cannot become primary"):
        copy.lead(5)


def test_a_primary_ignores_its_former_primary() -> None:
    copy = whole_second()
    copy.lead(3)
    for message in (forward(5), block(5), following(2, clock=9)):
        assert copy.receive(message, A) == []
    with pytest.raises(DistBeliefError, match="primary in term 4, shard-0b was"):
        follow(copy, 4)


def test_a_late_promote_is_ignored() -> None:
    copy = whole_second()
    assert copy.lead(2) == []
    assert copy.activity == "following"
    copy.lead(5)
    assert copy.lead(4, A) == []
    assert copy.counters()["term"] == 5


def test_messages_to_a_former_incarnation_are_ignored() -> None:
    """Two incarnations served in one term, and no client could tell them apart."""
    copy = OneCopy(B, life=3)
    assert copy.lead(6, life=2) == []
    assert copy.counters()["term"] == 0
    assert copy.receive(following(6, clock=9, life=2), A) == []
    assert copy.activity == "waiting"
    # It would have given up the snapshot it began from.
    copy.lead(7)
    assert copy.activity == "serving"
    assert copy.lead(8, A, life=2) == []
    assert copy.counters()["term"] == 7


def test_a_backup_exits_on_stop_at_once_and_leaves_nothing() -> None:
    copy = whole_second()
    pushed(copy, 5)
    pushed(copy, 6)
    copy.receive(Stop(reason="enough"))
    actions = copy.work()
    only(actions, Finished)
    assert isinstance(actions[-1], Exit)
    assert not copy.executor
    assert isinstance(copy.memory, PrivateMemory)
    assert not copy.memory._regions


def test_a_backup_refuses_a_checkpoint_request() -> None:
    copy = whole_second()
    saved = only(copy.receive(SaveCheckpoint(label="1")), CheckpointSaved)
    assert saved.error is not None
    assert "send the request to the primary" in saved.error


@pytest.mark.parametrize(
    "message",
    [
        rp.Promote(term=1, receiver_incarnation=1, backup="", backup_incarnation=0),
        following(1, clock=0),
        pf.PushApplied(sequence=1, term=1, clock=1, staleness=0),
    ],
)
def test_a_shard_of_one_copy_gets_no_replication_messages(message: Message) -> None:
    shard = shard_of(LAYOUT, PrivateMemory())
    copy = OneCopy(B)
    copy.shard = shard
    with pytest.raises(RemoteProtocolError, match="the only copy"):
        copy.receive(message, TEST)


def test_answers_meant_for_an_earlier_incarnation_are_dropped() -> None:
    copy = OneCopy(B)
    credit = rp.StateAck(term=1, position=0, received=1)
    assert not [a for a in copy.receive(credit, A) if isinstance(a, Send)]


def test_two_copies_know_each_other_and_their_shard() -> None:
    assert copy_names(12, 1) == ("shard-12",)
    first, second = copy_names(3, 2)
    assert (first, second) == ("shard-3", "shard-3b")
    assert (other_copy(first), other_copy(second)) == (second, first)
    assert shard_config.shard_of(first) == shard_config.shard_of(second) == first
    assert shard_config.shard_of("replica-b") == "replica-b"  # another role
