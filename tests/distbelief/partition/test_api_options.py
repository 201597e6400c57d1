import pytest
from hypothesis import given, strategies as st

from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec
from distbelief.partition.api import counts, input_spec, pins


EXTENTS = st.lists(st.integers(1, 5000), min_size=1, max_size=5)
WORDS = st.text("abc.019_", min_size=1, max_size=8)


@given(EXTENTS, st.none() | st.integers(1, 10**6))
def test_shapes_are_read_as_they_are_written(shape: list[int], n: int | None) -> None:
    text = "x".join(map(str, shape)) + (f":{n}" if n else "")
    assert input_spec(f" {text} ") == InputSpec(shape=tuple(shape), n_values=n)


def test_a_single_number_a_sample_has_no_extents() -> None:
    assert input_spec(":50") == InputSpec(shape=(), n_values=50)


@pytest.mark.parametrize("text", ["", " ", "3,4", "3x", "x3", "-3", "3.5", "a", "3:x"])
def test_an_invalid_shape_is_rejected(text: str) -> None:
    with pytest.raises(JobError, match="is not a shape"):
        input_spec(text)


@given(EXTENTS)
def test_an_extent_of_0_is_rejected(shape: list[int]) -> None:
    with pytest.raises(JobError, match="extent of 0"):
        input_spec("x".join(map(str, [*shape, 0])))


@given(EXTENTS)
def test_numbers_of_machines_ascend_and_none_is_there_twice(numbers: list[int]) -> None:
    assert counts(",".join(map(str, numbers))) == sorted(set(numbers))


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,2", "1.5", "1;2", "0,1"])
def test_an_invalid_number_of_machines_is_rejected(text: str) -> None:
    with pytest.raises(JobError, match="has no numbers of machines"):
        counts(text)


@given(st.dictionaries(WORDS, WORDS))
def test_pins_are_read_as_they_are_written(wanted: dict[str, str]) -> None:
    assert pins([f"{name}={split}" for name, split in wanted.items()]) == wanted


def test_the_same_pin_twice_is_one_and_two_that_differ_are_rejected() -> None:
    assert pins(["a=whole", "a=whole"]) == {"a": "whole"}
    with pytest.raises(JobError, match="'a' twice: whole and rows:2"):
        pins(["a=whole", "a=rows:2"])


@pytest.mark.parametrize("text", ["", "a", "a=", "=whole", "="])
def test_a_pin_without_a_split_is_rejected(text: str) -> None:
    with pytest.raises(JobError, match="pins nothing"):
        pins([text])
