"""L-BFGS within bounds, against scipy's L-BFGS-B and against dense algebra."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from distbelief.core.vectors import Vector
from sandblaster.optimizers.base import GramMatrix, IterationDone
from sandblaster.optimizers.bounds import form_direction, minimum
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.line_search import Sample, WolfeConditions, more_thuente
from tests.sandblaster.local import Function, Local, minimize_flat
from tests.sandblaster.optimizers.more_garbow_hillstrom import PROBLEMS, Problem
from tests.sandblaster.optimizers.problems import Logistic, search_to_end


Doubles = NDArray[np.float64]
BOUNDED = LBFGS(bounds="of the test")
EVALUATIONS_OVER_SCIPY_MAX = 1.2


@dataclass(frozen=True)
class Case:
    function: Function
    x0: Doubles
    lower: Doubles
    upper: Doubles

    @property
    def bounds(self) -> tuple[Doubles, Doubles]:
        return self.lower, self.upper

    def by_scipy(self) -> tuple[float, Doubles, int]:
        def plain(x: Doubles) -> tuple[float, Doubles]:
            return self.function(x)

        with np.errstate(all="ignore"):
            found = minimize(
                plain,
                np.clip(self.x0, self.lower, self.upper),
                jac=True,
                method="L-BFGS-B",
                bounds=[*zip(self.lower.tolist(), self.upper.tolist(), strict=True)],
                options={"maxiter": 15000, "ftol": 2.2e-9, "gtol": 1e-5},
            )
        return float(found.fun), np.asarray(found.x), int(found.nfev)


def known(name: str) -> Problem:
    return next(one for one in PROBLEMS if one.name == name)


def within(function: Function, x0: Doubles, lower: float, upper: float) -> Case:
    return Case(function, x0, np.full(len(x0), lower), np.full(len(x0), upper))


def least_squares() -> Case:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(100, 50)) * np.geomspace(1.0, 10.0, 50)
    b = a @ np.maximum(rng.normal(size=50), 0.0) + rng.normal(size=100)

    def function(x: Doubles) -> tuple[float, Doubles]:
        rest = a @ x - b
        return float(rest @ rest) / 200.0, a.T @ rest / 100.0

    return within(function, np.zeros(50), 0.0, math.inf)


def network(bound: float) -> Case:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] - x[:, 1] + 0.5 * x[:, 2] ** 2 > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()

    def function(point: Doubles) -> tuple[float, Doubles]:
        vector_to_parameters(torch.tensor(point), net.parameters())
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss = loss + 1e-2 * sum((one**2).sum() for one in net.parameters())
        loss.backward()
        parts = [one.grad.reshape(-1) for one in net.parameters() if one.grad is not None]
        return loss.item(), torch.cat(parts).numpy()

    start = parameters_to_vector(net.parameters()).detach().numpy().copy()
    return within(function, start, -bound, bound)


def logistic(lower: float) -> Case:
    return within(Logistic.made(300, 20, condition=3.0, l2=1e-3), np.zeros(20), lower, math.inf)


CASES: Mapping[str, Callable[[], Case]] = {
    "rosenbrock": lambda: within(known("rosenbrock"), np.array([-1.2, 1.0]), -math.inf, 0.8),
    "beale": lambda: within(known("beale"), np.array([1.0, 1.0]), -1.0, 2.0),
    "logistic": lambda: logistic(0.0),
    "least squares": least_squares,
    "network": lambda: network(0.5),
    "rosenbrock, free": lambda: within(
        known("rosenbrock"), np.array([-1.2, 1.0]), -math.inf, math.inf
    ),
    "beale, free": lambda: within(known("beale"), np.array([1.0, 1.0]), -math.inf, math.inf),
    "logistic, free": lambda: logistic(-math.inf),
    "network, free": lambda: network(math.inf),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_shards", [2, pytest.param(5, marks=pytest.mark.soak)])
def test_the_minimum_is_scipys_with_as_many_evaluations(name: str, n_shards: int) -> None:
    """Counts of the network depend on its start, even where it ends at the same minimum."""
    whole, rng = CASES[name](), np.random.default_rng(0)
    ours, theirs = 0, 0
    for _ in range(3 if "network" in name else 1):
        case = replace(whole, x0=whole.x0 + 1e-6 * rng.normal(size=len(whole.x0)))
        best, point, n_scipy = case.by_scipy()
        x, result = minimize_flat(
            case.function, case.x0, BOUNDED, n_shards=n_shards, bounds=case.bounds
        )
        ours, theirs = ours + result.n_evaluations, theirs + n_scipy
        assert result.reason.converged
        assert np.all((case.lower <= x) & (x <= case.upper))
        assert result.loss == pytest.approx(best, rel=1e-5, abs=1e-9)
        assert result.loss == pytest.approx(case.function(x)[0], rel=1e-12)
        if "network" not in name:  # whose hidden units may change places
            np.testing.assert_allclose(x, point, atol=5e-3)
        at_bounds = (x == case.lower) | (x == case.upper)
        assert at_bounds.any() == ("free" not in name)
    assert ours <= EVALUATIONS_OVER_SCIPY_MAX * theirs + 1


def cut(problem: Problem, rng: np.random.Generator) -> Case:
    """Return the problem with bounds that cut off its minimum in a third of the elements."""
    x, _ = minimize_flat(problem, problem.x0, LBFGS())
    width = 0.5 * np.abs(x) + 0.1
    has_lower, has_upper = rng.random((2, len(x))) < 0.35
    lower = np.where(has_lower, x + 0.3 * width, -np.inf)
    upper = np.where(has_upper & ~has_lower, x - 0.3 * width, np.inf)
    return Case(problem, np.clip(problem.x0, lower, upper), lower, upper)


def test_it_does_not_stop_short_of_a_bound() -> None:
    """It crept to a bound by steps of 1e-5 and less, and had converged at 1.3 of the minimum.

    The projected step went beyond the bound in one element, and so hardly down in the others.
    """
    problem = known("penalty 2 4")
    lower = np.array([0.26, -0.055, -np.inf, -np.inf])
    case = Case(problem, np.full(4, 0.5), lower, np.full(4, np.inf))
    best, _, n_scipy = case.by_scipy()
    _, result = minimize_flat(problem, case.x0, BOUNDED, bounds=case.bounds)
    assert result.loss <= best * (1.0 + 1e-3)
    assert result.n_evaluations <= n_scipy


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_cut_problems_where_both_end_at_one_minimum_take_few_more_evaluations(seed: int) -> None:
    """1.09 and 1.05 times scipy's were counted; 1.31 and 1.20 where rounding fixed elements."""
    rng = np.random.default_rng(seed)
    ours, theirs = 0, 0
    for problem in PROBLEMS:
        case = cut(problem, rng)
        best, _, n_scipy = case.by_scipy()
        x, result = minimize_flat(problem, case.x0, BOUNDED, n_shards=2, bounds=case.bounds)
        assert np.all((case.lower <= x) & (x <= case.upper))
        if result.loss == pytest.approx(best, rel=1e-4, abs=1e-9):
            ours, theirs = ours + result.n_evaluations, theirs + n_scipy
    assert ours <= EVALUATIONS_OVER_SCIPY_MAX * theirs


