from itertools import product

import pytest
from hypothesis import given, strategies as st

from distbelief.graph.region import Region, cuts
from tests.distbelief.graph.reference import tile


intervals = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (min(pair), max(pair)))
boxes = st.tuples(intervals, intervals).map(Region)


def indices(region: Region) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in region)))


@given(boxes, boxes)
def test_what_is_common_and_the_rest_are_those_of_the_index_sets(a: Region, b: Region) -> None:
    assert indices(a & b) == indices(a) & indices(b)
    assert (b in a) == (indices(b) <= indices(a))
    rest = a.minus(b)
    assert set().union(*map(indices, rest)) == indices(a) - indices(b)
    assert sum(r.n_elements for r in rest) == len(indices(a) - indices(b))
    assert len(rest) <= 4


@given(boxes, boxes)
def test_what_is_left_and_what_is_common_tile_the_region(a: Region, b: Region) -> None:
    assert tile(a, [a & b, *a.minus(b)])


@given(boxes, st.lists(boxes, max_size=4))
def test_tiling_is_holding_each_index_once(whole: Region, parts: list[Region]) -> None:
    counted = [index for part in parts for index in indices(part)]
    expected = sorted(counted) == sorted(indices(whole))
    assert tile(whole, parts) == expected


@given(
    st.integers(0, 40),
    st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda w: sum(w) > 0),
    st.integers(1, 7),
)
def test_cuts_tile_lie_at_multiples_and_follow_the_weights(
    extent: int, weights: list[float], unit: int
) -> None:
    ends = cuts(extent, weights, unit=unit)
    assert ends == sorted(ends)
    assert ends[-1] == extent
    assert all(end % unit == 0 or end == extent for end in ends)
    total = sum(weights)
    for index, end in enumerate(ends[:-1]):
        ideal = extent * sum(weights[: index + 1]) / total
        assert abs(end - ideal) <= unit
    region = Region(((3, 5), (2, 2 + extent)))
    parts = region.cut(1, weights, unit=unit)
    assert len(parts) == len(weights)
    assert tile(region, parts)


def test_a_slice_of_the_whole_is_the_region() -> None:
    region = Region(((1, 3), (0, 4)))
    assert region.shape == (2, 4)
    assert region.slices == (slice(1, 3), slice(0, 4))
    assert str(region) == "[1:3, 0:4]"
    assert region.within(Region(((1, 9), (0, 9)))) == Region(((0, 2), (0, 4)))
    assert Region.of().n_elements == 1


def test_regions_of_different_layers_are_not_compared() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        _ = Region.of(2) & Region.of(2, 2)
    with pytest.raises(ValueError, match="start <= stop"):
        Region(((2, 1),))
    with pytest.raises(ValueError, match="weights are"):
        cuts(4, [0.0, 0.0])
