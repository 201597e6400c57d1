import numpy as np
import pytest
from hypothesis import given, settings

from distbelief.graph.graph import GraphError
from distbelief.partition.solvers.problem import Problem, fitting, permitted, undominated
from tests.distbelief.partition.brute_force import enumerate_all
from tests.distbelief.partition.solvers.problems import best, crowded, problems


@settings(max_examples=40)
@given(problems())
def test_dominated_candidates_are_dropped(problem: Problem) -> None:
    expected = best(problem)
    if expected is None:
        return
    solution = enumerate_all(problem.restricted(undominated(problem)))
    assert solution.cost == expected.cost
    assert solution.overrun == pytest.approx(expected.overrun) or solution.feasible
    assert solution.feasible == expected.feasible


@settings(max_examples=40)
@given(problems())
def test_forbidden_candidates_are_dropped(problem: Problem) -> None:
    expected = best(problem)
    if expected is None:
        return
    small = problem.restricted(permitted(problem))
    assert all(np.isfinite(costs).all() for costs in small.costs)
    assert enumerate_all(small).cost == expected.cost


@settings(max_examples=40)
@given(problems(forbid=False))
def test_candidates_that_fit_beside_nothing_are_dropped(problem: Problem) -> None:
    expected = enumerate_all(problem)
    kept = fitting(problem)
    if kept is None:
        assert not expected.feasible
    elif expected.feasible:
        assert enumerate_all(problem.restricted(kept)).cost == expected.cost


def test_with_equal_edges_the_more_expensive_or_later_candidate_is_dropped() -> None:
    problem = Problem(
        costs=(np.array([2.0, 1.0, 1.0, 1.0]), np.zeros(2)),
        edges={(0, 1): np.array([[0, 5], [0, 5], [5, 0], [0, 5.0]])},
    )
    assert [list(rows) for rows in undominated(problem)] == [[1, 2], [0, 1]]


def test_what_takes_more_memory_is_not_better_for_being_cheaper() -> None:
    assert [list(rows) for rows in undominated(crowded(1, caps=1))] == [[0, 1]]


def test_contradicting_pins_are_rejected() -> None:
    edge = np.array([[np.inf, 0.0], [0.0, np.inf]])
    pins = Problem(costs=(np.array([0.0, np.inf]), np.array([0.0, np.inf])), edges={(0, 1): edge})
    with pytest.raises(GraphError, match="drop a pin"):
        permitted(pins)


def test_caps_that_the_rest_fills_leave_nothing() -> None:
    assert fitting(crowded(2, caps=0.5)) is None
