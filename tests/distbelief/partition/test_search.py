import math

from hypothesis import given, strategies as st

from distbelief.partition.search import improve
from distbelief.partition.solvers.local_search import independent
from distbelief.partition.solvers.problem import Choice, Problem
from tests.distbelief.partition.solvers.problems import chain, choices, problems


PROBLEMS = problems(caps=False, forbid=False)


@given(PROBLEMS, st.integers(0, 30))
def test_the_end_is_no_slower_than_the_start_and_tries_are_counted(
    problem: Problem, tries: int
) -> None:
    asked: list[Choice] = []

    def seconds_of(choice: Choice) -> float:
        asked.append(choice)
        return 1.0 + problem.cost(choice)

    start = independent(problem)
    end, seconds = improve(problem, start, seconds_of, tries=tries)
    assert seconds == 1.0 + problem.cost(end) <= 1.0 + problem.cost(start)
    assert asked[0] == start
    assert len(asked) == len(set(asked)) <= tries + 1
    assert seconds == min(1.0 + problem.cost(choice) for choice in asked)


@given(PROBLEMS)
def test_with_tries_enough_no_change_of_one_node_helps(problem: Problem) -> None:
    end, _ = improve(problem, independent(problem), problem.cost, tries=10_000)
    for other in choices(problem):
        if sum(a != b for a, b in zip(end, other, strict=True)) == 1:
            assert problem.cost(other) >= problem.cost(end) - 1e-6


def test_it_finds_what_the_model_does_not_see() -> None:
    problem = chain(6, 4, seed=1)
    end, seconds = improve(problem, (0,) * 6, lambda choice: -float(sum(choice)))
    assert (end, seconds) == ((3,) * 6, -18.0)


def test_what_does_not_fit_is_never_chosen() -> None:
    problem = chain(4, 3, seed=2)
    start = (1, 1, 1, 1)
    found = improve(problem, start, lambda x: 5.0 if x == start else math.inf)
    assert found == (start, 5.0)


def test_equal_problems_end_equal() -> None:
    one, other = (
        improve(p, (0,) * 8, p.cost, tries=20) for p in (chain(8, 5, seed=3), chain(8, 5, seed=3))
    )
    assert one == other
