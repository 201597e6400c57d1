"""Counts of pushes per element, against a count per element."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.vectors import Vector
from distbelief.parameter_server import optimizers as module, slices as slice_table
from distbelief.parameter_server.checkpoint import reshard
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.optimizers import SGD, StepCounts
from distbelief.parameter_server.ranges import IndexRanges, Indices
from distbelief.parameter_server.slices import ShardSlice, SliceTable


SIZE = 64
LAYOUT = Layout.of([TensorSpec(name="w", shape=(SIZE,))], n_shards=1)
WHOLE = ShardSlice(SIZE, dtype=LAYOUT.dtype)


def held(*ranges: tuple[int, int]) -> ShardSlice:
    starts, stops = np.array(ranges, np.int64).reshape(-1, 2).T
    return ShardSlice(SIZE, dtype=LAYOUT.dtype, ranges=IndexRanges.of(starts, stops))


HOLDINGS = (
    WHOLE,
    held((0, 10), (20, 30)),
    held((10, 20)),
    held((5, 25), (40, 64)),
    held((60, 64)),
    held(),
)


def mask_of(shard_slice: ShardSlice) -> Indices:
    mask = np.zeros(SIZE, np.int64)
    inner = shard_slice.within(0, SIZE)
    for start, stop in zip(inner.starts, inner.stops, strict=True):
        mask[start:stop] = 1
    return mask


pushes = st.lists(st.sampled_from(HOLDINGS), max_size=12)


def counted(pushed: list[ShardSlice]) -> tuple[StepCounts, Indices]:
    steps, counts = StepCounts(), np.zeros(SIZE, np.int64)
    for shard_slice in pushed:
        steps.add(shard_slice)
        counts += mask_of(shard_slice)
    return steps, counts


@given(pushes, st.sampled_from(HOLDINGS), st.integers(0, SIZE))
def test_every_element_has_its_own_count(
    pushed: list[ShardSlice], shard_slice: ShardSlice, stop: int
) -> None:
    steps, counts = counted(pushed)
    inner = shard_slice.within(0, stop)
    seen = np.full(SIZE, -1)
    for count, ranges in steps.at(inner, shard_slice=shard_slice):
        for start, end in zip(ranges.starts, ranges.stops, strict=True):
            assert (seen[start:end] == -1).all()
            seen[start:end] = count
    wanted = np.where(mask_of(shard_slice), counts, -1)
    wanted[stop:] = -1
    assert seen.tolist() == wanted.tolist()


@given(pushes)
def test_written_counts_are_read_back(pushed: list[ShardSlice]) -> None:
    steps, _ = counted(pushed)
    read = StepCounts.read(steps.to_wire(), size=SIZE)
    assert read.to_wire().tolist() == steps.to_wire().tolist()
    assert read.n_whole == steps.n_whole == pushed.count(WHOLE)


def test_clients_that_hold_the_same_are_counted_together() -> None:
    steps = StepCounts()
    steps.add(held((0, 10)))
    steps.add(held((5, 10), (0, 5)))
    assert steps.to_wire().tolist() == [0, 0, 2, 1, 0, 10, 10, 1]


def test_clients_that_never_pushed_are_not_written() -> None:
    steps = StepCounts(3)
    assert steps.register(held((0, 10))) is None
    assert steps.register(held((0, 10))) is None
    assert steps.register(WHOLE) is None
    assert steps.to_wire().tolist() == [3, 0]


def test_the_written_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "N_STRIPES_MAX", 1)
    steps = StepCounts()
    steps.add(held((0, 10)))
    reason = steps.register(held((0, 3)))
    assert reason is not None
    assert "need 2 stripes, of 1 at most" in reason
    assert steps.register(held((0, 10))) is None  # the other one is forgotten again


@given(pushes=st.lists(st.tuples(st.integers(0, 1), pushes), max_size=3))
def test_counts_of_parts_go_along_to_another_number_of_shards(
    pushes: list[tuple[int, list[ShardSlice]]],
) -> None:
    spec = TensorSpec(name="w", shape=(2 * SIZE,))
    two, one = (Layout.of([spec], n_shards=n) for n in (2, 1))
    steps, counts = [StepCounts(7), StepCounts(9)], np.zeros(2 * SIZE, np.int64)
    for shard, pushed in pushes:
        for shard_slice in pushed:
            if shard_slice.ranges is not None:
                steps[shard].add(shard_slice)
                counts[shard * SIZE : (shard + 1) * SIZE] += mask_of(shard_slice)

    def read(shard_index: int, array: str, start: int, stop: int) -> Vector:
        del shard_index, array
        return np.zeros(stop - start, np.float32)

    content = reshard(
        two, one, 0, rule=SGD(learning_rate=1.0), clocks=[8, 10], steps=steps, read=read
    )
    seen = np.zeros(2 * SIZE, np.int64)
    whole = ShardSlice(2 * SIZE, dtype=one.dtype)
    for count, ranges in content.steps.at(whole.within(0, 2 * SIZE), shard_slice=whole):
        seen[ranges.mask(np.arange(2 * SIZE + 1))] = count
    assert seen.tolist() == (counts + 9).tolist()


def test_a_shard_shares_what_its_clients_hold_and_forgets_at_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = SliceTable(SIZE, dtype=LAYOUT.dtype)
    one, other = held((0, 3)).stripes, held((1, 3)).stripes
    first = known.get(one)
    assert known.get(one) is first
    assert known.get(None).n_elements == SIZE
    monkeypatch.setattr(slice_table, "_N_KNOWN_MAX", 1)
    assert known.get(other).key != first.key
    assert known.get(one) is not first


def test_a_push_of_several_parts_is_one_push_once_all_are_there() -> None:
    """The clock counts the parts: pushes of two machines were told as twice as many."""
    first, second = held((0, 40)), held((40, 64))
    steps, _ = counted([WHOLE, first, first, second])
    assert steps.n_pushes == 2
    steps.add(second)
    assert steps.n_pushes == 3
    again = StepCounts.read(steps.to_wire(), size=SIZE)
    assert again.n_pushes == 3
