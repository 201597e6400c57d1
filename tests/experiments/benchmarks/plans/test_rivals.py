"""What the planner is measured by."""

import pytest
from hypothesis import given, strategies as st

from distbelief.graph.graph import LayerGraph
from distbelief.partition.cost_model import AnalyticCosts
from distbelief.partition.solvers.problem import Choice, Problem
from distbelief.program.compiler import compile_plan
from experiments.benchmarks.planner import IS_INSTALLED, cells_of, metis, search
from tests.distbelief.partition.plans import convolutional, equal, fully_connected
from tests.distbelief.partition.solvers.problems import chain, choices, problems


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


def test_cells_have_all_the_work_and_every_group_has_its_own() -> None:
    graph, cluster = fully_connected(40, 60, 30), equal(3)
    costs = AnalyticCosts(cluster, batch=8)
    cells = cells_of(graph, cluster, batch=8, costs=costs)
    machines = [set(p.machines) for p in cells.placements.values()]
    assert len(set.union(*machines)) > len(cluster)
    assert sum(cells.seconds) > 0
    assert all(one < other for one, other in cells.n_bytes)
    first = {"0", "1"}  # the sigmoid stays with its layer
    assert len({cells.placements[name].machines for name in first}) == 1


@pytest.mark.skipif(not IS_INSTALLED, reason="pymetis, of extra peers, is missing")
@pytest.mark.parametrize("graph", [fully_connected(40, 60, 30), convolutional()])
def test_its_plan_can_be_compiled_and_uses_these_machines(graph: LayerGraph) -> None:
    cluster = equal(3)
    costs = AnalyticCosts(cluster, batch=8)
    plan = metis(graph, cluster, batch=8, costs=costs)
    compiled = compile_plan(graph, plan, batch=8, n_machines=3)
    assert set(compiled.order) <= {0, 1, 2}
