import pytest
from hypothesis import given, settings

from distbelief.plans.planner.solvers.milp import milp, n_variables
from distbelief.plans.planner.solvers.problem import PROOF, TOLERANCE, Problem
from tests.distbelief.plans.planner.solvers.problems import best, chain, crowded, problems


@settings(max_examples=20)
@given(problems())
def test_the_program_finds_what_enumeration_finds(problem: Problem) -> None:
    expected = best(problem)
    solution = milp(problem)
    assert solution.exact
    assert (solution.overrun > 1 + TOLERANCE) == (expected.overrun > 1 + TOLERANCE)
    assert solution.cost == pytest.approx(expected.cost, rel=PROOF)
    assert solution.bound <= expected.cost * (1 + PROOF)


def test_costs_of_microseconds_are_distinguished() -> None:
    problem = crowded(8, caps=5)
    tiny = Problem(
        costs=tuple(costs * 1e-7 for costs in problem.costs),
        edges={},
        memory=problem.memory,
        caps=problem.caps,
    )
    assert milp(tiny).cost == pytest.approx(11e-7)
    assert milp(tiny).exact


def test_a_chain_has_a_variable_for_each_candidate_and_pair() -> None:
    assert n_variables(chain(5, 3, seed=0)) == 5 * 3 + 4 * 9
    assert milp(chain(5, 3, seed=0)).exact


def test_what_is_known_is_returned_if_time_is_over() -> None:
    problem = chain(12, 8, seed=0, skip=3)
    start = (7,) * 12
    solution = milp(problem, seconds=0, start=start)
    assert solution.choice == start
    assert solution.bound < solution.cost
    assert not solution.exact


def test_a_known_choice_only_helps() -> None:
    problem = crowded(8, caps=5)
    solution = milp(problem, start=(1, 1, 1, 1, 1, 0, 0, 0))
    assert solution.cost == 11
    assert solution.exact


def test_least_bad_is_least_overrun_then_least_cost() -> None:
    solution = milp(crowded(7, caps=2))
    assert sorted(solution.choice) == [0, 0, 0, 0, 1, 1, 1]
    assert solution.overrun == 2
    assert solution.exact
