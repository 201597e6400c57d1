"""A primary with a backup, message by message: what it sends and when it acknowledges."""

import numpy as np
import pytest

from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.replication import (
    REPORT_SECONDS,
    SILENCE_SECONDS,
    STALL_SECONDS,
    TICK_SECONDS,
)
from distbelief.parameter_server.rules import Adagrad
from distbelief.parameter_server.shard_config import ABSENCE_SECONDS_MAX
from distbelief.parameter_server.tensor_copies import push_buffer_views
from distbelief.protocol import Message, Stop, push_fetch as pf, replication as rp
from distbelief.protocol.role import SUPERVISOR, Action, Exit, PeerLost
from tests.distbelief.parameter_server.pair import CLIENT, LARGE, OTHER, layout_of, sent
from tests.distbelief.parameter_server.shard_copies import LAYOUT, A, B, N, OneCopy, kinds, only


def credit(
    copy: OneCopy, received: int, *, term: int = 2, clock: int = 0, life: int = 1
) -> list[Action]:
    message = rp.StateAck(term=term, position=clock, received=received)
    return copy.receive(message, B, life=life)


def acknowledge(copy: OneCopy, clock: int, *, term: int = 2, life: int = 1) -> list[Action]:
    """Say that the backup has applied the push of that clock."""
    message = pf.PushApplied(sequence=clock + 1, term=term, clock=clock + 1, staleness=0)
    return copy.receive(message, B, life=life)


def leader(*, host: str = "", whole: bool = True, layout: Layout = LAYOUT) -> OneCopy:
    """A primary with a client, and a backup that answers nothing by itself."""
    copy = OneCopy(A, memory=PrivateMemory(host=host) if host else None, layout=layout)
    copy.lead(1)
    copy.hello(host=host)
    copy.lead(2, B)
    if whole:
        credit(copy, 0)
        credit(copy, 1)
    return copy


def pushed(copy: OneCopy, sequence: int, *, number: int = 1) -> list[Action]:
    """Push by blocks; return what is done when that begins."""
    return copy.push(sequence, number=number)


def half_applied() -> OneCopy:
    """A primary that has applied push 1, to which its backup has not answered."""
    copy = leader()
    pushed(copy, 1)
    copy.work()
    return copy


def test_without_an_answer_of_the_backup_nothing_is_replicated_and_all_is_acknowledged() -> None:
    copy = OneCopy(A)
    copy.lead(1)
    copy.hello()
    assert only(copy.lead(2, B), rp.StartSync).term == 2
    assert sent(pushed(copy, 1), rp.ReplicatePush) == []
    assert only(copy.work(), pf.PushApplied).sequence == 1
    follow = only(copy.wait(TICK_SECONDS), rp.StartSync)
    assert (follow.clock, follow.clients[0].watermark) == (1, 1)
    assert not sent(copy.wait(60.0), rp.BackupUnresponsive)


def test_the_first_window_comes_with_the_clock_and_the_clients_as_they_are() -> None:
    copy = leader(whole=False)
    pushed(copy, 1)
    copy.work()
    actions = credit(copy, 0)
    assert kinds(actions, B) == ["StartSync", "StateBlock"]
    follow, piece = only(actions, rp.StartSync), only(actions, rp.StateBlock)
    assert (follow.clock, piece.position, piece.index) == (1, 1, 0)
    assert follow.clients[0].applied == 1
    assert (piece.values[:100] == 1.0).all()
    assert not sent(credit(copy, 1, clock=1), rp.StateBlock)


def test_a_window_waits_for_the_push_that_is_being_applied() -> None:
    copy = leader(whole=False)
    pushed(copy, 1)
    assert sent(credit(copy, 0), rp.StateBlock) == []
    actions = copy.work()
    assert only(actions, rp.StateBlock).position == 1
    assert only(actions, pf.PushApplied).sequence == 1  # it was not replicated


