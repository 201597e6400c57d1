"""Encoded pushes from a client to its shards: nothing is lost, and nothing is encoded twice.

Gradients are small whole numbers times a power of two, so that sums of them are exact in float32,
in any order: what the shards have, what the residual has, and what a codec has cut off add up to
what was pushed, with == (E2).
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server import codecs
from distbelief.parameter_server.client.residuals import Residuals
from distbelief.parameter_server.codecs import Bfloat16, Codec, Int4, Int8, Threshold, TopK
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, Adam, UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.tensor_copies import Pushed
from distbelief.protocol import Message, push_fetch as pf
from distbelief.protocol.role import Address, PeerLost
from tests.distbelief.parameter_server.codecs.residuals import CODECS, name_of
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
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, SHARD, Bench, sent
from tests.distbelief.parameter_server.shard_copies import OneCopy, only


OF_EACH_ELEMENT = [codec for codec in CODECS if isinstance(codec, Bfloat16 | Int8 | Int4)]

each_codec = pytest.mark.parametrize("codec", CODECS, ids=name_of)


def config_of(codec: Codec) -> ClientConfig:
    return ClientConfig(pushes=True, push=codec)


def encoding(codec: Codec, n_shards: int = 1, *, rule: UpdateRule = ONE, host: str = "") -> Bench:
    """Return shards, and a client that encodes."""
    bench = bench_of(n_shards, rule=rule, host=host)
    bench.add_client(config=config_of(codec))
    bench.settle()
    return bench


def whole(seed: int, specs: Sequence[TensorSpec]) -> Tensors:
    """Return tensors of multiples of 2^-9 below 4: a few of them added up stay exact."""
    stream = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-2048, 2049, (spec.n_elements,), generator=stream).float() / 512
        for spec in specs
    ]


def start_at_zero(bench: Bench, *, policy: ExchangePolicy, rule: UpdateRule = ONE) -> None:
    for k in range(bench.layout.n_shards):
        size = bench.layout.shard_size(k)
        shard = Shard(
            ShardConfig(index=k, layout=bench.layout, rule=rule, policy=policy),
            memory=bench.memory,
            initialise=partial(np.zeros, size, np.float32),
        )
        bench.start(Address(f"shard-{k}"), shard)


def residual_of(bench: Bench, name: Address = CLIENT) -> Tensors:
    """Return what a client holds back of each of its tensors, buffers as zeros."""
    client = bench.client(name)
    assert client._residuals is not None
    rests = [torch.zeros(spec.n_elements) for spec in client.view.tensors]
    for index, held in client.view.slices.items():
        vector = client._residuals._shards[index].residual.copy()
        vector[held.n_parameters :] = 0
        client.view.copier(index, compact=True).scatter(vector, rests)
    return rests


def clipped_of(bench: Bench, name: Address = CLIENT) -> float:
    return bench.client(name).counters()["clipped"]


# --- nothing is lost ---


@pytest.mark.each_value
@each_codec
@pytest.mark.parametrize("n_shards", [1, 3])
def test_what_shards_have_and_what_is_held_back_is_all_that_was_pushed(
    codec: Codec, n_shards: int
) -> None:
    """E1, E2, SR-2: with ==."""
    bench = bench_of(n_shards)
    start_at_zero(bench, policy=ExchangePolicy())
    bench.add_client(config=config_of(codec))
    bench.settle()
    total = [torch.zeros(spec.n_elements) for spec in SPECS]
    for seed in range(6):
        gradient = whole(seed, SPECS)
        total = [one + of_all for one, of_all in zip(gradient, total, strict=True)]
        assert push(bench, gradient)
        bench.settle()
        values, rests = served(bench), residual_of(bench)
        for spec, value, rest, of_all in zip(SPECS, values, rests, total, strict=True):
            if spec.kind == "parameter" and not clipped_of(bench):
                assert torch.equal(rest - value, of_all)
    assert not bench.refused
    is_clipped = isinstance(codec, Threshold) and codec.clip is not None
    assert bool(clipped_of(bench)) == is_clipped


@pytest.mark.parametrize("bits", [2, 32])
def test_what_is_held_back_decays_and_what_that_drops_is_counted(bits: Literal[2, 32]) -> None:
    """SparseLoCo's error feedback: e := decay (e + d - sent), here with exact halves."""
    both = [TopK(share=0.05, bits=bits, decay=decay) for decay in (1.0, 0.5)]
    kept, decaying = [encoding(codec, 2) for codec in both]
    gradient = whole(0, SPECS)
    assert push(kept, gradient)
    assert push(decaying, gradient)
    rests, halves = residual_of(kept), residual_of(decaying)
    assert_same(halves, [rest / 2 for rest in rests])
    lost = decaying.client().counters()["clipped"]
    assert lost == sum(float(rest.double().abs().sum()) for rest in halves) > 0.0
    # A push that is refused, and tensors without a gradient, let nothing decay.
    assert not push(decaying, [torch.full_like(one, torch.inf) for one in gradient])
    assert_same(residual_of(decaying), halves)
    decaying.settle()
    decaying.push_tensors([None, *gradient[1:]], gradient, skip_missing=True)
    assert_same(residual_of(decaying)[:1], halves[:1])


