"""Messages put together from blocks; what does not fit is refused."""

import numpy as np
import pytest

from distbelief.core.vectors import BLOCK_BYTES, Vector
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import TransferBlock
from distbelief.roles.reliable import Reassembly, StreamKey, blocks_of


LABEL = StreamKey(step=3, micro_batch=0, way=5, sender=1)
FLOAT = np.dtype(np.float32)


def transfer(values: Vector, *, index: int = 0) -> TransferBlock:
    return TransferBlock(
        generation=1,
        sequence=0,
        taken=0,
        step=3,
        micro_batch=0,
        way=5,
        block_index=index,
        values=values,
    )


@pytest.mark.parametrize("n", [0, 7, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 1, 700_000])
def test_blocks_become_the_message_in_any_order(n: int) -> None:
    values = np.arange(n, dtype=np.float32)
    inbox = Reassembly()
    blocks = list(blocks_of(values))
    whole = [
        inbox.take(LABEL, transfer(block, index=i), n_elements=n, dtype=FLOAT)
        for i, block in reversed(blocks)
    ]
    assert whole == [False] * (len(blocks) - 1) + [True]
    ((label, found),) = inbox.pop_step(3)
    assert label == LABEL
    np.testing.assert_array_equal(found, values)
    assert not list(inbox.pop_step(3))


def test_a_block_that_comes_again_changes_nothing() -> None:
    inbox, values = Reassembly(), np.arange(5, dtype=np.float32)
    assert inbox.take(LABEL, transfer(values), n_elements=5, dtype=FLOAT)
    assert not inbox.take(LABEL, transfer(values), n_elements=5, dtype=FLOAT)
    assert not list(inbox.pop_step(2))
    inbox.clear()
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
        Reassembly().take(LABEL, transfer(values, index=index), n_elements=5, dtype=FLOAT)