def test_between_two_windows_one_push_is_applied_at_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distbelief.core.vectors.BLOCK_BYTES", 512)
    monkeypatch.setattr("distbelief.parameter_server.replication.WINDOW_STATE_BLOCKS", 1)
    copy = leader(whole=False)
    assert N == 192
    actions = credit(copy, 0)
    assert [p.index for p in sent(actions, rp.StateBlock)] == [0]
    assert kinds(pushed(copy, 1), B)[-1:] == ["ReplicatePush"]
    pushed(copy, 2)
    copy.work()
    assert not copy.executor  # a window is due, once the second has that push
    credit(copy, 1)
    actions = acknowledge(copy, 0)
    assert [(p.index, p.position) for p in sent(actions, rp.StateBlock)] == [(1, 1)]
    assert kinds(actions, CLIENT) == ["PushApplied"]
    assert len(copy.executor) == 1


def test_a_lost_window_is_sent_again_from_where_the_backup_is() -> None:
    copy = leader(whole=False)
    credit(copy, 0)
    assert kinds(copy.wait(TICK_SECONDS), B) == ["StartSync", "StartSync", "StateBlock"]


def test_a_push_is_acknowledged_when_it_is_applied_on_both_sides() -> None:
    for second_is_first in (False, True):
        copy = leader()
        actions = pushed(copy, 1)
        forward = only(actions, rp.ReplicatePush)
        assert (forward.position, forward.client.watermark, forward.client.applied) == (0, 1, 1)
        assert only(actions, pf.PushBlock).sequence == 1
        if second_is_first:
            assert sent(acknowledge(copy, 0), pf.PushApplied) == []
            actions = copy.work()
        else:
            assert sent(copy.work(), pf.PushApplied) == []
            actions = acknowledge(copy, 0)
        told = only(actions, pf.PushApplied)
        assert (told.sequence, told.term, told.clock) == (1, 1, 1)


def test_unconfirmed_pushes_are_reported_to_no_client() -> None:
    copy = half_applied()
    welcome = only(copy.hello(), pf.SessionOpened)
    assert (welcome.watermark, welcome.applied, welcome.clock) == (0, 0, 1)
    answer = copy.said(1, number=1)
    assert kinds(answer, CLIENT) == ["PushBlockAck"]
    pushed(copy, 2)
    copy.work()
    told = only(acknowledge(copy, 0), pf.PushApplied)
    assert told.sequence == 1
    assert only(copy.said(1, number=1), pf.PushApplied).sequence == 1
    assert kinds(copy.said(2, number=1), CLIENT) == ["PushBlockAck"]
    assert only(acknowledge(copy, 1), pf.PushApplied).sequence == 2


def test_a_block_of_an_unconfirmed_push_is_answered_with_a_sign_of_life() -> None:
    """Its push buffer is not lent again, and the client does not take the shard for dead."""
    copy = half_applied()
    block = pf.PushBlock(sequence=1, term=1, block_index=0, values=np.zeros(N), answer=True)
    answer = copy.receive(block, CLIENT)
    assert kinds(answer, CLIENT) == ["PushBlockAck"]
    assert only(answer, pf.PushBlockAck).received == 1
    assert only(acknowledge(copy, 0), pf.PushApplied).sequence == 1


def test_an_absent_client_keeps_its_buffers_while_a_push_is_unconfirmed() -> None:
    """The backup may still read them: it would apply what another client put there."""
    copy = half_applied()
    lost = PeerLost(peer=CLIENT, incarnation=1, reason="killed")
    copy._note(copy.shard.handle(lost, copy.now))
    copy.wait(ABSENCE_SECONDS_MAX + 1.0)
    assert copy.counters()["push_buffer_bytes"] > 0
    acknowledge(copy, 0)
    copy.wait(ABSENCE_SECONDS_MAX + 1.0)
    assert copy.counters()["push_buffer_bytes"] == 0


def test_a_new_incarnation_of_a_client_waits_while_a_push_of_the_old_one_is_unconfirmed() -> None:
    copy = half_applied()
    assert "busy" in only(copy.hello(life=2, next_sequence=100), pf.SessionRefused).reason
    welcome = only(acknowledge(copy, 0), pf.SessionOpened)
    assert (welcome.watermark, welcome.applied, welcome.samples) == (99, 0, 10)


