"""One member of a ring, and a few without a network. Whole rings: `tests/simulation/test_ring`."""

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from distbelief.core.errors import LocalProtocolError, RemoteProtocolError
from distbelief.core.vectors import BLOCK_BYTES, Vector
from distbelief.protocol.ring import RingAck, RingBlock, RingFailed, RingMember, RingMembers
from distbelief.protocol.role import Action, Address, Received, Send, SetTimer
from distbelief.worker.ring import (
    ACK_EVERY,
    CREDIT_BLOCKS,
    RETRY_SECONDS,
    Ring,
    RingMessage,
    chunk_of,
)
from tests.simulation.rings import plain_sum


A, B, C = (Address(f"replica-{k}") for k in range(3))
N = BLOCK_BYTES // 4


def members_of(n: int, generation: int = 1) -> RingMembers:
    members = (RingMember(name=f"replica-{k}", incarnation=1) for k in range(n))
    return RingMembers(generation=generation, members=tuple(members))


def ring_of(n: int, index: int = 0) -> Ring:
    ring = Ring(Address(f"replica-{index}"))
    ring.start(1)
    ring.join(members_of(n))
    return ring


def sent(actions: Sequence[Action]) -> list[RingMessage]:
    messages = [one.message for one in actions if isinstance(one, Send)]
    assert all(isinstance(one, RingMessage) for one in messages)
    return messages  # type: ignore[return-value]


def block(
    index: int, values: Vector, *, vector: str | None = None, number: int = 1, generation: int = 1
) -> RingBlock:
    vector = vector or "6 float32"
    return RingBlock(generation=generation, round=number, index=index, vector=vector, values=values)


def hear(ring: Ring, sender: Address, message: RingMessage, now: float = 0.0) -> list[Action]:
    return ring.receive(Received(sender=sender, incarnation=1, message=message), message, now)


def sums_of(vectors: Sequence[Vector]) -> list[Vector]:
    """Let rings that share no memory sum these; return what each has."""
    n = len(vectors)
    rings = [ring_of(n, index) for index in range(n)]
    sums = [one.copy() for one in vectors]
    mail: deque[tuple[Address, Send]] = deque()
    for index, ring in enumerate(rings):
        sends = ring.begin(sums[index], 0.0)
        mail.extend((Address(f"replica-{index}"), s) for s in sends if isinstance(s, Send))
    while mail:
        sender, send = mail.popleft()
        message = send.message
        assert isinstance(message, RingMessage)
        receiver = rings[int(send.receiver.removeprefix("replica-"))]
        replies = hear(receiver, sender, message)
        mail.extend((send.receiver, one) for one in replies if isinstance(one, Send))
    assert all(ring.is_complete and ring.is_settled for ring in rings)
    assert [ring.n_again for ring in rings] == [0] * n
    return sums


@pytest.mark.parametrize("n", [2, 3, 4])
def test_e9_gloo_gives_the_same_sum(n: int) -> None:
    """torch.distributed as the yardstick, each rank in a thread; the vector has many blocks."""
    stream = np.random.default_rng(n)
    vectors = [stream.standard_normal(3 * N + 5).astype(np.float32) for _ in range(n)]
    theirs = [torch.from_numpy(one.copy()) for one in vectors]
    store = HashStore()

    def reduce(rank: int) -> None:
        group: Any = ProcessGroupGloo(store, rank, n, timedelta(seconds=30))
        group.allreduce([theirs[rank]]).wait()

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours = sums_of(vectors)
    wanted = plain_sum(vectors)
    assert all(one.tobytes() == wanted.tobytes() for one in ours)
    difference = float(np.linalg.norm(ours[0] - theirs[0].numpy()))
    assert difference <= 1e-6 * float(np.linalg.norm(wanted))


