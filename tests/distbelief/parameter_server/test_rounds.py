"""Rounds in which clients push parts of a shard."""

import numpy as np
import pytest

from distbelief.core.vectors import Vector
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.slices import IndexRanges, ShardSlice
from distbelief.parameter_server.store import RoundSum


N = 192
FLOATS = np.dtype(np.float32)


def part(*ends: tuple[int, int]) -> ShardSlice:
    ranges = IndexRanges.union(IndexRanges.whole(start, stop) for start, stop in ends)
    return ShardSlice(N, dtype=FLOATS, ranges=ranges)


@pytest.mark.parametrize(
    "parts",
    [
        [part((0, 64)), part((0, 64))],
        [part((0, 64), (128, 192)), part((64, 192))],
        [part((0, 192)), part((64, 128)), part((0, 64))],
    ],
)
def test_parts_of_one_round_may_overlap(parts: list[ShardSlice]) -> None:
    """Two replicas split alike, in a round: their shards ended with "ranges overlap"."""
    policy = ExchangePolicy(round=Round(quorum=0.5), weight="mean")
    rounds = RoundSum(N, n_gradient=N, dtype=FLOATS, policy=policy)
    total, counts = np.zeros(N, FLOATS), np.zeros(N)
    for value, one in enumerate(parts, 1):
        pushed: Vector = np.full(one.n_elements, value, FLOATS)
        rounds.add_work(pushed, shard_slice=one, touched=one, weight=1.0)()
        spread = np.zeros(N, FLOATS)
        one.scatter(pushed, spread)
        total, counts = total + spread, counts + (spread > 0)
    rounds.finish()
    assert rounds.touched is not None
    assert (rounds.touched.mask(np.arange(N + 1)) == (counts > 0)).all()
    np.testing.assert_array_equal(rounds.total, total / np.maximum(counts, 1))


@pytest.mark.parametrize("held", [ShardSlice(N, dtype=FLOATS), part((32, 96), (128, 192))])
def test_a_push_of_a_round_may_change_some_of_what_its_client_holds(held: ShardSlice) -> None:
    """What it does not change counts neither in the sum nor in the weights."""
    policy = ExchangePolicy(round=Round(quorum=0.5), weight="mean")
    rounds = RoundSum(N, n_gradient=N, dtype=FLOATS, policy=policy)
    whole = np.arange(N, dtype=FLOATS)
    ranges = part((48, 64), (160, 170))
    numbers: Vector = whole if held.ranges is None else whole[held.ranges.mask(np.arange(N + 1))]
    rounds.add_work(numbers, shard_slice=held, touched=ranges, weight=2.0)()
    rounds.finish()
    expected = np.zeros(N, FLOATS)
    for start, stop in ((48, 64), (160, 170)):
        expected[start:stop] = whole[start:stop]
    np.testing.assert_array_equal(rounds.total, expected)
