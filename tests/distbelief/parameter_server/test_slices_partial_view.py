"""Partial views against brute force: the position of every element, one by one."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.parameter_server import layout as module
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.slices import ShardSlice, SliceTable
from distbelief.parameter_server.tensor_copies import PIECE
from tests.distbelief.parameter_server.pair import gather, numbered, put_all


Items = list[tuple[str, Region]]

shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Return layouts of small tensors and of some that are cut."""
    tensors = [
        TensorSpec(name=f"t{i}", shape=shape, kind=draw(st.sampled_from(["parameter", "buffer"])))
        for i, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=4)))
    ]
    tensors.append(TensorSpec(name="large", shape=(40, draw(st.integers(5, 12)))))
    return Layout.of(tensors, n_shards=draw(st.integers(1, 3)))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Layout, list[Items]]:
    """Return regions that cover every tensor, dealt to a few clients."""
    layout = draw(layouts())
    clients: list[Items] = [[] for _ in range(draw(st.integers(1, 3)))]
    for spec in layout.tensors:
        regions = [Region.of(*spec.shape)]
        for dim in range(len(spec.shape)):
            n = draw(st.integers(1, 3))
            regions = [part for region in regions for part in region.cut(dim, [1.0] * n)]
        for region in regions:
            clients[draw(st.integers(0, len(clients) - 1))].append((spec.name, region))
    return layout, clients


def cut_out(layout: Layout, whole: list[torch.Tensor], items: Items) -> list[torch.Tensor]:
    """Return the flat tensors of these regions."""
    by_name = dict(zip((spec.name for spec in layout.tensors), whole, strict=True))
    shapes = {spec.name: spec.shape for spec in layout.tensors}
    return [
        by_name[name].reshape(shapes[name])[region.slices].reshape(-1).clone()
        for name, region in items
    ]


@pytest.mark.untraced
@given(tilings())
def test_clients_that_tile_the_tensors_fill_the_shards_with_their_very_elements(
    drawn: tuple[Layout, list[Items]],
) -> None:
    layout, clients = drawn
    whole = numbered(layout)
    for k in range(layout.n_shards):
        wanted = np.zeros(layout.shard_size(k), np.float32)
        gather(layout, k, whole, wanted)
        filled = np.zeros_like(wanted)
        times = np.zeros(len(wanted), np.int64)
        for items in clients:
            selection = PartialView(layout, items)
            tensors = cut_out(layout, whole, items)
            if k not in selection.shards:
                continue
            part = selection.slices[k]
            put_all(selection.copier(k), tensors, filled)
            indices = indices_of(part)
            times[indices] += 1
            # What goes over the codec is the same, in rising order.
            assert part.n_elements
            compact = np.full(part.n_elements, np.nan, np.float32)
            put_all(selection.copier(k, compact=True), tensors, compact)
            assert np.array_equal(compact, wanted[indices])
            assert_has(selection, k, tensors, compact)
        assert np.array_equal(filled, wanted)
        assert np.array_equal(times, (wanted != 0).astype(np.int64))


def assert_has(view: PartialView, k: int, tensors: Sequence[torch.Tensor], compact: Vector) -> None:
    """The copier finds any change of a number that was put, and none elsewhere."""
    copier = view.copier(k, compact=True)
    for index, tensor in enumerate(tensors):
        assert copier.has(index, tensor, compact)
        assert copier.has(index, tensor.double(), compact)
        there = compact.copy()
        copier.put(index, torch.full_like(tensor, math.nan), there)
        assert copier.has(index, torch.full_like(tensor, math.nan), there)
        assert copier.has(index, tensor, there) is np.array_equal(there, compact)
        for at in range(tensor.numel()):
            changed = tensor.clone()
            changed[at] *= 2.0
            copier.put(index, changed, there)
            assert copier.has(index, tensor, there) is np.array_equal(there, compact)


@given(tilings())
def test_a_scatter_gives_back_what_was_gathered(drawn: tuple[Layout, list[Items]]) -> None:
    layout, clients = drawn
    whole = numbered(layout)
    for items in clients:
        selection = PartialView(layout, items)
        wanted = cut_out(layout, whole, items)
        by_blocks = [torch.full_like(tensor, math.nan) for tensor in wanted]
        in_place = [torch.full_like(tensor, math.nan) for tensor in wanted]
        for k in selection.shards:
            part = selection.slices[k]
            vector = np.zeros(layout.shard_size(k), np.float32)
            gather(layout, k, whole, vector)
            vector.flags.writeable = False
            selection.copier(k).scatter(vector, in_place)
            size = 1 + part.n_elements // 3
            starts = range(0, part.n_elements, size)
            part.bounds = [(start, min(start + size, part.n_elements)) for start in starts]
            for i in range(len(part.bounds)):
                selection.block_copier(k, i).scatter(part.block(vector, i), by_blocks)
        for tensor, one, other in zip(wanted, by_blocks, in_place, strict=True):
            assert torch.equal(tensor, one)
            assert torch.equal(tensor, other)


