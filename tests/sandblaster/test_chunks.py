"""Division of a batch into chunks, and the order of the data."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from distbelief.core.errors import JobError
from distbelief.protocol import GroupChunk
from distbelief.task.data import Samples
from distbelief.worker.local_executor import summed
from sandblaster.chunks import ChunkSizes
from sandblaster.group_tasks import ChunkBatchPlan


def chunk(start: int, stop: int, *, attempt: int = 1) -> GroupChunk:
    return GroupChunk(
        series=1, evaluation=1, versions=(), attempt=attempt, start=start, stop=stop, keeps=()
    )


def attempt_of(plan: ChunkBatchPlan) -> int | None:
    return None if plan.chunk is None else plan.chunk.attempt


cuttings = st.builds(
    ChunkSizes, mini_batch_size=st.integers(1, 9), mini_batches_per_chunk=st.integers(1, 5)
)


@given(chunk_sizes=cuttings, n_examples=st.integers(1, 60))
def test_every_position_is_in_one_mini_batch_of_one_chunk(
    chunk_sizes: ChunkSizes, n_examples: int
) -> None:
    positions: list[int] = []
    for chunk_index in range(chunk_sizes.n_chunks(n_examples)):
        start, stop = chunk_sizes.chunk_bounds(chunk_index, n_examples)
        plan = ChunkBatchPlan(Samples(60), mini_batch_size=chunk_sizes.mini_batch_size)
        plan.set_chunk(1, chunk(start, stop))
        plan.start(start)
        mini_batches = [plan.bounds(step) for step in range(plan.n_steps(start, stop))]
        assert len(mini_batches) <= chunk_sizes.mini_batches_per_chunk
        for begin, end in mini_batches:
            assert 0 < end - begin <= chunk_sizes.mini_batch_size
            positions += range(begin, end)
    assert positions == list(range(n_examples))


@pytest.mark.parametrize("chunk_index", [-1, 3])
def test_a_batch_has_no_other_chunks(chunk_index: int) -> None:
    chunk_sizes = ChunkSizes(mini_batch_size=2, mini_batches_per_chunk=2)
    with pytest.raises(ValueError, match="of a batch of 11 examples, which has 3"):
        chunk_sizes.chunk_bounds(chunk_index, 11)


@pytest.mark.parametrize("name", ["mini_batch_size", "mini_batches_per_chunk"])
def test_a_mini_batch_is_never_empty(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; use at least 1"):
        ChunkSizes(**{"mini_batch_size": 1, name: 0})


def test_the_order_of_the_data_is_fixed_and_circular() -> None:
    samples = Samples(7, seed=3)
    one_round = samples.at(0, 7)
    assert sorted(one_round) == list(range(7))
    assert np.array_equal(samples.at(5, 9), [*one_round[5:], *one_round[:2]])
    assert np.array_equal(Samples(7, seed=3).at(14, 21), one_round)
    assert np.array_equal(Samples(7).at(6, 9), [6, 0, 1])


def test_a_batch_of_no_data_is_refused() -> None:
    with pytest.raises(JobError, match="has 0 samples"):
        Samples(0)


def test_a_summed_loss_is_the_mean_times_the_number_of_samples() -> None:
    outputs, targets = torch.randn(5, 3), torch.randn(5, 3)
    total = summed(functional.mse_loss)(outputs, targets)
    assert torch.equal(total, functional.mse_loss(outputs, targets) * 5)


def test_a_chunk_is_computed_by_mini_batches() -> None:
    plan = ChunkBatchPlan(Samples(10), mini_batch_size=3)
    assert plan.n_steps(7, 15) == 3
    plan.set_chunk(1, chunk(7, 15))
    assert not len(plan.batch(0).indices)  # the generation has not begun
    plan.start(7)
    assert plan.chunk is not None
    portions = [plan.batch(step) for step in range(4)]
    assert [portion.position for portion in portions] == [7, 0, 3, 5]
    assert [list(portion.indices) for portion in portions] == [[7, 8, 9], [0, 1, 2], [3, 4], []]
    assert [plan.is_last(step) for step in range(4)] == [False, False, True, False]


def test_late_messages_of_older_incarnations_change_nothing() -> None:
    plan = ChunkBatchPlan(Samples(10, seed=3), mini_batch_size=3)
    plan.set_chunk(5, chunk(0, 3, attempt=2))
    plan.set_chunk(4, chunk(0, 3, attempt=1))
    plan.start(0)
    assert attempt_of(plan) == 2
    plan.set_chunk(6, None)
    plan.start(0)
    assert attempt_of(plan) is None
    assert not plan.is_last(0)
    np.testing.assert_array_equal(plan.batch(0).indices, [])
