"""Two copies of a shard whose clients hold parts of it."""

import msgspec
import numpy as np
import pytest

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.parameter_server import step_counts
from distbelief.parameter_server.layout import PartialView, TensorSpec
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.rules import SGD, Adam, UpdateRule
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.tensor_copies import push_buffer_views
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Action, Address, Send
from tests.distbelief.parameter_server.pair import layout_of
from tests.distbelief.parameter_server.shard_copies import A, B, N, OneCopy, only
from tests.distbelief.parameter_server.test_replication_backup import (
    block,
    following,
    forward,
    whole_second,
)


LAYOUT = layout_of(
    (TensorSpec(name="w", shape=(2048, 200)), TensorSpec(name="z", shape=(70,)))
)  # 4 blocks
RULE = Adam(learning_rate=0.1)
NADAM: UpdateRule = msgspec.convert({"name": "NAdam", "lr": 0.1}, UpdateRule)
HELD: dict[Address, Vector | None] = {
    name: PartialView(LAYOUT, [("w", Region(((0, 2048), columns)))]).slices[0].stripes
    for name, columns in {
        Address("left"): (0, 90),
        Address("middle"): (50, 120),
        Address("right"): (90, 200),
    }.items()
}
HELD[Address("whole")] = None


class Pair:
    """A copy that leads, one that follows once it is told to, and their clients."""

    def __init__(self, *, shared: bool, rule: UpdateRule = RULE) -> None:
        memory = PrivateMemory(host="here" if shared else "")
        self.shared = shared
        self.a, self.b = (OneCopy(name, memory=memory, layout=LAYOUT, rule=rule) for name in (A, B))
        self.pump(self.a.lead(1))
        self.sequences = dict.fromkeys(HELD, 0)
        self.regions: dict[Address, str] = {}
        for name, holds in HELD.items():
            host = "here" if shared else ""
            welcome = self.a.hello(sender=name, host=host, holds=holds)
            self.regions[name] = only(welcome, pf.SessionOpened).push_buffers_region

    def pump(self, actions: list[Action]) -> None:
        """Pass messages between the copies, and do their work, until all is quiet."""
        waiting = [(A, action) for action in actions]
        while waiting or self.a.executor or self.b.executor:
            if not waiting:
                waiting += [(A, action) for action in self.a.work_all()]
                waiting += [(B, action) for action in self.b.work_all()]
                continue
            sender, action = waiting.pop(0)
            if isinstance(action, Send) and action.receiver in {A, B}:
                receiver = self.a if action.receiver == A else self.b
                replies = receiver.receive(action.message, sender)
                waiting += [(action.receiver, reply) for reply in replies]

    def follow(self) -> None:
        """Let the backup become the primary's copy."""
        self.pump(self.a.lead(2, B))

    def push(self, name: Address, seed: int, *, touches: Vector | None = None) -> list[Action]:
        self.sequences[name] += 1
        sequence = self.sequences[name]
        number = self.a.shard._sessions.term
        client = self.a.shard._sessions.get(name)
        assert client is not None
        n = client.shard_slice.n_elements
        values = np.random.default_rng(seed).standard_normal(n)
        if self.shared:
            region = self.a.memory.attach(self.regions[name])
            slots = push_buffer_views(region, n_elements=n, dtype=LAYOUT.dtype)
            slots[sequence % 2][:] = values
        else:
            for index, (start, stop) in enumerate(client.shard_slice.bounds):
                block = pf.PushBlock(
                    sequence=sequence, term=number, block_index=index, values=values[start:stop]
                )
                self.pump(self.a.receive(block, name))
        push = pf.Push(
            sequence=sequence,
            term=number,
            fetched_clock=0,
            n_gradients=1,
            samples=1,
            touches=touches,
        )
        actions = self.a.receive(push, name)
        self.pump(actions)
        return actions

    def assert_equal(self) -> None:
        one, other = self.a.shard.values, self.b.shard.values
        assert (one.clock, one.n_held) == (other.clock, other.n_held)
        assert one.vector.tobytes() == other.vector.tobytes()
        for name, vector in one.state.items():
            assert vector.tobytes() == other.state[name].tobytes()
        assert one.steps.to_wire().tolist() == other.steps.to_wire().tolist()


@pytest.mark.parametrize("shared", [True, False])
def test_a_backup_counts_pushes_per_element_as_its_primary_does(*, shared: bool) -> None:
    pair = Pair(shared=shared)
    order = [Address(n) for n in ("left", "whole", "left", "middle", "right")]
    for seed, name in enumerate(order[:3]):
        pair.push(name, seed)
    pair.follow()
    pair.assert_equal()
    for seed, name in enumerate(order * 2):
        pair.push(name, 10 + seed)
    pair.assert_equal()
    assert pair.a.shard.values.clock == 13
    assert pair.b.shard.values.steps.n_whole == 3