def indices_of(part: ShardSlice) -> Vector:
    ranges = part.ranges
    assert ranges is not None
    return np.concatenate(
        [np.arange(a, b) for a, b in zip(ranges.starts, ranges.stops, strict=True)]
    )


def layout_of(*shape: int, n_shards: int = 1) -> Layout:
    return Layout.of([TensorSpec(name="w", shape=shape)], n_shards=n_shards)


def test_columns_are_one_stripe_and_hold_what_the_shard_reads() -> None:
    layout = layout_of(4000, 6)
    part = PartialView(layout, [("w", Region(((0, 4000), (2, 5))))]).slices[0]
    assert part.stripes is not None
    assert part.stripes.tolist() == [2, 3, 6, 4000]
    received = SliceTable(24000, dtype=layout.dtype).get(part.stripes)
    assert received.key == part.key
    assert received.bounds == part.bounds == ((0, 12000),)


def test_shards_that_hold_nothing_are_left_out() -> None:
    layout = layout_of(4, 64, n_shards=4)  # a row each
    assert PartialView(layout, [("w", Region(((1, 3), (0, 10))))]).shards == (1, 2)
    empty = PartialView(layout, [("w", Region(((1, 1), (0, 64))))])
    assert empty.shards == ()
    assert empty.tensors[0].n_elements == 0
    assert PartialView(layout, []).shards == ()


def test_none_stands_for_zeros_and_integers_are_rounded() -> None:
    layout = layout_of(4)
    view = PartialView(layout, [("w", Region(((1, 3),)))])
    vector = np.array([1.0, 2.25, 3.75, 4.0] + 60 * [0.0], np.float32)
    counts = torch.zeros(2, dtype=torch.int64)
    copier = view.copier(0)
    copier.scatter(vector, [counts])
    assert counts.tolist() == [2, 4]
    put_all(copier, [None], vector)
    assert vector[:4].tolist() == [1.0, 0.0, 0.0, 4.0]
    copier.put(0, torch.tensor([5, 6]), vector)
    copier.zero_padding(vector)
    assert vector[:4].tolist() == [1.0, 5.0, 6.0, 4.0]


def test_an_item_that_lies_elsewhere_changes_nothing_here() -> None:
    layout = layout_of(2, 64, n_shards=2)
    selection = PartialView(
        layout, [("w", Region(((0, 1), (0, 64)))), ("w", Region(((1, 2), (0, 64))))]
    )
    vector = np.zeros(64, np.float32)
    selection.copier(0, compact=True).put(1, torch.ones(64), vector)
    assert not vector.any()


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ([("v", Region.of(4, 6))], r"no tensor 'v'; it has \['w'\]"),
        ([("w", Region.of(4))], r"shape \(4, 6\); it has no region \[0:4\]"),
        ([("w", Region.of(5, 6))], "has no region"),
        (
            [("w", Region(((0, 2), (0, 6)))), ("w", Region(((1, 4), (5, 6))))],
            r"\[0:2, 0:6\] and \[1:4, 5:6\] of tensor 'w' overlap",
        ),
    ],
)
def test_what_cannot_be_selected_is_named(items: Items, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        PartialView(layout_of(4, 6), items)


def test_regions_of_too_many_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(40, 6)
    monkeypatch.setattr(module, "N_RANGES_MAX", 39)
    with pytest.raises(ValueError, match="has 40 runs of elements"):
        PartialView(layout, [("w", Region(((0, 40), (0, 3))))])
    halves = [Region(((0, 20), (0, 3))), Region(((20, 40), (3, 5)))]
    with pytest.raises(ValueError, match="shard 0 into 40 ranges or 2 stripes"):
        PartialView(layout, [("w", half) for half in halves])


def test_a_whole_part_is_the_layout_itself() -> None:
    layout = layout_of(4)
    view = PartialView(layout)
    part = view.slices[0]
    assert part.stripes is None
    vector = np.arange(64, dtype=np.float32)
    assert part.block(vector, 0).base is not None  # no copy
    received = [torch.zeros(4)]
    view.copier(0).scatter(vector, received)
    assert received[0].tolist() == [0, 1, 2, 3]
    compact = np.ones(64, np.float32)
    put_all(view.copier(0, compact=True), received, compact)
    assert compact.tolist() == [0, 1, 2, 3, *60 * [0]]


def test_the_sum_of_a_tensor_shows_nan_in_any_of_its_pieces() -> None:
    layout = layout_of(PIECE + 64)
    vector = np.zeros(layout.shard_size(0), np.float32)
    tensor = torch.ones(PIECE + 64)
    copier = PartialView(layout).copier(0)
    assert copier.put(0, tensor, vector) == PIECE + 64
    tensor[0] = math.nan
    assert math.isnan(copier.put(0, tensor, vector))


def test_a_view_with_the_negative_bit_is_copied_by_its_values() -> None:
    layout = layout_of(64)
    vector = np.zeros(64, np.float32)
    negated = torch.full((64,), 2j).conj().imag
    assert negated.is_neg()
    PartialView(layout).copier(0).put(0, negated, vector)
    assert set(vector) == {-2.0}
