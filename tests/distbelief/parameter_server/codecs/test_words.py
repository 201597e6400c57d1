"""Words of pushes: how many there are, what invalid ones do, and the rules of the papers."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import RemoteProtocolError, SettingError
from distbelief.parameter_server.codecs import Codec
from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.exactness import History, Words, from_short, shorten
from distbelief.parameter_server.codecs.threshold import Adaptive, Threshold
from distbelief.parameter_server.codecs.top_k import TopK
from tests.distbelief.parameter_server.codecs.residuals import (
    CODECS,
    assert_nothing_is_lost,
    decoded,
    name_of,
    push,
    residual,
    tuned,
)


SEEDS = st.integers(0, 1 << 60)


# --- sizes ---


@pytest.mark.parametrize(
    ("codec", "n_bytes"),
    [
        (Bfloat16(), lambda n: 2 * n),
        (Int8(), lambda n: n + n // 32),
        (Int4(), lambda n: n // 2 + n // 32),
    ],
)
def test_x_3_bytes_of_dense_words(codec: Codec, n_bytes: object) -> None:
    assert callable(n_bytes)
    for n in (128, 12_800, 131_072):
        assert 4 * push(codec, residual(6, n)).encoded.n_words == n_bytes(n)
        assert 4 * codec.n_words_max(n) == n_bytes(n)


def test_x_3_bytes_of_sparse_words() -> None:
    n = 64_000
    numbers = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    few = push(Threshold(tau=3.0), numbers).encoded
    assert 4 * few.n_words == 4 * few.n_sent + 16  # Strom
    assert few.n_sent == np.count_nonzero(np.abs(numbers) >= 3.0)
    many = push(Threshold(tau=0.5), numbers).encoded
    assert many.n_sent > n // 16
    assert 4 * many.n_words == n // 4 + 16  # DL4J's bitmap, whose header is 20
    exact = push(TopK(share=0.01), numbers).encoded
    assert 4 * exact.n_words == 8 * exact.n_sent
    assert exact.n_sent == 640
    two = push(TopK(share=0.01, bits=2), numbers).encoded
    assert 4 * two.n_words == 2 * two.n_sent + 8 + 2 * 4  # rows of 16,384
    assert two.n_sent == 640


def test_x_5_a_model_of_14_6_million_by_steps_at_0_36_percent_takes_0_21_mb() -> None:
    numbers = np.zeros(14_600_000, np.float32)
    numbers[:: round(1 / 0.0036)] = 2.5
    encoded = push(Threshold(tau=2.0), numbers).encoded
    assert round(4 * encoded.n_words / 1e6, 2) == 0.21


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@given(seed=SEEDS, n_elements=st.integers(0, 700))
def test_no_residual_takes_more_words_than_the_bound(
    codec: Codec, seed: int, n_elements: int
) -> None:
    """`push` gives so much room, and looks at what lies behind it."""
    numbers = residual(seed, n_elements)
    pushed = push(tuned(codec, numbers, seed), numbers)
    assert pushed.encoded.n_words <= codec.n_words_max(n_elements)
    assert pushed.encoded.n_sent <= n_elements


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_the_worst_residuals_keep_the_bound(codec: Codec) -> None:
    for numbers in (np.full(640, 3e38, np.float32), np.full(640, 1.0, np.float32)):
        if isinstance(codec, Threshold):
            codec = Threshold(tau=0.9)
        assert_nothing_is_lost(push(codec, numbers))


# --- top-k ---


def test_about_the_share_is_sent_and_it_is_the_largest() -> None:
    numbers = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    for share in (0.001, 0.01, 0.1):
        pushed = push(TopK(share=share), numbers)
        assert pushed.encoded.n_sent == pytest.approx(share * len(numbers), rel=0.2)
        assert np.abs(pushed.rest).max() < np.abs(pushed.sent[pushed.sent != 0]).min()


@pytest.mark.parametrize("bits", [2, 32])
def test_equal_sizes_are_sent_in_turn_and_the_share_is_kept(bits: object) -> None:
    """After a step by signs all elements have one size: a cut alone would send all or none."""
    codec = TopK(share=0.05, bits=2 if bits == 2 else 32)
    signs = np.where(np.random.default_rng(0).random(6400) < 0.5, -1.0, 1.0).astype(np.float32)
    rest, history, sent = signs.copy(), History(), np.zeros(6400, np.bool_)
    for _ in range(22):
        pushed = push(codec, rest, history)
        assert 0 < pushed.encoded.n_sent <= 0.05 * 6400
        sent |= pushed.sent != 0
        history = codec.after(history, pushed.cut, n_sent=1, n_elements=6400)
        rest = signs.copy()  # a new step: everything has that size again
    assert sent.all()


def test_a_list_that_would_be_longer_than_all_values_becomes_all_values() -> None:
    numbers = np.random.default_rng(0).standard_normal(140_000).astype(np.float32)
    for share, is_list in ((0.49, True), (0.51, False), (0.9, False)):  # in piece 2 or 1 of 3
        pushed = push(TopK(share=share), numbers)
        assert (pushed.encoded.n_words < len(numbers)) is is_list
        assert pushed.encoded.n_sent == np.count_nonzero(pushed.sent)
        assert_nothing_is_lost(pushed)


def test_zeros_are_not_sent() -> None:
    numbers = np.zeros(6400, np.float32)
    numbers[17] = 2.0**-149
    assert push(TopK(share=0.5), numbers).encoded.n_sent == 1
    assert push(TopK(share=0.5, bits=2), numbers).encoded.n_sent == 0


def test_two_bits_stand_for_two_levels_of_each_sign() -> None:
    numbers = np.random.default_rng(0).standard_normal(64_000).astype(np.float32)
    pushed = push(TopK(share=0.05, bits=2), numbers)
    levels = sorted(set(pushed.sent.tolist()) - {0.0})
    assert levels == sorted([*(-one for one in pushed.cut.levels), *pushed.cut.levels])
    cut, (low, high) = pushed.cut.size, pushed.cut.levels
    assert cut <= low < high


# --- threshold ---


def test_sr_1_one_step_of_tau_at_most_and_the_rest_stays() -> None:
    numbers = np.array([5.0, -5.0, 1.0, 0.9, -0.9, 0.0], np.float32)
    first = push(Threshold(tau=1.0), numbers)
    assert first.sent.tolist() == [1.0, -1.0, 1.0, 0.0, 0.0, 0.0]
    assert first.rest.tolist() == [4.0, -4.0, 0.0, np.float32(0.9), np.float32(-0.9), 0.0]
    rest = first.rest
    for _ in range(4):
        rest = push(Threshold(tau=1.0), rest).rest
    assert not rest[:3].any()


@pytest.mark.parametrize("codec", [Threshold(tau=2.0), *CODECS[:-1]], ids=name_of)
def test_sr_2_what_is_sent_and_the_rest_are_the_sum_of_all_gradients_exactly(codec: Codec) -> None:
    """Gradients are multiples of 1/64 and steps short, so that sums of doubles are exact."""
    generator = np.random.default_rng(0)
    rest, history = np.zeros(1000, np.float32), History()
    total, sent = np.zeros(1000), np.zeros(1000)
    for _ in range(50):
        gradient = generator.integers(-200, 200, 1000).astype(np.float32) / np.float32(64)
        total += gradient
        pushed = push(codec, rest + gradient, history)
        history = codec.after(history, pushed.cut, n_sent=1, n_elements=1)
        sent += pushed.sent
        rest = pushed.rest
        assert np.array_equal(sent + rest, total)


def test_dj_2_an_element_of_size_tau_qualifies_and_so_does_a_single_one() -> None:
    numbers = np.zeros(640, np.float32)
    numbers[[3, 100]] = 1.0, -1.0
    pushed = push(Threshold(tau=1.0), numbers)
    assert pushed.words.tolist()[4:] == [3 << 1, 100 << 1 | 1]
    numbers[100] = np.nextafter(np.float32(-1.0), np.float32(0))
    assert push(Threshold(tau=1.0), numbers).words.tolist()[4:] == [3 << 1]


def test_dj_3_a_bitmap_has_a_step_and_a_sign_for_each_of_16_elements() -> None:
    numbers = np.zeros(32, np.float32)
    numbers[[0, 5, 31]] = 1.0, -1.0, -1.0
    words = push(Threshold(tau=1.0), numbers).words
    assert words.tolist()[0] == 1
    assert words.tolist()[4:] == [1 | 1 << 5 | 1 << 21, 1 << 15 | 1 << 31]


@given(seed=SEEDS)
def test_dj_4_list_and_bitmap_send_the_same_and_the_shorter_is_chosen(seed: int) -> None:
    """Nothing is lost where a list becomes a bitmap: the residual is encoded once."""
    generator = np.random.default_rng(seed)
    n = 66_000  # two pieces, and a list that becomes a bitmap in any of them
    is_step = generator.random(n) < generator.choice([0.03, 0.0625, 0.2])
    numbers = np.where(is_step, generator.choice([-1.5, 1.5], n), 0.25).astype(np.float32)
    pushed = push(Threshold(tau=1.0), numbers)
    n_steps = int(is_step.sum())
    assert pushed.words[0] == (n_steps > n // 16)
    assert pushed.encoded.n_words == 4 + min(n_steps, n // 16)
    assert np.array_equal(pushed.sent, np.where(is_step, np.sign(numbers), 0))


def test_dj_5_tau_follows_the_share_that_is_sent() -> None:
    codec = Threshold(tau=1e-3, adaptive=Adaptive())
    history = History()
    cut = codec.choose([], history)
    for n_sent, factor in ((0, 0.965936), (1, 1.0), (100, 1.0), (101, 1 / 0.965936)):
        after = codec.after(history, cut, n_sent=n_sent, n_elements=10_000)
        assert after.tau == pytest.approx(1e-3 * factor, rel=1e-6)
    for _ in range(20):
        history = codec.after(history, cut, n_sent=0, n_elements=10_000)
    assert history.tau == pytest.approx(5e-4)  # half in 20 pushes, and no rounding stops it
    for _ in range(5000):
        history = codec.after(history, cut, n_sent=0, n_elements=10_000)
    assert push(codec, np.zeros(64, np.float32), history).cut.size == 2.0**-100


def test_a_fixed_tau_stays() -> None:
    codec = Threshold(tau=2.0)
    history = codec.after(History(), codec.choose([], History()), n_sent=9, n_elements=9)
    assert codec.choose([], history).size == 2.0


def test_dj_6_every_fifth_push_but_the_first_cuts_the_rest_to_5_tau_and_counts_it() -> None:
    codec = Threshold(tau=1.0, clip=5.0)
    numbers = np.array([10.0, -7.5, 5.5, 0.5], np.float32)
    for n_pushes in range(11):
        pushed = push(codec, numbers, History(n_pushes=n_pushes))
        assert_nothing_is_lost(pushed)
        if n_pushes in {5, 10}:
            assert pushed.rest.tolist() == [5.0, -5.0, 4.5, 0.5]
            assert pushed.encoded.clipped == 4.0 - 1.5
            assert pushed.encoded.clipped_size == 4.0 + 1.5
        else:
            assert pushed.rest.tolist() == [9.0, -6.5, 4.5, 0.5]
            assert pushed.encoded.clipped_size == 0.0


@given(st.floats(1e-30, 1e30))
def test_tau_has_8_significant_bits_and_is_the_nearest(tau: float) -> None:
    bits = np.float32(shorten(tau)).view(np.uint32)
    assert not int(bits) & 0xFFFF
    error = abs(shorten(tau) - tau)
    for other in (int(bits) - 0x10000, int(bits) + 0x10000):
        assert error <= abs(from_short(other >> 16) - tau) * (1 + 1e-6)


# --- invalid words ---


def decode_or_refuse(codec: Codec, words: Words, n_elements: int) -> bool:
    """Return whether words are accepted; they write nowhere but into their piece."""
    words.flags.writeable = False
    try:
        add = codec.decoder(words, n_elements)
    except RemoteProtocolError:
        return False
    for start in range(0, n_elements, 128):
        stop = min(start + 128, n_elements)
        room = np.full(stop - start + 128, 7.0, np.float32)
        add(start, stop, room[64:-64])
        assert (room[:64] == 7.0).all()
        assert (room[-64:] == 7.0).all()
        assert not np.isnan(room).any()
    return True


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=40), n_elements=st.integers(0, 300))
def test_any_words_are_decoded_or_refused(codec: Codec, words: list[int], n_elements: int) -> None:
    decode_or_refuse(codec, np.array(words, np.uint32), n_elements)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@given(
    seed=SEEDS,
    n_elements=st.integers(1, 300),
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 2**32 - 1)), max_size=3),
    n_more=st.integers(-2, 2),
    other=st.integers(-1, 1),
)
def test_words_that_were_changed_are_decoded_or_refused(
    codec: Codec,
    seed: int,
    n_elements: int,
    changes: list[tuple[int, int]],
    n_more: int,
    other: int,
) -> None:
    numbers = residual(seed, n_elements)
    words = push(tuned(codec, numbers, seed), numbers).words
    words = np.concatenate([words, words])[: max(len(words) + n_more, 0)]
    for place, word in changes:
        if len(words):
            words[place % len(words)] = (
                word if word % 3 else words[place % len(words)] ^ 1 << word % 32
            )
    decode_or_refuse(codec, words, n_elements + other)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_words_of_another_number_of_elements_are_refused(codec: Codec) -> None:
    numbers = np.random.default_rng(0).standard_normal(640).astype(np.float32)
    words = push(tuned(codec, numbers, 1), numbers).words
    assert decode_or_refuse(codec, words, 640)
    assert not decode_or_refuse(codec, words[:-1], 640)
    assert not decode_or_refuse(codec, np.append(words, np.uint32(0)), 640)


def refused(codec: Codec, words: list[int], n_elements: int, match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        codec.decoder(np.array(words, np.uint32), n_elements)


TAU = 0x3F800000


def test_each_fault_of_words_is_named() -> None:
    step = Threshold()
    refused(step, [0, 0, 0], 64, "less than the first 4")
    refused(step, [2, 0, 0, TAU], 64, "is_bitmap is 2")
    refused(step, [0, 0, 0, TAU | 1], 64, "tau is not a bfloat16")
    refused(step, [0, 0, 0, 0x7F800000], 64, "tau is not a bfloat16")
    refused(step, [0, 0, 0, TAU | 1 << 31], 64, "tau is not a bfloat16")
    refused(step, [0, 2, 0, TAU, 2], 64, "not as many as its counts say")
    refused(step, [0, 2, 0, TAU, 4, 2], 64, "indices do not rise")
    refused(step, [0, 2, 0, TAU, 4, 5], 64, "indices do not rise")
    refused(step, [0, 1, 0, TAU, 64 << 1], 64, "indices do not rise, or some is beyond 64")
    refused(step, [0, 0, 1, TAU, 3, 0x7F800000], 64, "a number is not finite")
    refused(step, [1, 1, 0, TAU, 1 << 20], 16, "an element has a sign and no step")
    refused(step, [1, 2, 0, TAU, 1], 16, "1 steps, not 2")
    refused(step, [1, 1, 0, TAU, 1 << 9], 9, "a step beyond 9 elements")
    refused(TopK(), [1], 64, "an index has no number")
    refused(TopK(), [0] * 65, 64, "65 for 64 elements")
    refused(TopK(), [0x7FC00000] * 64, 64, "a number is not finite")
    two = TopK(bits=2)
    refused(two, [0, 0], 64, "2 for 64 elements")
    refused(two, [0, 0, 0], 64, "a level is not a number above 0")
    refused(two, [0x3F803F80, 0, 1], 64, "not as many as its counts say")
    refused(two, [0x3F803F80, 0, 2, 8 << 2 | 8 << 18], 64, "indices do not rise")
    refused(Bfloat16(), [0x7F80], 2, "a number is not finite")
    refused(Int8(), [0xBF80, *[0] * 16], 64, "a scale is too small, too large or negative")
    refused(Int4(), [0x7F00, *[0] * 8], 64, "a scale is too small, too large or negative")
    refused(Int4(), [0] * 8, 64, "8 for 64 elements")


def test_the_most_negative_code_of_the_largest_scale_is_finite() -> None:
    words = np.array([0x7B80, *[0x80808080] * 16], np.uint32)
    assert decoded(Int8(), words, 64).tolist() == [-(2.0**127)] * 64
    words = np.array([0x7D80, *[0] * 8], np.uint32)
    assert decoded(Int4(), words, 64).tolist() == [-(2.0**127)] * 64


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"share": 0.0}, "share is 0.0; use a share between 0 and 1"),
        ({"share": 1.0}, "share is 1.0; use a share between 0 and 1"),
    ],
)
def test_top_k_refuses(settings: dict[str, float], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        TopK(share=settings["share"])


def test_threshold_refuses() -> None:
    with pytest.raises(SettingError, match=r"tau is 0\.0; use a number from 2\^-100"):
        Threshold(tau=0.0)
    with pytest.raises(SettingError, match=r"clip is 0\.5; use 1 or more"):
        Threshold(clip=0.5)
    with pytest.raises(SettingError, match="clip_every is 0"):
        Threshold(clip_every=0)
    with pytest.raises(SettingError, match=r"decay is 0\.4"):
        Adaptive(decay=0.4)
    with pytest.raises(SettingError, match=r"most is 0\.1; use a share of at least"):
        Adaptive(least=0.2, most=0.1)