@pytest.mark.parametrize("bits", [2, 32])
def test_what_decays_is_not_pushed_at_the_end(bits: Literal[2, 32]) -> None:
    """Preset `sparseloco` ended with a loss of 4.46 on text; before its last push it was 2.55.

    What waits is nearly all of several rounds, which later ones have found again.
    """
    bench = encoding(TopK(share=0.05, bits=bits, decay=0.5), 2)
    for seed in range(3):
        push(bench, noise(seed, bench.layout))
        bench.settle()
    assert bench.client().counters()["residual"]
    assert not bench.client().owes_rest
    push_last = bench.client().draft(is_last=True)
    zeros = [torch.zeros(spec.n_elements) for spec in SPECS]
    rests = residual_of(bench)
    before = served(bench)
    outcome = push_last.put_all(zeros, zeros)
    bench.perform(CLIENT, bench.client().staged(outcome, n_gradients=1, samples=4, now=bench.now))
    bench.settle()
    for spec, rest, now, was in zip(SPECS, rests, served(bench), before, strict=True):
        if spec.kind == "parameter":  # of real gradients too, the last push is the largest 5 %
            assert (now != was).sum() < rest.numel() / 2


@each_codec
def test_the_last_push_leaves_next_to_nothing_behind(codec: Codec) -> None:
    bench = encoding(codec, 2)
    for seed in range(3):
        push(bench, noise(seed, bench.layout))
        bench.settle()
    client = bench.client()
    before = client.counters()["residual"]
    draft = client.draft(is_last=True)
    zeros = [torch.zeros(spec.n_elements) for spec in SPECS]
    outcome = draft.put_all(zeros, zeros)
    bench.perform(CLIENT, client.staged(outcome, n_gradients=0, samples=3, now=bench.now))
    bench.settle()
    if isinstance(codec, Threshold):  # steps put no bound on what waits, so it is left
        assert client.counters()["residual"] > before / 256
    else:
        assert client.counters()["residual"] <= before / 256
    assert not client.owes_rest


@pytest.mark.each_value
@each_codec
@pytest.mark.parametrize("rule", [ONE, Adam(learning_rate=0.1)], ids=["sgd", "adam"])
def test_any_number_of_shards_gives_the_same_bits(codec: Codec, rule: UpdateRule) -> None:
    """E11: the cut is chosen once for a push, before it is cut into shards."""
    found = []
    for n_shards in (1, 2, 5):
        bench = encoding(codec, n_shards, rule=rule)
        for seed in range(4):
            push(bench, noise(seed, bench.layout))
            bench.settle()
        found.append([*served(bench), *residual_of(bench)])
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.each_value
@pytest.mark.parametrize("codec", OF_EACH_ELEMENT, ids=name_of)
@pytest.mark.parametrize("n_shards", [1, 3])
def test_clients_that_hold_parts_lose_nothing_either(codec: Codec, n_shards: int) -> None:
    bench = bench_of(n_shards)
    start_at_zero(bench, policy=ExchangePolicy())
    for name, items in ITEMS.items():
        bench.add_client(name, config=config_of(codec), view=PartialView(bench.layout, items))
    bench.settle()
    total: dict[Address, Tensors] = {}
    for seed in range(4):
        for name in ITEMS:
            gradient = whole(seed, bench.client(name).view.tensors)
            before = total.setdefault(name, [torch.zeros_like(one) for one in gradient])
            total[name] = [one + of_all for one, of_all in zip(gradient, before, strict=True)]
            assert push(bench, gradient, name)
        bench.settle()
    assert not bench.refused
    for name in ITEMS:
        specs = bench.client(name).view.tensors
        values, rests = fetch(bench, name), residual_of(bench, name)
        for spec, value, rest, of_all in zip(specs, values, rests, total[name], strict=True):
            if spec.kind == "parameter":
                assert torch.equal(rest - value, of_all)


