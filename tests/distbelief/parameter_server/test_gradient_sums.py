"""Gradient sums of chunks, staged and committed into one tree."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.parameter_server.gradient_sums import GradientSums
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.slices import ShardSlice


N_ELEMENTS, N_GRADIENT = 80, 64
WHOLE = ShardSlice(N_ELEMENTS, dtype=np.dtype(np.float32))


def collecting(*, n_staged_max: int = 64) -> GradientSums:
    sums = GradientSums(n_elements=N_ELEMENTS, n_gradient=N_GRADIENT, dtype=np.dtype(np.float32))
    sums.open(first_commit_token=10, n_staged_max=n_staged_max)
    return sums


def pushed(seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=N_ELEMENTS).astype(np.float32)


def wants(sums: GradientSums, commit_token: int) -> bool:
    return sums.wants(pushed(commit_token), commit_token=commit_token, shard_slice=WHOLE)


def stage(sums: GradientSums, commit_token: int, *, n_examples: int = 3) -> None:
    assert wants(sums, commit_token)
    values = pushed(commit_token)
    sums.stage_work(values, commit_token=commit_token, n_examples=n_examples, shard_slice=WHOLE)()


def whole_subtrees(vectors: list[Vector]) -> Vector:
    """Return the sum by the rule of the module, written as recursion."""
    n = len(vectors)
    if n == 1:
        return vectors[0]
    size = 1 << ((n - 1).bit_length() - 1)  # of the largest proper whole subtree
    if size * 2 == n:
        return whole_subtrees(vectors[:size]) + whole_subtrees(vectors[size:])
    total, begin = None, 0
    while begin < n:
        size = 1 << ((n - begin).bit_length() - 1)
        part = whole_subtrees(vectors[begin : begin + size])
        total = part if total is None else total + part
        begin += size
    assert total is not None
    return total


@given(order=st.integers(1, 21).flatmap(lambda n: st.permutations(range(n))))
def test_the_sum_has_the_same_bits_in_every_order(order: list[int]) -> None:
    sums, n = collecting(), len(order)
    for chunk_index in order:
        stage(sums, 10 + chunk_index)
        sums.commit(chunk_index, 10 + chunk_index)
    expected = whole_subtrees([pushed(10 + index) for index in range(n)])
    total = sums.total()
    assert total is not None
    assert total[:N_GRADIENT].tobytes() == expected[:N_GRADIENT].tobytes()
    assert total[N_GRADIENT:].tobytes() == pushed(10 + n - 1)[N_GRADIENT:].tobytes()
    assert (sums.n_committed, sums.n_examples) == (n, 3 * n)


@given(order=st.permutations(range(32)))
def test_memory_is_bounded_by_half_the_chunks_and_their_logarithm(order: list[int]) -> None:
    sums, most = collecting(), 0
    for chunk_index in order:
        stage(sums, 10 + chunk_index)
        sums.commit(chunk_index, 10 + chunk_index)
        most = max(most, sums.n_vectors)
    assert most <= 16 + 5 + 1


def test_in_order_the_memory_is_the_logarithm() -> None:
    sums = collecting(n_staged_max=1)
    for chunk_index in range(64):
        stage(sums, 10 + chunk_index)
        sums.commit(chunk_index, 10 + chunk_index)
    assert sums.n_vectors <= 7


def test_nothing_is_not_a_sum() -> None:
    assert collecting().total() is None


@pytest.mark.parametrize(
    ("commit_token", "why"),
    [(9, "of another evaluation"), (12, "void"), (10, "staged"), (11, "counted")],
)
def test_what_does_not_count_is_not_staged(commit_token: int, why: str) -> None:
    sums = collecting()
    stage(sums, 10)
    stage(sums, 11)
    sums.commit(0, 11)
    sums.forget([12])
    assert not wants(sums, commit_token), why
    assert sums.n_refused == 1


def test_no_more_is_staged_than_was_agreed() -> None:
    sums = collecting(n_staged_max=2)
    stage(sums, 10)
    stage(sums, 11)
    assert not wants(sums, 12)
    sums.forget([10])
    assert wants(sums, 12)


def test_nothing_is_staged_before_and_after_an_evaluation() -> None:
    sums = collecting()
    stage(sums, 10)
    sums.close()
    assert not wants(sums, 11)
    sums.open(first_commit_token=20, n_staged_max=4)
    assert sums.n_committed == sums.n_examples == sums.digest == 0
    assert not wants(sums, 11)
    assert wants(sums, 20)


def test_a_part_of_a_gradient_or_another_type_is_not_staged() -> None:
    sums = collecting()
    assert not sums.wants(pushed(1)[:40], commit_token=10, shard_slice=WHOLE)
    assert not sums.wants(pushed(1).astype(np.float64), commit_token=10, shard_slice=WHOLE)
    assert sums.n_refused == 2


def test_a_chunk_that_is_not_staged_or_is_committed_cannot_be_committed() -> None:
    sums = collecting()
    stage(sums, 10)
    sums.check([(0, 10)])
    with pytest.raises(RemoteProtocolError, match="with token 11: this shard has"):
        sums.check([(0, 10), (1, 11)])
    sums.commit(0, 10)
    stage(sums, 12)
    with pytest.raises(RemoteProtocolError, match="committed with token 10"):
        sums.check([(0, 12)])


# ------------------------------------------------------------------------------- parts

LAYOUT = Layout.of(
    [TensorSpec(name="w", shape=(8, 8)), TensorSpec(name="z", shape=(16,), kind="buffer")],
    n_shards=1,
)
COLUMNS = [((0, 8), (0, 3)), ((0, 8), (3, 8))]


def parts() -> list[ShardSlice]:
    """What two machines hold: some columns each, and half of the buffer."""
    return [
        PartialView(LAYOUT, [("w", Region(columns)), ("z", Region(((8 * m, 8 * m + 8),)))]).slices[
            0
        ]
        for m, columns in enumerate(COLUMNS)
    ]


def stage_part(sums: GradientSums, part: ShardSlice, whole: Vector, *, commit_token: int) -> None:
    values = np.concatenate([part.block(whole, k) for k in range(len(part.bounds))])
    assert sums.wants(values, commit_token=commit_token, shard_slice=part)
    sums.stage_work(values, commit_token=commit_token, n_examples=3, shard_slice=part)()


@pytest.mark.parametrize("first", [0, 1])
def test_parts_of_a_chunk_are_put_together(first: int) -> None:
    sums = collecting()
    whole = pushed(1)
    stage(sums, 12)
    sums.forget([12])  # whose memory is used again
    for part in (parts()[first], parts()[1 - first]):
        stage_part(sums, part, whole, commit_token=10)
    sums.commit(0, 10)
    assert (sums.n_committed, sums.n_examples, sums.digest) == (1, 3, 10)
    np.testing.assert_array_equal(sums.total(), whole)


def test_what_no_part_has_is_zero_and_buffers_stay_as_they_are() -> None:
    sums, part, whole = collecting(), parts()[1], pushed(1)
    values = np.concatenate([part.block(whole, k) for k in range(len(part.bounds))])
    buffers = np.arange(16, dtype=np.float32)
    sums.stage_work(values, commit_token=10, n_examples=3, shard_slice=part, buffers=buffers)()
    sums.commit(0, 10)
    total = sums.total()
    assert total is not None
    np.testing.assert_array_equal(total[:64].reshape(8, 8)[:, :3], 0.0)
    np.testing.assert_array_equal(total[64:72], buffers[:8])
    np.testing.assert_array_equal(total[72:], whole[72:])


def test_a_part_counts_once_and_none_is_added_to_a_whole_push() -> None:
    sums, (one, other), whole = collecting(), parts(), pushed(1)
    stage_part(sums, one, whole, commit_token=10)
    values = np.zeros(one.n_elements, np.float32)
    assert not sums.wants(values, commit_token=10, shard_slice=one)
    assert not sums.wants(whole, commit_token=10, shard_slice=WHOLE)
    stage(sums, 11)
    assert not sums.wants(values, commit_token=11, shard_slice=one)
    stage_part(sums, other, whole, commit_token=10)  # the first is there all the same
    sums.check([(0, 10), (1, 11)])


def test_if_one_part_is_refused_so_are_the_others() -> None:
    sums, (one, other), whole = collecting(n_staged_max=1), parts(), pushed(1)
    stage_part(sums, one, whole, commit_token=10)
    values = np.zeros(one.n_elements, np.float32)
    assert not sums.wants(values, commit_token=11, shard_slice=one)  # one too many
    sums.forget([10])  # now there would be room
    values = np.zeros(other.n_elements, np.float32)
    assert not sums.wants(values, commit_token=11, shard_slice=other)
    with pytest.raises(RemoteProtocolError, match="with token 11: this shard has"):
        sums.check([(0, 11)])
