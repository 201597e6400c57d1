"""Clients and shards together: the invariants of the parameter server, on a small bench.

`tests/simulation` adds random faults, and runs whole clusters in virtual time.
"""

from collections.abc import Sequence

import pytest
import torch

from distbelief.core.errors import MemoryGoneError
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.shard_config import ABSENCE_SECONDS_MAX, ClientConfig
from distbelief.protocol import Message, SaveCheckpoint, Stop, push_fetch as pf
from distbelief.protocol.role import Address, PeerLost
from tests.distbelief.parameter_server.pair import (
    CLIENT,
    LARGE,
    OTHER,
    SHARD,
    SMALL,
    TEST,
    Bench,
    layout_of,
)


def memory_of(*, shared: bool) -> PrivateMemory:
    return PrivateMemory(host="here" if shared else "", poison=True)


def bench_of(layout: Layout, *, shared: bool, clients: Sequence[Address] = (CLIENT,)) -> Bench:
    bench = Bench(layout=layout, memory=memory_of(shared=shared))
    for k in range(layout.n_shards):
        bench.add_shard(Address(f"shard-{k}"))
    for name in clients:
        bench.add_client(name)
    bench.settle()
    return bench


both = pytest.mark.parametrize("shared", [True, False])


@both
@pytest.mark.parametrize("tensors", [SMALL, LARGE])
@pytest.mark.parametrize("n_shards", [1, 3])
def test_what_is_fetched_is_the_sum_of_what_was_pushed(
    *, shared: bool, tensors: Sequence[TensorSpec], n_shards: int
) -> None:
    bench = bench_of(layout_of(tensors, n_shards=n_shards), shared=shared)
    for value in (-1.0, -2.0, -3.0):
        bench.push(value)
        bench.settle()
    for tensor in bench.fetch():
        assert tensor.unique().tolist() == [6.0]
    assert bench.client().unacknowledged == 0
    assert bench.client().clocks == (3,) * n_shards


@both
def test_shards_with_nothing_on_them_take_part(*, shared: bool) -> None:
    tensors = (TensorSpec(name="w", shape=(3,)),)
    bench = bench_of(layout_of(tensors, n_shards=2), shared=shared)
    bench.push()
    bench.settle()
    assert bench.fetch()[0].tolist() == [1.0] * 3
    assert bench.client().clocks == (1, 1)


@both
def test_each_side_measures_the_same_staleness(*, shared: bool) -> None:
    bench = bench_of(layout_of(), shared=shared, clients=(CLIENT, OTHER))
    bench.fetch(CLIENT)
    for _ in range(3):
        bench.fetch(OTHER)
        bench.push(name=OTHER)
        bench.settle()
    bench.push(name=CLIENT)
    bench.settle()
    assert bench.counters(CLIENT)["staleness_mean"] == 3
    assert bench.counters(OTHER)["staleness_mean"] == 0
    assert bench.counters(SHARD)["staleness_max"] == 3


@both
def test_a_client_fetches_while_its_push_is_applied(*, shared: bool) -> None:
    """Torn from shared memory until the push is in; by blocks once it is."""
    bench = bench_of(layout_of(), shared=shared)
    bench.push()
    bench.pass_messages()
    bench.begin_fetch()
    bench.pass_messages()
    assert bench.client().fetch_complete == shared
    tensors = [torch.zeros(100).double(), torch.zeros(3).double()][::-1]
    if shared:
        assert bench.install(tensors).torn == (0,)
    bench.settle()
    assert bench.client().fetch_complete
    assert bench.install(tensors).clocks == (1,)
    assert tensors[1].unique().tolist() == [1.0]


def test_a_client_without_memory_to_share_and_one_with_push_to_one_shard() -> None:
    bench = bench_of(layout_of(), shared=True)
    bench.add_client(OTHER, memory=PrivateMemory(host="elsewhere"))
    bench.settle()
    bench.push(name=CLIENT)
    bench.push(name=OTHER)
    bench.settle()
    for name in (CLIENT, OTHER):
        assert bench.fetch(name)[0].unique().tolist() == [2.0]


@both
@pytest.mark.parametrize("kind", ["OpenSession", "SessionOpened", "PushBlock", "Push", "Fetch"])
def test_any_first_message_may_be_lost(*, shared: bool, kind: str) -> None:
    bench = Bench(layout=layout_of(LARGE), memory=memory_of(shared=shared))
    lost: set[str] = set()

    def lose(_: Address, message: Message) -> bool:
        name = type(message).__name__
        if name == kind and name not in lost:
            lost.add(name)
            return True
        return False

    bench.lose = lose
    bench.add_shard()
    bench.add_client()
    bench.settle()
    bench.advance(5.0)
    bench.push()
    bench.settle()
    bench.advance(5.0)
    assert bench.client().unacknowledged == 0
    bench.begin_fetch()
    bench.settle()
    bench.advance(5.0)
    tensors = [torch.zeros(300_000).double()]
    assert bench.install(tensors).torn == ()
    assert tensors[0].unique().tolist() == [1.0]


def test_an_expired_pin_does_not_end_the_fetch() -> None:
    """All blocks but the first are lost for longer than a pin lasts."""
    bench = Bench(layout=layout_of(LARGE), memory=memory_of(shared=False))
    bench.lose = lambda _, message: (
        isinstance(message, pf.ParameterBlock) and message.block_index > 0 and bench.now < 14.0
    )
    bench.add_shard(n_copies=1)
    bench.add_client()
    bench.settle()
    bench.begin_fetch()
    bench.settle()
    bench.push()
    bench.settle()
    bench.advance(30.0)
    tensors = [torch.zeros(300_000).double()]
    outcome = bench.install(tensors)
    assert outcome.torn == ()
    assert tensors[0].unique().tolist() == [float(outcome.clocks[0])]


