"""Tensors assembled from slots, compared with arrays filled index by index."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distbelief.graph.graph import GraphError
from distbelief.graph.region import Region
from distbelief.worker.execution.slots import How, Slices, gather, gathered


EXTENTS = (5, 4)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in EXTENTS]
    return Region(tuple((a, b) for a, b in ends))


def at(region: Region) -> Slices:
    return (..., *region.slices)


@settings(max_examples=100)
@given(
    wanted=regions(),
    pieces=st.lists(st.tuples(regions(), st.booleans()), max_size=5),
    samples=st.integers(0, 1),
)
def test_a_sum_is_the_sum_index_by_index(
    wanted: Region, pieces: list[tuple[Region, bool]], samples: int
) -> None:
    known = [(slot, region) for slot, (region, _) in enumerate(pieces)]
    values = [
        torch.randn(*(2,) * samples, *region.shape) if there else None for region, there in pieces
    ]
    spec = gather(wanted, known, how="sum", samples=bool(samples), what="a state")
    given_values = [values[piece.slot] for piece in spec.pieces]
    found = gathered(spec, given_values, like=torch.zeros(2, 1))
    whole = torch.zeros(*(2,) * samples, *EXTENTS)
    for (region, _), value in zip(pieces, values, strict=True):
        if value is not None:
            whole[at(region)] += value
    expected = whole[at(wanted)]
    if found is None:
        assert not expected.any()
    else:
        torch.testing.assert_close(found, expected)


@given(wanted=regions(), cut=st.integers(0, 5), samples=st.integers(0, 1))
def test_a_cut_gives_the_original_values(wanted: Region, cut: int, samples: int) -> None:
    whole = torch.arange(20.0).view(EXTENTS).expand(*(2,) * samples, *EXTENTS)
    known = [(slot, Region((rows, (0, 4)))) for slot, rows in enumerate([(0, cut), (cut, 5)])]
    spec = gather(wanted, known, how="cut", samples=bool(samples), what="a state")
    pieces: list[torch.Tensor | None] = [whole[at(known[piece.slot][1])] for piece in spec.pieces]
    found = gathered(spec, pieces, like=torch.zeros(2, 1))
    assert found is not None
    torch.testing.assert_close(found, whole[at(wanted)])


def test_a_maximum_covers_what_overlaps() -> None:
    known = [(0, Region(((0, 3),))), (1, Region(((2, 5),)))]
    spec = gather(Region(((0, 5),)), known, how="max", samples=True, what="a maximum")
    pieces = [torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[-2.0, -2.0, -2.0]])]
    found = gathered(spec, pieces, like=torch.zeros(1, 1))
    assert found is not None
    assert found.tolist() == [[1.0, 1.0, 1.0, -2.0, -2.0]]


@pytest.mark.parametrize(("how", "stop"), [("cut", 4), ("max", 4)])
def test_a_gap_is_named(how: How, stop: int) -> None:
    known = [(0, Region(((0, stop),)))]
    with pytest.raises(GraphError, match=r"state 'a' \[0:5\] is not there"):
        gather(Region(((0, 5),)), known, how=how, samples=True, what="state 'a'")


def test_overlapping_pieces_cannot_be_cut() -> None:
    known = [(0, Region(((0, 3),))), (1, Region(((2, 5),)))]
    with pytest.raises(GraphError, match="twice"):
        gather(Region(((0, 5),)), known, how="cut", samples=True, what="state 'a'")


def test_one_piece_that_has_it_all_is_not_copied() -> None:
    value = torch.randn(3, 5, 4)
    part = Region(((1, 3), (0, 4)))
    spec = gather(part, [(0, Region.of(5, 4))], how="sum", samples=True, what="x")
    found = gathered(spec, [value], like=value)
    assert found is not None
    assert found.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    np.testing.assert_array_equal(found, value[:, 1:3])


def test_a_sum_leaves_its_pieces_alone() -> None:
    values = [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)]
    known = [(slot, Region.of(3)) for slot in range(3)]
    spec = gather(Region.of(3), known, how="sum", samples=True, what="x")
    found = gathered(spec, values, like=values[0])
    assert found is not None
    assert found.tolist() == [[3.0] * 3] * 2
    assert all(value.eq(1.0).all() for value in values)


def test_a_single_maximum_is_a_copy_only_where_it_must() -> None:
    known = [(0, Region.of(3)), (1, Region(((1, 2),)))]
    spec = gather(Region.of(3), known, how="max", samples=False, what="x")
    first = torch.zeros(3)
    found = gathered(spec, [first, torch.ones(1)], like=first)
    assert found is not None
    assert found.tolist() == [0.0, 1.0, 0.0]
    assert not first.any()
    assert gathered(spec, [first, None], like=first) is first
