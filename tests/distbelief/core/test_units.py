import math
import re
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from distbelief.core.units import UNITS, Dimension, parse, show
from distbelief.errors import JobFileError


DIMENSIONS: list[Dimension] = ["time", "bytes", "rate", "compute"]


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("2 s", "time", 2.0),
        ("500 ms", "time", 0.5),
        ("0.1 s", "time", 0.1),
        ("3 min", "time", 180.0),
        ("1 h", "time", 3600.0),
        ("2d", "time", 172_800.0),
        ("4 GiB", "bytes", 4 * 2.0**30),
        ("4 GB", "bytes", 4e9),
        ("1 Gbit/s", "rate", 125e6),
        ("2.5 MB/s", "rate", 2.5e6),
        ("20 GFLOP/s", "compute", 20e9),
        ("1.5 TFLOP/s", "compute", 1.5e12),
        ("7 FLOP/s", "compute", 7.0),
    ],
)
def test_each_unit_says_what_it_is(text: str, dimension: Dimension, value: float) -> None:
    assert parse(text, dimension) == value


@given(st.sampled_from(DIMENSIONS), st.floats(min_value=0, max_value=1e15, allow_subnormal=False))
def test_what_is_shown_reads_back_exactly(dimension: Dimension, value: float) -> None:
    assert parse(show(value, dimension), dimension) == value


@given(st.sampled_from(DIMENSIONS), st.data(), st.integers(0, 10**6))
def test_the_space_before_a_unit_may_be_left_out(
    dimension: Dimension, data: st.DataObject, number: int
) -> None:
    unit = data.draw(st.sampled_from(sorted(UNITS[dimension])))
    assert parse(f"{number}{unit}", dimension) == parse(f" {number}  {unit} ", dimension)


@given(st.sampled_from(DIMENSIONS), st.text() | st.integers() | st.floats())
def test_whatever_is_no_quantity_is_refused_in_words(dimension: Dimension, value: object) -> None:
    with suppress(JobFileError):
        assert parse(value, dimension) >= 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2, '2 has no unit: write "2 s"'),
        (2.5, '2.5 has no unit: write "2.5 s"'),
        # With a unit these would be refused as well: "nan s" was once the advice.
        (math.nan, "nan is no quantity: write for example"),
        (math.inf, "inf is no quantity: write for example"),
        (-1, "-1 is no quantity: write for example"),
        ("2", '"2" has no unit: write "2 s"'),
        ("2 sec", "\"2 sec\" has the unknown unit 'sec'. Known: us, ms, s, min, h, d"),
        ("2 Min", "Did you mean 'min'?"),
        ("-2 s", '"-2 s" is no quantity: write a number and a unit'),
        ("1e400 s", "too large"),
        (True, "no quantity"),
        (None, "no quantity"),
    ],
)
def test_a_mistake_shows_the_value_and_the_mend(value: object, message: str) -> None:
    with pytest.raises(JobFileError, match=re.escape(message)):
        parse(value, "time")


@pytest.mark.parametrize("value", [90.0, 600.0, 86_400.0, 0.25])
def test_round_times_are_shown_in_a_unit_that_suits_them(value: float) -> None:
    assert show(value, "time") in {"90 s", "10 min", "1 d", "250 ms"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2e9, '2000000000.0 has no unit: write "2000000000.0 FLOP/s"'),
        ("20 GFLOPS", "Did you mean 'GFLOP/s'?"),
        ("20 Gflop/s", "Did you mean 'GFLOP/s'?"),
        ("1 Gbit/s", "unknown unit 'Gbit/s'"),
        ("fast", 'for example "20 GFLOP/s"'),
    ],
)
def test_how_fast_a_machine_computes_has_units_too(value: object, message: str) -> None:
    with pytest.raises(JobFileError, match=re.escape(message)):
        parse(value, "compute")


@pytest.mark.parametrize("value", [20e9, 1.5e12, 7.0])
def test_speeds_are_shown_in_a_unit_that_suits_them(value: float) -> None:
    assert show(value, "compute") in {"20 GFLOP/s", "1500 GFLOP/s", "7 FLOP/s"}
