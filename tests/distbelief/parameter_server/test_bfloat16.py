"""Fetches whose parameters travel as bfloat16: bits, bytes, faults, two copies."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.bfloat16 import WORD, as_tensor, decode, encode, word_count
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.rules import SGD, Adam, UpdateRule
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.tensor_copies import convert, parts
from distbelief.protocol import Message, push_fetch as pf
from distbelief.protocol.role import Address, PeerLost
from tests.distbelief.parameter_server.exchanges import (
    ITEMS,
    ONE,
    SPECS,
    Lossy,
    Pair,
    Tensors,
    assert_same,
    bench_of,
    fetch,
    first,
    noise,
    push,
    served,
)
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, READER, SHARD, Bench, sent


Bits = NDArray[np.uint32]

LARGEST = 0x7F7F  # the largest finite bfloat16
CLASSES = st.one_of(
    st.integers(0, 0x7FFFFF),  # zero and subnormals
    st.integers(0x800000, 0x7F7FFFFF),  # normal numbers
    st.integers(0x7F7F0000, 0x7F7FFFFF),  # what may round to infinity
    st.just(0x7F800000),  # infinity
    st.integers(0x7F800001, 0x7FFFFFFF),  # NaN
    st.builds(lambda high: high << 16 | 0x8000, st.integers(0, 0x7F7E)),  # ties
)
FLOATS = st.builds(lambda bits, sign: bits | sign << 31, CLASSES, st.integers(0, 1))


def rounded(bits: Bits) -> NDArray[np.uint16]:
    """Return the words of numbers that are no NaN, by integer arithmetic."""
    wide = bits.astype(np.uint64)
    words = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
    is_finite = wide & 0x7F800000 != 0x7F800000
    too_large = is_finite & (words & 0x7FFF > LARGEST)
    return np.where(too_large, words & 0x8000 | LARGEST, words).astype(np.uint16)


def rounded_tensor(tensor: torch.Tensor) -> torch.Tensor:
    words = rounded(tensor.numpy().view(np.uint32)).astype(np.uint32)
    return torch.from_numpy((words << 16).view(np.float32))


# --- numbers ---


@given(st.lists(FLOATS, max_size=200), st.integers(0, 70))
def test_every_class_of_numbers_rounds_to_the_nearest_and_ties_to_even(
    some: list[int], n_before: int
) -> None:
    bits = np.array([0x3F800000] * n_before + some, np.uint32)
    words = np.zeros(len(bits), np.uint16)
    is_finite = encode(torch.from_numpy(bits.view(np.float32)), words)
    numbers = bits.view(np.float32)
    nan = np.isnan(numbers)
    assert is_finite == bool(np.isfinite(numbers).all())
    assert words[~nan].tolist() == rounded(bits[~nan]).tolist()
    back = torch.zeros(len(bits))
    decode(words, back)
    assert back.numpy().view(np.uint32)[~nan].tolist() == [int(w) << 16 for w in words[~nan]]
    assert bool(back.isnan().numpy()[nan].all())


@given(st.lists(FLOATS, max_size=60), st.data())
def test_a_cut_changes_no_bit(some: list[int], data: st.DataObject) -> None:
    numbers = torch.from_numpy(np.array(some, np.uint32).view(np.float32))
    numbers = numbers[~numbers.isnan()]
    whole = np.zeros(len(numbers), np.uint16)
    encode(numbers, whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=4)))
    pieces = np.zeros(len(numbers), np.uint16)
    for start, stop in pairwise([0, *cuts, len(numbers)]):
        encode(numbers[start:stop], pieces[start:stop])
    assert pieces.tolist() == whole.tolist()


def test_long_vectors_and_other_types_round_alike() -> None:
    numbers = torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    for given_as in (numbers, numbers.double(), numbers[:, None].expand(-1, 2)[:, 1]):
        words = np.zeros(len(numbers), np.uint16)
        assert encode(given_as, words)
        assert words.tolist() == rounded(numbers.numpy().view(np.uint32)).tolist()
    halves = numbers.bfloat16()
    words = np.zeros(len(numbers), np.uint16)
    encode(halves, words)
    assert torch.equal(as_tensor(words), halves)


def test_one_bad_number_among_many_is_found_in_any_piece() -> None:
    for place in (0, 40_000, 99_999):
        for bad in (np.nan, np.inf, -np.inf):
            numbers = torch.full((100_000,), -3.4e38)
            numbers[place] = bad
            words = np.zeros(len(numbers), np.uint16)
            assert not encode(numbers, words)
            others = np.delete(words, place)
            assert (others == 0x8000 | LARGEST).all()


@given(st.integers(0, 9), st.integers(0, 5), st.integers(0, 3))
def test_parameters_take_a_word_and_buffers_stay_exact(
    n_parameters: int, n_buffers: int, misaligned: int
) -> None:
    n = n_parameters + n_buffers
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    memory = np.zeros(4 * n + 64, np.uint8)[2 * misaligned :]
    words = memory[: 2 * word_count(n, n_parameters)].view(WORD)
    own = np.zeros(word_count(n, n_parameters), WORD)
    convert(values, own, n_parameters=n_parameters)
    words[:] = own  # as of a small message, which may lie at any address
    back = np.zeros(n, np.float32)
    convert(words, back, n_parameters=n_parameters)
    expected = rounded(values[:n_parameters].view(np.uint32)).astype(np.uint32) << 16
    assert back[:n_parameters].view(np.uint32).tolist() == expected.tolist()
    assert back[n_parameters:].tolist() == values[n_parameters:].tolist()
    assert len(words) * 2 <= max(4 * n, 0) or n == 0


@given(st.integers(1, 400), st.integers(0, 400), st.data())
def test_blocks_of_words_are_the_words_of_the_vector(
    n_parameters: int, n_buffers: int, data: st.DataObject
) -> None:
    size = n_parameters + n_buffers
    ends = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=8)))
    starts, stops = np.array(ends[:-1:2], np.int64), np.array(ends[1::2], np.int64)
    ranges = IndexRanges.of(starts[: len(stops)], stops)
    part = ShardSlice(size, dtype=np.dtype(np.float32), ranges=ranges, n_gradient=n_parameters)
    cuts = sorted(data.draw(st.sets(st.integers(1, part.n_elements), max_size=3)))
    evens = [cut & ~1 for cut in cuts if 0 < cut & ~1 < part.n_elements]
    part.bounds = tuple(pairwise(sorted({0, *evens, part.n_elements})))
    vector = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    words = np.zeros(word_count(size, n_parameters), WORD)
    convert(vector, words, n_parameters=n_parameters)
    held = zip(ranges.starts, ranges.stops, strict=True)
    compact = np.concatenate([vector[start:stop] for start, stop in held])
    expected = part.room(np.zeros(part.n_elements, np.float32), words=True)
    convert(compact, expected, n_parameters=part.n_parameters)
    blocks = [part.block(words, index) for index in range(len(part.bounds))]
    assert np.concatenate(blocks).tolist() == expected.tolist()
    for index, block in enumerate(blocks):
        part.check_block(index, block, words=True, sender="shard")
        dense = part.block(vector, index)
        n = part.n_parameters_within(*part.bounds[index])
        assert parts(block, n)[1].tolist() == dense[n:].tolist()


# --- a client and its shards ---

ROUNDING = ClientConfig(pushes=True, fetch="bfloat16")


def rounding(n_shards: int = 1, *, rule: UpdateRule = ONE, host: str = "") -> Bench:
    """Return such shards and a client that rounds."""
    bench = bench_of(n_shards, rule=rule, host=host)
    bench.add_client(config=ROUNDING)
    bench.settle()
    return bench


def rounded_all(tensors: Tensors, layout: Layout) -> Tensors:
    """Return what a client gets of these: buffers stay."""
    return [
        tensor if spec.kind == "buffer" else rounded_tensor(tensor)
        for spec, tensor in zip(layout.tensors, tensors, strict=True)
    ]


def apply(values: Tensors, gradient: Tensors, layout: Layout) -> None:
    """Change values as a push to the rule `ONE` does."""
    for spec, value, one in zip(layout.tensors, values, gradient, strict=True):
        value.copy_(one if spec.kind == "buffer" else value - one)


@pytest.mark.parametrize("n_shards", [1, 2, 3])
def test_fetches_are_rounded_once_and_shards_are_not(n_shards: int) -> None:
    bench = rounding(n_shards)
    layout = bench.layout
    values = noise(0, layout)
    for seed in range(1, 4):
        assert_same(fetch(bench), rounded_all(values, layout))
        gradient = noise(seed, layout)
        assert push(bench, gradient)
        bench.settle()
        apply(values, gradient, layout)
        assert_same(served(bench), values)
    assert_same(fetch(bench, exact=True), values)
    assert not bench.refused


@pytest.mark.parametrize("rule", [ONE, Adam(learning_rate=0.1)])
def test_any_number_of_shards_gives_the_same_bits(rule: UpdateRule) -> None:
    found = []
    for n_shards in (1, 2, 3, 7):
        bench = rounding(n_shards, rule=rule)
        for seed in range(3):
            push(bench, noise(seed, bench.layout))
            bench.settle()
        found.append([*served(bench), *fetch(bench)])
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("n_shards", [1, 3])
def test_clients_that_hold_parts_give_the_bits_of_one_that_holds_everything(n_shards: int) -> None:
    whole, cut = bench_of(n_shards), bench_of(n_shards)
    whole.add_client(config=ROUNDING)
    for name, items in ITEMS.items():
        cut.add_client(name, config=ROUNDING, view=PartialView(cut.layout, items))
    whole.settle()
    cut.settle()

    def cut_of(tensors: Tensors, name: Address) -> Tensors:
        by_name = {
            spec.name: tensor.reshape(spec.shape)
            for spec, tensor in zip(whole.layout.tensors, tensors, strict=True)
        }
        return [by_name[key][region.slices].reshape(-1).clone() for key, region in ITEMS[name]]

    for seed in range(1, 3):
        gradient = noise(seed, whole.layout)
        push(whole, gradient)
        for name in ITEMS:
            push(cut, cut_of(gradient, name), name)
        whole.settle()
        cut.settle()
    assert_same(served(cut), served(whole))
    for name in ITEMS:
        assert_same(fetch(cut, name), cut_of(fetch(whole), name))
        assert_same(fetch(cut, name, exact=True), cut_of(served(whole), name))
    assert not cut.refused


def test_bytes_are_two_for_each_parameter_and_four_for_each_buffer() -> None:
    bench = rounding()
    client = bench.client()
    push(bench, noise(1, bench.layout))
    fetch(bench)
    n_parameters = bench.layout.n_gradient(0)
    n_bytes = 2 * n_parameters + 4 * (bench.layout.shard_size(0) - n_parameters)
    assert client.counters()["bytes_in"] == bench.counters()["bytes_out"] == n_bytes
    fetch(bench, exact=True)
    assert client.counters()["bytes_in"] == n_bytes + 4 * bench.layout.shard_size(0)


def test_in_shared_memory_nothing_is_rounded() -> None:
    bench = rounding(2, host="here")
    values = noise(0, bench.layout)
    assert_same(fetch(bench), values)
    gradient = noise(1, bench.layout)
    push(bench, gradient)
    bench.settle()
    expected = [
        one if spec.kind == "buffer" else value - one
        for spec, value, one in zip(bench.layout.tensors, values, gradient, strict=True)
    ]
    assert_same(fetch(bench), expected)
    assert_same(served(bench), expected)


def test_tensors_without_a_gradient_stay() -> None:
    bench = rounding(2, rule=SGD(learning_rate=1.0, weight_decay=0.1))
    before, gradient = served(bench), noise(1, bench.layout)
    given_ = [None, *gradient[1:]]
    bench.push_tensors(given_, gradient, skip_missing=True)
    bench.settle()
    after = served(bench)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[2], before[2])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_is_not_finite_is_not_pushed(bad: float, index: int) -> None:
    bench = rounding(2)
    client = bench.client()
    gradient = noise(1, bench.layout)
    gradient[index][4] = bad
    before = served(bench)
    assert not push(bench, gradient)
    bench.settle()
    assert_same(served(bench), before)
    assert client.counters()["non_finite"] == 1.0
    assert bench.layout.tensors[index].name in bench.reports[-1].text


@pytest.mark.parametrize("selection", [None, CLIENT])
def test_what_is_finite_stays_finite(selection: Address | None) -> None:
    bench = bench_of()
    view = None if selection is None else PartialView(bench.layout, ITEMS[selection])
    bench.add_client(config=ROUNDING, view=view)
    bench.settle()
    client = bench.client()
    gradient = [torch.zeros(spec.n_elements) for spec in client._specs]
    place = [spec.name for spec in client._specs].index("b")
    gradient[place][0] = -torch.finfo(torch.float32).max
    before = fetch(bench)
    assert push(bench, gradient)
    bench.settle()
    largest = torch.finfo(torch.bfloat16).max
    assert served(bench)[0][0] > largest  # it rounds up, to infinity
    assert fetch(bench)[place][0] == largest
    assert before[place][0] != largest


@pytest.mark.parametrize("seed", range(6))
def test_retries_and_duplicates_change_no_bit(seed: int) -> None:
    bench = bench_of(2, kind=Lossy)
    assert isinstance(bench, Lossy)
    bench.add_client(config=ROUNDING)
    bench.settle()
    bench.random, bench.is_lossy = np.random.default_rng(seed), True
    values = noise(0, bench.layout)
    for step in range(1, 4):
        gradient = noise(step, bench.layout)
        push(bench, gradient)
        while bench.client().unacknowledged:
            bench.advance(0.5)
        apply(values, gradient, bench.layout)
        bench.begin_fetch()
        while not bench.client().fetch_complete:
            bench.advance(0.5)
        found = [torch.zeros_like(value) for value in values]
        assert bench.install(found).torn == ()
        assert_same(found, rounded_all(values, bench.layout))
    bench.is_lossy = False
    bench.advance(5.0)
    assert_same(served(bench), values)
    assert not bench.refused


def test_fetches_of_both_kinds_at_once_get_a_version_each() -> None:
    bench = bench_of()
    for name, config in (
        (CLIENT, ROUNDING),
        (OTHER, ROUNDING),
        (READER, ClientConfig(pushes=False)),
    ):
        bench.add_client(name, config=config)
    bench.settle()
    for name in (CLIENT, READER, OTHER):
        bench.begin_fetch(name)
    bench.settle()
    values = noise(0, bench.layout)
    expected = {name: rounded_all(values, bench.layout) for name in (CLIENT, OTHER)}
    for name in (CLIENT, OTHER, READER):
        found = [torch.zeros_like(value) for value in values]
        assert bench.install(found, name).torn == ()
        assert_same(found, expected.get(name, values))
    versions = bench.roles[SHARD]._versions._versions  # type: ignore[attr-defined]
    assert sorted(str(one.values.dtype) for one in versions) == ["float32", "uint16"]
    # One version of each kind is enough, and free ones change their kind.
    for _ in range(3):
        assert_same(fetch(bench), expected[CLIENT])
        assert_same(fetch(bench, exact=True), values)
    assert len(versions) == 2


def test_one_version_serves_both_kinds_in_turns() -> None:
    bench = bench_of()
    layout = bench.layout
    values = noise(0, layout)
    bench.add_shard(n_copies=1, initialise=partial(first, layout, 0))
    bench.add_client(config=ROUNDING)
    bench.add_client(READER)
    bench.settle()
    bench.begin_fetch(CLIENT)
    bench.begin_fetch(READER)
    bench.settle()
    found = [torch.zeros_like(value) for value in values]
    bench.install(found)
    assert_same(found, rounded_all(values, layout))
    bench.install(found, READER)
    assert_same(found, values)


@pytest.mark.parametrize("starts_shared", [True, False])
def test_a_push_under_way_moves_between_shared_memory_and_blocks(*, starts_shared: bool) -> None:
    """The shard restarts on another host, or on that of the client."""
    layout = Layout.of(SPECS, n_shards=1)
    memories = {True: PrivateMemory(host="here"), False: PrivateMemory(host="")}
    bench = Bench(layout=layout, memory=memories[True])
    bench.add_shard(memory=memories[starts_shared])
    bench.add_client(config=ROUNDING)
    bench.settle()
    gradient = noise(1, layout)
    bench.lose = lambda receiver, message: receiver == SHARD and isinstance(message, pf.Push)
    push(bench, gradient)
    bench.settle()
    bench.lose = lambda _receiver, _message: False
    bench.add_shard(memory=memories[not starts_shared])
    bench.deliver(CLIENT, PeerLost(peer=SHARD, incarnation=1, reason="gone", for_good=False))
    bench.settle()
    bench.advance(5.0)
    assert bench.client().unacknowledged == 0
    expected = [
        one if spec.kind == "buffer" else -one
        for spec, one in zip(layout.tensors, gradient, strict=True)
    ]
    assert_same(served(bench), expected)
    assert not bench.refused


# --- two copies ---


@pytest.mark.parametrize("n_clients", [1, 2])
@pytest.mark.parametrize("rule", [ONE, Adam(learning_rate=0.1)])
def test_the_backup_ends_with_the_bits_of_the_primary(rule: UpdateRule, n_clients: int) -> None:
    layout = Layout.of(SPECS, n_shards=1)
    pair = Pair(layout=layout, memory=PrivateMemory(host="", poison=True))
    pair.config = ROUNDING
    pair.begin(rule=rule, n_clients=n_clients)
    n_bytes = []

    def note(receiver: Address, message: Message) -> bool:
        if receiver == pair.B and isinstance(message, pf.PushBlock):
            n_bytes.append(message.values.nbytes)
        return False

    pair.lose = note
    for seed in range(1, 5):
        for name in (CLIENT, OTHER)[:n_clients]:
            gradient = [
                torch.randn(spec.n_elements, generator=torch.Generator().manual_seed(seed))
                for spec in pair.client(name)._specs
            ]
            push(pair, gradient, name)
        pair.settle()
    one, other = pair.copy(pair.A).values, pair.copy(pair.B).values
    assert one.clock == other.clock == 4 * n_clients
    assert one.vector.tobytes() == other.vector.tobytes()
    for key, vector in one.state.items():
        assert vector.tobytes() == other.state[key].tobytes()
    assert one.vector.any()
    client_bytes = sum(pair.client(n).counters()["bytes_out"] for n in (CLIENT, OTHER)[:n_clients])
    assert sum(n_bytes) == client_bytes  # forwarded as they came
    assert not pair.refused


def test_a_backup_that_takes_over_has_each_push_once() -> None:
    layout = Layout.of(SPECS, n_shards=1)
    pair = Pair(layout=layout, memory=PrivateMemory(host="", poison=True))
    pair.config = ROUNDING
    pair.begin(rule=ONE)
    gradients = [noise(seed, layout) for seed in range(1, 4)]
    for number, gradient in enumerate(gradients):
        if number == 2:  # the primary applies it, and is gone before its backup or client hears
            pair.lose = lambda receiver, _message: receiver in {pair.B, CLIENT}
        push(pair, gradient)
        pair.settle()
    assert pair.client().unacknowledged == 1
    assert pair.copy(pair.A).values.clock == 3
    pair.kill(pair.A)
    pair.lose = lambda _receiver, _message: False
    pair.lead(pair.B, term=3)
    pair.settle()
    pair.advance(5.0)
    assert pair.client().unacknowledged == 0
    expected = [torch.zeros(spec.n_elements) for spec in layout.tensors]
    for gradient in gradients:
        apply(expected, gradient, layout)
    assert_same(fetch(pair, exact=True), expected)


# --- refusals ---


def test_a_client_refuses_blocks_of_another_payload_than_it_asked_for() -> None:
    bench = rounding()
    actions = bench.client().begin_fetch(0.0)
    (asked,) = sent(actions, pf.Fetch)
    assert asked.payload == "bfloat16"
    start, stop = PartialView(bench.layout).slices[0].bounds[0]
    block = pf.ParameterBlock(
        request=asked.request,
        term=1,
        block_index=0,
        clock=0,
        values=np.zeros(stop - start, np.float32),
    )
    bench.send(SHARD, CLIENT, block)
    bench.pass_messages()
    assert "elements of float32 as block 0" in str(bench.refused[0])
