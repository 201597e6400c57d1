"""ST-1: no variable of a round depends by more than the bound on those of other blocks."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import sparse

from sandblaster.strads import plan
from sandblaster.strads.columns import Columns


def sizes_of(n: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    half = np.triu(generator.random((n, n)) * (generator.random((n, n)) < 0.4), 1)
    return half + half.T + np.eye(n)


def interference(sizes: np.ndarray, blocks: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    together = (rounds[:, None] == rounds) & (blocks[:, None] != blocks)
    return np.asarray((sizes * together).sum(axis=1))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), n_blocks=st.integers(1, 5), seed=st.integers(0, 99))
def test_st1_no_sum_of_interference_in_a_round_is_above_the_bound(
    n: int, n_blocks: int, seed: int
) -> None:
    sizes, blocks = sizes_of(n, seed), np.arange(n) % n_blocks
    rounds = plan.rounds(sparse.csr_array(sizes), blocks, 0.8, np.full(n, -1))
    assert (rounds >= 0).all()
    assert (interference(sizes, blocks, rounds) <= 0.8 + 1e-12).all()


def test_st1_variables_of_one_block_need_one_round() -> None:
    rounds = plan.rounds(
        sparse.csr_array(np.ones((5, 5))), np.zeros(5, np.int64), 0.1, np.full(5, -1)
    )
    assert rounds.tolist() == [0] * 5


def test_st1_dependent_variables_of_two_blocks_are_kept_apart() -> None:
    sizes = np.eye(4)
    sizes[0, 2] = sizes[2, 0] = 0.9  # 0 and 1 are of the first block
    rounds = plan.rounds(sparse.csr_array(sizes), np.array([0, 0, 1, 1]), 0.1, np.full(4, -1))
    assert rounds.tolist() == [0, 0, 1, 0]


def test_variables_stay_in_their_rounds_when_others_come() -> None:
    sizes, blocks = sizes_of(20, 5), np.arange(20) % 3
    before = plan.rounds(sparse.csr_array(sizes), blocks, 0.5, np.full(20, -1))
    before[[3, 8, 14]] = -1
    rounds = plan.rounds(sparse.csr_array(sizes), blocks, 0.5, before)
    kept = before >= 0
    assert (rounds[kept] == before[kept]).all()
    assert (interference(sizes, blocks, rounds) <= 0.5 + 1e-12).all()


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_correlations_are_those_of_numpy(share: float, *, centred: bool) -> None:
    generator = np.random.default_rng(4)
    x = generator.standard_normal((80, 7)) + 0.5
    x[generator.random(x.shape) > share] = 0.0
    columns = Columns.of(sparse.csc_array(x), range(7), centred=centred)
    moved = x - x.mean(axis=0) if centred else x
    lengths = np.linalg.norm(moved, axis=0)
    lengths[lengths == 0.0] = np.inf
    expected = np.abs(moved.T @ moved / np.outer(lengths, lengths))
    np.testing.assert_allclose(plan.correlations(columns).toarray(), expected, atol=1e-12)
