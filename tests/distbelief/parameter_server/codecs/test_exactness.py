"""E1: decode(words) + rest + what was clipped == residual, for floats of all exponents."""

from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from distbelief.core.errors import JobError, LocalProtocolError
from distbelief.parameter_server.codecs import Codec
from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.exactness import History
from distbelief.parameter_server.codecs.threshold import Threshold
from distbelief.parameter_server.codecs.top_k import TopK
from tests.distbelief.parameter_server.codecs.residuals import (
    CODECS,
    LARGEST,
    assert_nothing_is_lost,
    name_of,
    push,
    residual,
    tuned,
)


SEEDS = st.integers(0, 1 << 60)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@given(seed=SEEDS, n_elements=st.integers(0, 300), n_pushes=st.integers(0, 6))
def test_nothing_is_lost(codec: Codec, seed: int, n_elements: int, n_pushes: int) -> None:
    numbers = residual(seed, n_elements)
    pushed = push(tuned(codec, numbers, seed), numbers, History(n_pushes=n_pushes))
    assert_nothing_is_lost(pushed)


@pytest.mark.soak
@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_nothing_is_lost_in_a_million_blocks(codec: Codec) -> None:
    n_blocks = 0
    for seed in count():
        numbers = residual(seed, 64 * (seed % 200) + seed % 3)
        assert_nothing_is_lost(
            push(tuned(codec, numbers, seed), numbers, History(n_pushes=seed % 3))
        )
        n_blocks += seed % 200
        if n_blocks > 1_000_000:
            break


@pytest.mark.each_value
@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@pytest.mark.parametrize("n_elements", [65_536, 131_137])
def test_nothing_is_lost_over_several_pieces(codec: Codec, n_elements: int) -> None:
    for seed in range(4):
        numbers = residual(seed, n_elements)
        assert_nothing_is_lost(push(tuned(codec, numbers, seed), numbers, History(n_pushes=1)))


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@given(seed=SEEDS, n_pushes=st.integers(2, 12))
def test_a_push_that_is_put_back_leaves_the_former_bits(
    codec: Codec, seed: int, n_pushes: int
) -> None:
    """E14, for a residual that has no zero of negative sign, as sums have none."""
    numbers = residual(seed, 200) + np.float32(0)
    codec = tuned(codec, numbers, seed)
    if isinstance(codec, Threshold):
        codec = Threshold(tau=codec.tau)
    pushed = push(codec, numbers, History(n_pushes=n_pushes))
    back = pushed.rest + pushed.sent
    back += np.float32(0)
    assert back.tobytes() == numbers.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_all_of_a_residual_is_sent_in_the_end(codec: Codec) -> None:
    """What is kept is delayed: without new gradients the rest comes down to little."""
    generator = np.random.default_rng(3)
    numbers = generator.standard_normal(4096).astype(np.float32)
    if isinstance(codec, Threshold):
        codec = Threshold(tau=0.05)
    rest, sent, history = numbers, [], History()
    for _ in range(120):
        pushed = push(codec, rest, history)
        history = codec.after(history, pushed.cut, n_sent=pushed.encoded.n_sent, n_elements=4096)
        rest = pushed.rest
        sent.append(pushed.sent)
    assert np.abs(rest).max() < 0.051
    for one in reversed(sent):
        rest = rest + one
    assert np.array_equal(rest, numbers)


# --- where a subtraction would round ---


@pytest.mark.parametrize("n_huge", [1, 3])
def test_what_is_too_large_for_steps_is_sent_whole_one_of_each_64(n_huge: int) -> None:
    codec = Threshold(tau=1e-3)
    tau = codec.choose([], History()).size
    numbers = np.zeros(128, np.float32)
    numbers[5 : 5 + n_huge] = np.nextafter(np.float32(tau * 2**16), np.float32(1e9))
    numbers[70] = np.nextafter(np.float32(tau * 2**16), np.float32(0))
    pushed = push(codec, numbers)
    assert pushed.sent[5] == numbers[5]
    assert np.array_equal(pushed.sent[6 : 5 + n_huge], np.zeros(n_huge - 1))
    assert pushed.sent[70] == np.float32(tau)
    assert_nothing_is_lost(pushed)
    again = push(codec, pushed.rest)
    assert bool(again.sent[6]) == (n_huge > 1)


