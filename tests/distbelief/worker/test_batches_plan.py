"""Batch plans: the number of steps from one position to another."""

from itertools import chain

import numpy as np
import pytest

from distbelief.core.spans import Epochs
from distbelief.task.data import DataShard, Indices, dealt_samples
from distbelief.worker.batches import DealtBatch, DealtPlan, TrainingPlan


@pytest.mark.parametrize("n_samples", [7, 8, 9, 12, 13])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_steps_are_counted_as_they_are_taken(n_samples: int, batch_size: int) -> None:
    shard = DataShard(n_samples, replica_index=0, n_replicas=1, seed=0)
    plan = TrainingPlan(shard, batch_size=batch_size)
    plan.start(0)
    places = [plan.batch(step).position for step in range(20)]
    for first in (0, 2, 5):
        for last in (first, first + 1, 19):
            found = plan.n_steps(places[first], places[last])
            assert found == last - first


@pytest.mark.parametrize("n_samples", [7, 8, 9, 13])
@pytest.mark.parametrize("batch_size", [1, 4, 20])
def test_steps_to_a_position_within_a_batch_take_the_whole_batch(
    n_samples: int, batch_size: int
) -> None:
    shard = DataShard(n_samples, replica_index=0, n_replicas=1, seed=0)
    for start in (0, 2, 5, 11):
        plan = TrainingPlan(shard, batch_size=batch_size)
        plan.start(start)
        stops = [plan.batch(step).stop for step in range(60)]
        for stop in range(start - 1, start + 50):
            n_steps = sum(end < stop for end in [start, *stops])
            assert plan.n_steps(start, stop) == n_steps


# ----------------------------------------------------------------------- dealt samples


EPOCHS = Epochs(n_samples=20, batch_size=3, n_push=2)


def dealt_plan(*ranges: tuple[int, int]) -> DealtPlan:
    plan = DealtPlan(EPOCHS, seed=1)
    plan.start(100)
    plan.take(ranges, n_before=0)
    return plan


def test_dealt_ranges_are_read_in_batches_of_whole_pushes() -> None:
    plan = dealt_plan((0, 6), (12, 20))
    batches = [plan.batch(step) for step in range(plan.n_dealt)]
    assert [len(batch.indices) for batch in batches] == [3, 3, 3, 3, 2]
    assert [batch.position for batch in batches] == [100, 103, 106, 109, 112]
    assert [batch.dealt for batch in batches] == [
        DealtBatch(push=(0, 6), stop=3, ends_push=False, ends_range=False),
        DealtBatch(push=(0, 6), stop=6, ends_push=True, ends_range=True),
        DealtBatch(push=(12, 18), stop=15, ends_push=False, ends_range=False),
        DealtBatch(push=(12, 18), stop=18, ends_push=True, ends_range=False),
        DealtBatch(push=(18, 20), stop=20, ends_push=True, ends_range=True),
    ]
    assert plan.is_read
    assert len(plan.batch(5).indices) == 0


def test_whoever_reads_a_position_reads_the_same_sample() -> None:
    whole = dealt_samples(0, 20, n_samples=20, seed=1)
    parts = [dealt_plan((start, start + 6)) for start in (0, 6)]
    found = [plan.batch(step).indices for plan in parts for step in range(2)]
    assert np.concatenate(found).tolist() == whole[:12].tolist()
    assert sorted(whole) == list(range(20))
    after = dealt_samples(20, 40, n_samples=20, seed=1)
    assert sorted(after) == list(range(20))
    assert after.tolist() != whole.tolist()  # another epoch, another order


def test_samples_of_a_range_are_looked_up_at_once() -> None:
    """To look up the samples of each batch took a sixth of the time of a small model."""
    asked: list[tuple[int, list[int]]] = []

    def order(epoch: int, positions: Indices, _: int) -> Indices:
        asked.append((epoch, positions.tolist()))
        return positions[::-1].copy()

    plan = DealtPlan(EPOCHS, seed=1, order=order)
    plan.take([(6, 18), (18, 26)], n_before=0)
    plan.start(0)
    found = [plan.batch(step).indices.tolist() for step in range(plan.n_dealt)]
    assert asked == [(0, [*range(6, 18)]), (0, [18, 19]), (1, [*range(6)])]
    assert [*chain(*found)] == [*range(17, 5, -1), 19, 18, *range(5, -1, -1)]


def test_a_message_that_is_repeated_deals_nothing_twice() -> None:
    plan = dealt_plan((0, 6))
    plan.take([(12, 18)], n_before=2)  # the message before it is lost
    assert plan.n_ranges == 1
    plan.take([(0, 6), (6, 12), (12, 18)], n_before=0)
    plan.take([(6, 12)], n_before=1)
    assert (plan.n_ranges, plan.n_dealt) == (3, 6)


def test_a_generation_begins_anew_with_what_one_rank_has_not_pushed() -> None:
    leader, rank = dealt_plan((0, 6), (12, 20)), DealtPlan(EPOCHS, seed=1)
    for step in range(4):
        leader.batch(step)
    leader.restart(9)
    leader.start(115)
    rank.follow(leader.from_step(0))
    rank.start(115)
    assert (leader.n_ranges, leader.n_gone, leader.n_dealt) == (2, 1, 2)
    for plan in (leader, rank):
        batches = [plan.batch(step) for step in range(2)]
        assert [batch.dealt for batch in batches] == [
            DealtBatch(push=(15, 18), stop=18, ends_push=True, ends_range=False),
            DealtBatch(push=(18, 20), stop=20, ends_push=True, ends_range=True),
        ]
        assert batches[0].position == 115
    leader.take([(20, 26)], n_before=2)
    assert leader.from_step(1).n_before == 1  # the range of the last step, and the new one
    assert len(rank.batch(2).indices) == 0  # it has not been told
    told = leader.from_step(2)
    rank.take(told.ranges, n_before=told.n_before)
    assert rank.batch(2).indices.tolist() == leader.batch(2).indices.tolist() != []


# ----------------------------------------------------------------------- a look ahead


def test_a_look_ahead_changes_neither_batches_nor_what_counts_as_read() -> None:
    """A replica tells that it has read its ranges when it asks for the last batch of them."""
    plan, other = (dealt_plan((0, 6), (12, 20)) for _ in range(2))
    for step in range(12):
        ahead = [other.peek(step + k).indices.tolist() for k in range(1, 5)]
        assert plan.is_read == other.is_read
        one, two = plan.batch(step), other.batch(step)
        assert (one.position, one.dealt, one.epoch) == (two.position, two.dealt, two.epoch)
        assert one.indices.tolist() == two.indices.tolist()
        assert plan.is_read == other.is_read == (step in {4, 5, 6} or step >= 8)
        if step == 6:
            for each in (plan, other):
                each.take([(20, 32)], n_before=2)
            continue
        assert ahead == [other.peek(step + k).indices.tolist() for k in range(1, 5)]


def test_batches_that_were_looked_at_are_those_that_come() -> None:
    shard = DataShard(13, replica_index=0, n_replicas=1, seed=0)
    plan, other = (TrainingPlan(shard, batch_size=4) for _ in range(2))
    for start in (0, 5):
        plan.start(start)
        other.start(start)
        for step in range(20):
            ahead = [other.peek(step + k) for k in range(9)]
            assert other.batch(step) is ahead[0]
            assert plan.batch(step).indices.tolist() == ahead[0].indices.tolist()
            assert plan.batch(step).position == ahead[0].position
