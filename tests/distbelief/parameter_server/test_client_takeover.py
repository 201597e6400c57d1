"""A client of shards with two copies: a push is applied once or counted as lost.

The test plays both copies; `tests/simulation/test_copies.py` has real ones, and random faults.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from distbelief.core.errors import JobError, PeerLostError, RemoteProtocolError
from distbelief.core.memory import HEADER_BYTES, Memory
from distbelief.parameter_server.tensor_copies import push_buffer_bytes, push_buffer_views
from distbelief.protocol import Message, PrimaryChanged, push_fetch as pf
from distbelief.protocol.role import Action, Address, PeerJoined, PeerLost, Received, Send
from distbelief.simulation.storage import HostMemory
from tests.distbelief.parameter_server.client.test_client import FIRST, LAYOUT, Alone, N
from tests.distbelief.parameter_server.pair import SHARD, full_of, sent, zeros_of


SECOND = Address("shard-0b")
BUSY = pf.SessionRefused(reason="busy", for_good=False)


def alone_of(*, memory: Memory | None = None, welcome: bool = True) -> Alone:
    """A client that the first copy has welcomed as primary number 3, in its life 1."""
    alone = Alone(shard_copies=2, memory=memory, welcome=False)
    if welcome:
        alone.welcome(term=3, sender=SHARD)
    return alone


def acknowledge(alone: Alone, sequence: int, number: int, *, sender: Address = SHARD) -> None:
    message = pf.PushApplied(sequence=sequence, term=number, clock=1, staleness=0)
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
        (a.receiver, m.sequence, m.term, float(m.values.max()))
        for a in actions
        if isinstance(a, Send) and isinstance(m := a.message, pf.PushBlock)
    ]


def test_open_session_goes_to_both_copies_and_the_rest_to_the_primary() -> None:
    alone = alone_of(welcome=False)
    assert receivers(alone.greeting, pf.OpenSession) == [SHARD, SECOND]
    assert receivers(alone.timer(0.5), pf.OpenSession) == [SHARD, SECOND]
    alone.welcome(term=4, sender=SECOND)
    assert alone.ready()
    actions = [*alone.push(), *alone.client.begin_fetch(0.0)]
    for kind in (pf.PushBlock, pf.Push, pf.Fetch):
        assert receivers(actions, kind) == [SECOND]
    for copy in (SHARD, SECOND):
        assert alone.client.owns(Received(sender=copy, incarnation=1, message=BUSY))
        assert alone.client.owns(PeerJoined(peer=copy, incarnation=1))


def test_incarnations_of_copies_do_not_order_primaries() -> None:
    alone = alone_of()
    alone.push(7.0)
    actions = alone.welcome(term=4, sender=SECOND, life=1, clock=2)
    assert pushed(actions) == [(SECOND, FIRST, 4, 7.0)]
    # A higher incarnation, a lower term.
    assert alone.welcome(term=3, sender=SHARD, life=9) == []
    assert pushed(alone.push()) == [(SECOND, FIRST + 1, 4, 1.0)]


def test_messages_of_a_demoted_primary_have_no_effect() -> None:
    alone = alone_of()
    alone.push()
    alone.push()
    alone.welcome(term=5, sender=SECOND)
    late: list[Message] = [
        pf.PushApplied(sequence=FIRST, term=3, clock=9, staleness=0),
        pf.PushBlockAck(sequence=FIRST, term=3, received=1),
        PrimaryChanged(term=3),
        PrimaryChanged(term=4),
        BUSY,
    ]
    for message in late:
        assert alone.receive(message, sender=SHARD) == []
    assert alone.welcome(term=3, sender=SHARD, watermark=FIRST, applied=1) == []
    lost = PeerLost(peer=SHARD, incarnation=1, reason="killed")
    assert alone.client.handle(lost, 0.0) == []
    joined = PeerJoined(peer=SHARD, incarnation=2)
    assert alone.client.handle(joined, 0.0) == []
    assert alone.ready()
    assert alone.unacknowledged() == 2
    assert not alone.can_push()


def test_a_refusal_for_good_by_any_copy_counts() -> None:
    with pytest.raises(JobError, match="shard-0b refuses this client: other layout"):
        alone_of().receive(pf.SessionRefused(reason="other layout", for_good=True), sender=SECOND)


def test_primary_changed_is_answered_with_one_open_session() -> None:
    alone = alone_of()
    alone.push()
    acknowledge(alone, FIRST, 3)
    alone.push()
    leading = PrimaryChanged(term=5)
    actions = alone.receive(leading, sender=SECOND)
    assert receivers(actions, pf.OpenSession) == [SHARD, SECOND]
    told = [(h.next_sequence, h.known_term) for h in sent(actions, pf.OpenSession)]
    assert told == [(FIRST + 1, 5)] * 2
    assert not alone.can_push()
    assert alone.receive(leading, sender=SECOND) == []
    # The old primary's SessionOpened comes too late, and so does its acknowledgement.
    assert alone.welcome(term=3, sender=SHARD, watermark=FIRST, applied=1) == []
    acknowledge(alone, FIRST + 1, 3)
    assert not alone.ready()
    assert alone.unacknowledged() == 1
    alone.welcome(term=5, sender=SECOND, watermark=FIRST, applied=1)
    assert alone.ready()
    assert alone.receive(leading, sender=SECOND) == []
    assert alone.client.counters()["pushes_lost"] == 0


def test_a_primary_whose_message_was_lost_is_found_by_the_timer() -> None:
    alone = alone_of()
    alone.push(2.0)
    actions = alone.timer(0.5)
    assert receivers(actions, pf.PushBlock) == [SHARD]
    assert receivers(actions, pf.OpenSession) == [SECOND]
    assert pushed(alone.welcome(term=5, sender=SECOND)) == [(SECOND, FIRST, 5, 2.0)]


def test_a_primary_that_restarts_is_no_longer_primary() -> None:
    alone = alone_of()
    alone.push()
    actions = alone.client.handle(PeerJoined(peer=SHARD, incarnation=2), 0.0)
    assert receivers(actions, pf.OpenSession) == [SHARD, SECOND]
    assert alone.receive(BUSY, sender=SECOND) == []
    assert alone.welcome(term=3, sender=SHARD, life=1) == []  # of its former incarnation
    assert not alone.ready()
    alone.welcome(term=6, sender=SHARD, life=2)
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
    alone.welcome(term=3, sender=SHARD, push_buffers_region="slots-a")
    alone.push(4.0)
    work = partial(alone.client.draft().put_all, full_of(LAYOUT, 6.0), zeros_of(LAYOUT))
    first.release_all()  # it is dead, and the next incarnation has begun
    alone.receive(PrimaryChanged(term=4), sender=SECOND)
    region = "" if to_blocks else "slots-b"
    actions = alone.welcome(term=4, sender=SECOND, push_buffers_region=region)
    assert [push.sequence for push in sent(actions, pf.Push)] == [FIRST]
    assert not alone.can_push()
    assert host.n_bytes == 2 * push_buffer_bytes(N, itemsize=8)  # one is still being filled
    actions += alone.client.staged(work(), n_gradients=2, samples=8, now=0.0)
    assert host.n_bytes == push_buffer_bytes(N, itemsize=8)
    pushes = sent(actions, pf.Push)
    assert [p.sequence for p in pushes] == [FIRST, FIRST + 1]
    assert {p.term for p in pushes} == {4}
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
    alone.welcome(term=3, sender=SHARD, push_buffers_region="slots-a")
    alone.push(4.0)
    first.release_all()
    assert alone.welcome(term=4, sender=SECOND, push_buffers_region="slots-b") == []
    n_bytes = HEADER_BYTES + 8 * N
    second.create("values-b", n_bytes=n_bytes)
    regions = {"parameters_region": "values-b", "push_buffers_region": "slots-b"}
    assert alone.welcome(term=4, sender=SECOND, **regions) == []  # type: ignore[arg-type]
    assert not alone.ready()
    second.create("slots-c", n_bytes=8)
    with pytest.raises(RemoteProtocolError, match="push buffers have 8 bytes"):
        alone.welcome(term=4, sender=SECOND, push_buffers_region="slots-c")
    slots = second.create("slots-b", n_bytes=push_buffer_bytes(N, itemsize=8))
    (push,) = sent(alone.welcome(term=4, sender=SECOND, **regions), pf.Push)  # type: ignore[arg-type]
    assert (push.sequence, push.term) == (FIRST, 4)
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
    alone.welcome(term=3, sender=SHARD, clock=9, parameters_region="a")
    alone.client.begin_fetch(0.0)
    first.release_all()
    tensors = zeros_of(LAYOUT)
    outcome = alone.client.install(tensors)()  # as good as any older version
    assert (outcome.torn, outcome.clocks) == ((), (9,))
    alone.welcome(term=4, sender=SECOND, clock=7, parameters_region="b")
    alone.client.installed(outcome, 0.0)
    assert alone.clocks() == (7,)  # staleness is counted by the clock of who leads
    assert host.n_bytes == HEADER_BYTES + 8 * N
    alone.client.begin_fetch(0.0)
    assert alone.client.install(tensors)().clocks == (7,)
    assert tensors[0].unique().tolist() == [7.0]
