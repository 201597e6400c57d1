"""Staleness of partial pushes, against a count per element."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.parameter_server import push_handler
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.push_handler import PartialStaleness
from distbelief.parameter_server.slices import IndexRanges, ShardSlice


SIZE = 256
LAYOUT = Layout.of([TensorSpec(name="values", shape=(SIZE,))], n_shards=1)
WHOLE = ShardSlice.whole(LAYOUT, 0)
LEFT = ShardSlice.of(IndexRanges.whole(0, 128), LAYOUT)
RIGHT = ShardSlice.of(IndexRanges.whole(128, SIZE), LAYOUT)
MIDDLE = ShardSlice.of(IndexRanges.whole(64, 192), LAYOUT)
ENDS = ShardSlice.of(
    IndexRanges.union([IndexRanges.whole(0, 64), IndexRanges.whole(192, SIZE)]), LAYOUT
)
ALL = (WHOLE, LEFT, RIGHT, MIDDLE, ENDS)


def elements(shard_slice: ShardSlice) -> frozenset[int]:
    ranges = shard_slice.within(0, SIZE)
    spans = zip(ranges.starts.tolist(), ranges.stops.tolist(), strict=True)
    return frozenset(i for start, stop in spans for i in range(start, stop))


@given(st.lists(st.sampled_from(ALL), max_size=12), st.sampled_from(ALL), st.data())
def test_the_staleness_of_a_push_counts_the_pushes_of_its_elements(
    pushed: list[ShardSlice], mine: ShardSlice, data: st.DataObject
) -> None:
    fetched = data.draw(st.integers(0, len(pushed)))
    recent = PartialStaleness()
    for clock, shard_slice in enumerate(pushed):
        recent.add(shard_slice, clock=clock)
    since = [each for each in pushed[fetched:] if elements(each) & elements(mine)]
    found = recent.since(mine, fetched_clock=fetched, clock=len(pushed))
    assert found == len(since)


def test_one_blocking_replica_of_two_ranks_is_never_stale() -> None:
    """It said 0.5: the push of one half made the other half's stale."""
    recent = PartialStaleness()
    for step in range(4):
        for offset, half in enumerate((LEFT, RIGHT)):
            clock = 2 * step + offset
            assert recent.since(half, fetched_clock=2 * step, clock=clock) == 0
            recent.add(half, clock=clock)


def test_what_is_too_long_ago_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = PartialStaleness()
    n = push_handler._N_KEPT
    for clock in range(n + 10):
        recent.add(LEFT, clock=clock)
    assert recent.since(RIGHT, fetched_clock=0, clock=n + 10) == 10
    # Which clients share elements is not kept forever either.
    monkeypatch.setattr(push_handler, "_N_KNOWN_MAX", 1)
    assert recent.since(MIDDLE, fetched_clock=n, clock=n + 10) == 10
    assert recent.since(RIGHT, fetched_clock=n, clock=n + 10) == 0


def test_ranges_that_touch_do_not_overlap() -> None:
    one, other = IndexRanges.whole(0, 64), IndexRanges.whole(64, 128)
    assert not one.overlaps(other)
    assert one.overlaps(IndexRanges.whole(63, 64))
    nothing = IndexRanges.of(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert not one.overlaps(nothing)
    assert not nothing.overlaps(one)