@each_codec
def test_tensors_without_a_gradient_stay_and_so_does_what_is_held_back_of_them(
    codec: Codec,
) -> None:
    bench = encoding(codec, 2, rule=SGD(learning_rate=1.0, weight_decay=0.1))
    push(bench, noise(1, bench.layout))
    bench.settle()
    before, held = served(bench), residual_of(bench)
    gradient = noise(2, bench.layout)
    bench.push_tensors([None, *gradient[1:]], gradient, skip_missing=True)
    bench.settle()
    after = served(bench)
    assert_same([after[0], residual_of(bench)[0]], [before[0], held[0]])
    assert not torch.equal(after[2], before[2])


def test_the_last_push_has_what_is_held_back_of_tensors_without_a_gradient() -> None:
    """Regression: it was left, and counted as sent."""
    bench = encoding(TopK(share=0.01), 2)
    start_at_zero(bench, policy=ExchangePolicy())
    bench.settle()
    gradient = whole(1, SPECS)
    push(bench, gradient)
    bench.settle()
    client, zeros = bench.client(), [torch.zeros(spec.n_elements) for spec in SPECS]
    draft = client.draft(touched=[None, *zeros[1:]], is_last=True)
    outcome = draft.put_all([None, *zeros[1:]], zeros)
    bench.perform(CLIENT, client.staged(outcome, n_gradients=0, samples=3, now=bench.now))
    bench.settle()
    assert client.counters()["residual"] < 0.01 * sum(float(one.abs().sum()) for one in gradient)


@pytest.mark.parametrize("rounds", [None, Round()])
def test_a_push_of_what_was_held_back_counts_as_the_one_before(rounds: Round | None) -> None:
    """Regression: it had no samples, so with weight = "samples" it was multiplied by 0."""
    policy = ExchangePolicy(send="delta", staleness=0, round=rounds, weight="samples")
    layout = Layout.of(SPECS, n_shards=2)
    bench = Bench(layout=layout, memory=PrivateMemory(host=""))
    start_at_zero(bench, policy=policy)
    bench.add_client(config=config_of(TopK(share=0.01)))
    bench.settle()
    client, gradient = bench.client(), whole(1, SPECS)
    zeros = [torch.zeros(spec.n_elements) for spec in SPECS]
    for samples, given, is_last in ((8, gradient, False), (8, zeros, True)):
        bench.perform(CLIENT, client.enter(bench.now, staleness=0))
        bench.settle()
        outcome = client.draft(is_last=is_last).put_all(given, zeros)
        n = 0 if is_last else 1
        actions = client.staged(outcome, n_gradients=n, samples=samples, now=bench.now)
        bench.perform(CLIENT, actions)
        bench.settle()
    assert client.unacknowledged == 0
    assert (served(bench)[2] + gradient[2]).abs().max() <= 0.01
    assert client.counters()["residual"] < 0.01 * float(gradient[2].abs().sum())


def test_what_is_held_back_is_dropped_and_counted_when_its_samples_are_dealt_again() -> None:
    """A shard knows positions of a push, and drops it with all that was in it."""
    bench = bench_of()
    config = ShardConfig(index=0, layout=bench.layout, rule=ONE, deals=True)
    size = bench.layout.shard_size(0)
    bench.start(
        SHARD, Shard(config, memory=bench.memory, initialise=partial(np.zeros, size, np.float32))
    )
    bench.add_client(config=config_of(TopK(share=0.01)))
    bench.settle()
    client, gradient, held = bench.client(), whole(1, SPECS), 0.0
    for dealt in ((0, 8), (8, 16), (8, 16)):
        outcome = client.draft().put_all(gradient, gradient)
        bench.perform(
            CLIENT, client.staged(outcome, n_gradients=1, samples=8, now=bench.now, dealt=dealt)
        )
        bench.settle()
        held = client.counters()["residual"]
    before = served(bench)
    push(bench, gradient)
    bench.settle()
    assert client.counters()["residual_lost"] == held
    assert (served(bench)[2] - before[2] + gradient[2] - residual_of(bench)[2]).abs().max() == 0
    client.forget_rest()  # the values are set
    assert not client.owes_rest