def test_a_huge_outlier_among_2_bit_values_is_sent_whole() -> None:
    """It lies where the sample does not see it."""
    codec = TopK(share=0.01, bits=2)
    numbers = np.random.default_rng(0).standard_normal(1 << 19).astype(np.float32)
    cut = codec.choose([numbers], History())
    one, place = numbers, 99
    while one is numbers or codec.choose([one], History()) != cut:
        place += 1
        one = numbers.copy()
        one[place] = 3e38
    one[place + 1] = -3e38
    pushed = push(codec, one)
    assert pushed.sent[place] == np.float32(3e38)
    assert pushed.sent[place + 1] == (0 if place // 64 == (place + 1) // 64 else -3e38)
    assert_nothing_is_lost(pushed)


def test_two_bits_fit_the_elements_that_there_are_if_these_are_less_than_the_share() -> None:
    """Regression: the cut fell to nothing, and both levels with it; one of each 64 was sent."""
    numbers = np.zeros(4096, np.float32)
    numbers[:300:3] = 1.0
    numbers[1:300:3] = -3.0
    numbers[2:300:3] = 1e-6  # far below the others: these wait
    pushed = push(TopK(share=0.2, bits=2), numbers)
    assert np.array_equal(pushed.sent[:300:3], numbers[:300:3])
    assert np.array_equal(pushed.sent[1:300:3], numbers[1:300:3])
    assert np.array_equal(pushed.rest[2:300:3], numbers[2:300:3])
    assert_nothing_is_lost(pushed)


@pytest.mark.parametrize("codec", [Int8(), Int4()])
def test_the_largest_and_the_smallest_numbers_have_a_scale_or_are_kept(codec: Codec) -> None:
    for size in (LARGEST, 2.0**127, 2.0**-110, 2.0**-118, 2.0**-124, 2.0**-149):
        numbers = np.full(64, size, np.float32)
        numbers[1::2] /= -3
        pushed = push(codec, numbers)
        assert_nothing_is_lost(pushed)
        assert pushed.sent.any() == (size > 2.0**-119)


def test_bfloat16_rounds_to_the_nearest_and_stays_finite() -> None:
    numbers = np.array([1.0, 1 + 2.0**-9, 1 + 2.0**-8 + 2.0**-20, LARGEST, -LARGEST], np.float32)
    largest = torch.finfo(torch.bfloat16).max
    pushed = push(Bfloat16(), numbers)
    assert pushed.sent.tolist() == [1.0, 1.0, 1 + 2.0**-7, largest, -largest]
    assert_nothing_is_lost(pushed)


# --- what is refused ---


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_residual_that_is_not_finite_is_refused(codec: Codec, bad: float) -> None:
    numbers = np.ones(130, np.float32)
    numbers[100] = bad
    with pytest.raises(LocalProtocolError, match="residual is not finite"):
        push(codec, numbers)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_it_is_refused_too_where_no_sample_saw_it(codec: Codec) -> None:
    numbers = np.ones(130, np.float32)
    cut = codec.choose([numbers], History())
    out = np.zeros(codec.n_words_max(130), np.uint32)
    for bad in (np.nan, np.inf):
        numbers[100] = bad
        with pytest.raises(LocalProtocolError, match="residual is not finite"):
            codec.encode(numbers.copy(), cut, out)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_arithmetic_without_subnormal_numbers_is_refused(codec: Codec) -> None:
    numbers = np.ones(64, np.float32)
    cut = codec.choose([numbers], History())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(JobError, match=r"leave out torch\.set_flush_denormal"):
            codec.encode(numbers, cut, np.zeros(200, np.uint32))
    finally:
        torch.set_flush_denormal(False)
