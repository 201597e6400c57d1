"""Words of factors: what they stand for, what invalid ones do, and when factors are chosen."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from distbelief.core.errors import RemoteProtocolError, SettingError
from distbelief.parameter_server.codecs import Auto, Factors, decoder, flops_of, n_words_max
from distbelief.parameter_server.codecs.exactness import Residual, Words
from distbelief.parameter_server.codecs.factors import (
    Layer,
    Matrix,
    blocks,
    copy_of,
    pays,
    rebuilt,
    write,
)


SIZES = st.integers(1, 400)


def numbers(seed: int, *shape: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def vector_of(seed: int) -> tuple[Residual, list[Layer]]:
    """Return a vector, and layers that rebuild some of its elements: parts of random weights."""
    stream = np.random.default_rng(seed)
    parts: list[Residual] = []
    layers: list[Layer] = []
    for index in range(int(stream.integers(4))):
        parts.append(numbers(seed + index, int(stream.integers(200))))
        k, rows, width = (int(stream.integers(1, most)) for most in (6, 420, 90))
        errors, inputs = numbers(seed + 7, k, rows), numbers(seed + 8, k, width)
        whole = np.concatenate(
            [rebuilt(errors[:, top:stop], copy_of(inputs)) for top, stop in blocks(rows)]
        )
        offset = int(stream.integers(rows * width))
        n = int(stream.integers(rows * width - offset)) + 1
        if pays(k, rows, width, n):
            layers.append(Layer(sum(map(len, parts)), n, offset, errors, inputs))
            parts.append(whole[offset : offset + n])
    return np.concatenate([*parts, numbers(seed, 1)]), layers


def words_of(vector: Residual, layers: list[Layer]) -> Words:
    room = np.full(n_words_max(len(vector)) + 2, 0xA5A5A5A5, np.uint32)
    n_words = write(vector, layers, room[:-2])
    assert (room[-2:] == 0xA5A5A5A5).all()
    return room[:n_words]


@pytest.mark.parametrize("default", [torch.float16, torch.float64])
def test_the_users_default_type_does_not_change_what_is_rebuilt(default: torch.dtype) -> None:
    """Replicas rebuilt in float16 what shards had in float32; with float64 they waited for ever."""
    errors, inputs = numbers(0, 3, 20), numbers(1, 3, 30)
    expected = rebuilt(errors, copy_of(inputs))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = rebuilt(errors, copy_of(inputs))
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)


# --- what words stand for ---


@given(seed=st.integers(0, 1 << 32), step=st.sampled_from([64, 640, 1 << 16]))
def test_e_8_words_stand_for_the_bits_of_the_vector_however_it_is_read(
    seed: int, step: int
) -> None:
    vector, layers = vector_of(seed)
    add = decoder("factors", words_of(vector, layers), len(vector))
    starts = [*range(0, len(vector), step)]
    if seed % 2:
        starts.reverse()
    out = np.full(len(vector), -0.0, np.float32)
    for start in starts:
        add(start, min(start + step, len(vector)), out[start : start + step])
    assert out.tobytes() == vector.tobytes()


@given(seed=st.integers(0, 1 << 32))
def test_factors_take_fewer_words_than_numbers(seed: int) -> None:
    vector, layers = vector_of(seed)
    n_words = len(words_of(vector, layers))
    assert n_words <= 1 + len(vector) - len(layers)
    n_layers = sum(6 + one.errors.size + one.inputs.size - one.n for one in layers)
    assert n_words == 1 + len(vector) + n_layers


@given(rows=st.integers(1, 2000), first=st.integers(0, 15), last=st.integers(1, 16))
def test_blocks_of_a_part_are_those_of_the_whole(rows: int, first: int, last: int) -> None:
    of_all = blocks(rows)
    assert of_all[0][0] == 0
    assert of_all[-1][1] == rows
    assert all(stop - start < 256 for start, stop in of_all)
    part = of_all[first:last]
    if part:
        start = part[0][0]
        assert [(a + start, b + start) for a, b in blocks(part[-1][1] - start)] == part


def test_the_operations_of_rebuilding_are_known() -> None:
    layer = Layer(0, 600, 0, numbers(0, 2, 20), numbers(1, 2, 30))
    assert flops_of(words_of(numbers(2, 600), [layer]), 600) == 2 * 2 * 20 * 30
    assert flops_of(words_of(numbers(2, 600), []), 600) == 0


# --- words of somebody else ---


def valid_words() -> Words:
    layers = [
        Layer(64, 500, 3, numbers(0, 2, 20), numbers(1, 2, 30)),
        Layer(564, 400, 0, numbers(2, 1, 20), numbers(3, 1, 30)),
    ]
    return words_of(numbers(4, 1000), layers)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 0),  # layers
        (0, 1),
        (0, 3),
        (0, 0xFFFFFFFF),
        (1, 65),  # their first element: the second one overlaps
        (1, 0xFFFFFFFF),
        (2, 501),  # elements
        (2, 0),
        (3, 101),  # elements before them
        (3, 0xFFFFFFFF),
        (4, 0),  # samples
        (4, 3),
        (4, 0xFFFFFFFF),
        (5, 0),  # rows
        (5, 21),
        (6, 31),  # columns
        (6, 0x80000000),
        (13, 0x7F800000),  # infinity
        (999, 0x7FC00000),  # NaN, if there is such a word
    ],
)
def test_invalid_words_are_refused(place: int, value: int) -> None:
    words = valid_words()
    decoder("factors", words, 1000)
    words[min(place, len(words) - 1)] = value
    with pytest.raises(RemoteProtocolError, match="words of a push"):
        decoder("factors", words, 1000)


@pytest.mark.parametrize("n", [0, 1, 5, 12, 13, 100])
def test_words_that_end_too_early_or_too_late_are_refused(n: int) -> None:
    words = valid_words()
    for wrong in (words[:n], words[:-1], np.append(words, np.uint32(0))):
        with pytest.raises(RemoteProtocolError, match="words of a push"):
            decoder("factors", wrong.copy(), 1000)


@given(data=st.data())
def test_changed_words_are_refused_or_read(data: st.DataObject) -> None:
    words = valid_words()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 13) | st.integers(0, len(words) - 1))
        words[place] = data.draw(st.integers(0, 40) | st.integers(0, 0xFFFFFFFF))
    out = np.zeros(1000, np.float32)
    try:
        decoder("factors", words, 1000)(0, 1000, out)
    except RemoteProtocolError:
        assert not out.any()


def test_few_words_cannot_ask_for_much_memory() -> None:
    """255 rows of a million columns, of which little more than a row is wanted."""
    assert not pays(1, 255, 1_000_000, 1_000_300)
    assert pays(1, 2, 1_000_000, 1_000_300)
    assert pays(1, 255, 1000, 1300)  # a block of small layers may be cut anywhere


# --- what is chosen ---


def dense_seconds(m: int, n: int, *, workers: int, shards: int, rate: float) -> float:
    """exchange.md 5.1: push and fetch of numbers, through a worker's card or a shard's."""
    size = 4 * m * n
    return max(2 * size, 2 * workers * size / shards) / rate


def factored_seconds(
    k: int, m: int, n: int, *, workers: int, shards: int, rate: float, flops: float
) -> float:
    """The same of factors, each shard with its rows of E, and A; comparing, rebuilding them."""
    size, work = 4 * m * n, 2 * k * m * n
    out = 4 * k * m + 4 * k * n * shards
    to_shard = workers * (4 * k * m / shards + 4 * k * n + size / shards)
    compared = max(1, workers / shards) * work / flops
    return max(out + size, to_shard) / rate + compared + workers * work / (flops * shards)


@given(k=SIZES, m=SIZES, n=SIZES, workers=st.integers(1, 200), shards=st.integers(1, 30))
def test_ad_6_factors_only_where_they_are_fewer_numbers(
    k: int, m: int, n: int, workers: int, shards: int
) -> None:
    chosen = Factors().takes(k, m, n, workers=workers, shards=shards)
    assert chosen is (k * (m + n) < m * n)
    assert not (pays(k, m, n, m * n) and not chosen)
    assert chosen or not Auto().takes(k, m, n, workers=workers, shards=shards)


@given(
    k=SIZES,
    m=SIZES,
    n=SIZES,
    workers=st.integers(1, 200),
    shards=st.integers(1, 30),
    gbits=st.sampled_from([0.1, 1.0, 10.0]),
    gflops=st.sampled_from([1.0, 80.0]),
)
def test_po_5_the_choice_is_that_of_the_formula(
    k: int, m: int, n: int, workers: int, shards: int, gbits: float, gflops: float
) -> None:
    dense = dense_seconds(m, n, workers=workers, shards=shards, rate=gbits * 125e6)
    factored = factored_seconds(
        k, m, n, workers=workers, shards=shards, rate=gbits * 125e6, flops=gflops * 1e9
    )
    if abs(dense - factored) > 1e-9 * dense:
        auto = Auto(gbits=gbits, gflops=gflops)
        assert auto.takes(k, m, n, workers=workers, shards=shards) is (factored < dense)


@pytest.mark.parametrize("codec", [Factors(), Auto(), Auto(gbits=1.0), Auto(gbits=10, gflops=2)])
def test_po_5_more_samples_or_workers_only_turn_factors_into_numbers(codec: Factors | Auto) -> None:
    counts = [1, 2, 3, 5, 8, 32, 64, 128, 300]
    shapes = [(10, 10), (64, 4096), (4096, 64), (1000, 1000), (4096, 25088)]
    for (m, n), shards in itertools.product(shapes, (1, 2, 8)):
        grid = [
            [codec.takes(k, m, n, workers=workers, shards=shards) for k in counts]
            for workers in counts
        ]
        for row in [*grid, *zip(*grid, strict=True)]:
            assert [*row] == sorted(row, reverse=True)
    assert not codec.takes(10, 10, 10, workers=2, shards=1)
    assert codec.takes(1, 4096, 4096, workers=2, shards=2)


def test_settings_of_auto_are_above_zero() -> None:
    for settings in ({"gbits": 0.0}, {"gflops": -1.0}):
        with pytest.raises(SettingError, match="use a number above 0"):
            Auto(**settings)