# --- nothing is pushed that is not finite ---


@pytest.mark.each_value
@each_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_refused_push_changes_nothing_that_is_held_back(codec: Codec, bad: float) -> None:
    bench = encoding(codec, 2)
    push(bench, noise(1, bench.layout))
    bench.settle()
    before, held = served(bench), residual_of(bench)
    gradient = noise(2, bench.layout)
    gradient[2][7] = bad
    assert not push(bench, gradient)
    bench.settle()
    assert_same([*served(bench), *residual_of(bench)], [*before, *held])
    assert "w" in bench.reports[-1].text
    # As if that push had never been.
    other = encoding(codec, 2)
    for one, seeds in ((bench, (3,)), (other, (1, 3))):
        for seed in seeds:
            push(one, noise(seed, one.layout))
            one.settle()
    assert_same(residual_of(bench), residual_of(other))


def test_a_push_is_refused_whose_sum_with_what_is_held_back_is_not_finite() -> None:
    bench, other = encoding(TopK(share=1e-4), 2), encoding(TopK(share=1e-4), 2)
    largest = torch.finfo(torch.float32).max
    gradient = [torch.zeros(spec.n_elements) for spec in SPECS]
    gradient[2][:20_000] = largest
    assert push(bench, gradient)
    bench.settle()
    held = residual_of(bench)
    assert held[2][:20_000].eq(largest).any()
    assert not push(bench, gradient)
    assert_same(residual_of(bench), held)
    assert "NaN or infinity in" in bench.reports[-1].text
    # As if that push had never been: the next one looks at the same sample of elements.
    push(other, gradient)
    for one in (bench, other):
        push(one, noise(1, one.layout))
        one.settle()
    assert_same([*served(bench), *residual_of(bench)], [*served(other), *residual_of(other)])


# --- encoded once ---


@pytest.mark.each_value
@each_codec
@pytest.mark.parametrize("seed", range(3))
def test_retries_and_duplicates_change_no_bit(codec: Codec, seed: int) -> None:
    """X-3, E14: messages repeat words, and nobody encodes twice."""
    found = []
    for is_lossy in (False, True):
        bench = bench_of(2, kind=Lossy)
        assert isinstance(bench, Lossy)
        bench.add_client(config=config_of(codec))
        bench.settle()
        bench.random, bench.is_lossy = np.random.default_rng(seed), is_lossy
        for step in range(1, 5):
            push(bench, noise(step, bench.layout))
            while bench.client().unacknowledged > 1:
                bench.advance(0.5)
        while bench.client().unacknowledged:
            bench.advance(0.5)
        bench.is_lossy = False
        bench.advance(5.0)
        found.append([*served(bench), *residual_of(bench)])
        assert not bench.refused
    assert_same(found[0], found[1])


@each_codec
def test_a_push_under_way_is_sent_again_to_a_shard_that_restarts(codec: Codec) -> None:
    bench = encoding(codec)
    found = []
    for loses in (False, True):
        bench = encoding(codec)
        push(bench, noise(1, bench.layout))
        bench.settle()
        bench.lose = lambda to, one, loses=loses: (  # type: ignore[misc]
            loses and to == SHARD and isinstance(one, pf.Push)
        )
        push(bench, noise(2, bench.layout))
        bench.settle()
        bench.lose = lambda _receiver, _message: False
        if loses:
            bench.add_shard(initialise=partial(first, bench.layout, 0))
            gone = PeerLost(peer=SHARD, incarnation=1, reason="gone", for_good=False)
            bench.deliver(CLIENT, gone)
            bench.settle()
            bench.advance(5.0)
        assert bench.client().unacknowledged == 0
        found.append((served(bench), residual_of(bench)))
    (values, rests), (after_loss, rests_after_loss) = found
    assert_same(rests, rests_after_loss)
    # The first push is lost with the shard, the second is there.
    assert not torch.equal(values[2], after_loss[2])
    assert bench.client().counters()["pushes_lost"] == 1.0


