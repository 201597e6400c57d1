"""The two slots of one client: which pushes there is room for."""

import numpy as np
import pytest

from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.session_state import PushBuffer, Session
from distbelief.protocol import Push
from distbelief.roles.role import Address


def client(*, watermark: int, n_held: int) -> Session:
    slots = (PushBuffer(np.zeros(4, np.float32)), PushBuffer(np.zeros(4, np.float32)))
    return Session(
        name=Address("replica-0"),
        incarnation=1,
        watermark=watermark,
        n_held=n_held,
        slots=slots,
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
    ("watermark", "n_held", "taken"), [(3, 0, [4, 5]), (3, 1, [4]), (3, 2, []), (0, 0, [1, 2])]
)
def test_a_push_that_is_held_keeps_its_slot_and_is_not_taken_again(
    watermark: int, n_held: int, taken: list[int]
) -> None:
    """With the watermark that the client was told of in place of the true one, a push
    that is applied, and held for the second copy, would be taken once more; the other
    way round a later push would overwrite what the second copy still reads.
    """
    assert room(client(watermark=watermark, n_held=n_held)) == taken


def test_the_next_to_be_applied_follows_the_last_applied_not_the_last_told() -> None:
    one = client(watermark=3, n_held=1)
    one.take_push(push(4))
    complete = one.next_complete()
    assert complete is not None
    assert complete.sequence == 4
