"""As good as scipy: what it solves is solved, with about as many evaluations.

`pytest -s tests/sandblaster/test_against_scipy.py` prints a row per problem.
"""

import functools
import sys
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from sandblaster.optimizers.base import Runnable
from sandblaster.optimizers.descent import ConjugateGradient, GradientDescent
from sandblaster.optimizers.lbfgs import LBFGS
from tests.sandblaster.local import minimize_flat
from tests.sandblaster.optimizers.more_garbow_hillstrom import PROBLEMS, Problem
from tests.sandblaster.optimizers.problems import Logistic, ScipyMethod, minimize_by_scipy


pytestmark = pytest.mark.untraced


Doubles = NDArray[np.float64]
DIGITS_SOLVED = 4
EVALUATIONS_OVER_SCIPY_MAX = 1.2

# Problems that take scipy's CG thousands of evaluations without solving them; and those
# that take it hundreds: too long for every day.
UNSOLVED_BY_CG = frozenset({"meyer", "osborne 1", "watson 9"})
LONG_FOR_CG = frozenset(
    {
        *("watson 6", "osborne 2", "gulf", "biggs", "boundary value", "wood"),
        *("penalty 1 4", "penalty 1 10", "penalty 2 10", "brown dennis"),
    }
)


N_STARTS = 4
"""Starts that differ in their last bits, where counts are compared: from eight such starts scipy's
CG takes 540 to 1323 evaluations for "watson 6", ours 566 to 1062; and 3452 to 4444 in sum."""


def start_of(problem: Problem, k: int) -> Doubles:
    return problem.x0 * (1.0 + 1e-15 * k) + 1e-16 * k


@functools.cache
def scipys(problem_index: int, name: ScipyMethod, k: int) -> tuple[int, float]:
    """Evaluations and digits of scipy's method."""
    problem = PROBLEMS[problem_index]
    found = minimize_by_scipy(problem, start_of(problem, k), name)
    return found.nfev, problem.digits(found.fun)


def compare(
    method: Runnable,
    scipy_name: ScipyMethod,
    *,
    n_shards: int,
    without: frozenset[str] = frozenset(),
    n_starts: int = 1,
) -> None:
    ours, theirs, lost = 0, 0, []
    for (index, problem), k in product(enumerate(PROBLEMS), range(n_starts)):
        if problem.name in without:
            continue
        n_scipy, digits_scipy = scipys(index, scipy_name, k)
        start = start_of(problem, k)
        _, result = minimize_flat(problem, start, method, n_shards=n_shards)
        digits = problem.digits(result.loss)
        sys.stdout.write(
            f"{problem.name:22} {scipy_name} {n_scipy:6} {digits_scipy:5.1f}   "
            f"ours {result.n_evaluations:6} {digits:5.1f} {result.reason.name}\n"
        )
        if digits_scipy >= DIGITS_SOLVED:
            ours += result.n_evaluations
            theirs += n_scipy
            lost += [problem.name] if digits < DIGITS_SOLVED else []
    sys.stdout.write(f"sum {scipy_name} {theirs}, ours {ours}: {ours / theirs:.3f} ({n_shards=})\n")
    assert lost == []
    assert ours <= EVALUATIONS_OVER_SCIPY_MAX * theirs


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "n_shards",
    [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(5, marks=pytest.mark.soak)],
)
def test_lbfgs_solves_what_scipy_solves_with_as_many_evaluations(n_shards: int) -> None:
    compare(LBFGS(), "L-BFGS-B", n_shards=n_shards)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_conjugate_gradients_solve_what_scipys_solve() -> None:
    compare(ConjugateGradient(), "CG", n_shards=2, without=UNSOLVED_BY_CG | LONG_FOR_CG)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n_shards", [1, 2, 5])
def test_conjugate_gradients_solve_all_that_scipys_solve(n_shards: int) -> None:
    compare(ConjugateGradient(), "CG", n_shards=n_shards, without=UNSOLVED_BY_CG, n_starts=N_STARTS)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_gradients_are_those_of_the_values(problem: Problem) -> None:
    rng = np.random.default_rng(0)
    direction = rng.normal(size=len(problem.x0))
    x = problem.x0 + 1e-2 * np.abs(problem.x0) * rng.normal(size=len(problem.x0))
    h = 1e-6 * max(1e-3, float(np.linalg.norm(x))) / float(np.linalg.norm(direction))
    value, gradient = problem(x)
    difference = (problem(x + h * direction)[0] - problem(x - h * direction)[0]) / 2 / h
    noise = 1e-15 * abs(value) / h
    assert difference == pytest.approx(gradient @ direction, rel=1e-4, abs=noise + 1e-8)


LOGISTIC: dict[str, Callable[[], Logistic]] = {
    "well conditioned": lambda: Logistic.made(300, 20, l2=1e-3),
    "ill conditioned": lambda: Logistic.made(300, 20, condition=10.0, l2=1e-3),
    "hardly regularised": lambda: Logistic.made(300, 20, condition=3.0, l2=1e-6),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", LOGISTIC)
@pytest.mark.parametrize("n_shards", [1, 2, 5])
def test_logistic_regression_takes_as_many_evaluations_as_scipy(name: str, n_shards: int) -> None:
    problem = LOGISTIC[name]()
    start = np.zeros(20)
    best = minimize_by_scipy(problem, start, "L-BFGS-B", exact=True).fun
    pairs: list[tuple[ScipyMethod, Runnable]] = [("L-BFGS-B", LBFGS()), ("CG", ConjugateGradient())]
    for scipy_name, method in pairs:
        theirs = minimize_by_scipy(problem, start, scipy_name)
        x, ours = minimize_flat(problem, start, method, n_shards=n_shards)
        assert ours.loss - best <= max(1e-4 * best, theirs.fun - best)
        assert ours.n_evaluations <= 1.2 * theirs.nfev + 2
        assert ours.loss == pytest.approx(problem(x)[0], rel=1e-12)


def test_l2_as_operations_is_l2_in_the_loss() -> None:
    """The penalty's value and gradient never leave the shards."""
    inside = Logistic.made(200, 10, condition=3.0, l2=0.05)
    outside = Logistic(inside.inputs, inside.labels)
    for method in (LBFGS(l2=0.05), ConjugateGradient(l2=0.05), GradientDescent(l2=0.05)):
        x, result = minimize_flat(outside, np.zeros(10), method, n_shards=3)
        expected = minimize_by_scipy(inside, np.zeros(10), "BFGS")
        assert result.loss == pytest.approx(expected.fun, rel=1e-6)
        np.testing.assert_allclose(x, expected.x, atol=1e-3)


def test_gradient_descent_is_slower_but_arrives() -> None:
    problem = Logistic.made(300, 20, condition=3.0, l2=1e-2)
    _, plain = minimize_flat(problem, np.zeros(20), GradientDescent())
    _, quasi_newton = minimize_flat(problem, np.zeros(20), LBFGS())
    assert plain.reason.converged
    assert plain.loss == pytest.approx(quasi_newton.loss, rel=1e-6)
    assert plain.n_evaluations >= quasi_newton.n_evaluations
