"""Fetches of what has changed: the bits of fetches of everything, in fewer bytes (E10)."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.codecs import Int4, Int8
from distbelief.parameter_server.fetch_logs import ChangeLog, MoveLog, changed_of, compact
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.rules import SGD, Adam, Momentum, UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig
from distbelief.parameter_server.store import ShardStore
from distbelief.protocol import Message, Promote, SaveCheckpoint, push_fetch as pf
from distbelief.protocol.role import Address, PeerLost
from tests.distbelief.parameter_server.exchanges import (
    ITEMS,
    ONE,
    SPECS,
    Lossy,
    Pair,
    Tensors,
    assert_same,
    fetch,
    noise,
    push,
    served,
)
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, SHARD, TEST, Bench


CHANGED = ExchangePolicy(fetch="changed")
MOVED = ExchangePolicy(fetch=Int4())


def begin(
    bench: Bench, *, rule: UpdateRule = ONE, policy: ExchangePolicy = CHANGED, name: Address = SHARD
) -> None:
    index = int(name.removeprefix("shard-"))
    size = bench.layout.shard_size(index)
    config = ShardConfig(index=index, layout=bench.layout, rule=rule, policy=policy)

    def initialise() -> Vector:
        return np.zeros(size, np.float32)

    bench.start(name, Shard(config, memory=bench.memory, initialise=initialise))


def bench_of(
    n_shards: int = 1,
    *,
    rule: UpdateRule = ONE,
    policy: ExchangePolicy = CHANGED,
    clients: ClientConfig | None = None,
    kind: type[Bench] = Bench,
    host: str = "",
) -> Bench:
    layout = Layout.of(SPECS, n_shards=n_shards)
    bench = kind(layout=layout, memory=PrivateMemory(host=host, poison=True))
    for k in range(n_shards):
        begin(bench, rule=rule, policy=policy, name=Address(f"shard-{k}"))
    for name in (CLIENT, OTHER):
        bench.add_client(name, config=clients or ClientConfig.of(policy))
    bench.settle()
    return bench


def sparse(seed: int, n: int = 50) -> Tensors:
    """Return gradients of which few numbers are not zero, and values of buffers."""
    stream = np.random.default_rng(seed)
    tensors = []
    for spec in SPECS:
        tensor = torch.zeros(spec.n_elements)
        places = stream.integers(spec.n_elements, size=min(n, spec.n_elements))
        tensor[torch.from_numpy(places)] = torch.from_numpy(
            stream.standard_normal(len(places)).astype(np.float32)
        )
        tensors.append(tensor)
    return tensors


def counted(bench: Bench) -> list[pf.ParameterBlock]:
    """Return the blocks sent from now on."""
    blocks: list[pf.ParameterBlock] = []

    def note(_receiver: Address, message: Message) -> bool:
        if isinstance(message, pf.ParameterBlock):
            blocks.append(message)
        return False

    bench.lose = note
    return blocks


@pytest.mark.parametrize("n_shards", [1, 3])
def test_after_the_first_fetch_only_changed_elements_come(n_shards: int) -> None:
    bench = bench_of(n_shards)
    expected = served(bench)
    assert_same(fetch(bench), expected)
    blocks = counted(bench)
    for seed in range(5):
        push(bench, sparse(seed), OTHER)
        bench.settle()
        expected = served(bench)
        blocks.clear()
        assert_same(fetch(bench), expected)
        assert {one.payload for one in blocks} == {"changed"}
        n_bytes = sum(one.values.nbytes for one in blocks)
        assert 0 < n_bytes <= 8 * 3 * 50
    blocks.clear()
    assert_same(fetch(bench), expected)  # nothing has changed
    assert [len(one.values) for one in blocks] == [0] * n_shards


def test_everything_comes_if_that_is_less() -> None:
    bench = bench_of()
    fetch(bench)
    push(bench, noise(1, bench.layout))
    bench.settle()
    blocks = counted(bench)
    assert_same(fetch(bench), served(bench))
    assert {one.n_words for one in blocks} == {pf.ParameterBlock.__struct_defaults__[-1]}


def test_everything_comes_where_the_rule_moves_all() -> None:
    """V16: momentum goes on where no gradient comes."""
    bench = bench_of(rule=Momentum(learning_rate=1.0, momentum=0.5))
    push(bench, noise(1, bench.layout))
    bench.settle()
    fetch(bench)
    push(bench, sparse(2))
    bench.settle()
    assert_same(fetch(bench), served(bench))


def test_shards_that_do_not_keep_changes_send_everything() -> None:
    bench = bench_of(policy=ExchangePolicy(), clients=ClientConfig.of(CHANGED))
    fetch(bench)
    push(bench, sparse(2))
    bench.settle()
    assert_same(fetch(bench), served(bench))


def test_in_shared_memory_everything_is_read_there() -> None:
    bench = bench_of(2, host="here")
    for seed in range(3):
        push(bench, sparse(seed))
        bench.settle()
        assert_same(fetch(bench), served(bench))


@pytest.mark.parametrize("policy", [CHANGED, MOVED], ids=["changed", "moved"])
@pytest.mark.parametrize("n_shards", [1, 3])
def test_clients_that_hold_parts_get_what_has_changed_of_them(
    n_shards: int, policy: ExchangePolicy
) -> None:
    """Or everything of them: moves are not cut."""
    bench = bench_of(n_shards, policy=policy)
    for name, items in ITEMS.items():
        config, view = ClientConfig.of(policy), PartialView(bench.layout, items)
        bench.add_client(name, config=config, view=view)
    bench.add_client(Address("replica-2"), config=ClientConfig.of(policy))
    bench.settle()
    blocks = counted(bench)
    for seed in range(4):
        push(bench, sparse(seed), Address("replica-2"))
        bench.settle()
        by_name = {
            spec.name: value.view(spec.shape)
            for spec, value in zip(SPECS, served(bench), strict=True)
        }
        for name, items in ITEMS.items():
            blocks.clear()
            cut = [by_name[key][region.slices].reshape(-1) for key, region in items]
            assert_same(fetch(bench, name), cut)
            payload = "changed" if policy is CHANGED else msgspec.UNSET
            assert not seed or {one.payload for one in blocks} == {payload}


@pytest.mark.each_value
@pytest.mark.parametrize("policy", [CHANGED, MOVED], ids=["changed", "moved"])
@pytest.mark.parametrize("seed", range(6))
def test_bits_are_those_of_everything_through_any_course(seed: int, policy: ExchangePolicy) -> None:
    """Messages are lost and doubled, shards restart, pushes come between fetches."""
    stream = np.random.default_rng(seed)
    bench = bench_of(2, kind=Lossy, policy=policy)
    assert isinstance(bench, Lossy)
    bench.random = stream
    for step in range(12):
        name = (CLIENT, OTHER)[int(stream.integers(2))]
        bench.is_lossy = True
        if stream.random() < 0.2 and step:
            shard = Address(f"shard-{int(stream.integers(2))}")
            incarnation = bench.incarnations[shard]
            begin(bench, name=shard, policy=policy)
            gone = PeerLost(peer=shard, incarnation=incarnation, reason="gone", for_good=False)
            for client in (CLIENT, OTHER):
                bench.deliver(client, gone)
        while bench.client(name).unacknowledged or not bench.client(name).can_push:
            bench.advance(0.5)
        push(bench, sparse(100 * seed + step, n=int(stream.integers(1, 60))), name)
        while bench.client(name).unacknowledged:
            bench.advance(0.5)
        bench.begin_fetch(name)
        while not bench.client(name).fetch_complete:
            bench.advance(0.5)
        found = [torch.full((spec.n_elements,), torch.nan) for spec in SPECS]
        assert bench.install(found, name).torn == ()
        bench.is_lossy = False
        assert_same(found, served(bench))


# --- moves ---


@pytest.mark.each_value
@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=["int8", "int4"])
@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("rule", [ONE, Adam(learning_rate=0.1)], ids=["sgd", "adam"])
def test_a_fetch_of_moves_has_the_bits_of_everything(
    n_shards: int, codec: Int8 | Int4, rule: UpdateRule
) -> None:
    bench = bench_of(n_shards, rule=rule, policy=ExchangePolicy(fetch=codec))
    fetch(bench)
    blocks = counted(bench)
    for seed in range(6):
        for name in (CLIENT, OTHER)[: 1 + seed % 2]:
            push(bench, noise(seed, bench.layout), name)
            bench.settle()
        expected = served(bench)
        blocks.clear()
        assert_same(fetch(bench), expected)
        assert {one.payload for one in blocks} == {"moved"}
        n_pushes, n_bytes = 1 + seed % 2, 0
        for k in range(n_shards):
            n = bench.layout.n_gradient(k)
            n_bytes += 4 * n_pushes * codec.n_words_max(n)
            n_bytes += 4 * (bench.layout.shard_size(k) - n)
        assert sum(one.values.nbytes for one in blocks) == n_bytes  # E15
    for _ in range(10):
        push(bench, noise(1, bench.layout), OTHER)
        bench.settle()
    blocks.clear()
    assert_same(fetch(bench), served(bench))
    assert {one.payload for one in blocks} == {msgspec.UNSET}  # all are shorter


def stores(bench: Bench) -> list[ShardStore]:
    shards = [bench.roles[Address(f"shard-{k}")] for k in range(bench.layout.n_shards)]
    return [shard.values for shard in shards if isinstance(shard, Shard)]


@pytest.mark.parametrize("policy", [MOVED, ExchangePolicy()], ids=["moved", "dense"])
def test_what_a_shard_holds_back_is_all_that_its_values_lack(policy: ExchangePolicy) -> None:
    """E2: gradients of one push, and sums of a few, are exact; values round as ever."""
    bench = bench_of(policy=policy)
    total = [torch.zeros(spec.n_elements, dtype=torch.float64) for spec in SPECS]
    for seed in range(8):
        gradient = noise(seed, bench.layout)
        push(bench, gradient)
        bench.settle()
        total = [of_all - one.double() for of_all, one in zip(total, gradient, strict=True)]
    (store,) = stores(bench)
    settled = [torch.zeros(spec.n_elements) for spec in SPECS]
    PartialView(bench.layout).copier(0).scatter(store.settled, settled)
    for place in (0, 2):  # the others are buffers
        assert (settled[place].double() - total[place]).abs().max() < 4e-6
    assert (served(bench)[2].double() - total[2]).abs().max() < (0.6 if policy is MOVED else 4e-6)


def test_any_number_of_shards_moves_alike() -> None:
    found = []
    for n_shards in (1, 2, 5):
        bench = bench_of(n_shards, policy=MOVED)
        for seed in range(4):
            push(bench, noise(seed, bench.layout))
            bench.settle()
        found.append(served(bench))
    for other in found[1:]:
        assert_same(other, found[0])


def test_a_backup_holds_back_the_same_bits() -> None:
    """E12, also of one that came late."""
    layout = Layout.of(SPECS, n_shards=1)
    pair = Pair(layout=layout, memory=PrivateMemory(host="", poison=True))
    pair.config, pair.policy = ClientConfig.of(MOVED), MOVED
    pair.begin(rule=ONE)
    for seed in range(3):
        push(pair, noise(seed, layout))
        pair.settle()
    one, other = pair.copy(pair.A).values, pair.copy(pair.B).values
    assert isinstance(one.log, MoveLog)
    assert isinstance(other.log, MoveLog)
    assert one.vector.tobytes() == other.vector.tobytes()
    assert one.log.rest.tobytes() == other.log.rest.tobytes()
    assert one.log.rest.any()
    before = fetch(pair)
    pair.kill(pair.A)
    pair.lead(pair.B, term=3)
    pair.settle()
    pair.advance(5.0)
    push(pair, noise(9, layout))
    pair.settle()
    assert not torch.equal(fetch(pair)[2], before[2])
    assert_same(fetch(pair), fetch(pair, exact=True))


def test_a_backup_that_comes_late_gets_what_is_held_back() -> None:
    layout = Layout.of(SPECS, n_shards=1)
    pair = Pair(layout=layout, memory=PrivateMemory(host="", poison=True))
    pair.config, pair.policy = ClientConfig.of(MOVED), MOVED
    pair.begin(rule=ONE)
    pair.kill(pair.B)
    pair.lead(pair.A, term=3)
    pair.settle()
    for seed in range(3):
        push(pair, noise(seed, layout))
        pair.settle()
    pair.start_copy(pair.B, rule=ONE)
    pair.settle()
    promote = Promote(term=4, receiver_incarnation=1, backup=pair.B, backup_incarnation=2)
    pair.send(TEST, pair.A, promote)
    pair.settle()
    pair.advance(2.0)
    for seed in range(3, 5):
        push(pair, noise(seed, layout))
        pair.settle()
        pair.advance(2.0)
    one, other = pair.copy(pair.A).values, pair.copy(pair.B).values
    assert isinstance(one.log, MoveLog)
    assert isinstance(other.log, MoveLog)
    assert one.clock == other.clock == 5
    assert one.vector.tobytes() == other.vector.tobytes()
    assert one.log.rest.tobytes() == other.log.rest.tobytes()


def test_a_round_moves_once() -> None:
    rounds = ExchangePolicy(
        send="delta", staleness=0, round=Round(), weight="mean", fetch=Int4(), push=Int4()
    )
    bench = bench_of(2, policy=rounds)
    for name in (CLIENT, OTHER):
        bench.perform(name, bench.client(name).enter(bench.now, staleness=0))
    bench.settle()
    fetch(bench)
    blocks = counted(bench)
    for seed in range(4):
        for name in (CLIENT, OTHER):
            bench.perform(name, bench.client(name).enter(bench.now, staleness=0))
            bench.settle()
            push(bench, noise(10 * seed + len(name), bench.layout), name)
        bench.settle()
        assert bench.client().unacknowledged == 0
        expected = served(bench)
        blocks.clear()
        assert_same(fetch(bench), expected)
        n_bytes = sum(
            4 * Int4().n_words_max(bench.layout.n_gradient(k))
            + 4 * (bench.layout.shard_size(k) - bench.layout.n_gradient(k))
            for k in range(2)
        )
        assert sum(one.values.nbytes for one in blocks) == n_bytes
    assert [store.clock for store in stores(bench)] == [8, 8]


@pytest.mark.parametrize("policy", [CHANGED, MOVED], ids=["changed", "moved"])
def test_values_that_are_set_are_what_all_get(policy: ExchangePolicy) -> None:
    """Regression: shards moved towards them by what 4 bits can say."""
    bench = bench_of(2, policy=policy)
    bench.add_client(Address("setter"))
    bench.settle()
    for seed in range(2):
        push(bench, noise(seed, bench.layout))
        bench.settle()
    fetch(bench)
    setter, values = bench.client(Address("setter")), noise(7, bench.layout)
    outcome = setter.draft().put_all(values, values)
    actions = setter.staged(outcome, n_gradients=0, samples=0, now=bench.now, sets=True)
    bench.perform(Address("setter"), actions)
    bench.settle()
    assert_same(served(bench), values)
    assert_same(fetch(bench), values)
    for store in stores(bench):
        assert store.settled.tobytes() == store.vector.tobytes()
    push(bench, sparse(3))
    bench.settle()
    assert_same(fetch(bench), served(bench))


@pytest.mark.parametrize("n_elements", [0, 1, 64])
def test_a_log_of_few_elements_ends(n_elements: int) -> None:
    """Regression: a shard without elements ended with IndexError."""
    log = MoveLog(Int4(), n_elements, n_gradient=n_elements)
    values = np.zeros(n_elements, np.float32)
    for _ in range(3):
        log.note(values.copy(), values)
        log.end_push()
    log.since(1, None)


def test_a_second_incarnation_gets_words_of_its_own() -> None:
    """Regression: words that were made for the fetch of its former one went to it."""
    bench = bench_of()
    fetch(bench)
    push(bench, sparse(1), OTHER)
    bench.settle()
    bench.begin_fetch()
    bench.pass_messages()  # the words are being made
    bench.add_client(CLIENT, config=ClientConfig.of(CHANGED))
    bench.pass_messages()
    bench.begin_fetch()
    bench.settle()
    bench.advance(3.0)
    found = [torch.full((spec.n_elements,), torch.nan) for spec in SPECS]
    assert bench.install(found).torn == ()
    assert_same(found, served(bench))


def test_a_checkpoint_has_what_was_held_back_and_all_go_on_from_there() -> None:
    bench = bench_of(policy=MOVED)
    for seed in range(3):
        push(bench, noise(seed, bench.layout))
        bench.settle()
    fetch(bench)
    (store,) = stores(bench)
    settled = store.settled.copy()
    bench.send(TEST, SHARD, SaveCheckpoint(label="1"))
    bench.settle()
    (snapshot,) = bench.snapshots
    assert snapshot.arrays["values"].tobytes() == settled.tobytes()
    config = ShardConfig(index=0, layout=bench.layout, rule=ONE, policy=MOVED)
    zeros = np.zeros(bench.layout.shard_size(0), np.float32)
    bench.start(
        SHARD, Shard(config, memory=bench.memory, initialise=lambda: zeros), restored=snapshot
    )
    bench.settle()
    bench.advance(5.0)
    (store,) = stores(bench)
    assert store.vector.tobytes() == settled.tobytes()
    push(bench, noise(4, bench.layout))
    bench.settle()
    assert_same(fetch(bench), served(bench))


# --- refusals ---


def words_of(*words: int) -> Vector:
    return np.array(words, np.uint32)


@pytest.mark.parametrize(
    ("words", "n_words"),
    [
        (words_of(1, 2, 3), 3),  # an element without a value
        (words_of(5, 5, 1, 1), 4),  # twice
        (words_of(400_000, 1), 2),  # there are fewer
        (words_of(1, 2), 10**9),
        (np.zeros(2, np.float32), 2),
    ],
)
def test_a_client_refuses_changes_that_are_none(words: Vector, n_words: int) -> None:
    bench = bench_of()
    fetch(bench)
    actions = bench.client().begin_fetch(0.0)
    bench.perform(CLIENT, actions)
    bench.messages.clear()
    request = bench.client()._links[0].fetching._request
    block = pf.ParameterBlock(
        request=request,
        term=1,
        block_index=0,
        clock=0,
        values=words,
        payload="changed",
        n_words=n_words,
    )
    bench.send(SHARD, CLIENT, block)
    bench.pass_messages()
    assert isinstance(bench.refused[0], RemoteProtocolError)
    bench.advance(5.0)  # it asks again
    assert bench.client().fetch_complete
    found = [torch.zeros(spec.n_elements) for spec in SPECS]
    bench.install(found)
    assert_same(found, served(bench))


# --- the log ---


@given(st.lists(st.lists(st.integers(0, 63), max_size=12), max_size=12), st.integers(0, 14))
@settings(max_examples=300)
def test_the_log_has_what_differs_or_nothing(pushes: Sequence[Sequence[int]], since: int) -> None:
    log, values = ChangeLog(64), np.zeros(64, np.float32)
    states = [values.copy()]
    log.begin(5)
    for number, places in enumerate(pushes, 1):
        before = values.copy()
        values[list(places)] = number
        states.append(values.copy())
        log.note(before, values)
        log.end_push()
    to_words = log.since(5 + since, None)
    if to_words is None:
        return
    words = to_words(values)
    known, changed = states[since].copy(), words[: len(words) // 2]
    known[changed] = words[len(words) // 2 :].view(np.float32)
    assert known.tobytes() == values.tobytes()
    assert len(words) <= 32


@given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)))
def test_changed_elements_of_a_part_are_found_in_its_compact_vector(
    some: set[int], held: set[int]
) -> None:
    ranges = IndexRanges.union(IndexRanges.whole(one, one + 1) for one in held)
    vector = np.arange(100)
    whole = vector[ranges.mask(np.arange(101))] if held else vector[:0]
    places, here = compact(np.array(sorted(some), np.uint32), ranges)
    assert whole[places].tolist() == here.tolist() == sorted(some & held)


def test_a_sign_of_zero_is_a_change() -> None:
    assert changed_of(np.array([0.0, 1.0]), np.array([-0.0, 1.0])).tolist() == [0]
    assert SGD(learning_rate=1.0).name == "sgd"