def test_a_shared_push_buffer_is_named_and_unchanged_while_unconfirmed() -> None:
    copy = leader(host="here")
    region = only(copy.hello(host="here"), pf.SessionOpened).push_buffers_region
    assert region == "shard-0.1.slots-0"
    slots = push_buffer_views(copy.memory.attach(region), n_elements=N, dtype=np.dtype(np.float64))
    slots[1][:] = -1.0
    actions = copy.said(1, number=1)
    assert kinds(actions, B) == ["ReplicatePush"]
    forward = only(actions, rp.ReplicatePush)
    assert (forward.push_buffers_region, forward.slot) == (region, 1)
    copy.work()
    assert (slots[1] == -1.0).all()
    # The backup cannot reach it.
    answer = pf.PushBlockAck(sequence=1, term=2, received=0)
    assert kinds(copy.receive(answer, B), B) == ["PushBlock", "ReplicatePush"]
    acknowledge(copy, 0)
    slots[0][:] = -1.0
    assert kinds(copy.said(2, number=1), B) == ["PushBlock", "ReplicatePush"]


def test_blocks_go_out_within_the_window_of_the_backup() -> None:
    copy = OneCopy(A, layout=layout_of(LARGE))
    copy.lead(1)
    copy.hello()
    copy.lead(2, B)
    n_state_blocks = copy.shard.values.n_state_blocks
    credit(copy, 0)
    credit(copy, n_state_blocks)
    actions = pushed(copy, 1)
    assert kinds(actions, B) == ["PushBlock"] * 3 + ["ReplicatePush"]
    taken = pf.PushBlockAck(sequence=1, term=2, received=2)
    copy.receive(taken, B)
    again = copy.wait(2 * TICK_SECONDS)
    assert [b.block_index for b in sent(again, pf.PushBlock)][:1] == [2]
    assert kinds(again, B)[:2] == ["PushBlock", "ReplicatePush"]


def test_messages_of_others_and_of_other_terms_are_ignored() -> None:
    copy = half_applied()
    assert acknowledge(copy, 0, term=1) == []
    assert acknowledge(copy, 0, life=2) == []
    strangers: list[Message] = [
        pf.PushApplied(sequence=1, term=2, clock=1, staleness=0),
        rp.StateAck(term=2, position=0, received=1),
        pf.PushBlockAck(sequence=1, term=2, received=0),
    ]
    for message in strangers:
        assert copy.receive(message, CLIENT) == []
    assert kinds(acknowledge(copy, 0), CLIENT) == ["PushApplied"]


def test_only_the_named_incarnation_of_the_backup_counts() -> None:
    copy = leader(whole=False)
    assert credit(copy, 0, life=2) == []
    assert sent(pushed(copy, 1), rp.ReplicatePush) == []
    copy.work()
    follow = only(copy.wait(TICK_SECONDS), rp.StartSync)
    assert follow.receiver_incarnation == 1
    assert kinds(credit(copy, 0), B) == ["StartSync", "StateBlock"]


def test_a_silent_backup_gets_messages_again_and_is_then_reported() -> None:
    copy = half_applied()
    actions = copy.wait(SILENCE_SECONDS - 0.01)
    assert len(sent(actions, rp.ReplicatePush)) >= 2
    assert sent(actions, rp.BackupUnresponsive) == []
    actions = copy.wait(2 * REPORT_SECONDS)
    assert [alone.term for alone in sent(actions, rp.BackupUnresponsive)] == [2, 2]
    assert kinds(actions, SUPERVISOR) == ["BackupUnresponsive", "BackupUnresponsive"]
    assert kinds(actions, CLIENT) == []  # until the supervisor says so
    assert only(copy.lead(3), pf.PushApplied).sequence == 1
    pushed(copy, 2)
    assert only(copy.work(), pf.PushApplied).sequence == 2
    assert copy.wait(60.0) == []


def test_a_backup_without_progress_is_reported_in_the_end() -> None:
    copy = half_applied()
    alive = pf.PushBlockAck(sequence=1, term=2, received=1)
    n_alone = 0
    for _ in range(int(STALL_SECONDS / 0.25) + 4):
        copy.receive(alive, B)
        n_alone += len(sent(copy.wait(0.25), rp.BackupUnresponsive))
        assert not n_alone or copy.now >= STALL_SECONDS
    assert n_alone


def test_a_primary_that_was_paused_reports_nobody() -> None:
    copy = half_applied()
    copy.now += 30.0
    assert sent(copy.wait(0.0), rp.BackupUnresponsive) == []


