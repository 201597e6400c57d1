"""Transfers of all candidates at once, compared with counting indices one by one."""

import time
from itertools import pairwise, product

import msgspec
import numpy as np
from hypothesis import given, settings, strategies as st

from distbelief.graph.region import Region, Shape
from distbelief.plans.cluster import Cluster, FloatArray
from distbelief.plans.planner.cost_tables import Boxes, own_seconds, transfer_seconds
from tests.distbelief.plans.planner.plans import equal, unequal


Candidates = list[list[tuple[int, Region]]]


@st.composite
def owners(draw: st.DrawFn, shape: Shape) -> list[tuple[int, Region]]:
    """A grid of cells on any machines, some of which have several."""
    rows = []
    for extent in shape:
        cuts = draw(st.lists(st.integers(0, extent), max_size=2))
        rows.append(list(pairwise((0, *sorted(cuts), extent))))
    return [(draw(st.integers(0, 4)), Region(box)) for box in product(*rows)]


@st.composite
def readers(draw: st.DrawFn, shape: Shape) -> list[tuple[int, Region]]:
    """Some machines, each with a box, or with one cut in two."""
    found = []
    for machine in draw(st.sets(st.integers(0, 4))):
        ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
        region = Region(tuple((a, b) for a, b in ends))
        pieces = region.cut(0, [1.0, 1.0]) if draw(st.booleans()) else [region]
        found += [(machine, piece) for piece in pieces]
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Candidates, Candidates]:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    return (
        shape,
        draw(st.lists(owners(shape), min_size=1, max_size=3)),
        draw(st.lists(readers(shape), min_size=1, max_size=3)),
    )


def counted(
    own: list[tuple[int, Region]], need: list[tuple[int, Region]], cluster: Cluster
) -> float:
    """The same, index by index; 8 bytes each."""
    has = {index: machine for machine, region in own for index in indices(region)}
    sent = np.zeros((5, 5))
    for machine, region in need:
        for index in indices(region):
            sent[has[index], machine] += 8.0
    np.fill_diagonal(sent, 0.0)
    seconds = sent / rates_of(cluster) + cluster.message_overhead * (sent > 0)
    busiest = float(max(seconds.sum(0).max(), seconds.sum(1).max()))
    return busiest + cluster.latency * (busiest > 0)


def rates_of(cluster: Cluster) -> FloatArray:
    return np.array([[cluster.rate(p, q) for q in range(5)] for p in range(5)])


def indices(region: Region) -> list[tuple[int, ...]]:
    starts = [start for start, _ in region]
    return [
        tuple(int(a + b) for a, b in zip(starts, place, strict=True))
        for place in np.ndindex(*region.shape)
    ]


@settings(max_examples=60)
@given(case=cases(), even=st.booleans(), overhead=st.sampled_from([0.0, 1e-4]))
def test_transfers_are_what_counting_indices_gives(
    case: tuple[Shape, Candidates, Candidates], *, even: bool, overhead: float
) -> None:
    shape, own, need = case
    cluster = equal(5, latency=1e-3) if even else unequal()
    cluster = msgspec.structs.replace(cluster, message_overhead=overhead)
    matrix = transfer_seconds(
        Boxes.of(own, n_dims=len(shape)),
        Boxes.of(need, n_dims=len(shape)),
        cluster=cluster,
        bytes_each=8.0,
    )
    expected = [[counted(one, other, cluster) for other in need] for one in own]
    np.testing.assert_allclose(matrix, expected, rtol=1e-12)


@settings(max_examples=20)
@given(case=cases())
def test_transfers_inside_a_group_are_the_diagonal(
    case: tuple[Shape, Candidates, Candidates],
) -> None:
    shape, own, need = case
    n = min(len(own), len(need))
    boxes = [Boxes.of(rows[:n], n_dims=len(shape)) for rows in (own, need)]
    matrix = transfer_seconds(*boxes, cluster=unequal(), bytes_each=4.0)
    inside = own_seconds(*boxes, cluster=unequal(), bytes_each=4.0)
    np.testing.assert_allclose(inside, matrix.diagonal(), rtol=1e-12)


def test_a_scalar_goes_to_all_ranks() -> None:
    number = Region(())
    own = Boxes.of([[(0, number)], [(1, number)]], n_dims=0)
    need = Boxes.of([[(0, number)], [(q, number) for q in range(4)], []], n_dims=0)
    matrix = transfer_seconds(own, need, cluster=equal(4), bytes_each=1e8)
    np.testing.assert_allclose(matrix, [[0, 3, 0], [1, 3, 0]])


def test_rates_are_those_of_each_pair_and_one_number_if_all_are_equal() -> None:
    np.testing.assert_array_equal(unequal().rates, rates_of(unequal()))
    assert unequal().first(2).rates.ndim == 0  # the link of a missing machine does not count


def test_fifty_candidates_on_144_machines_take_a_fraction_of_a_second() -> None:
    shape = (16, 96, 96)
    sizes = np.linspace(2, 144, 50).astype(int)
    rows = [list(enumerate(Region.of(*shape).cut(1 + k % 2, [1.0] * int(k)))) for k in sizes]
    boxes = Boxes.of(rows, n_dims=3)
    began = time.process_time()  # other processes are at work too
    transfer_seconds(boxes, boxes, cluster=equal(144), bytes_each=4.0)
    assert time.process_time() - began < 1.0
