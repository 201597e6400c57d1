"""Scheduled coordinate descent finds the minimum, and its rounds lower the objective."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from distbelief.core.errors import SettingError
from sandblaster.strads.columns import Matrix, checked_matrix
from sandblaster.strads.descent import COEFFICIENTS, INTERCEPT, PREDICTOR, Descent, Solution, State
from sandblaster.strads.losses import Logistic, Loss, Squares
from sandblaster.strads.program import packed, run
from tests.sandblaster.strads.problems import (
    Floats,
    correlated_problem,
    lasso_objective,
    plain_lasso,
    sparse_problem,
)


def largest_alpha(x: Matrix, y: Floats) -> float:
    return float(np.abs(np.asarray(x.T @ y)).max()) / len(y)


def solved(
    x: Matrix,
    y: Floats,
    loss: Loss | None = None,
    *,
    workers: int = 1,
    **options: Any,  # noqa: ANN401 -- of the program
) -> tuple[Solution, Floats]:
    options = {"centred": False, "tolerance": 1e-10, **options}
    program = Descent(checked_matrix(x, user="test"), y, loss or Squares(), **options)
    (solution,), tables = run(program, workers=workers)
    assert (np.flatnonzero(tables[COEFFICIENTS]) == solution.ids).all()
    assert (tables[COEFFICIENTS][solution.ids] == solution.values).all()
    assert tables[INTERCEPT][0] == solution.intercept
    expected: Floats = np.asarray(x @ tables[COEFFICIENTS])
    np.testing.assert_allclose(tables[PREDICTOR], expected, atol=1e-9 * np.abs(y).max())
    return solution, tables[COEFFICIENTS]


def rises(objectives: Floats) -> float:
    return float(np.diff(objectives).max()) / float(objectives[0])


def test_what_is_saved_of_a_scheduler_grows_with_what_is_used() -> None:
    """Of a million columns it was 16 MB of zeros, compressed while all workers waited."""
    coefficients = np.zeros(1_000_000)
    coefficients[::50_000] = 1.5
    assert len(packed(State.at(coefficients))) < 1000


# --- the minimum ---


@pytest.mark.each_value
@pytest.mark.parametrize("schedule", ["priority", "round_robin"])
@pytest.mark.parametrize("n_blocks", [1, 3])
def test_a_lasso_is_that_of_plain_coordinate_descent(schedule: str, n_blocks: int) -> None:
    x, y = correlated_problem(correlation=0.2)
    alpha = 0.1 * largest_alpha(x, y)
    solution, w = solved(
        x, y, alphas=[alpha], n_blocks=n_blocks, schedule=schedule, max_iterations=1000
    )
    assert solution.converged
    expected = plain_lasso(x, y, alpha, n_passes=300)
    np.testing.assert_allclose(w, expected, atol=1e-4)
    least = lasso_objective(x, y, expected, alpha)
    assert solution.objective == pytest.approx(lasso_objective(x, y, w, alpha), rel=1e-12)
    assert solution.objective - least <= solution.gap + 1e-12


@pytest.mark.each_value
@pytest.mark.parametrize("n_blocks", [1, 4])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("loss", [Squares(), Logistic()])
def test_the_solution_satisfies_the_conditions_of_a_minimum(
    loss: Loss, n_blocks: int, *, centred: bool
) -> None:
    x, y = sparse_problem()
    y = y + 1.0 if isinstance(loss, Squares) else (y > 0.3).astype(np.float64)
    alpha = 0.1 * largest_alpha(x, y - y.mean())
    solution, w = solved(
        x, y, loss, alphas=[alpha], n_blocks=n_blocks, centred=centred, tolerance=1e-12, gather=0.0
    )
    f: Floats = np.asarray(x @ w) + solution.intercept
    gradient = (f - y if isinstance(loss, Squares) else 1 / (1 + np.exp(-f)) - y) / len(y)
    products: Floats = np.asarray(x.T @ gradient)
    assert solution.converged
    assert 0 < len(solution.ids) < x.shape[1]
    np.testing.assert_allclose(products[w != 0], -alpha * np.sign(w[w != 0]), atol=1e-5 * alpha)
    assert np.abs(products).max() <= alpha * (1 + 1e-5)
    if centred:
        assert gradient.sum() == pytest.approx(0.0, abs=1e-6)
    else:
        assert solution.intercept == 0.0


def test_the_gap_bounds_the_distance_from_the_minimum_at_any_tolerance() -> None:
    x, y = sparse_problem()
    alpha = 0.05 * largest_alpha(x, y)
    least, _ = solved(x, y, alphas=[alpha], tolerance=1e-14)
    for tolerance in (1e-1, 1e-2, 1e-3, 1e-5):
        solution, _ = solved(x, y, alphas=[alpha], tolerance=tolerance)
        assert -1e-12 <= solution.objective - least.objective <= solution.gap
        assert solution.gap <= tolerance * float(y @ y) / len(y)


def test_empty_and_constant_columns_stay_unused() -> None:
    x, y = correlated_problem()
    x[:, 3], x[:, 9] = 0.0, 7.0
    _, w = solved(x, y + 2.0, alphas=[1e-3], centred=True, tolerance=1e-6)
    assert w[3] == w[9] == 0.0
    assert np.count_nonzero(w)


# --- blocks and workers ---


def test_the_bits_are_the_same_for_any_number_of_workers() -> None:
    x, y = sparse_problem()
    alpha = 0.05 * largest_alpha(x, y)
    found = [
        solved(x, y, alphas=[alpha], n_blocks=5, gather=0.0, workers=workers)[1].tobytes()
        for workers in (1, 2, 4)
    ]
    assert len(set(found)) == 1


def test_a_small_working_set_is_updated_in_one_place_with_the_bits_of_one_block() -> None:
    x, y = sparse_problem()
    alpha = 0.05 * largest_alpha(x, y)
    one, several = (
        solved(x, y, alphas=[alpha], n_blocks=n, centred=True, gather=1e9) for n in (1, 16)
    )
    assert one[1].tobytes() == several[1].tobytes()
    assert one[0].n_updates == several[0].n_updates


def test_st1_sixteen_blocks_need_at_most_a_tenth_more_updates_than_one() -> None:
    x, y = sparse_problem(n_samples=4000, n_features=1600, n_used=50)
    alpha = 0.1 * largest_alpha(x, y)
    one, sixteen = (
        solved(x, y, alphas=[alpha], n_blocks=n, tolerance=1e-8, gather=0.0)[0] for n in (1, 16)
    )
    assert sixteen.n_updates <= 1.1 * one.n_updates
    assert sixteen.n_updates > 25 * sixteen.n_rounds  # in each many at once
    assert sixteen.objective == pytest.approx(one.objective, rel=1e-9)


@pytest.mark.parametrize("bound", ["_N_ENTRIES_MAX", "_N_COMPARED_MAX"])
def test_columns_too_many_to_compare_are_updated_block_after_block(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(f"sandblaster.strads.descent.{bound}", 10)
    x, y = correlated_problem()
    solution, _ = solved(x, y, alphas=[0.05], n_blocks=3, tolerance=1e-6)
    assert solution.converged
    assert rises(solution.objectives) <= 1e-14


def test_more_blocks_than_columns_are_refused() -> None:
    x, y = correlated_problem()
    with pytest.raises(SettingError, match="n_blocks is 49 for 48 columns; use 1 to 48"):
        solved(x, y, alphas=[1.0], n_blocks=49)
    with pytest.raises(SettingError, match="interference is 0"):
        solved(x, y, alphas=[1.0], interference=0)


# --- the schedule ---


def test_st2_priority_needs_at_most_half_the_updates_of_round_robin() -> None:
    x, y = sparse_problem()
    alpha = 0.1 * largest_alpha(x, y)
    priority, robin = (
        solved(x, y, alphas=[alpha], schedule=one, tolerance=1e-6)[0]
        for one in ("priority", "round_robin")
    )
    assert priority.converged
    assert robin.converged
    assert 2 * priority.n_updates <= robin.n_updates


def test_st2_a_variable_that_did_not_change_is_considered_again() -> None:
    # The second column is useless until the first, which hides it, has its weight.
    generator = np.random.default_rng(6)
    first, second = generator.standard_normal((2, 50))
    second -= first * (first @ second) / (first @ first)
    x = np.stack([first, second + first], axis=1)
    y = 3.0 * first - 2.0 * second
    solution, _ = solved(x, y, alphas=[1e-3], tolerance=1e-8)
    assert solution.ids.tolist() == [0, 1]


@pytest.mark.each_value
@pytest.mark.parametrize("loss", [Squares(), Logistic()])
@pytest.mark.parametrize("schedule", ["priority", "round_robin"])
def test_st3_scheduled_descent_on_correlated_columns_falls_monotonically(
    loss: Loss, schedule: str
) -> None:
    x, y = correlated_problem()
    y = y if isinstance(loss, Squares) else (y > 0.0).astype(np.float64)
    solution, _ = solved(
        x, y, loss, alphas=[0.02], n_blocks=16, schedule=schedule, max_iterations=12, gather=0.0
    )
    assert len(solution.objectives) > 20
    assert rises(solution.objectives) <= 1e-14


def test_st3_unscheduled_descent_on_correlated_columns_diverges() -> None:
    x, y = correlated_problem()
    scheduled, unscheduled = (
        solved_unchecked(x, y, interference=bound) for bound in (0.05, np.inf)
    )
    assert scheduled.objective < 0.1 * scheduled.objectives[0]
    assert unscheduled.objective > 1e3 * unscheduled.objectives[0]
    assert not unscheduled.converged


def solved_unchecked(x: Floats, y: Floats, *, interference: float) -> Solution:
    program = Descent(
        x, y, Squares(), alphas=[0.02], n_blocks=16, centred=False,
        schedule="round_robin", interference=interference, max_iterations=8,
    )  # fmt: skip
    solutions: Sequence[Solution] = run(program)[0]
    return solutions[0]


def test_st3_a_bound_of_one_is_enough_for_a_falling_objective() -> None:
    x, y = correlated_problem(correlation=0.1)
    solution, _ = solved(
        x, y, alphas=[0.01], n_blocks=16, interference=1.0, tolerance=1e-6, gather=0.0
    )
    assert rises(solution.objectives) <= 1e-14


# --- paths ---


def test_a_path_solves_each_alpha_from_the_one_before() -> None:
    x, y = sparse_problem()
    alphas = (largest_alpha(x, y) * np.geomspace(1.0, 0.05, 8)).tolist()
    options = {"centred": False, "tolerance": 1e-8, "n_blocks": 2}
    path, _ = run(Descent(x, y, Squares(), alphas=alphas, **options))  # type: ignore[arg-type] # of a dict
    assert [one.alpha for one in path] == alphas
    assert not len(path[0].ids)
    for one in path[1:]:
        cold, _ = solved(x, y, alphas=[one.alpha], tolerance=1e-8)
        assert one.converged
        assert one.objective == pytest.approx(cold.objective, rel=1e-7)


def test_held_out_samples_are_evaluated_and_end_a_path() -> None:
    x, y = sparse_problem()
    train, held = (x[:150], y[:150]), (x[150:], y[150:])
    alphas = (largest_alpha(*train) * np.geomspace(1.0, 1e-4, 60)).tolist()
    held_out = (sparse.csc_array(held[0]), held[1])
    for n_blocks in (1, 3):
        program = Descent(
            sparse.csc_array(train[0]), train[1], Squares(), alphas=alphas, n_blocks=n_blocks,
            held_out=held_out, patience=3,
        )  # fmt: skip
        path, tables = run(program)
        losses = [one.held_out for one in path]
        best = int(np.argmin(losses))
        assert 3 <= best < len(path) - 1 < len(alphas) - 1
        assert len(path) - 1 - best == 3
        rest = held[1] - held[0] @ tables[COEFFICIENTS] - tables[INTERCEPT][0]
        assert losses[-1] == pytest.approx(float(rest @ rest) / (2 * len(rest)), rel=1e-9)


def test_a_start_at_the_solution_ends_at_once() -> None:
    x, y = sparse_problem()
    alpha = 0.05 * largest_alpha(x, y)
    first, w = solved(x, y, alphas=[alpha])
    again, _ = solved(x, y, alphas=[alpha], start=(w, 0.0))
    assert first.n_updates
    assert (again.n_updates, again.n_iterations) == (0, 1)
