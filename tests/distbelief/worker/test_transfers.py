"""Blocks between two ranks, over a link that loses, repeats and reorders them."""

import numpy as np
import pytest

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.protocol.codec import FRAME_BYTES_MAX
from distbelief.protocol.role import Action, Address, Send
from distbelief.worker.outboxes import SharedLink
from distbelief.worker.steps import (
    ACK_EVERY,
    AGAIN_SECONDS,
    Block,
    RankLink,
    Reassembly,
    StreamKey,
    blocks_of,
)


def block(step: int) -> Block:
    return Block(step, 0, 1, 0, np.full(3, step, np.float32))


def link() -> RankLink:
    here, there = Address("a"), Address("b")
    apart = SharedLink(PrivateMemory(host=""), here, there, sent={}, received={})
    made = RankLink(there, apart)
    made.begin(7)
    return made


def messages(actions: list[Action]) -> list[TransferBlock | TransferAck]:
    found = [action.message for action in actions if isinstance(action, Send)]
    return [m for m in found if isinstance(m, TransferBlock | TransferAck)]


def test_what_is_not_acknowledged_is_sent_again_in_this_generation_only() -> None:
    sender = link()
    sender.post([block(0)], 0.0)
    assert sender.remind(AGAIN_SECONDS - 0.1) == []
    assert len(sender.remind(AGAIN_SECONDS)) == 1
    assert sender.n_again == 1
    sender.begin(8)
    assert sender.remind(1e3) == []
    assert (sender.n_again, sender.n_out) == (1, 1)


def test_acknowledgements_go_every_few_blocks_and_with_what_is_sent() -> None:
    receiver = link()
    told = [messages(receiver.arrived(i)) for i in range(ACK_EVERY + 1)]
    assert [len(each) for each in told] == [0] * (ACK_EVERY - 1) + [1, 0]
    (transfer,) = messages(receiver.post([block(0)], 0.0))
    assert transfer.taken == ACK_EVERY + 1
    assert receiver.remind(0.1) == []


KEY = StreamKey(step=3, micro_batch=0, way=5, sender=1)
FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize("n", [0, 7, FRAME_BYTES_MAX // 4, FRAME_BYTES_MAX // 4 + 1, 1_400_000])
def test_blocks_become_the_message_in_any_order_once(n: int) -> None:
    values = np.arange(n, dtype=np.float32)
    inbox = Reassembly()
    blocks = list(blocks_of(values))
    for completes in (True, False):  # a block that comes again changes nothing
        whole = [
            inbox.take(KEY, i, block, n_elements=n, dtype=FLOAT) for i, block in reversed(blocks)
        ]
        assert whole == [False] * (len(blocks) - 1) + [completes]
    assert not list(inbox.pop_step(2))
    ((key, found),) = inbox.pop_step(3)
    assert key == KEY
    np.testing.assert_array_equal(found, values)
    assert not list(inbox.pop_step(3))


@pytest.mark.parametrize(
    ("values", "index"),
    [
        (np.zeros(6, np.float32), 0),
        (np.zeros(5, np.float64), 0),
        (np.zeros(5, np.float32), 1),
        (np.zeros(0, np.float32), 1 << 40),
    ],
)
def test_what_does_not_fit_is_refused(values: Vector, index: int) -> None:
    with pytest.raises(RemoteProtocolError, match=r"message 5 of step 3 has"):
        Reassembly().take(KEY, index, values, n_elements=5, dtype=FLOAT)
