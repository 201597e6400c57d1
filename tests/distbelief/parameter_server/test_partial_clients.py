"""Clients that hold regions of the tensors, beside clients that hold everything.

tensor   shape      client "left"     client "right"
w        (70, 50)   columns 0 to 20   columns 20 to 50
b        (33,)      0 to 10           10 to 33
m        (5,)       0 to 2            2 to 5              a buffer
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from distbelief.core.errors import JobError, LocalProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.parameter_server import step_counts, store
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.rules import (
    SGD,
    Adagrad,
    Adam,
    DelayedNesterov,
    Momentum,
    RMSprop,
    UpdateRule,
    rules_on,
)
from distbelief.parameter_server.schedules import InverseTime
from distbelief.parameter_server.shard import Shard
from distbelief.protocol import Message, OpenSession, SaveCheckpoint
from distbelief.protocol.role import Address, PeerJoined
from tests.distbelief.parameter_server.pair import (
    CLIENT,
    READER,
    SHARD,
    TEST,
    Bench,
    gather,
    layout_of,
)


Items = list[tuple[str, Region]]

LEFT, RIGHT = Address("left"), Address("right")
SPECS = (
    TensorSpec(name="b", shape=(33,)),
    TensorSpec(name="m", shape=(5,), kind="buffer"),
    TensorSpec(name="w", shape=(70, 50)),
)
ITEMS: dict[Address, Items] = {
    LEFT: [("w", Region(((0, 70), (0, 20)))), ("b", Region(((0, 10),))), ("m", Region(((0, 2),)))],
    RIGHT: [
        ("m", Region(((2, 5),))),
        ("w", Region(((0, 70), (20, 50)))),
        ("b", Region(((10, 33),))),
    ],
}
RULES: tuple[UpdateRule, ...] = (
    SGD(learning_rate=0.1, weight_decay=0.01, clip_value=1.5),
    SGD(learning_rate=0.1, schedule=InverseTime(n_pushes=2)),
    Momentum(learning_rate=0.1, dampening=0.5, weight_decay=0.01),
    Adagrad(learning_rate=0.1, initial_accumulator=0.5),
    RMSprop(learning_rate=0.1, momentum=0.5),
    Adam(learning_rate=0.1, weight_decay=0.01),
    DelayedNesterov(learning_rate=0.1, n_pushes=2),
    msgspec.convert({"name": "NAdam", "lr": 0.1, "weight_decay": 0.01}, UpdateRule),
    msgspec.convert({"name": "SGD", "lr": 0.1, "momentum": 0.5, "dampening": 0.5}, UpdateRule),
    Adagrad(
        learning_rate=0.1,
        initial_accumulator=0.5,
        groups={"b": Momentum(learning_rate=0.1), "*": RMSprop(learning_rate=0.1, momentum=0.5)},
    ),
)

Tensors = list[torch.Tensor]  # each (n_elements,), in the layout's order


class Machines:
    """Shards, and clients that hold parts: each pushes its part of whole tensors."""

    def __init__(
        self,
        rule: UpdateRule,
        *,
        shared: bool,
        n_shards: int = 1,
        layout: Layout | None = None,
        pushers: Sequence[Address] = (LEFT, RIGHT),
    ) -> None:
        self.layout = layout or Layout.of(SPECS, n_shards=n_shards)
        memory = PrivateMemory(host="here" if shared else "", poison=True)
        self.bench = Bench(layout=self.layout, memory=memory)
        self.rule = rule
        self.items = dict(ITEMS)
        self.names = [Address(f"shard-{k}") for k in range(self.layout.n_shards)]
        for name in self.names:
            self.bench.add_shard(name, rule=rule)
        for name in pushers:
            self.add(name)

    def add(self, name: Address, items: Items | None = None) -> None:
        """Add a client that holds these, or what it did before, or everything."""
        if items is not None:
            self.items[name] = items
        selection = self.selection(name) if name in self.items else None
        self.bench.add_client(name, view=selection)
        self.bench.settle()

    def selection(self, name: Address) -> PartialView:
        return PartialView(self.layout, self.items[name])

    def ranges(self, name: Address) -> IndexRanges:
        """Return what this client holds of shard 0."""
        ranges = self.selection(name).slices[0].ranges
        assert ranges is not None
        return ranges

    def noise(self, seed: int) -> Tensors:
        stream = torch.Generator().manual_seed(seed)
        return [torch.randn(spec.n_elements, generator=stream) for spec in self.layout.tensors]

    def cut(self, name: Address, tensors: Tensors) -> Tensors:
        """Return what this client holds of whole tensors."""
        if name not in self.items:
            return tensors
        whole = {
            spec.name: tensor.reshape(spec.shape)
            for spec, tensor in zip(self.layout.tensors, tensors, strict=True)
        }
        return [
            whole[tensor][region.slices].reshape(-1).clone() for tensor, region in self.items[name]
        ]

    def push(self, name: Address, tensors: Tensors) -> None:
        part = self.cut(name, tensors)
        self.bench.push_tensors(part, part, name)
        self.bench.settle()
        assert self.bench.client(name).unacknowledged == 0

    def fetch(self, name: Address) -> Tensors:
        client = self.bench.client(name)
        shapes = self.cut(name, self.noise(0))
        tensors = [torch.full_like(tensor, torch.nan) for tensor in shapes]
        self.bench.begin_fetch(name)
        self.bench.settle()
        assert client.fetch_complete
        assert self.bench.install(tensors, name).torn == ()
        self.bench.settle()
        return tensors

    def arrays(self) -> list[Vector]:
        """Return values and state of every shard."""
        return [array for name in self.names for array in arrays_of(self.shard(name))]

    def shard(self, name: Address = SHARD) -> Shard:
        shard = self.bench.roles[name]
        assert isinstance(shard, Shard)
        return shard


def arrays_of(shard: Shard) -> list[Vector]:
    values = shard.values
    return [values.vector, *(values.state[name] for name in sorted(values.state))]


def assert_same_bits(one: Sequence[Vector], other: Sequence[Vector]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.each_value
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("n_shards", [1, 2])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_clients_that_push_a_part_each_give_the_bits_of_one_that_pushes_everything(
    rule: UpdateRule, n_shards: int, monkeypatch: pytest.MonkeyPatch, *, small: bool
) -> None:
    if small:  # copied out in several pieces; some ranges updated where they lie
        monkeypatch.setattr(store, "PIECE", 256)
        monkeypatch.setattr(store, "_IN_PLACE_MIN", 30)
    one = Machines(rule, shared=small, n_shards=n_shards, pushers=[CLIENT])
    two = Machines(rule, shared=not small, n_shards=n_shards)
    for step in range(4):
        tensors = one.noise(step)
        one.push(CLIENT, tensors)
        for name in (LEFT, RIGHT) if step % 2 else (RIGHT, LEFT):
            two.push(name, tensors)
        for k in range(n_shards):  # each element of a buffer is one client's
            n = one.layout.n_gradient(k)
            parts = [m.shard(one.names[k]).values.vector[n:] for m in (one, two)]
            parts[1][:] = parts[0]
        assert_same_bits(one.arrays(), two.arrays())
    for name in (LEFT, RIGHT):
        wanted = one.cut(name, one.fetch(CLIENT))
        for got, want in zip(two.fetch(name), wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_element_is_updated_by_its_own_count_of_pushes(rule: UpdateRule) -> None:
    """Whole and partial clients mixed, against the rule applied to each element."""
    machines = Machines(rule, shared=True, pushers=[LEFT, RIGHT, CLIENT])
    middle = Address("middle")
    machines.add(middle, [("w", Region(((3, 60), (10, 30))))])
    layout, n = machines.layout, machines.layout.n_gradient(0)
    wanted = [array[:n].copy() for array in machines.arrays()]
    names = sorted(machines.shard(machines.names[0]).values.state)
    counts = np.zeros(n, np.int64)
    order = [LEFT, CLIENT, middle, RIGHT, LEFT, middle, CLIENT]
    for step, name in enumerate(order):
        tensors = machines.noise(step)
        machines.push(name, tensors)
        pushed = np.zeros(layout.shard_size(0), np.float32)
        gather(layout, 0, tensors, pushed)
        held = np.ones(n, np.bool_)
        if name != CLIENT:
            held = machines.ranges(name).mask(np.arange(len(pushed) + 1))[:n]
        after = [array.copy() for array in wanted]
        for one, ranges in rules_on(rule, layout, 0):
            own = held & ranges.mask(np.arange(n + 1))
            for count in np.unique(counts[own]):
                copies = [array.copy() for array in wanted]
                state = dict(zip(names, copies[1:], strict=True))
                one.apply(copies[0], pushed[:n], state, clock=int(count))
                chosen = own & (counts == count)
                for array, copy in zip(after, copies, strict=True):
                    array[chosen] = copy[chosen]
        wanted = after
        counts += held
        assert_same_bits([array[:n] for array in machines.arrays()], wanted)


def test_shards_that_hold_nothing_of_a_client_never_hear_from_it() -> None:
    heard: set[Address] = set()

    def hear(receiver: Address, _message: Message) -> bool:
        heard.add(receiver)
        return False

    layout = layout_of([TensorSpec(name="w", shape=(4, 64))], n_shards=4)  # a row each
    machines = Machines(SGD(learning_rate=1.0), shared=True, layout=layout, pushers=[])
    machines.bench.lose = hear
    machines.add(LEFT, [("w", Region(((1, 3), (0, 9))))])
    client = machines.bench.client(LEFT)
    machines.push(LEFT, [torch.full((256,), -1.0)])
    assert client.clocks == (0, 0)
    assert [t.tolist() for t in machines.fetch(LEFT)] == [[1.0] * 18]
    assert client.clocks == (1, 1)
    assert client.versions == ((1, 1), (1, 1))
    assert heard - {LEFT} == {"shard-1", "shard-2"}
    assert client.counters()["bytes_out"] == 18 * 8


def test_a_client_that_holds_nothing_is_always_ready_and_says_nothing() -> None:
    bench = Bench(layout=layout_of())
    bench.add_shard()
    bench.settle()
    empty = PartialView(bench.layout, [("w", Region(((5, 5),)))])
    client = bench.add_client(LEFT, view=empty)
    assert not bench.messages
    assert client.ready
    assert client.can_push
    assert (client.samples, client.unacknowledged, client.clocks) == (0, 0, ())
    assert client.waiting_for is None
    bench.begin_fetch(LEFT)
    assert client.fetch_complete
    assert bench.install([torch.zeros(0)], LEFT).torn == ()
    outcome = client.draft().put_all([torch.zeros(0)], [torch.zeros(0)])
    assert outcome.finite
    assert client.staged(outcome, n_gradients=1, samples=1, now=0.0) == []
    assert client.can_push
    assert client.counters()["pushes_acknowledged"] == 1
    assert not bench.messages


def hello_of(machines: Machines, words: list[int]) -> OpenSession:
    return OpenSession(
        layout=machines.layout.fingerprint,
        pushes=True,
        host="",
        next_sequence=1,
        holds=np.array(words, np.int64),
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([0, 1, 1], "the elements that you hold are invalid: 3 numbers of int64"),
        ([0, 1 << 40, 1 << 40, 1], "does not fit a vector"),
        ([0, 9, 9, 1, 8, 1, 1, 1], "stripes overlap"),
    ],
)
def test_invalid_ranges_are_refused_for_good(words: list[int], what: str) -> None:
    machines = Machines(SGD(learning_rate=1.0), shared=False, pushers=[])
    machines.bench.add_client(LEFT)
    machines.bench.messages.clear()
    machines.bench.send(LEFT, SHARD, hello_of(machines, words))
    with pytest.raises(JobError, match=what):
        machines.bench.settle()


def test_an_incarnation_of_a_client_cannot_change_its_part() -> None:
    machines = Machines(SGD(learning_rate=1.0), shared=False)
    machines.bench.send(LEFT, SHARD, hello_of(machines, [0, 9, 9, 1]))
    with pytest.raises(JobError, match="now hold 9 others"):
        machines.bench.settle()


def test_a_new_incarnation_may_have_another_part() -> None:
    machines = Machines(SGD(learning_rate=1.0), shared=False)
    machines.push(LEFT, machines.noise(0))
    machines.add(LEFT, ITEMS[RIGHT])
    assert machines.bench.client(LEFT).ready


def test_a_shard_refuses_parts_whose_counts_need_too_much_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_counts, "N_STRIPES_MAX", 4)
    machines = Machines(SGD(learning_rate=1.0), shared=False, pushers=[LEFT])
    with pytest.raises(JobError, match="need 6 stripes, of 4 at most"):
        machines.add(RIGHT)
    machines.bench.kill(RIGHT)
    machines.add(READER, ITEMS[RIGHT])  # it only fetches: nothing is written down
    assert machines.bench.client(READER).ready


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rule", [RULES[2], RULES[5]], ids=lambda rule: rule.name)
def test_counts_of_pushes_outlive_a_shard(rule: UpdateRule, *, shared: bool) -> None:
    one = Machines(rule, shared=shared, pushers=[LEFT, RIGHT, CLIENT])
    two = Machines(rule, shared=shared, pushers=[LEFT, RIGHT, CLIENT])
    before, after = [LEFT, CLIENT, LEFT], [RIGHT, LEFT, CLIENT, RIGHT]
    for machines in (one, two):
        for step, name in enumerate(before):
            machines.push(name, machines.noise(step))
    two.bench.send(TEST, SHARD, SaveCheckpoint(label="first"))
    two.bench.settle()
    (snapshot,) = two.bench.snapshots
    two.bench.add_shard(rule=rule, restored=snapshot)
    for name in (LEFT, RIGHT, CLIENT):  # each meets the new incarnation
        two.bench.deliver(name, PeerJoined(peer=SHARD, incarnation=2))
    two.bench.settle()
    for machines in (one, two):
        for step, name in enumerate(after):
            machines.push(name, machines.noise(10 + step))
    assert_same_bits(one.arrays(), two.arrays())


def test_pushes_in_flight_outlive_a_shard_and_are_applied_once() -> None:
    machines = Machines(SGD(learning_rate=1.0), shared=False)
    bench, ones = machines.bench, [-torch.ones(spec.n_elements) for spec in SPECS]
    bench.send(TEST, SHARD, SaveCheckpoint(label="first"))
    bench.settle()
    client, part = bench.client(LEFT), machines.cut(LEFT, ones)
    for _ in range(2):
        bench.push_tensors(part, part, LEFT)
    bench.add_shard(rule=machines.rule, restored=bench.snapshots[0])
    bench.advance(30.0)
    assert client.unacknowledged == 0
    assert client.counters()["pushes_lost"] == 0
    w, b, _ = machines.fetch(LEFT)
    assert w.eq(2.0).all()
    assert b.eq(2.0).all()


def test_a_torn_read_of_a_part_gives_way_to_blocks() -> None:
    machines = Machines(SGD(learning_rate=1.0), shared=True)
    machines.push(LEFT, machines.noise(0))
    bench, client = machines.bench, machines.bench.client(LEFT)
    published = machines.shard().values._published
    published.begin()  # it is being written, all the time
    tensors = machines.cut(LEFT, machines.noise(1))
    bench.begin_fetch(LEFT)
    assert bench.install(tensors, LEFT).torn == (0,)
    bench.advance(2.0, settle=False)
    assert bench.install(tensors, LEFT).torn == (0,)
    assert not client.fetch_complete
    bench.settle()
    assert bench.install(tensors, LEFT).torn == ()
    assert torch.equal(tensors[1], -machines.cut(LEFT, machines.noise(0))[1])
    published.end(clock=1)


def test_buffers_are_averaged_over_the_clients_that_hold_them() -> None:
    machines = Machines(SGD(learning_rate=1.0), shared=True)

    def buffers_after(name: Address) -> list[float]:
        machines.push(name, [torch.full((spec.n_elements,), 4.0) for spec in SPECS])
        n = machines.layout.n_gradient(0)
        return [float(v) for v in machines.shard().values.vector[n : n + 5]]

    assert buffers_after(LEFT) == [4.0, 4.0, 0.0, 0.0, 0.0]  # no one else holds these
    machines.add(CLIENT)
    machines.shard().values.vector[machines.layout.n_gradient(0) :] = 0.0
    assert buffers_after(RIGHT) == [0.0, 0.0, 2.0, 2.0, 2.0]  # two hold them
    assert buffers_after(CLIENT) == [2.0, 2.0, 3.0, 3.0, 3.0]
    other = Address("other")
    machines.add(other, [("w", Region(((0, 70), (0, 20))))])  # none of the buffers
    assert buffers_after(LEFT) == [3.0, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", [CLIENT, LEFT])
def test_a_draft_is_filled_piece_by_piece_and_pushes_what_stage_does(
    name: Address, *, shared: bool
) -> None:
    one, two = (Machines(RULES[3], shared=shared, n_shards=2, pushers=[name]) for _ in range(2))
    for step in range(3):
        tensors = one.noise(step)
        one.push(name, tensors)
        bench, client = two.bench, two.bench.client(name)
        draft = client.draft()
        assert not client.can_push
        part = two.cut(name, tensors)
        for index in reversed(range(len(part))):
            draft.put(index, part[index])
            part[index].fill_(torch.nan)  # it is not read later
        outcome = draft.finish()
        assert outcome.finite
        actions = client.staged(outcome, n_gradients=1, samples=1, now=bench.now)
        bench.perform(name, actions)
        bench.settle()
    assert_same_bits(one.arrays(), two.arrays())


def test_a_draft_names_what_is_not_finite() -> None:
    machines = Machines(RULES[0], shared=True)
    client = machines.bench.client(LEFT)
    draft = client.draft()
    w, b, m = machines.cut(LEFT, machines.noise(0))
    w[7] = torch.inf
    draft.put(0, w)
    draft.put(1, torch.full_like(b, 3e38))  # whose sum overflows
    draft.put(2, m)
    outcome = draft.finish()
    assert not outcome.finite
    assert outcome.culprits == ("w",)
    client.staged(outcome, n_gradients=1, samples=1, now=0.0)
    assert client.can_push
    assert client.counters()["non_finite"] == 1


def test_what_was_not_put_into_a_draft_is_zero_but_buffers_must_be() -> None:
    machines = Machines(SGD(learning_rate=1.0), shared=True)
    bench, client = machines.bench, machines.bench.client(LEFT)
    machines.push(LEFT, [torch.ones(spec.n_elements) for spec in SPECS])
    machines.push(LEFT, [torch.ones(spec.n_elements) for spec in SPECS])
    draft = client.draft(fetched_clocks=[1])
    draft.put(0, torch.ones(1400))
    with pytest.raises(LocalProtocolError, match="tensor 0 of 3 is put twice"):
        draft.put(0, torch.ones(1400))
    with pytest.raises(LocalProtocolError, match="buffer 'm' was not put"):
        draft.finish()
    draft.put(2, torch.zeros(2))
    actions = client.staged(draft.finish(), n_gradients=1, samples=1, now=0.0)
    bench.perform(LEFT, actions)
    bench.settle()
    w, b, m = machines.fetch(LEFT)
    assert w.eq(-3.0).all()
    assert b.eq(-2.0).all()
    assert m.eq(0.0).all()


def test_a_draft_may_be_abandoned() -> None:
    machines = Machines(SGD(learning_rate=1.0), shared=True)
    client = machines.bench.client(LEFT)
    client.draft().put(0, torch.ones(1400))
    with pytest.raises(LocalProtocolError, match="draft while not can_push"):
        client.draft()
    client.abandon()
    with pytest.raises(LocalProtocolError, match="abandon without a draft"):
        client.abandon()
    machines.push(LEFT, [torch.ones(spec.n_elements) for spec in SPECS])
    assert machines.shard().values.clock == 1
    assert client.counters()["pushes_sent"] == 1