def test_a_later_promote_drops_the_backup_and_a_late_one_does_nothing() -> None:
    copy = leader()
    pushed(copy, 1)  # being applied
    pushed(copy, 2)
    copy.work()
    assert copy.lead(2) == []
    assert copy.lead(1) == []
    actions = copy.lead(4, B)
    assert only(actions, pf.PushApplied).sequence == 1
    assert only(actions, rp.StartSync).term == 4
    # The second push was being applied, and is not held.
    assert only(copy.work(), pf.PushApplied).sequence == 2
    assert copy.counters()["term"] == 4
    assert only(copy.hello(), pf.SessionOpened).term == 1  # as it began to lead


def test_a_deposed_primary_does_not_raise_its_floor() -> None:
    """A worker whose push the next primary had applied told its tick to the former one, too.

    That primary was cut off, not dead, and lacked the push. It raised its floor, and another worker
    began a tick on values that were staler than allowed.
    """
    copy = OneCopy(A, policy=ExchangePolicy(staleness=0))
    copy.lead(1)
    copy.hello(tick=0)
    copy.hello(OTHER, tick=1)
    assert copy.counters()["floor"] == 0
    assert copy.hello(next_sequence=2, tick=1, number=2) == []
    assert copy.counters()["floor"] == 0
    assert kinds(copy.hello(tick=1, number=1), OTHER) == ["Floor"]


def test_a_tick_ends_when_the_backup_has_its_push_too() -> None:
    """Else the floor counts a push that only this copy has.

    If it then dies, the backup leads without that push, and a worker has begun a tick on
    values that are staler than allowed.
    """
    copy = OneCopy(A, policy=ExchangePolicy(staleness=0))
    copy.lead(1)
    for name in (CLIENT, OTHER):
        copy.hello(name, tick=0)
    copy.lead(2, B)
    credit(copy, 0)
    credit(copy, 1)
    for clock, name in enumerate((CLIENT, OTHER)):
        copy.push(1, sender=name, tick=1)
        copy.work()
        assert copy.counters()["pushes_applied"] == clock + 1
    assert copy.counters()["floor"] == 0
    told = only(acknowledge(copy, 0), pf.PushApplied)
    assert (told.floor, told.behind) == (0, OTHER)
    assert copy.counters()["floor"] == 0
    assert only(acknowledge(copy, 1), pf.PushApplied).floor == 1


def test_the_staleness_that_is_told_is_of_the_push_that_both_copies_have() -> None:
    """A client slows down by what it is told: it must not hear of a push that may be lost."""
    copy = leader()
    copy.hello(OTHER)
    copy.push(1, sender=OTHER)
    copy.work()
    acknowledge(copy, 0)
    copy.push(1, fetched_clock=0)
    copy.work()
    assert only(acknowledge(copy, 1), pf.PushApplied).staleness == 1
    copy.push(2, fetched_clock=2)
    copy.work()  # of staleness 0, and not confirmed
    assert only(copy.said(1, number=1), pf.PushApplied).staleness == 1
    assert only(acknowledge(copy, 2), pf.PushApplied).staleness == 0


def test_a_stopping_primary_does_not_wait_for_its_backup() -> None:
    copy = half_applied()
    actions = copy.receive(Stop(reason="enough"))
    assert kinds(actions, CLIENT) == ["PushApplied"]
    assert isinstance(actions[-1], Exit)


def test_the_backup_averages_buffers_over_as_many_clients() -> None:
    mean = TensorSpec(name="mean", shape=(64,), kind="buffer")
    with_buffers = Layout.of([*LAYOUT.tensors, mean], n_shards=1)
    for layout, n_pushing in ((with_buffers, 2), (LAYOUT, 1)):  # 1: there is nothing to average
        copy = leader(layout=layout)
        copy.hello(sender=OTHER)
        assert only(pushed(copy, 1), rp.ReplicatePush).n_pushing == n_pushing


def test_state_blocks_begin_at_multiples_of_64_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels treat the last elements of an array differently, and a backup updates a prefix."""
    monkeypatch.setattr("distbelief.core.vectors.BLOCK_BYTES", 1100)  # of 68 elements and state
    copy = OneCopy(A, rule=Adagrad(learning_rate=1.0))
    copy.lead(1)
    copy.lead(2, B)
    blocks = sent(credit(copy, 0), rp.StateBlock)
    assert [len(block.values) for block in blocks] == [2 * 64] * (N // 64)
