"""The two push buffers of one session: which pushes they have room for."""

import numpy as np
import pytest

from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.session_state import PushBuffer, Session
from distbelief.protocol import Push
from distbelief.roles.role import Address


def client(*, watermark: int, n_unconfirmed: int) -> Session:
    push_buffers = (PushBuffer(np.zeros(4, np.float32)), PushBuffer(np.zeros(4, np.float32)))
    return Session(
        name=Address("replica-0"),
        incarnation=1,
        watermark=watermark,
        n_unconfirmed=n_unconfirmed,
        push_buffers=push_buffers,
        region="shared",
    )


def push(sequence: int) -> Push:
    return Push(sequence=sequence, shard_incarnation=1, fetched_clock=0, n_gradients=1, samples=1)


def room(client: Session) -> list[int]:
    """Return the pushes that it takes."""
    taken = []
    for sequence in range(1, 9):
        try:
            client.take_push(push(sequence))
        except RemoteProtocolError:
            continue
        taken.append(sequence)
    return taken


@pytest.mark.parametrize(
    ("watermark", "n_unconfirmed", "taken"),
    [(3, 0, [4, 5]), (3, 1, [4]), (3, 2, []), (0, 0, [1, 2])],
)
def test_a_push_that_is_not_replicated_keeps_its_buffer_and_is_not_taken_again(
    watermark: int, n_unconfirmed: int, taken: list[int]
) -> None:
    """With the confirmed watermark instead of the true one, a push that waits for the backup
    would be accepted twice. The other way round, a later push would overwrite what the
    backup still reads.
    """
    assert room(client(watermark=watermark, n_unconfirmed=n_unconfirmed)) == taken


def test_the_next_push_follows_the_last_applied_not_the_last_confirmed() -> None:
    one = client(watermark=3, n_unconfirmed=1)
    one.take_push(push(4))
    complete = one.next_complete()
    assert complete is not None
    assert complete.sequence == 4