@both
def test_a_client_that_restarts_continues(*, shared: bool) -> None:
    bench = bench_of(layout_of(), shared=shared)
    bench.push(samples=32)
    bench.settle()
    bench.push(samples=64)
    bench.pass_messages()  # whole, and being applied when the client dies
    bench.add_client()
    bench.settle()
    assert bench.client().samples == 64
    bench.push(samples=96)
    bench.settle()
    assert bench.fetch()[0].unique().tolist() == [3.0]


@both
def test_an_incomplete_push_dies_with_its_client(*, shared: bool) -> None:
    bench = bench_of(layout_of(LARGE), shared=shared)
    bench.lose = lambda _, message: isinstance(message, pf.Push)
    bench.push()
    bench.settle()
    bench.lose = lambda *_: False
    bench.add_client()
    bench.settle()
    bench.push()
    bench.settle()
    assert bench.fetch()[0].unique().tolist() == [1.0]


@both
def test_a_shard_that_restarts_loses_what_its_snapshot_lacks_and_says_so(*, shared: bool) -> None:
    bench = bench_of(layout_of(), shared=shared)
    for _ in range(2):
        bench.push(samples=10)
        bench.settle()
    bench.send(TEST, SHARD, SaveCheckpoint(label="1"))
    bench.settle()
    for _ in range(3):
        bench.push(samples=20)
        bench.settle()
    bench.push()  # in flight, and not lost: it is pushed again
    bench.add_shard(restored=bench.snapshots[-1])
    bench.deliver(CLIENT, PeerLost(peer=SHARD, incarnation=1, reason="killed"))
    bench.settle()
    bench.advance(5.0)
    client = bench.client()
    assert client.ready
    assert client.samples == 10
    assert client.counters()["pushes_lost"] == 3
    bench.push()
    bench.settle()
    assert bench.fetch()[0].unique().tolist() == [4.0]


@both
def test_a_restart_between_two_acknowledgements_of_shards_loses_nothing(*, shared: bool) -> None:
    """Shards do not wait for each other: one has the push, the other will have it."""
    bench = bench_of(layout_of(LARGE, n_shards=2), shared=shared)
    other = Address("shard-1")
    bench.lose = lambda receiver, message: receiver == other and isinstance(message, pf.Push)
    bench.push()
    bench.settle()
    bench.lose = lambda *_: False
    bench.add_shard(other)
    bench.settle()
    bench.advance(5.0)
    assert bench.client().unacknowledged == 0
    assert bench.client().counters()["pushes_lost"] == 0
    bench.push()
    bench.settle()
    assert bench.fetch()[0].unique().tolist() == [2.0]


@both
def test_pushes_that_a_dead_shard_did_not_acknowledge_are_applied_by_its_next_incarnation(
    *, shared: bool
) -> None:
    """A shard dies with one push applied but not acknowledged, and one that waits."""
    bench = bench_of(layout_of(), shared=shared)
    bench.push(-1.0)
    bench.push(-2.0)
    bench.lose = lambda _, message: isinstance(message, pf.PushApplied)
    bench.pass_messages()
    bench.run_work()
    bench.lose = lambda *_: False
    bench.add_shard()  # without a snapshot
    bench.settle()
    bench.advance(5.0)
    assert bench.client().unacknowledged == 0
    assert bench.client().counters()["pushes_lost"] == 0
    assert bench.fetch()[0].unique().tolist() == [3.0]


def test_a_shard_that_is_stopped_leaves_its_memory_clean() -> None:
    bench = bench_of(layout_of(), shared=True)
    bench.push()
    bench.pass_messages()
    bench.send(TEST, SHARD, Stop(reason="enough"))
    bench.settle()
    assert bench.halted[SHARD].error is None
    assert bench.client().unacknowledged == 0
    assert not bench.memory.__dict__["_regions"]


@both
def test_a_client_gone_until_its_push_buffers_are_released_loses_no_push(*, shared: bool) -> None:
    """A guest that died kept its push buffers for ever; one that returns needs others."""
    bench = bench_of(layout_of(LARGE), shared=shared, clients=())
    patient = ClientConfig(
        pushes=True, silence_seconds_max=1e4, stall_seconds_max=1e4, credit_blocks=4
    )
    client = bench.add_client(config=patient)
    bench.settle()
    bench.push(-1.0)
    bench.settle()
    # Cut off in the middle of a push: two blocks have arrived, and were answered.
    n_messages = 0

    def cut_off(receiver: Address, _message: Message) -> bool:
        nonlocal n_messages
        n_messages += receiver == SHARD
        return n_messages > 2 and receiver == SHARD

    if not shared:
        bench.lose = cut_off
    bench.push(-2.0)
    bench.pass_messages()
    bench.lose = lambda receiver, _message: receiver == SHARD
    bench.messages.clear()
    bench.deliver(SHARD, PeerLost(peer=CLIENT, incarnation=1, reason="cut off"))
    bench.settle()
    bench.advance(ABSENCE_SECONDS_MAX - 1.0)
    slots = bench.counters()["push_buffer_bytes"]
    bench.advance(2.0 + shared * ABSENCE_SECONDS_MAX)
    assert slots == 2 * 300_032 * 8
    assert bench.counters()["push_buffer_bytes"] == 0
    if shared:
        with pytest.raises(MemoryGoneError):
            bench.memory.attach("shard-0.1.slots-0")
    bench.lose = lambda _receiver, _message: False
    bench.advance(10.0)
    bench.push(-4.0)
    bench.settle()
    assert bench.fetch()[0].unique().tolist() == [7.0]
    assert client.unacknowledged == 0
    assert client.counters()["pushes_lost"] == 0
    assert bench.counters()["pushes_applied"] == 3
