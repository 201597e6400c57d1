import pytest
from hypothesis import given, settings

from distbelief.partition.solvers import lagrangian
from distbelief.partition.solvers.dynamic_programming import elimination_order
from distbelief.partition.solvers.lagrangian import relax
from distbelief.partition.solvers.problem import TOLERANCE, Deadline, Problem, permitted
from tests.distbelief.partition.solvers.problems import best, choices, crowded, problems


def check(problem: Problem) -> None:
    if best(problem) is None:
        return
    small = problem.restricted(permitted(problem))
    relaxed = relax(small, elimination_order(small), deadline=Deadline(60))
    if relaxed.choice is not None:
        assert small.overrun(relaxed.choice) <= 1 + TOLERANCE
    for choice in choices(small):
        if small.overrun(choice) > 1 + TOLERANCE:
            continue
        cost = small.cost(choice)
        assert relaxed.bound <= cost + 1e-9 * (1 + cost)
        for node, index in enumerate(choice):
            assert relaxed.floors[node][index] <= cost + 1e-9 * (1 + cost)


@settings(max_examples=10)
@given(problems())
def test_no_choice_that_fits_is_below_its_bounds(problem: Problem) -> None:
    check(problem)


@settings(max_examples=10)
@given(problems())
def test_no_choice_that_fits_is_cheaper_with_messages_instead_of_elimination(
    problem: Problem,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lagrangian, "WORK_PER_STEP_MAX", 0)
        check(problem)


def test_a_price_on_memory_makes_the_bound_tight() -> None:
    problem = crowded(8, caps=5)
    relaxed = relax(problem, elimination_order(problem), deadline=Deadline(60))
    assert relaxed.bound == pytest.approx(11)
    assert relaxed.choice is not None
    assert problem.cost(relaxed.choice) == 11


def test_no_time_is_enough_for_some_bound() -> None:
    problem = crowded(8, caps=5)
    relaxed = relax(problem, elimination_order(problem), deadline=Deadline(0))
    assert 8 <= relaxed.bound <= 11