@pytest.mark.each_value
@each_codec
@pytest.mark.parametrize("rule", [ONE, Adam(learning_rate=0.1)], ids=["sgd", "adam"])
def test_the_backup_ends_with_the_bits_of_the_primary(codec: Codec, rule: UpdateRule) -> None:
    """E12: it gets the words as they came."""
    layout = Layout.of(SPECS, n_shards=1)
    pair = Pair(layout=layout, memory=PrivateMemory(host="", poison=True))
    pair.config = config_of(codec)
    pair.begin(rule=rule)
    n_bytes = []

    def note(receiver: Address, message: Message) -> bool:
        if receiver == pair.B and isinstance(message, pf.PushBlock):
            n_bytes.append(message.values.nbytes)
        return False

    pair.lose = note
    for seed in range(1, 5):
        push(pair, noise(seed, layout))
        pair.settle()
    one, other = pair.copy(pair.A).values, pair.copy(pair.B).values
    assert one.clock == other.clock == 4
    assert one.vector.tobytes() == other.vector.tobytes()
    for key, vector in one.state.items():
        assert vector.tobytes() == other.state[key].tobytes()
    assert one.vector.any()
    assert sum(n_bytes) == pair.client().counters()["bytes_out"]
    assert not pair.refused


@each_codec
def test_a_backup_that_takes_over_has_each_push_once(codec: Codec) -> None:
    layout = Layout.of(SPECS, n_shards=1)
    found = []
    for dies in (False, True):
        pair = Pair(layout=layout, memory=PrivateMemory(host="", poison=True))
        pair.config = config_of(codec)
        pair.begin(rule=ONE)
        for number in range(3):
            if dies and number == 2:  # applied, but neither backup nor client hears of it
                pair.lose = lambda receiver, _message, pair=pair: (  # type: ignore[misc]
                    receiver in {pair.B, CLIENT}
                )
            push(pair, noise(number, layout))
            pair.settle()
        if dies:
            pair.kill(pair.A)
            pair.lose = lambda _receiver, _message: False
            pair.lead(pair.B, term=3)
            pair.settle()
            pair.advance(5.0)
        assert pair.client().unacknowledged == 0
        found.append([*fetch(pair), *residual_of(pair)])
    assert_same(found[0], found[1])


# --- bytes and memory ---


