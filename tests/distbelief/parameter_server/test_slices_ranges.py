"""Ranges and their copies, against sets of indices."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from distbelief.core.errors import RemoteProtocolError
from distbelief.parameter_server import ranges as module
from distbelief.parameter_server.ranges import N_STRIPES_MAX, IndexRanges, RangeCopier


SIZE = 200


@st.composite
def some_ranges(draw: st.DrawFn) -> tuple[list[int], IndexRanges]:
    """Return indices of a vector of `SIZE`, and the same as ranges."""
    if draw(st.booleans()):
        bits = draw(st.integers(0, 2**SIZE - 1))
        inside = [bits >> i & 1 for i in range(SIZE)]
    else:  # columns of a matrix, and a few more
        width, start = draw(st.integers(1, 20)), draw(st.integers(0, 20))
        inside = [start <= i % 20 < start + width or i in {3, 7} for i in range(SIZE)]
    indices = [i for i, is_inside in enumerate(inside) if is_inside]
    starts = np.array(indices, np.int64)
    seed = draw(st.integers(0, 9))
    order = np.random.default_rng(seed).permutation(len(starts))
    return indices, IndexRanges.of(starts[order], starts[order] + 1)


def indices_of(ranges: IndexRanges) -> list[int]:
    return [
        i
        for start, stop in zip(ranges.starts, ranges.stops, strict=True)
        for i in range(start, stop)
    ]


@given(some_ranges())
def test_ranges_hold_what_they_were_made_of_and_never_touch(
    drawn: tuple[list[int], IndexRanges],
) -> None:
    indices, ranges = drawn
    assert indices_of(ranges) == indices
    assert ranges.n_elements == len(indices)
    assert (ranges.starts[1:] > ranges.stops[:-1]).all()
    assert (ranges.stops > ranges.starts).all()


@given(some_ranges())
def test_stripes_say_the_same_on_the_other_side_of_the_wire(
    drawn: tuple[list[int], IndexRanges],
) -> None:
    indices, ranges = drawn
    received = IndexRanges.from_wire(ranges.stripes(), size=SIZE)
    assert indices_of(received) == indices
    assert received.key == ranges.key


def test_equal_keys_are_of_equal_elements_only() -> None:
    one, other = IndexRanges.whole(0, 4), IndexRanges.whole(0, 5)
    assert one.key != other.key
    split = IndexRanges.of(np.array([2, 0]), np.array([4, 2]))
    assert split.key == one.key


@given(some_ranges(), st.integers(0, SIZE), st.integers(0, SIZE))
def test_parts_are_those_of_the_indices(
    drawn: tuple[list[int], IndexRanges], one: int, other: int
) -> None:
    indices, ranges = drawn
    start, stop = min(one, other), max(one, other)
    clipped = ranges.clipped(start, stop)
    assert indices_of(clipped) == [i for i in indices if start <= i < stop]
    assert ranges.clipped(0, stop).n_elements == sum(i < stop for i in indices)
    assert indices_of(ranges.part(start, stop)) == indices[start:stop]
    places = indices_of(ranges.positions_of(clipped))
    assert [indices[place] for place in places] == indices_of(clipped)
    assert indices_of(clipped.shifted(5)) == [i + 5 for i in indices_of(clipped)]
    bounds = np.arange(SIZE + 1)
    assert np.flatnonzero(ranges.mask(bounds)).tolist() == indices


@pytest.mark.parametrize("stripe_min", [1, 30, 1000])
@given(drawn=some_ranges())
def test_gather_takes_the_elements_and_scatter_puts_them_back(
    drawn: tuple[list[int], IndexRanges], stripe_min: int
) -> None:
    indices, ranges = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_STRIPE_MIN", stripe_min)
        copier = RangeCopier(ranges)
    whole = torch.arange(10 + SIZE, dtype=torch.float32)
    vector = whole[10:]  # not at the beginning of its memory
    compact = torch.zeros(len(indices))
    copier.gather(vector, compact)
    assert compact.tolist() == [10.0 + i for i in indices]
    copier.scatter(-compact, vector)
    signs = torch.ones(SIZE)
    signs[indices] = -1.0
    assert torch.equal(vector, signs * torch.arange(10.0, 10.0 + SIZE))
    assert torch.equal(whole[:10], torch.arange(10.0))


@pytest.mark.parametrize("stripe_min", [1, 1000])
def test_integers_receive_the_nearest(stripe_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRIPE_MIN", stripe_min)
    counts = torch.zeros(2, dtype=torch.int64)
    copier = RangeCopier(IndexRanges.whole(1, 3))
    copier.gather(torch.tensor([0.0, 2.75, 4.25]), counts)
    assert counts.tolist() == [3, 4]
    values = torch.zeros(3)
    copier.scatter(counts, values)
    assert values.tolist() == [0.0, 3.0, 4.0]


def test_ranges_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[0, 4\) and \[3, 5\) overlap"):
        IndexRanges.of(np.array([3, 0]), np.array([5, 4]))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([0, 1, 1], "3 numbers of int64 are not stripes"),
        ([0, 1, 1, 1] * (N_STRIPES_MAX + 1), "the most is"),
        ([-1, 1, 1, 1], r"stripe \[-1, 1, 1, 1\] does not fit"),
        ([0, 0, 1, 1], "does not fit a vector of 200"),
        ([0, 1, 1, 0], "does not fit"),
        ([200, 1, 1, 1], "does not fit"),
        ([0, 201, 201, 1], "does not fit"),
        ([0, 3, 2, 2], "does not fit"),
        ([0, 100, 100, 3], "does not fit"),
        ([0, 1, 1 << 62, 1 << 62], "does not fit"),
        ([(1 << 63) - 1, (1 << 63) - 1, 1, 1], "does not fit"),
        ([0, 4, 4, 1, 3, 1, 1, 1], "overlap"),
    ],
)
def test_invalid_stripes_are_refused(words: list[int], what: str) -> None:
    with pytest.raises(RemoteProtocolError, match=what):
        IndexRanges.from_wire(np.array(words, np.int64), size=SIZE)


def test_stripes_of_floats_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="4 numbers of float32"):
        IndexRanges.from_wire(np.zeros(4, np.float32), size=SIZE)


def test_too_many_ranges_are_refused_before_they_are_made() -> None:
    with pytest.raises(RemoteProtocolError, match="1099511627776 ranges; the most is"):
        IndexRanges.from_wire(np.array([0, 1, 2, 1 << 40]), size=1 << 60)


def test_an_empty_vector_has_no_stripes() -> None:
    assert IndexRanges.from_wire(np.zeros(0, np.int64), size=0).n_elements == 0
    assert IndexRanges.whole(3, 3).stripes().tolist() == []
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        IndexRanges.from_wire(np.array([0, 1, 1, 1]), size=0)
