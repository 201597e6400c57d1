import math
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distbelief.core.vectors import Vector
from distbelief.parameter_server.initial_values import (
    Distribution,
    Initial,
    _standard_normals,
    draw,
    shard_values,
    shard_values_from,
)
from distbelief.parameter_server.layout import Layout, TensorSpec


UNIFORM = Initial(distribution="uniform", low=-0.5, high=0.25)
NORMAL = Initial(distribution="normal", mean=1.0, std=2.0)
CONSTANT = Initial(distribution="constant", value=3.0)
ALL = (UNIFORM, NORMAL, CONSTANT)
DTYPES: tuple[Literal["float32", "float64"], ...] = ("float32", "float64")


@given(
    initial=st.sampled_from(ALL),
    dtype=st.sampled_from(DTYPES),
    cuts=st.lists(st.integers(0, 1000), max_size=5),
    seed=st.integers(-(2**70), 2**70),
)
def test_a_draw_has_the_same_bits_however_it_is_cut(
    initial: Initial, dtype: str, cuts: list[int], seed: int
) -> None:
    whole = draw(initial, seed=seed, tensor="w", start=0, stop=1000, dtype=dtype)
    bounds = sorted({0, 1000, *cuts})
    parts = [
        draw(initial, seed=seed, tensor="w", start=start, stop=stop, dtype=dtype)
        for start, stop in pairwise(bounds)
    ]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert whole.dtype == np.dtype(dtype)


@pytest.mark.parametrize("initial", ALL)
def test_a_draw_longer_than_a_piece_has_the_same_bits_as_its_end(initial: Initial) -> None:
    n = (1 << 18) + 77  # a piece is 2**18
    whole = draw(initial, seed=1, tensor="w", start=3, stop=n, dtype="float32")
    end = draw(initial, seed=1, tensor="w", start=n - 99, stop=n, dtype="float32")
    assert whole[-99:].tobytes() == end.tobytes()
    assert len(whole) == n - 3


@settings(max_examples=30)
@given(
    shapes=st.lists(st.sampled_from([(), (0,), (3,), (64, 3), (200, 5), (333,)]), min_size=1),
    n_shards=st.integers(1, 7),
    dtype=st.sampled_from(DTYPES),
)
def test_initial_values_have_the_same_bits_for_any_number_of_shards(
    shapes: list[tuple[int, ...]], n_shards: int, dtype: Literal["float32", "float64"]
) -> None:
    """DB-5: what lies where does not change what it is."""
    specs = [TensorSpec(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes)]
    initials = {spec.name: ALL[i % 3] for i, spec in enumerate(specs)}
    layout = Layout.of(specs, n_shards=n_shards, dtype=dtype)
    for k in range(n_shards):
        values = shard_values(layout, k, initials, seed=5)
        assert values.dtype == layout.dtype
        covered = np.zeros(len(values), np.bool_)
        for segment in layout.segments(k):
            spec = layout.tensors[segment.tensor_index]
            whole = draw(
                initials[spec.name],
                seed=5,
                tensor=spec.name,
                start=0,
                stop=spec.n_elements,
                dtype=dtype,
            )
            place = slice(segment.offset, segment.offset + segment.n_elements)
            np.testing.assert_array_equal(values[place], whole[segment.start : segment.stop])
            covered[place] = True
        assert not values[~covered].any()  # padding


@pytest.mark.parametrize("initial", ALL)
def test_a_float32_draw_is_the_float64_draw_rounded(initial: Initial) -> None:
    single = draw(initial, seed=2, tensor="w", start=0, stop=999, dtype="float32")
    double = draw(initial, seed=2, tensor="w", start=0, stop=999, dtype="float64")
    np.testing.assert_array_equal(single, double.astype(np.float32))


def test_uniform_and_normal_draws_follow_their_distributions() -> None:
    from scipy import stats  # noqa: PLC0415 -- takes a second of every worker

    n = 100_000
    uniform = draw(UNIFORM, seed=0, tensor="w", start=0, stop=n, dtype="float64")
    normal = draw(NORMAL, seed=0, tensor="w", start=0, stop=n, dtype="float64")
    assert stats.kstest(uniform, stats.uniform(-0.5, 0.75).cdf).pvalue > 0.01
    assert stats.kstest(normal, stats.norm(1.0, 2.0).cdf).pvalue > 0.01
    assert float(np.mean(uniform)) == pytest.approx(-0.125, abs=0.002)
    assert float(np.std(uniform)) == pytest.approx(0.75 / math.sqrt(12), abs=0.002)
    assert float(np.mean(normal)) == pytest.approx(1.0, abs=0.02)
    assert float(np.std(normal)) == pytest.approx(2.0, abs=0.02)
    assert abs(stats.pearsonr(uniform[:-1], uniform[1:]).statistic) < 0.01


