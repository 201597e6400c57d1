import numpy as np
from hypothesis import given, strategies as st

from distbelief.graph.region import (
    Region,
    disjoint,
    merged,
    n_elements,
    overlaps,
    shared_by,
    to_array,
    to_regions,
)
from tests.distbelief.plans.plans import indices


@st.composite
def regions(draw: st.DrawFn, n_dims: int = 2, extent: int = 5) -> Region:
    intervals = []
    for _ in range(n_dims):
        start = draw(st.integers(0, extent))
        intervals.append((start, draw(st.integers(start, extent))))
    return Region(tuple(intervals))


@given(st.lists(regions(), max_size=6))
def test_a_union_with_neighbours_joined_or_not_holds_every_index_once(
    several: list[Region],
) -> None:
    for found in (disjoint(several), merged(disjoint(several))):
        listed = [index for region in found for index in indices(region)]
        assert len(set(listed)) == len(listed)
        assert set(listed) == set[tuple[int, ...]]().union(*map(indices, several))
        assert all(region.n_elements for region in found)


@given(st.lists(regions(), max_size=5), st.lists(regions(), max_size=5))
def test_overlaps_are_what_pairs_have_in_common(ours: list[Region], theirs: list[Region]) -> None:
    first, second, boxes = overlaps(to_array(ours, 2), to_array(theirs, 2))
    found = dict(
        zip(zip(first.tolist(), second.tolist(), strict=True), to_regions(boxes), strict=True)
    )
    common = {
        (i, j): a & b
        for i, a in enumerate(ours)
        for j, b in enumerate(theirs)
        if (a & b).n_elements
    }
    assert found == common
    assert n_elements(boxes).tolist() == [r.n_elements for r in found.values()]


def test_numbers_without_dimensions_overlap() -> None:
    one = to_array([Region(())], 0)
    first, second, boxes = overlaps(one, one)
    assert (first.tolist(), second.tolist()) == ([0], [0])
    assert to_regions(boxes) == (Region(()),)
    assert shared_by({3: (Region(()),)}, 0) == [((3,), Region(()))]


@given(st.lists(st.lists(regions(), max_size=3), min_size=1, max_size=4))
def test_regions_are_grouped_by_their_users(each: list[list[Region]]) -> None:
    uses = {user: disjoint(mine) for user, mine in enumerate(each)}
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for users, region in shared_by(uses, 2):
        for index in indices(region):
            assert index not in seen
            seen[index] = users
    expected: dict[tuple[int, ...], tuple[int, ...]] = {}
    for user, mine in uses.items():
        for region in mine:
            for index in indices(region):
                expected[index] = (*expected.get(index, ()), user)
    assert seen == expected
    assert np.all([len(users) > 0 for users in seen.values()])
