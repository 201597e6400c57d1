"""Batch plans: the number of steps from one position to another."""

import pytest

from distbelief.data import DataShard
from distbelief.worker.batches import TrainingPlan


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
