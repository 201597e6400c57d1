"""What the planner is measured by."""

from hypothesis import given, strategies as st

from distbelief.plans.planner.solvers.problem import Choice, Problem
from experiments.benchmarks.planner import search
from tests.distbelief.plans.planner.solvers.problems import chain, choices, problems


def words(problem: Problem) -> list[list[str]]:
    return [[f"units {index}" for index in range(size)] for size in problem.sizes]


@given(problems(caps=False), st.integers(1, 40))
def test_it_returns_the_best_of_what_it_tried(problem: Problem, tries: int) -> None:
    asked: list[Choice] = []

    def seconds_of(choice: Choice) -> float:
        asked.append(choice)
        return problem.cost(choice)

    start = tuple(0 for _ in problem.sizes)
    best = search(problem, words(problem), seconds_of, [start], tries=tries, seed=1)
    assert asked[0] == start
    assert len(asked) == tries
    assert best == min(map(problem.cost, asked))


def test_of_a_small_problem_it_finds_the_best() -> None:
    for seed in range(10):
        problem = chain(5, 4, seed=seed)
        best = search(problem, words(problem), problem.cost, [], tries=2000, seed=0)
        assert best == min(map(problem.cost, choices(problem)))
    problem = chain(12, 6, seed=5)  # with equal seeds it finds the same
    one, again = (
        search(problem, words(problem), problem.cost, [], tries=100, seed=7) for _ in range(2)
    )
    assert one == again
