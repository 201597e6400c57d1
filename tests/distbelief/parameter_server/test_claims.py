"""What a client claims in numbers of a legal type, and cannot be."""

import msgspec
import pytest

from distbelief.core.errors import FalseClaimError, ProtocolError
from distbelief.core.spans import Span, Spans, of_part
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.ticks import TICKS_AHEAD_MAX
from distbelief.protocol import (
    PushApplied,
    SamplesApplied,
    SessionOpened,
    StartSync,
    push_fetch as pf,
)
from distbelief.protocol.codec import Codec
from distbelief.protocol.role import Address
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, sent
from tests.distbelief.parameter_server.shard_copies import A, B, OneCopy


MOST = 1 << 53


def push_of(dealt: Span, *, sequence: int = 1, tick: pf.Ticks = msgspec.UNSET) -> pf.Push:
    return pf.Push(
        sequence=sequence, term=1, fetched_clock=0, n_gradients=1, samples=8, dealt=dealt, tick=tick
    )


@pytest.mark.parametrize("dealt", [(0, 101), (99, 101), (250, 350), (4, 4), (5, 4), (0, MOST)])
def test_no_push_has_more_positions_than_an_epoch(dealt: Span) -> None:
    """`dealt = (0, 2**63 - 1)` was a MemoryError in the shard. Nobody deals more than a push."""
    copy = OneCopy(A, is_replicated=False, deals=True, n_samples=100)
    copy.hello()
    with pytest.raises(FalseClaimError, match="which nobody dealt"):
        copy.receive(push_of(dealt), CLIENT)
    assert copy.shard.values.applied == Spans()
    copy.receive(push_of((96, 100)), CLIENT)


def test_what_thousands_of_replicas_have_pushed_is_told_whole() -> None:
    """Of more than 4,096 places the last were never told: 3 % of all steps were dealt twice."""
    n = 10_000
    copy = OneCopy(A, is_replicated=False, deals=True, n_samples=4 * n)
    copy.hello()
    copy.shard.values.applied = Spans((4 * at, 4 * at + 2) for at in range(n))
    told, codec = sent(copy.wait(10.0), SamplesApplied), Codec(run="r")
    for one in told:
        assert Spans.from_wire(one.spans).n_positions == 2 * n
        codec.decode(codec.encode(one, sender=A, incarnation=1))  # a legal message
    assert len(told) <= 6  # every 2 s, as in a small job: there is no news


@pytest.mark.parametrize("part", [1, 7, 4095])
def test_a_rank_claims_positions_of_its_own(part: int) -> None:
    """They begin at a number that is no multiple of an epoch."""
    copy = OneCopy(A, is_replicated=False, deals=True, n_samples=100)
    copy.hello()
    with pytest.raises(FalseClaimError, match="which nobody dealt"):
        copy.receive(push_of(of_part((99, 101), part)), CLIENT)
    copy.receive(push_of(of_part((96, 100), part)), CLIENT)


def test_no_push_has_positions_where_nothing_is_dealt() -> None:
    copy = OneCopy(A, is_replicated=False)
    copy.hello()
    with pytest.raises(FalseClaimError, match="which nobody dealt"):
        copy.receive(push_of((0, 4)), CLIENT)


@pytest.mark.parametrize("dealt", [(0, 1 << 63), (0, MOST + 1), (-1, 4)])
def test_positions_beyond_what_a_float_counts_are_no_message(dealt: Span) -> None:
    message = msgspec.structs.replace(push_of((0, 4)), dealt=dealt)
    codec = Codec(run="r")
    with pytest.raises(ProtocolError, match=r"unreadable header"):
        codec.decode(codec.encode(message, sender="worker-1", incarnation=1))


def test_a_worker_alone_cannot_bring_the_floor_to_where_counting_ends() -> None:
    """Those that came later began at the floor: their next tick was no legal message."""
    ssp = ExchangePolicy(staleness=1)
    copy = OneCopy(A, is_replicated=False, policy=ssp)
    with pytest.raises(FalseClaimError, match="has ended 9007199254740992 ticks: 0 are known"):
        copy.hello(tick=MOST)
    copy.hello(tick=TICKS_AHEAD_MAX)  # of a shard that has restarted
    push = msgspec.structs.replace(push_of((0, 4), tick=MOST), dealt=msgspec.UNSET)
    with pytest.raises(FalseClaimError, match="ticks"):
        copy.receive(push, CLIENT)
    (opened,) = sent(copy.hello(OTHER, tick=0), SessionOpened)
    assert opened.tick == opened.floor == TICKS_AHEAD_MAX


def test_only_the_other_copy_replicates_to_a_shard() -> None:
    """Any client that knew its incarnation made itself the primary, with values of its own."""
    copy = OneCopy(B)
    start = StartSync(term=1 << 60, receiver_incarnation=1, clock=7, clients=())
    for sender in (CLIENT, Address("shard-1"), Address("shard-1b"), B):
        with pytest.raises(FalseClaimError, match=f"{sender} is no copy of shard-0b"):
            copy.receive(start, sender)
    assert copy.shard.status()[0] == "waiting"
    assert not sent(copy.receive(start, A), PushApplied)
    assert copy.shard.status()[0] == "following"
