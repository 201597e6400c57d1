import numpy as np
import pytest
from hypothesis import given, settings

from distbelief.graph.graph import GraphError
from distbelief.partition.solvers.problem import TOLERANCE, Problem
from tests.distbelief.partition.brute_force import enumerate_all
from tests.distbelief.partition.solvers.problems import best, chain, choices, crowded, problems


@settings(max_examples=40)
@given(problems())
def test_no_choice_that_fits_is_cheaper(problem: Problem) -> None:
    solution = best(problem)
    if solution is None:
        assert min(map(problem.cost, choices(problem))) == np.inf
        return
    limit = max(1, solution.overrun) * (1 + 2 * TOLERANCE)
    allowed = [c for c in choices(problem) if problem.overrun(c) <= limit]
    assert solution.exact
    assert solution.cost == min(map(problem.cost, allowed))
    assert solution.choice == min(allowed, key=lambda c: (problem.cost(c), c))


def test_of_equals_the_lowest_indices_win() -> None:
    assert enumerate_all(crowded(3, caps=2)).choice == (0, 0, 1)


def test_if_nothing_fits_the_least_overrun_is_had_at_least_cost() -> None:
    solution = enumerate_all(crowded(6, caps=2))
    assert sorted(solution.choice) == [0, 0, 0, 1, 1, 1]
    assert solution.overrun == 1.5
    assert solution.offending == (0, 1)


def test_too_many_choices_are_rejected() -> None:
    with pytest.raises(GraphError, match="1073741824 choices"):
        enumerate_all(chain(10, 8, seed=0))
