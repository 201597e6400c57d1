"""OWL-QN against the split problem, whose bounds scipy handles."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController  # of scikit-learn

from sandblaster.optimizers.owlqn import OWLQN
from tests.sandblaster.local import minimize_flat
from tests.sandblaster.optimizers.problems import Logistic


Doubles = NDArray[np.float64]


def split(problem: Logistic, l1: float) -> Doubles:
    """Minimise f(u - v) + l1 (u + v) over u, v >= 0."""
    d = problem.inputs.shape[1]

    def whole(uv: Doubles) -> tuple[float, Doubles]:
        loss, gradient = problem(uv[:d] - uv[d:])
        return loss + l1 * float(uv.sum()), np.concatenate([gradient, -gradient]) + l1

    with ThreadpoolController().limit(limits=1):
        found = minimize(
            whole,
            np.zeros(2 * d),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, None)] * (2 * d),
            options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 5000},
        )
    return np.asarray(found.x[:d] - found.x[d:])


@pytest.mark.each_value
@pytest.mark.parametrize("l1", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("n_shards", [1, 3])
def test_the_minimum_is_that_of_the_split_problem(l1: float, n_shards: int) -> None:
    problem = Logistic.made(200, 30, condition=3.0, l2=1e-3)
    expected = split(problem, l1)
    best = problem(expected)[0] + l1 * np.abs(expected).sum()
    x, result = minimize_flat(problem, np.zeros(30), OWLQN(l1=l1), n_shards=n_shards)
    assert result.reason.converged
    assert result.loss == pytest.approx(problem(x)[0] + l1 * np.abs(x).sum())
    assert result.loss == pytest.approx(best, rel=1e-6)
    np.testing.assert_allclose(x, expected, atol=1e-2)


def test_parameters_that_do_not_pay_are_exactly_zero() -> None:
    problem = Logistic.made(200, 30)
    expected = split(problem, 0.05)
    x, _ = minimize_flat(problem, np.full(30, 0.3), OWLQN(l1=0.05), n_shards=2)
    assert 0 < np.count_nonzero(x) < 30
    np.testing.assert_array_equal(x == 0.0, np.abs(expected) < 1e-6)


def test_a_penalty_beyond_every_gradient_leaves_nothing() -> None:
    problem = Logistic.made(100, 5)
    l1 = 1.01 * float(np.abs(problem(np.zeros(5))[1]).max())
    x, result = minimize_flat(problem, np.ones(5), OWLQN(l1=l1))
    assert result.reason.converged
    np.testing.assert_array_equal(x, np.zeros(5))


def test_l1_and_l2_together_are_an_elastic_net() -> None:
    inside = Logistic.made(200, 10, l2=0.1)
    outside = Logistic(inside.inputs, inside.labels)
    x, _ = minimize_flat(outside, np.zeros(10), OWLQN(l1=0.02, l2=0.1), n_shards=2)
    np.testing.assert_allclose(x, split(inside, 0.02), atol=1e-3)
