"""Steps of a life: how many there are from one position to another."""

import pytest

from distbelief.data.subset import DataShard
from distbelief.runtime.machine.course import TrainingCourse


@pytest.mark.parametrize("n_samples", [7, 8, 9, 12, 13])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_steps_are_counted_as_they_are_taken(n_samples: int, batch_size: int) -> None:
    shard = DataShard(n_samples, replica_index=0, n_replicas=1, seed=0)
    course = TrainingCourse(shard, batch_size=batch_size)
    course.start(0)
    places = [course.batch(step).position for step in range(20)]
    for first in (0, 2, 5):
        for last in (first, first + 1, 19):
            found = course.n_steps(places[first], places[last])
            assert found == last - first