def test_chunks_are_near_equal_and_the_first_ones_longer() -> None:
    assert [chunk_of(10, 4, k) for k in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [chunk_of(2, 3, k) for k in range(3)] == [(0, 1), (1, 2), (2, 2)]


def test_not_a_number_and_infinity_are_summed_as_any_other() -> None:
    vectors = [np.array([np.inf, np.nan, 3e38], np.float32), np.array([-np.inf, 1, 3e38], "f")]
    for one in sums_of(vectors):
        assert np.isnan(one[:2]).all()
        assert np.isinf(one[2])


def test_ra5_one_member_has_its_sum_at_once_and_sends_nothing() -> None:
    ring, values = ring_of(1), np.arange(5, dtype=np.float64)
    assert ring.begin(values, 0.0) == []
    assert ring.is_complete
    assert ring.is_settled
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_a_block_is_passed_on_as_soon_as_it_has_come() -> None:
    ring = ring_of(3)
    values = np.arange(6, dtype=np.float32)
    (own,) = sent(ring.begin(values, 0.0))
    assert isinstance(own, RingBlock)
    assert own.values.tolist() == [0, 1]
    (part,) = sent(hear(ring, C, block(0, np.array([10, 20], np.float32))))
    assert isinstance(part, RingBlock)
    assert part.index == 1
    assert part.values.tolist() == [14, 25]  # chunk 2: the left neighbour's, and its own


def test_early_blocks_are_held_acknowledged_and_taken_once_the_round_begins() -> None:
    ring = ring_of(3)
    vector = f"{12 * N} float32"
    answers = [hear(ring, C, block(k, np.ones(N, "f"), vector=vector)) for k in range(ACK_EVERY)]
    (ack,) = sent([one for answer in answers for one in answer])
    assert isinstance(ack, RingAck)
    assert (ack.round, ack.received, ack.limit) == (1, ACK_EVERY, CREDIT_BLOCKS)
    messages = sent(ring.begin(np.zeros(12 * N, np.float32), 0.0))
    acks = [one for one in messages if isinstance(one, RingAck)]
    assert acks[-1].received == ACK_EVERY
    assert acks[-1].limit == ACK_EVERY + CREDIT_BLOCKS
    blocks = [one for one in messages if isinstance(one, RingBlock)]
    assert [one.index for one in blocks] == list(range(2 * 4))  # its own chunk, and these


def test_a_neighbour_that_sends_more_than_it_may_breaks_the_protocol() -> None:
    ring = ring_of(2)
    for index in range(CREDIT_BLOCKS):
        hear(ring, B, block(index, np.ones(3, np.float32)))
    with pytest.raises(RemoteProtocolError, match="holds 16 blocks, and allowed no more"):
        hear(ring, B, block(CREDIT_BLOCKS, np.ones(3, np.float32)))


@pytest.mark.parametrize(
    "message",
    [
        block(0, np.ones(2, np.float32)),  # C is to the right
        block(0, np.ones(3, np.float32), number=3),
    ],
)
def test_messages_that_cannot_be_are_refused(message: RingBlock) -> None:
    ring = ring_of(3, 1)
    ring.begin(np.ones(6, np.float32), 0.0)
    with pytest.raises(RemoteProtocolError, match="sent replica-1 a RingBlock that cannot be"):
        hear(ring, C, message)


@pytest.mark.parametrize("values", [np.ones(2, np.float32), np.ones(3, np.float64)])
def test_a_block_of_another_size_or_type_is_an_error_also_if_it_came_early(values: Vector) -> None:
    ring = ring_of(2)
    hear(ring, B, block(0, values))
    ring.begin(np.ones(6, np.float32), 0.0)
    assert ring.failure is not None


def test_messages_of_another_generation_are_dropped() -> None:
    ring = ring_of(2)
    ring.begin(np.ones(6, np.float32), 0.0)
    for generation in (0, 2):
        assert hear(ring, B, block(0, np.ones(3, np.float32), generation=generation)) == []
    failed = RingFailed(generation=2, reason="another", answer=True)
    assert hear(ring, B, failed) == []
    assert ring.failure is None


def test_a_new_generation_ends_the_round_and_its_vector_is_not_used_again() -> None:
    """Messages that have not left yet would have other numbers, and still count in the old one."""
    ring, values = ring_of(2), np.ones(6, np.float32)
    ring.begin(values, 0.0)
    ring.join(members_of(2, generation=2))
    assert not ring.is_complete
    assert ring.round == 0
    with pytest.raises(LocalProtocolError, match="memory that may still be read"):
        ring.begin(values, 0.0)
    assert len(sent(ring.begin(values.copy(), 0.0))) == 1
    assert ring.join(members_of(2, generation=1)) == []
    assert ring.round == 1


def test_who_is_not_listed_with_its_incarnation_is_not_in() -> None:
    ring = Ring(A)
    ring.start(2)
    ring.join(members_of(2))
    assert ring.members == []
    with pytest.raises(LocalProtocolError, match="begins a round before it can"):
        ring.begin(np.ones(6, np.float32), 0.0)


def test_only_flat_floats_are_summed() -> None:
    for values in (np.ones(4, np.int64), np.ones((2, 2), np.float32), np.ones(8, "f")[::2]):
        with pytest.raises(LocalProtocolError, match="use a flat float vector"):
            ring_of(2).begin(values, 0.0)


def test_unacknowledged_blocks_are_sent_again_and_less_often() -> None:
    ring = ring_of(2)
    actions = ring.begin(np.ones(6, np.float32), 0.0)
    (timer,) = [one for one in actions if isinstance(one, SetTimer)]
    times, now = [], timer.at
    for _ in range(3):
        again = ring.woke(now)
        assert [type(one) for one in sent(again)] == [RingAck, RingBlock]
        times.append(now)
        (timer,) = [one for one in again if isinstance(one, SetTimer)]
        now = timer.at
    assert times[0] == RETRY_SECONDS
    assert times[2] - times[1] > times[1] - times[0]
    assert ring.n_again == 3
    assert ring.n_bytes == 12  # each block once


def test_ra4_another_length_is_told_to_both_neighbours_until_they_know() -> None:
    ring = ring_of(3)
    ring.begin(np.ones(6, np.float32), 0.0)
    told = hear(ring, C, block(0, np.ones(2, np.float32), vector="7 float32"))
    assert ring.failure == (
        "received different lengths: replica-2 sums 7 float32, replica-0 6 float32"
    )
    assert [type(one) for one in sent(told)] == [RingFailed] * 2
    answer = RingFailed(generation=1, reason=ring.failure, answer=False)
    assert hear(ring, C, answer) == []
    (again,) = [one for one in ring.woke(RETRY_SECONDS) if isinstance(one, Send)]
    assert again.receiver == B
    hear(ring, B, answer)
    assert ring.woke(10.0) == []
    with pytest.raises(LocalProtocolError):
        ring.begin(np.ones(6, np.float32), 0.0)


@pytest.mark.parametrize("vector", ["6 float32 b", "6 float64 a"])
def test_hv1_another_layout_or_element_type_is_an_error_too(vector: str) -> None:
    ring = ring_of(2)
    ring.begin(np.ones(6, np.float32), 0.0, layout="a")
    assert sent(hear(ring, B, block(0, np.ones(3, np.float32), vector="6 float32 a"))) != []
    assert ring.failure is None
    hear(ring, B, block(1, np.ones(3, np.float32), vector=vector))
    assert ring.failure is not None


@pytest.mark.parametrize("n", [2, 3])
def test_hv2_tensors_in_one_vector_have_the_sums_that_each_would_have_alone(n: int) -> None:
    """HV-2: up to the order of adding; two members have only one."""
    stream = np.random.default_rng(n)
    tensors = [
        [stream.standard_normal(size).astype("f") for size in (700, 3, 90)] for _ in range(n)
    ]
    together = sums_of([np.concatenate(one) for one in tensors])[0]
    alone = np.concatenate([sums_of(each)[0] for each in zip(*tensors, strict=True)])
    if n == 2:
        assert together.tobytes() == alone.tobytes()
    assert np.linalg.norm(together - alone) <= 1e-6 * np.linalg.norm(alone)