def boxed(problem: Problem, rng: np.random.Generator) -> Case:
    """Return the problem with both bounds of each element, near its start or not."""
    x = np.asarray(problem.x0)
    size = np.abs(x) + 1.0
    widths = rng.uniform(0.05, 2.0, (2, len(x)))
    return Case(problem, x, x - size * widths[0], x + size * widths[1])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_boxed_problems_take_few_more_evaluations_and_end_no_higher(seed: int) -> None:
    """1.07 and 1.03 times scipy's were counted, of 1.12 and 1.22 by first steps of length 1."""
    rng = np.random.default_rng(seed)
    ours, theirs, higher, lower = 0, 0, 0, 0
    for problem in PROBLEMS:
        case = boxed(problem, rng)
        best, _, n_scipy = case.by_scipy()
        x, result = minimize_flat(problem, case.x0, BOUNDED, n_shards=2, bounds=case.bounds)
        assert np.all((case.lower <= x) & (x <= case.upper))
        if result.loss == pytest.approx(best, rel=1e-4, abs=1e-9):
            ours, theirs = ours + result.n_evaluations, theirs + n_scipy
        else:
            higher, lower = higher + (result.loss > best), lower + (result.loss < best)
    assert ours <= EVALUATIONS_OVER_SCIPY_MAX * theirs
    assert higher <= lower


def test_a_first_step_between_two_bounds_reaches_those_at_once() -> None:
    """Steps of length 1 took 29 evaluations to a corner that scipy finds in 4."""
    function = known("rosenbrock")
    case = within(function, np.array([-1.2, 1.0]), -2.0, 0.5)
    best, _, n_scipy = case.by_scipy()
    _, result = minimize_flat(function, case.x0, BOUNDED, n_shards=2, bounds=case.bounds)
    assert result.loss == pytest.approx(best)
    assert result.n_evaluations <= n_scipy


