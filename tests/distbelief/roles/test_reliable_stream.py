"""Two couriers over a link that loses, repeats and reorders: nothing is missed."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distbelief.errors import RemoteProtocolError
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.roles.reliable import AGAIN_SECONDS, TAKEN_EVERY, WINDOW, Outgoing, ReliableSender
from distbelief.roles.role import Action, Address, Send


def parcel(step: int) -> Outgoing:
    return Outgoing(
        step=step, micro_batch=0, way=1, block_index=0, values=np.full(3, step, np.float32)
    )


def messages(actions: list[Action]) -> list[TransferBlock | TransferAck]:
    found = [action.message for action in actions if isinstance(action, Send)]
    return [m for m in found if isinstance(m, TransferBlock | TransferAck)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), n=st.integers(1, 3 * WINDOW))
def test_everything_arrives_once_over_a_bad_link(seed: int, n: int) -> None:
    generator = np.random.default_rng(seed)
    sender, receiver = ReliableSender(Address("b")), ReliableSender(Address("a"))
    sender.begin(7)
    receiver.begin(7)
    now = 0.0
    under_way = messages(sender.post([parcel(i) for i in range(n)], now))
    came: list[int] = []
    for _ in range(10_000):
        if len(came) == n and not under_way:
            break
        if not under_way:
            now += AGAIN_SECONDS * 16
            under_way += messages(sender.remind(now)) + messages(receiver.remind(now))
            continue
        message = under_way.pop(int(generator.integers(len(under_way))))
        if generator.random() < 0.2:
            continue  # lost
        if generator.random() < 0.2:
            under_way.append(message)  # and once more
        if isinstance(message, TransferAck):
            under_way += messages(sender.taken(message.taken, now))
            continue
        if receiver.is_new(message.sequence):
            came.append(message.step)
        under_way += messages(receiver.have(message.sequence))
    assert sorted(came) == list(range(n))
    assert sender.n_out == n
    assert sender.n_bytes == 12 * n


def test_only_so_many_are_under_way() -> None:
    courier = ReliableSender(Address("b"))
    courier.begin(1)
    assert len(courier.post([parcel(i) for i in range(2 * WINDOW)], 0.0)) == WINDOW
    assert len(courier.taken(3, 0.0)) == 3
    assert courier.taken(3, 0.0) == []


def test_patience_doubles() -> None:
    courier = ReliableSender(Address("b"))
    courier.begin(1)
    courier.post([parcel(0)], 0.0)
    assert courier.remind(AGAIN_SECONDS - 0.1) == []
    assert len(courier.remind(AGAIN_SECONDS)) == 1
    assert courier.remind(2 * AGAIN_SECONDS) == []
    assert len(courier.remind(3 * AGAIN_SECONDS)) == 1
    assert courier.n_again == 2


def test_what_was_never_sent_cannot_have_come() -> None:
    courier = ReliableSender(Address("b"))
    courier.begin(1)
    with pytest.raises(RemoteProtocolError, match="b acknowledged 1 transfers; 0 were"):
        courier.taken(1, 0.0)
    with pytest.raises(RemoteProtocolError, match=f"transfer {WINDOW} before 0"):
        courier.is_new(WINDOW)


def test_the_other_is_told_now_and_then_and_with_what_is_sent() -> None:
    courier = ReliableSender(Address("b"))
    courier.begin(1)
    told = [messages(courier.have(i)) for i in range(TAKEN_EVERY + 1)]
    assert [len(each) for each in told] == [0] * (TAKEN_EVERY - 1) + [1, 0]
    (transfer,) = messages(courier.post([parcel(0)], 0.0))
    assert transfer.taken == TAKEN_EVERY + 1
    assert courier.remind(0.1) == []
