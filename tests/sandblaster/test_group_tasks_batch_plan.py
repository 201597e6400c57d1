"""Samples of each generation of a model-parallel replica."""

import numpy as np
import pytest

from distbelief.data import Samples
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import ChunkOrder
from sandblaster.group_tasks import ChunkBatchPlan


def order(start: int, stop: int, *, attempt: int = 1) -> ChunkOrder:
    return ChunkOrder(
        epoch=1, evaluation=1, versions=(), attempt=attempt, start=start, stop=stop, keeps=()
    )


def attempt_of(course: ChunkBatchPlan) -> int | None:
    return None if course.order is None else course.order.attempt


def test_a_chunk_is_computed_by_mini_batches() -> None:
    course = ChunkBatchPlan(Samples(10), mini_batch_size=3)
    assert course.n_steps(7, 15) == 3
    course.set_order(1, order(7, 15))
    assert not len(course.batch(0).indices)  # the generation has not begun
    course.start(7)
    assert course.order is not None
    portions = [course.batch(step) for step in range(4)]
    assert [portion.position for portion in portions] == [7, 0, 3, 5]
    assert [list(portion.indices) for portion in portions] == [[7, 8, 9], [0, 1, 2], [3, 4], []]
    assert [course.is_last(step) for step in range(4)] == [False, False, True, False]


def test_late_messages_of_older_incarnations_change_nothing() -> None:
    course = ChunkBatchPlan(Samples(10, seed=3), mini_batch_size=3)
    course.set_order(5, order(0, 3, attempt=2))
    course.set_order(4, order(0, 3, attempt=1))
    course.start(0)
    assert attempt_of(course) == 2
    course.set_order(6, None)
    course.start(0)
    assert attempt_of(course) is None
    assert not course.is_last(0)
    np.testing.assert_array_equal(course.batch(0).indices, [])


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (0, 1 << 62)])
def test_an_invalid_chunk_is_rejected(start: int, stop: int) -> None:
    course = ChunkBatchPlan(Samples(10), mini_batch_size=3)
    with pytest.raises(RemoteProtocolError, match=f"invalid chunk: positions {start} to {stop} of"):
        course.set_order(1, order(start, stop))
