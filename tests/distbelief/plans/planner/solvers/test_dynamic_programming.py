import numpy as np
from hypothesis import given

from distbelief.plans.planner.solvers.dynamic_programming import eliminate, elimination_order
from distbelief.plans.planner.solvers.problem import TOLERANCE, Problem
from tests.distbelief.plans.planner.solvers.problems import best, chain, crowded, problems


@given(problems(caps=False))
def test_elimination_finds_what_enumeration_finds(problem: Problem) -> None:
    expected = best(problem)
    solution = eliminate(problem)
    assert solution.cost == expected.cost
    assert solution.exact
    assert solution == eliminate(problem)


@given(problems())
def test_without_caps_it_bounds_what_fits(problem: Problem) -> None:
    expected = best(problem)
    solution = eliminate(problem)
    assert solution.bound == solution.cost <= expected.cost
    assert solution.exact == (solution.overrun <= 1 + TOLERANCE)


def test_a_chain_needs_tables_of_two_nodes() -> None:
    order = elimination_order(chain(200, 5, seed=0))
    assert sorted(order.nodes) == list(range(200))
    assert order.entries == 25


def test_a_residual_network_needs_tables_of_three() -> None:
    problem = chain(200, 60, seed=0, skip=3)
    assert elimination_order(problem).entries == 60**3
    assert eliminate(problem).exact


def test_a_node_without_choice_joins_nothing() -> None:
    rng = np.random.default_rng(0)
    sizes = [1] + [7] * 30
    star = Problem(
        costs=tuple(rng.random(size) for size in sizes),
        edges={(0, v): rng.random((1, 7)) for v in range(1, 31)} | {(1, 2): rng.random((7, 7))},
    )
    assert elimination_order(star).entries == 49
    assert eliminate(star).exact


def test_ties_go_to_the_first_candidate() -> None:
    assert eliminate(crowded(3, caps=9)).choice == (0, 0, 0)
    level = Problem(costs=(np.zeros(3),) * 4, edges={(v, v + 1): np.eye(3) for v in range(3)})
    assert eliminate(level).cost == 0
    assert eliminate(level) == eliminate(level)


def test_tables_beyond_bounds_are_not_made() -> None:
    n = 8
    clique = Problem(
        costs=(np.zeros(10),) * n,
        edges={(u, v): np.ones((10, 10)) for v in range(n) for u in range(v)},
    )
    assert not elimination_order(clique).fits