def test_tensors_and_seeds_are_independent_of_each_other() -> None:
    draws = [
        draw(NORMAL, seed=seed, tensor=tensor, start=0, stop=10_000, dtype="float64")
        for seed, tensor in [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (11, ":b")]
    ]
    correlations = np.corrcoef(np.stack(draws)) - np.eye(len(draws))
    assert np.abs(correlations).max() < 0.05


@pytest.mark.parametrize(
    ("initial", "expected"),
    [
        (
            Initial(distribution="uniform", low=0.0, high=1.0),
            ["0x1.0f75e8e62f61cp-2", "0x1.f559842ddd713p-1", "0x1.4ccee1430fbd2p-2"],
        ),
        (
            Initial(distribution="normal", mean=0.0, std=1.0),
            ["-0x1.4162b4p-1", "0x1.04cbdcp+1", "-0x1.d0a142p-2"],
        ),
    ],
)
def test_draws_never_change_from_one_release_to_the_next(
    initial: Initial, expected: list[str]
) -> None:
    """Whoever reports a seed has reported the values."""
    drawn = draw(initial, seed=0, tensor="0.weight", start=2, stop=5, dtype="float64").astype(
        np.float64
    )
    bits = 1e-15 if initial.distribution == "uniform" else 1e-7  # ndtri may improve
    np.testing.assert_allclose(drawn, [float.fromhex(x) for x in expected], rtol=bits)


def test_a_uniform_of_zero_has_a_finite_normal() -> None:
    normals = _standard_normals(np.array([0.0, 0.5, 1.0 - 2.0**-53]))
    np.testing.assert_allclose(normals, [-8.2924, 0.0, 8.2095], atol=1e-4)


def read_indices(name: str, start: int, stop: int) -> Vector:
    del name
    return np.arange(start, stop, dtype=np.float64)


def test_values_read_from_elsewhere_lie_where_they_belong_and_are_cast() -> None:
    specs = [TensorSpec(name="a", shape=(300,)), TensorSpec(name="b", shape=())]
    layout = Layout.of(specs, n_shards=2)
    first = shard_values_from(layout, 0, read_indices)
    second = shard_values_from(layout, 1, read_indices)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, [*range(128), *[0] * 64])
    np.testing.assert_array_equal(second, [*range(128, 300), *[0] * 20])


def test_a_reader_that_returns_too_little_is_named() -> None:
    layout = Layout.of([TensorSpec(name="a", shape=(300,))], n_shards=1)
    with pytest.raises(ValueError, match=r"'a': read \(299,\), not \(300,\)"):
        shard_values_from(layout, 0, lambda _n, start, stop: np.zeros(stop - start - 1))


def test_a_tensor_without_a_distribution_is_named() -> None:
    layout = Layout.of([TensorSpec(name="a", shape=(3,))], n_shards=1)
    with pytest.raises(ValueError, match=r"tensors \['a'\]; .*known: \['b'\]"):
        shard_values(layout, 0, {"b": UNIFORM}, seed=0)


@pytest.mark.parametrize(
    ("distribution", "numbers", "message"),
    [
        ("gamma", {}, "distribution is 'gamma'; use one of"),
        ("uniform", {"low": 1.0, "high": 0.0}, "low 1.0 is above high 0.0"),
        ("uniform", {"std": 1.0}, r"'uniform': std is 1.0; .* \('low', 'high'\) only"),
        ("normal", {"std": -1.0}, "std is -1.0; use a number, 0 or more"),
        ("normal", {"mean": math.nan}, "'normal': mean is nan"),
        ("constant", {"value": math.inf}, "'constant': value is inf"),
    ],
)
def test_a_wrong_distribution_is_refused_by_name_and_value(
    distribution: Distribution, numbers: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Initial(distribution=distribution, **numbers)


@pytest.mark.parametrize("initial", ALL)
def test_a_distribution_survives_json(initial: Initial) -> None:
    assert msgspec.json.decode(msgspec.json.encode(initial), type=Initial) == initial