@pytest.mark.parametrize("seed", range(5))
def test_a_direction_is_the_models_minimum_over_free_elements(seed: int) -> None:
    """B by the dense BFGS update, from theta I."""
    rng = np.random.default_rng(seed)
    n, m = 9, 3
    curvature = rng.normal(size=(n, n))
    curvature = curvature @ curvature.T + np.eye(n)
    steps = rng.normal(size=(m, n))
    vectors = {"gradient": rng.normal(size=n)}
    for k, s in enumerate(steps):
        vectors |= {f"s{k}": s, f"y{k}": curvature @ s}
    history = [(f"s{k}", f"y{k}") for k in range(m)]
    last_s, last_y = vectors[history[-1][0]], vectors[history[-1][1]]
    dense = last_y @ last_y / (last_s @ last_y) * np.eye(n)
    for s, y in ((vectors[s], vectors[y]) for s, y in history):
        b_s = dense @ s
        dense = dense - np.outer(b_s, b_s) / (s @ b_s) + np.outer(y, y) / (y @ s)
    is_free = rng.random(n) < 0.6
    fixed = np.where(is_free, 0.0, rng.normal(size=n))

    names = tuple(vectors)
    whole, free = GramMatrix(), GramMatrix()
    whole.put(names, names, tuple(float(vectors[a] @ vectors[b]) for a in names for b in names))
    free.put(
        names,
        names,
        tuple(float((vectors[a] * is_free) @ vectors[b]) for a in names for b in names),
    )
    shift = {name: float(vector @ fixed) for name, vector in vectors.items()}
    found = sum(a * vectors[name] for name, a in minimum(history, whole, free, shift).items())
    pulled = vectors["gradient"] + dense @ fixed
    expected = -np.linalg.solve(dense[np.ix_(is_free, is_free)], pulled[is_free])
    np.testing.assert_allclose(np.asarray(found)[is_free], expected, rtol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_a_direction_fixes_only_what_is_out_of_bounds(seed: int) -> None:
    """Where x + d was rounded, an element counted as out of bounds.

    So all were fixed as soon as one was, and d was a mere projection, along which a loss may rise:
    runs "had converged" 6 % above the minimum.
    """
    rng = np.random.default_rng(seed)
    n = 6
    x, gradient, s = rng.normal(size=(3, n))
    y = rng.uniform(0.5, 2.0, n) * s
    lower = np.full(n, -np.inf)
    theta = y @ y / (s @ y)
    dense = theta * (np.eye(n) - np.outer(s, s) / (s @ s)) + np.outer(y, y) / (s @ y)
    out = int(np.argmin(np.linalg.solve(dense, -gradient)))
    lower[out] = x[out] + 0.1 * np.linalg.solve(dense, -gradient)[out]
    local = Local(x, known("beale"), n_shards=2, bounds=(lower, np.full(n, np.inf)))
    vectors = {"s0": s, "y0": y, "gradient": gradient}
    for name, vector in vectors.items():
        local.put(name, vector)
    gram = GramMatrix()
    gram.put(
        (*vectors,),
        (*vectors,),
        tuple(float(a @ b) for a in vectors.values() for b in vectors.values()),
    )
    local.perform(local.run(form_direction([("s0", "y0")], gram, ())))
    is_free = np.arange(n) != out
    pulled = gradient + dense[:, out] * (lower[out] - x[out])
    expected = np.full(n, lower[out] - x[out])
    expected[is_free] = np.linalg.solve(dense[np.ix_(is_free, is_free)], -pulled[is_free])
    np.testing.assert_allclose(local.get("direction"), expected, rtol=1e-9, atol=1e-12)


def test_a_run_within_bounds_resumes_from_any_savepoint_unchanged() -> None:
    case = logistic(0.0)
    cuts: list[tuple[IterationDone, list[Mapping[str, Vector]]]] = []

    def keep(done: IterationDone) -> bool:
        cuts.append((done, local.export(done.vectors)))
        return False

    local = Local(case.x0, case.function, n_shards=2, callback=keep, bounds=case.bounds)
    result = local.run(BOUNDED.steps())
    last = local.get("parameters")
    for done, vectors in [cuts[k] for k in (0, 3, len(cuts) // 2, len(cuts) - 2)]:
        again = Local(case.x0, case.function, n_shards=2, bounds=case.bounds)
        again.restore(vectors)
        assert again.run(BOUNDED.steps(done.state)) == result
        np.testing.assert_array_equal(again.get("parameters"), last)


def test_a_start_out_of_bounds_is_moved_within() -> None:
    case = within(known("beale"), np.array([5.0, -7.0]), -1.0, 2.0)
    x, result = minimize_flat(case.function, case.x0, BOUNDED, bounds=case.bounds)
    assert np.all((x >= -1.0) & (x <= 2.0))
    assert result.loss == pytest.approx(case.by_scipy()[0], rel=1e-5)


def test_a_search_goes_no_further_than_the_longest_step() -> None:
    found, tried = search_to_end(
        more_thuente(Sample(0.0, 0.0, -1.0), step=1.0, wolfe=WolfeConditions(), longest=3.0),
        lambda step: Sample(step, -step, -1.0),
    )
    assert found.satisfied
    assert tried == [1.0, 3.0]
    found, tried = search_to_end(
        more_thuente(Sample(0.0, 0.0, -1.0), step=1.0, wolfe=WolfeConditions(), longest=math.inf),
        lambda step: Sample(step, -step, -1.0),
    )
    assert not found.satisfied
    assert max(tried) > 100.0
