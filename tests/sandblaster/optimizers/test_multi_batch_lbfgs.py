"""Multi-batch L-BFGS: which examples it asks for, and where it arrives."""

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from sandblaster.optimizers.base import Examples
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.multi_batch_lbfgs import Batch, MultiBatchLBFGS, mean_loss
from sandblaster.optimizers.termination import Reason
from tests.sandblaster.local import Local, minimize_flat
from tests.sandblaster.optimizers.problems import Logistic


Doubles = NDArray[np.float64]


def test_batches_overlap_as_drawn() -> None:
    batch = Batch(start=100, size=10, n_tail=3)
    assert (batch.rest, batch.tail) == (Examples(100, 107), Examples(107, 110))
    following = batch.next()
    assert following == Batch(start=107, size=10, n_tail=3)
    assert (following.body, following.tail) == (Examples(110, 114), Examples(114, 117))
    parts = ((batch.rest, 1.0), (batch.tail, 2.0))
    assert mean_loss(parts) == pytest.approx(1.3)


@pytest.mark.parametrize("overlap", [0.01, 0.25, 0.5])
def test_every_example_of_a_batch_is_evaluated_once_per_trial(overlap: float) -> None:
    problem, seen = Logistic.made(100, 4), []

    def watched(x: Doubles, examples: Examples | None) -> tuple[float, Doubles, int]:
        assert examples is not None  # no batch's gradient is small
        seen.append(examples)
        return problem.of(x, examples)

    method = MultiBatchLBFGS(batch_size=20, overlap=overlap, n_iterations_max=30)
    result = Local(np.zeros(4), watched).run(method.steps())
    assert result.n_evaluations == len(seen)
    for rest, tail in zip(seen[0::2], seen[1::2], strict=True):
        assert rest.stop == tail.start  # two parts, one beside the other
    first = seen[0]
    assert seen[1].stop - first.start == 20
    starts = [part.start for part in seen]
    assert max(starts) > 100  # round and round
    for part, following in pairwise(seen):
        assert part.stop > part.start
        assert following.start <= part.stop


@pytest.mark.parametrize("n_shards", [1, 3])
def test_it_comes_near_the_minimum_of_the_whole(n_shards: int) -> None:
    problem = Logistic.made(2000, 20, condition=3.0)
    _, exact = minimize_flat(problem, np.zeros(20), LBFGS(l2=1e-2))
    method = MultiBatchLBFGS(batch_size=500, n_iterations_max=30, l2=1e-2)
    local = Local(np.zeros(20), problem.of, n_shards=n_shards)
    local.run(method.steps())
    x = local.get("parameters")
    assert problem(x)[0] + 0.5e-2 * x @ x <= 1.1 * exact.loss


def test_overlap_makes_better_steps() -> None:
    """The reason for the overlap: y of differing examples is noise."""
    problem = Logistic.made(2000, 20, condition=10.0, l2=1e-3)

    def end(overlap: float) -> float:
        method = MultiBatchLBFGS(batch_size=100, overlap=overlap, n_iterations_max=40)
        local = Local(np.zeros(20), problem.of)
        local.run(method.steps())
        return problem(local.get("parameters"))[0]

    assert end(0.5) < end(0.01)


def test_a_batch_of_everything_is_lbfgs() -> None:
    """With nothing new in the next batch, y is exact and so is the minimum."""
    problem = Logistic.made(60, 5, l2=1e-1)
    method = MultiBatchLBFGS(batch_size=60, overlap=0.5, gradient_tolerance=1e-6)
    local = Local(np.zeros(5), problem.of)
    assert local.run(method.steps()).reason is Reason.CONVERGED_GRADIENT
    expected, _ = minimize_flat(problem, np.zeros(5), LBFGS(gradient_tolerance=1e-8))
    np.testing.assert_allclose(local.get("parameters"), expected, atol=1e-4)


def test_a_point_where_the_next_batch_is_not_finite_is_not_moved_to() -> None:
    problem = Logistic.made(60, 3, l2=0.1)

    def walled(x: Doubles, examples: Examples | None) -> tuple[float, Doubles, int]:
        loss, gradient, n = problem.of(x, examples)
        assert examples is not None  # no batch's gradient is small
        beyond = examples.start >= 20 and np.linalg.norm(x) > 0.3
        return (math.nan if beyond else loss), gradient, n

    method = MultiBatchLBFGS(batch_size=20, n_iterations_max=10)
    local = Local(np.zeros(3), walled)
    result = local.run(method.steps())
    assert math.isfinite(result.loss)
    assert np.linalg.norm(local.get("parameters")) <= 0.3


@pytest.mark.parametrize("batch_size", [3, 5, 8, 12])
def test_a_batch_that_is_fitted_is_not_all_examples(batch_size: int) -> None:
    """Batches of 5 in 8 dimensions ended "converged", at a loss of 2.3 million.

    Each was fitted to the last bit, and so was the next one, by chance.
    """
    problem = Logistic.made(400, 8)
    method = MultiBatchLBFGS(batch_size=batch_size, n_evaluations_max=3000)
    local = Local(np.zeros(8), problem.of)
    result = local.run(method.steps())
    if result.reason.converged:
        _, gradient, _ = problem.of(local.get("parameters"), None)
        assert np.abs(gradient).max() <= method.gradient_tolerance
        assert np.abs(gradient).max() == pytest.approx(result.gradient_norm)


def test_the_gradient_of_all_is_asked_for_less_and_less_in_vain() -> None:
    """One example in 100 is not fitted: nearly every batch has a small gradient."""
    n_examples, asked = 100, []

    def nearly_flat(x: Doubles, examples: Examples | None) -> tuple[float, Doubles, int]:
        span = range(n_examples)
        if examples is None:
            asked.append(len(seen))
        else:
            span = range(examples.start, examples.stop)
        seen.append(examples)
        share = sum(k % n_examples == 60 for k in span) / len(span)
        return share * float(np.cosh(x[0] - 3.0)), share * np.sinh(x - 3.0), len(span)

    seen: list[Examples | None] = []
    method = MultiBatchLBFGS(batch_size=4, gradient_tolerance=1e-4)
    local = Local(np.zeros(1), nearly_flat)
    result = local.run(method.steps())
    assert result.reason is Reason.CONVERGED_GRADIENT
    assert local.get("parameters")[0] == pytest.approx(3.0, abs=1e-2)
    assert result.n_evaluations == len(seen)
    assert len(asked) ** 2 / 4 < len(seen)


def test_a_run_continues_after_batches_with_a_small_gradient() -> None:
    """Resumed from any savepoint it ends at the same point, to the bit."""
    problem = Logistic.made(60, 5)
    method = MultiBatchLBFGS(batch_size=6, n_iterations_max=25, gradient_tolerance=0.02)
    whole = Local(np.zeros(5), problem.of)
    end = whole.run(method.steps())
    assert end.iteration > 3
    for n in (1, end.iteration // 2, end.iteration - 1):
        first = Local(np.zeros(5), problem.of)
        cut = first.run(msgspec.structs.replace(method, n_iterations_max=n).steps())
        first.run(method.steps(cut.state))
        assert np.array_equal(first.get("parameters"), whole.get("parameters"))