@pytest.mark.parametrize("shared", [True, False])
def test_a_push_that_changes_some_of_it_changes_both_copies_alike(*, shared: bool) -> None:
    """Of tensors without a gradient neither values nor the rule's state may move."""
    pair = Pair(shared=shared)
    whole, size = Address("whole"), LAYOUT.shard_size(0)
    pair.push(whole, 0)
    pair.follow()
    before = pair.a.shard.values.vector.copy()
    pair.push(whole, 1, touches=np.array([64, 128, 128, 1], np.int64))
    pair.push(whole, 2, touches=np.zeros(0, np.int64))
    pair.assert_equal()
    moved = np.flatnonzero(pair.a.shard.values.vector != before)
    assert moved.tolist() == list(range(64, 192))
    steps_of = pair.a.shard.values.steps
    met = steps_of.at(IndexRanges.whole(0, size), shard_slice=ShardSlice(size, dtype=LAYOUT.dtype))
    assert [(n, ranges.n_elements) for n, ranges in met] == [(1, size - 128), (2, 128)]


@pytest.mark.each_value
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rule", [RULE, SGD(learning_rate=0.1), NADAM])
def test_a_push_of_a_part_that_changes_some_of_it_changes_both_copies_alike(
    rule: UpdateRule, *, shared: bool
) -> None:
    pair = Pair(shared=shared, rule=rule)
    left = Address("left")
    pair.push(left, 0)
    pair.follow()
    before = pair.a.shard.values.vector.copy()
    some = np.array([200, 64, 200, 3], np.int64)  # of three rows, the first 64 of 90 columns
    pair.push(left, 1, touches=some)
    pair.push(left, 2, touches=np.zeros(0, np.int64))
    pair.assert_equal()
    moved = np.flatnonzero(pair.a.shard.values.vector != before)
    assert moved.tolist() == [200 * row + column for row in (1, 2, 3) for column in range(64)]


def test_a_push_cannot_change_what_its_client_does_not_hold() -> None:
    pair = Pair(shared=False)
    before = pair.a.shard.values.vector.copy()
    actions = pair.push(Address("left"), 0, touches=np.array([0, 91, 91, 1], np.int64))
    refused = only(actions, pf.SessionRefused)
    assert refused.for_good
    assert "it changes elements that its client does not hold" in refused.reason
    assert np.array_equal(pair.a.shard.values.vector, before)


@pytest.mark.parametrize("words", [[0, 64, 64], [0, 0, 1, 1], [1 << 40, 1, 1, 1]])
def test_a_push_cannot_change_what_is_not_there(words: list[int]) -> None:
    pair = Pair(shared=False)
    with pytest.raises(RemoteProtocolError, match="stripe"):
        pair.push(Address("whole"), 0, touches=np.array(words, np.int64))


def test_a_replicated_part_changes_that_part() -> None:
    copy = whole_second()
    copy.receive(block(5, size=7), A)
    copy.receive(forward(5, holds=[10, 7, 7, 1]), A)
    copy.work()
    assert copy.values.tolist() == [7.0] * 10 + [8.0] * 7 + [7.0] * (N - 17)
    steps = copy.shard.values.steps
    assert steps.to_wire().tolist() == [5, 0, 1, 1, 10, 7, 7, 1]


def test_without_counts_of_parts_every_element_has_received_all_pushes() -> None:
    copy = OneCopy(B)
    copy.receive(following(2, clock=5), A)
    assert copy.shard.values.steps.to_wire().tolist() == [5, 0]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([5], "1 numbers of int64 are not push counts"),
        ([5, 1], "are not push counts"),
        ([-1, 0], "-1 pushes"),
        ([5, 0, 1], "end in the middle of a part"),
        ([5, 0, 1, 0], "end in the middle of a part"),
        ([5, 0, 1, -1, 0, 1, 1, 1], "end in the middle of a part"),
        ([5, 0, 1, 2, 0, 1, 1, 1], "end in the middle of a part"),
        ([5, 0, 1, 1, N, 1, 1, 1], "does not fit a vector"),
    ],
)
def test_invalid_counts_are_refused_before_anything_is_dropped(words: list[int], what: str) -> None:
    copy = OneCopy(B)
    with pytest.raises(RemoteProtocolError, match=what):
        copy.receive(following(2, clock=5, steps=words), A)
    assert copy.activity == "waiting"


def test_invalid_parts_are_refused() -> None:
    copy = whole_second()
    copy.receive(block(5, size=7), A)
    with pytest.raises(RemoteProtocolError, match="does not fit a vector"):
        copy.receive(forward(5, holds=[N, 1, 1, 1]), A)
    with pytest.raises(RemoteProtocolError, match="7 elements, its client 8"):
        copy.receive(forward(5, holds=[10, 8, 8, 1]), A)
    with pytest.raises(RemoteProtocolError, match="shard-0 sent 193 elements"):
        whole_second().receive(block(5, size=N + 1), A)


def test_a_backup_has_the_same_limit_of_counts_as_a_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_counts, "N_STRIPES_MAX", 1)
    copy = whole_second()
    copy.receive(block(5, size=3), A)
    with pytest.raises(RemoteProtocolError, match="need 2 stripes"):
        copy.receive(forward(5, holds=[0, 1, 1, 1, 9, 2, 2, 1]), A)
