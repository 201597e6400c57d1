import math
import re
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import JobFileError
from distbelief.core.units import TIME_MAX, UNITS, Dimension, parse, show


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


@given(
    st.sampled_from(DIMENSIONS), st.floats(min_value=0, max_value=TIME_MAX, allow_subnormal=False)
)
def test_what_is_shown_reads_back_exactly(dimension: Dimension, value: float) -> None:
    assert parse(show(value, dimension), dimension) == value


@given(st.sampled_from(DIMENSIONS), st.data(), st.integers(0, 36_500))
def test_a_unit_needs_no_space(dimension: Dimension, data: st.DataObject, number: int) -> None:
    unit = data.draw(st.sampled_from(sorted(UNITS[dimension])))
    assert parse(f"{number}{unit}", dimension) == parse(f" {number}  {unit} ", dimension)


@given(st.sampled_from(DIMENSIONS), st.text() | st.integers() | st.floats())
def test_whatever_is_no_quantity_is_refused_in_words(dimension: Dimension, value: object) -> None:
    with suppress(JobFileError):
        assert parse(value, dimension) >= 0


@pytest.mark.parametrize(
    ("value", "dimension", "message"),
    [
        (2, "time", '2 has no unit: write "2 s"'),
        (2.5, "time", '2.5 has no unit: write "2.5 s"'),
        # With a unit these would be refused as well: "nan s" was once the advice.
        (math.nan, "time", "nan is no quantity: write for example"),
        (math.inf, "time", "inf is no quantity: write for example"),
        (-1, "time", "-1 is no quantity: write for example"),
        ("2", "time", '"2" has no unit: write "2 s"'),
        ("2 sec", "time", "\"2 sec\" has the unknown unit 'sec'. Known: us, ms, s, min, h, d"),
        ("2 Min", "time", "Did you mean 'min'?"),
        ("-2 s", "time", '"-2 s" is no quantity: write for example'),
        ("1e400 s", "time", 'wants at most "36500 d"'),
        ("1e300 h", "time", '"1e300 h": wants at most "36500 d"'),
        ("1e400 B", "bytes", "too large"),
        (True, "time", "no quantity"),
        (None, "time", "no quantity"),
        (2e9, "compute", '2000000000.0 has no unit: write "2000000000.0 FLOP/s"'),
        ("20 GFLOPS", "compute", "Did you mean 'GFLOP/s'?"),
        ("20 Gflop/s", "compute", "Did you mean 'GFLOP/s'?"),
        ("1 Gbit/s", "compute", "unknown unit 'Gbit/s'"),
        ("fast", "compute", 'for example "20 GFLOP/s"'),
    ],
)
def test_a_mistake_shows_value_and_fix(value: object, dimension: Dimension, message: str) -> None:
    with pytest.raises(JobFileError, match=re.escape(message)):
        parse(value, dimension)


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (90.0, "time", "90 s"),
        (600.0, "time", "10 min"),
        (86_400.0, "time", "1 d"),
        (0.25, "time", "250 ms"),
        (20e9, "compute", "20 GFLOP/s"),
        (1.5e12, "compute", "1500 GFLOP/s"),
        (7.0, "compute", "7 FLOP/s"),
    ],
)
def test_values_are_shown_in_a_fitting_unit(value: float, dimension: Dimension, text: str) -> None:
    assert show(value, dimension) == text