def payload_bytes(codec: Codec, n: int, *, n_sent: int) -> int:
    """Return the bytes of n parameters, by formula (E15)."""
    n_blocks = -(-n // 64)
    match codec:
        case Bfloat16():
            return 4 * -(-n // 2)
        case Int8() | Int4():
            n_bits = 8 if isinstance(codec, Int8) else 4
            return 4 * -(-n_blocks // 2) + n_blocks * 64 * n_bits // 8
        case TopK(bits=32):
            return min(8 * n_sent, 4 * n)
        case _:
            raise AssertionError(codec)


@pytest.mark.parametrize("codec", [*OF_EACH_ELEMENT, TopK(share=0.05)], ids=name_of)
def test_bytes_are_those_of_the_formula_and_buffers_take_four_each(codec: Codec) -> None:
    bench = encoding(codec)
    client = bench.client()
    push(bench, noise(1, bench.layout))
    bench.settle()
    n, n_buffers = bench.layout.n_gradient(0), 64
    assert bench.layout.shard_size(0) == n + n_buffers
    before = noise(0, bench.layout)
    n_sent = sum(
        int((value != one).sum())
        for spec, value, one in zip(SPECS, served(bench), before, strict=True)
        if spec.kind == "parameter"
    )
    expected = payload_bytes(codec, n, n_sent=n_sent) + 4 * n_buffers
    assert client.counters()["bytes_out"] == bench.counters()["bytes_in"] == expected
    assert client.counters()["words"] == (expected - 4 * n_buffers) / 4


@each_codec
def test_a_shard_has_memory_for_words_and_not_for_numbers(codec: Codec) -> None:
    bench = bench_of()
    names = [Address(f"replica-{k}") for k in range(10)]
    for name in names:
        bench.add_client(name, config=config_of(codec))
    bench.settle()
    assert bench.counters()["push_buffer_bytes"] == 0
    for seed in range(3):
        for name in names:
            push(bench, noise(seed, bench.layout), name)
        bench.settle()
    assert bench.counters()["push_buffer_bytes"] == 0  # all are applied
    bench.lose = lambda receiver, one: receiver == SHARD and isinstance(one, pf.Push)
    for name in names:
        push(bench, noise(5, bench.layout), name)
    bench.pass_messages()
    n_words = max(bench.client(name).counters()["words_max"] for name in names)
    n_bytes = 4 * (n_words + 64) * len(names)
    assert 0 < bench.counters()["push_buffer_bytes"] <= n_bytes
    bound = 4 * codecs.n_words_max(bench.layout.n_gradient(0))
    assert max(4 * n_words, 1) <= bound


@each_codec
@pytest.mark.parametrize(("start", "stop"), [(0, 300), (7, 9), (64, 128), (100, 299), (5, 5)])
def test_any_part_of_a_push_is_read_alike(codec: Codec, start: int, stop: int) -> None:
    words = words_of(codec, 300)
    held = ShardSlice(320, dtype=np.dtype(np.float32))  # with padding
    pushed = Pushed.of(words, held, codec.form).gradient
    whole_ = pushed[:].copy()
    assert whole_.any()
    assert pushed[start:stop].tobytes() == whole_[start:stop].tobytes()


def test_in_shared_memory_fetches_are_exact_and_words_come_in_blocks() -> None:
    bench = encoding(Int4(), 2, host="here")
    assert_same(fetch(bench), noise(0, bench.layout))
    blocks: list[pf.PushBlock] = []

    def note(_receiver: Address, message: Message) -> bool:
        if isinstance(message, pf.PushBlock):
            blocks.append(message)
        return False

    bench.lose = note
    push(bench, noise(1, bench.layout))
    bench.settle()
    assert {one.values.dtype for one in blocks} == {np.dtype(np.uint32)}
    bench.lose = lambda _receiver, _message: False
    apart = encoding(Int4(), 2)
    push(apart, noise(1, apart.layout))
    apart.settle()
    assert_same(served(bench), served(apart))


# --- rounds ---


@pytest.mark.parametrize("holds", ["everything", "parts", "some tensors"])
def test_a_round_of_words_is_the_round_of_what_they_stand_for(holds: str) -> None:
    policy = ExchangePolicy(send="delta", staleness=0, round=Round(), weight="mean")
    layout = Layout.of(SPECS, n_shards=2)
    benches = []
    for config in (config_of(Int8()), ClientConfig(pushes=True)):
        bench = Bench(layout=layout, memory=PrivateMemory(host=""))
        start_at_zero(bench, policy=policy)
        for name in (CLIENT, OTHER):
            view = PartialView(layout, ITEMS[name]) if holds == "parts" else None
            bench.add_client(name, config=config, view=view)
        bench.settle()
        benches.append(bench)
    encoded, dense = benches
    skips = holds == "some tensors"
    for seed in range(1, 4):
        for index, name in enumerate((CLIENT, OTHER)):
            pushed = whole(10 * seed + index, encoded.client(name).view.tensors)
            given: list[torch.Tensor | None] = list(pushed)
            if skips:
                given[0] = None
            before = residual_of(encoded, name)
            encoded.push_tensors(given, pushed, name, samples=seed, skip_missing=skips)
            after = residual_of(encoded, name)
            sums = zip(given, before, after, strict=True)
            sent_ = [None if one is None else one + held - rest for one, held, rest in sums]
            dense.push_tensors(sent_, pushed, name, samples=seed, skip_missing=skips)
        for bench in benches:
            bench.settle()
            assert bench.client(CLIENT).unacknowledged == 0
            assert not bench.refused
    assert_same(served(encoded), served(dense))
    assert served(encoded)[2].any()


# --- refusals ---


FLOAT32 = Layout.of(SPECS[:1], n_shards=1)  # 64 elements with padding


def words_of(codec: Codec, n: int = 64) -> NDArray[np.uint32]:
    view = PartialView(Layout.of([TensorSpec(name="b", shape=(n,))], n_shards=1))
    residuals = Residuals(codec, view)
    residuals.staging(0)[:n] = np.arange(n) - n // 2
    encoded = residuals.encode(1, is_last=False, touched=None)
    assert not isinstance(encoded, list)
    return encoded.words[0]


def block_of(
    words: NDArray[np.uint32] | NDArray[np.float32], *, n_words: pf.Words = 0, sequence: int = 1
) -> pf.PushBlock:
    n_words = len(words) if n_words == 0 else n_words
    return pf.PushBlock(sequence=sequence, term=1, block_index=0, values=words, n_words=n_words)


def push_of(form: pf.Form | None, n_words: int = 32, **rest: int | bool) -> pf.Push:
    push_ = pf.Push(sequence=1, term=1, fetched_clock=0, n_gradients=1, samples=1, **rest)  # type: ignore[arg-type]
    if form is None:
        return push_
    return pf.Push(
        sequence=1,
        term=1,
        fetched_clock=0,
        n_gradients=1,
        samples=1,
        form=form,
        n_words=n_words,
        **rest,  # type: ignore[arg-type]
    )


HALVES = words_of(Bfloat16())


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([block_of(HALVES[:16], n_words=32)], "16 elements of uint32 as block 0, which has 32"),
        ([block_of(np.zeros(32, np.float32))], "elements of float32 as block 0"),
        ([block_of(HALVES, n_words=msgspec.UNSET)], "32 elements of uint32"),
        ([block_of(HALVES, n_words=10**9)], "more than"),
        ([block_of(HALVES), push_of(None)], "of two sizes"),
        ([push_of("bfloat16"), block_of(HALVES[:31])], "of two sizes"),
        ([block_of(HALVES), push_of("int4")], "words of a push"),
        ([block_of(np.full(32, 0x7F80, np.uint32)), push_of("bfloat16")], "not finite"),
        ([push_of("bfloat16", commit_token=3)], "sums of a batch"),
        ([push_of("bfloat16", sets=True)], "for values"),
    ],
)
def test_a_shard_refuses_words_that_are_not_what_they_say(
    messages: list[Message], reason: str
) -> None:
    alone = OneCopy(SHARD, layout=FLOAT32, is_replicated=False)
    alone.hello()
    *before, last = messages
    for message in before:
        alone.receive(message, CLIENT)
    with pytest.raises(RemoteProtocolError, match=reason):
        alone.receive(last, CLIENT)
    # It goes on, with the push as it should be unless that is under way with another size.
    alone.receive(block_of(HALVES, sequence=2), CLIENT)
    assert alone.shard.values.clock == 0
    if "sizes" not in reason and "32 elements of uint32" not in reason:
        alone.receive(block_of(HALVES), CLIENT)
        alone.work(alone.receive(push_of("bfloat16"), CLIENT))
        assert alone.shard.values.clock == 1


def test_a_shard_refuses_words_where_the_push_lies_in_shared_memory() -> None:
    alone = OneCopy(SHARD, layout=FLOAT32, is_replicated=False)
    assert only(alone.hello(host="here"), pf.SessionOpened).push_buffers_region
    with pytest.raises(RemoteProtocolError, match="in shared memory"):
        alone.receive(push_of("bfloat16"), CLIENT)


def test_shards_of_float64_know_no_words() -> None:
    alone = OneCopy(SHARD, is_replicated=False)
    alone.hello()
    words = words_of(Bfloat16(), 192)
    alone.receive(block_of(words), CLIENT)
    with pytest.raises(RemoteProtocolError, match="use float32"):
        alone.receive(push_of("bfloat16", len(words)), CLIENT)
    request = pf.Fetch(request=1, term=1, credit=1, payload="bfloat16")
    with pytest.raises(RemoteProtocolError, match="bfloat16 of values of float64"):
        alone.receive(request, CLIENT)


def test_a_client_that_encodes_says_so() -> None:
    bench = bench_of()
    bench.add_client(config=config_of(Int4()))
    opened = [event.message for _, event in bench.messages]
    assert [one.encodes for one in opened if isinstance(one, pf.OpenSession)] == [True]
    assert sent([], pf.OpenSession) == []
