"""Staleness of pushes, the two push buffers of one session, and weights of pushes."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.parameter_server import staleness as module
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.sessions import Session, Sessions
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.staleness import PartialPushes, Staleness
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.tensor_copies import PushBuffer
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Address


SIZE = 256
FLOATS = np.dtype(np.float32)
WHOLE = ShardSlice(SIZE, dtype=FLOATS)
LEFT = ShardSlice(SIZE, dtype=FLOATS, ranges=IndexRanges.whole(0, 128))
RIGHT = ShardSlice(SIZE, dtype=FLOATS, ranges=IndexRanges.whole(128, SIZE))
MIDDLE = ShardSlice(SIZE, dtype=FLOATS, ranges=IndexRanges.whole(64, 192))
OUTER = IndexRanges.union([IndexRanges.whole(0, 64), IndexRanges.whole(192, SIZE)])
ENDS = ShardSlice(SIZE, dtype=FLOATS, ranges=OUTER)
ALL = (WHOLE, LEFT, RIGHT, MIDDLE, ENDS)


def elements(shard_slice: ShardSlice) -> frozenset[int]:
    ranges = shard_slice.within(0, SIZE)
    spans = zip(ranges.starts.tolist(), ranges.stops.tolist(), strict=True)
    return frozenset(i for start, stop in spans for i in range(start, stop))


@given(st.lists(st.sampled_from(ALL), max_size=12), st.sampled_from(ALL), st.data())
def test_the_staleness_of_a_push_counts_the_pushes_of_its_elements(
    pushed: list[ShardSlice], mine: ShardSlice, data: st.DataObject
) -> None:
    fetched = data.draw(st.integers(0, len(pushed)))
    recent = PartialPushes()
    for clock, shard_slice in enumerate(pushed):
        if shard_slice.ranges is not None:
            recent.add(shard_slice, clock=clock)
    since = [each for each in pushed[fetched:] if elements(each) & elements(mine)]
    found = len(pushed) - fetched - recent.n_elsewhere(mine, since=fetched)
    assert found == len(since)


def test_what_is_too_long_ago_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = PartialPushes()
    n = module._N_KEPT
    for clock in range(n + 10):
        recent.add(LEFT, clock=clock)
    assert recent.n_elsewhere(RIGHT, since=0) == n
    # Which clients share elements is not kept forever either.
    monkeypatch.setattr(module, "_N_KNOWN_MAX", 1)
    assert recent.n_elsewhere(MIDDLE, since=n) == 0
    assert recent.n_elsewhere(RIGHT, since=n) == 10


def test_mean_and_maximum_are_of_all_pushes_and_p95_of_the_recent() -> None:
    staleness = Staleness()
    assert set(staleness.counters().values()) == {0.0}
    staleness.add(5000)
    for value in range(1, 101):
        staleness.add(value)
    counters = staleness.counters()
    assert counters["staleness_mean"] == (5000 + 5050) / 101
    assert counters["staleness_max"] == 5000
    assert counters["staleness_p95"] == 96  # of 5000 and 1 to 100
    for _ in range(1024):
        staleness.add(3)
    assert staleness.counters()["staleness_p95"] == 3
    assert staleness.counters()["staleness_max"] == 5000


# --- push buffers ---


def client(*, watermark: int, n_unconfirmed: int) -> Session:
    push_buffers = tuple(PushBuffer(4, np.dtype(np.float32)) for _ in range(2))
    return Session(
        name=Address("replica-0"),
        incarnation=1,
        watermark=watermark,
        n_unconfirmed=n_unconfirmed,
        push_buffers=push_buffers,
        region="shared",
    )


def room(client: Session) -> list[int]:
    """Return the pushes that it takes."""
    taken = []
    for sequence in range(1, 9):
        try:
            client.push_buffer_of(sequence)
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


# --- rounds of parts ---


def test_a_part_is_as_stale_as_the_rounds_that_its_elements_have_missed() -> None:
    """The ranks of a replica push a half each: a round of both raises the clock by two."""
    policy = ExchangePolicy(staleness=0, round=Round(), weight="mean")
    company = Company(policy, 0)
    sessions = company.sessions
    ranks = [company.open(n, entries=1, holds=half.stripes) for n, half in enumerate((LEFT, RIGHT))]

    def play(sequence: int, *, fetched_clock: int) -> list[int]:
        for rank in ranks:
            block = pf.PushBlock(
                sequence=sequence, term=1, block_index=0, values=np.ones(128, np.float32)
            )
            sessions.take_block(rank, block)
            sessions.take_push(
                rank, msgspec.structs.replace(PUSH, sequence=sequence, fetched_clock=fetched_clock)
            )
        while sessions.begin_push(0.0) is not None:
            company.store.clock += 1
            sessions.end_push(held=False)
        return [rank.staleness for rank in ranks]

    assert play(1, fetched_clock=0) == [0, 0]
    assert play(2, fetched_clock=2) == [0, 0]
    assert play(3, fetched_clock=2) == [1, 1]


# --- weights ---

LAYOUT = Layout.of([TensorSpec(name="w", shape=(SIZE,))], n_shards=1)
PUSH = pf.Push(sequence=1, term=1, fetched_clock=0, n_gradients=1, samples=1)


class Company:
    """Workers at one shard, which enter and leave."""

    def __init__(self, policy: ExchangePolicy, n_workers: int) -> None:
        config = ShardConfig(index=0, layout=LAYOUT, rule=SGD(learning_rate=1.0), policy=policy)
        memory = PrivateMemory()
        self.store = ShardStore(config, memory=memory)
        self.sessions = Sessions(config, self.store, memory=memory)
        self.workers = [self.open(n, entries=1) for n in range(n_workers)]

    def open(self, worker: int, *, entries: int, holds: Vector | None = None) -> Session:
        """Enter, by an odd number of `entries`, or leave."""
        request = pf.OpenSession(
            layout=LAYOUT.fingerprint,
            pushes=True,
            host="",
            next_sequence=1,
            entries=entries,
            holds=holds,
        )
        name = Address(f"replica-{worker}")
        return self.sessions.admit(name, 1, request, region="", now=0.0)[0]

    def scale(self, worker: int, *, staleness: int = 0) -> float:
        return self.sessions._share_of(self.workers[worker], PUSH, staleness).scale


def test_excess_damping_allows_one_push_of_each_other_worker() -> None:
    """With one more it passed every test."""
    company = Company(ExchangePolicy(damping="excess"), 4)
    found = [company.scale(0, staleness=staleness) for staleness in range(6)]
    assert found == [1.0, 1.0, 1.0, 1.0, 1 / 2, 1 / 3]


def test_the_last_pushes_of_workers_that_end_together_count_as_before() -> None:
    """They would count 1/4 + 1/3 + 1/2 + 1."""
    company = Company(ExchangePolicy(weight="mean"), 4)
    found = []
    for worker in range(4):
        company.open(worker, entries=2)
        found.append(company.scale(worker))
    assert found == [1 / 4] * 4
    assert company.scale(3) == 1.0  # from then on it is alone
