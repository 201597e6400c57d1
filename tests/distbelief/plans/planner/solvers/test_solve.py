import math
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings

from distbelief.plans.planner.solvers import dynamic_programming, solve as solve_module
from distbelief.plans.planner.solvers.problem import PROOF, TOLERANCE, Problem, time_left
from distbelief.plans.planner.solvers.solve import descend, independent, repair, solve
from tests.distbelief.plans.planner.solvers.problems import best, chain, crowded, problems


@pytest.mark.untraced
@settings(max_examples=25)
@given(problems())
def test_it_finds_what_enumeration_finds(problem: Problem) -> None:
    expected = best(problem)
    solution = solve(problem)
    assert solution.exact
    assert (solution.overrun > 1 + TOLERANCE) == (expected.overrun > 1 + TOLERANCE)
    assert solution.cost == pytest.approx(expected.cost, rel=PROOF)
    assert solution.cost == problem.cost(solution.choice)
    assert solution.bound <= expected.cost * (1 + PROOF)
    assert solution == solve(problem)


@settings(max_examples=15)
@given(problems())
def test_without_tables_or_programs_bounds_still_hold(problem: Problem) -> None:
    expected = best(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_programming, "ENTRIES_MAX", 0)
        patch.setattr(solve_module, "VARIABLES_MAX", 0)
        patch.setattr(solve_module, "DENSE_VARIABLES_MAX", 0)
        solution = solve(problem)
    assert expected.overrun <= 1 + TOLERANCE or solution.overrun > 1 + TOLERANCE
    if solution.overrun <= 1 + TOLERANCE or expected.overrun > 1 + TOLERANCE:
        assert solution.bound <= expected.cost * (1 + PROOF) + 1e-9
    if solution.exact and solution.overrun <= 1 + TOLERANCE:
        assert solution.cost == pytest.approx(expected.cost, rel=PROOF)


def test_least_overrun_is_not_claimed_without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve_module, "VARIABLES_MAX", 0)
    free = Problem(
        costs=(np.zeros(2),) * 5, edges={}, memory=(np.eye(2),) * 5, caps=np.array([2.0, 2.0])
    )
    solution = solve(free)
    assert solution.cost == solution.bound == 0
    assert not solution.exact


def test_where_tables_are_too_large_a_program_proves() -> None:
    n = 8
    rng = np.random.default_rng(5)
    clique = Problem(
        costs=tuple(rng.random(6) for _ in range(n)),
        edges={(u, v): rng.random((6, 6)) * 0.2 for v in range(n) for u in range(v)},
    )
    solution = solve(clique)
    assert solution.exact
    assert solution.cost == pytest.approx(solution.bound, rel=PROOF)


def test_dense_problems_too_large_for_a_program_are_searched_from_several_choices() -> None:
    """DenseNet-121 on 8 machines once began with the best split of each layer by itself."""
    n, k = 12, 30  # 12 * 30 + 66 * 900 variables
    rng = np.random.default_rng(3)
    alike = Problem(
        costs=tuple(rng.random(k) for _ in range(n)),
        edges={(u, v): 1.0 - np.eye(k) for v in range(n) for u in range(v)},
    )
    solution = solve(alike, seconds=1.0)
    assert solution.solver == "repair"
    assert solution.cost == pytest.approx(np.sum(alike.costs, axis=0).min())


def test_scaling_all_times_changes_nothing_else() -> None:
    problem = chain(20, 5, seed=4, skip=3)
    scaled = Problem(
        costs=tuple(1e-6 * costs for costs in problem.costs),
        edges={pair: 1e-6 * table for pair, table in problem.edges.items()},
    )
    assert solve(problem).choice == solve(scaled).choice


def test_caps_that_do_not_bind_leave_elimination_exact() -> None:
    assert solve(crowded(5, caps=5)).solver == "elimination"
    assert solve(crowded(5, caps=4)).cost == 6


def test_the_least_overrun_is_found_if_nothing_fits() -> None:
    solution = solve(crowded(5, caps=2))
    assert solution.overrun == 1.5
    assert solution.exact


def test_when_time_is_over_the_best_known_and_its_bound_are_returned() -> None:
    rng = np.random.default_rng(7)
    n, k, machines = 8, 4, 3
    free = chain(n, k, seed=7, skip=3)
    memory = rng.random((n, k, machines))
    problem = Problem(
        costs=free.costs, edges=free.edges, memory=tuple(memory), caps=np.full(machines, 0.4 * n)
    )
    ticks = count()
    solution = solve(problem, seconds=4, clock=lambda: float(next(ticks)))
    patient = solve(problem, seconds=20)
    assert solution.bound <= patient.cost <= solution.cost
    assert not solution.exact
    assert patient.overrun <= 1 + TOLERANCE


def test_a_local_search_begins_from_known_choices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """DenseNet-121 on 8 machines: every layer over all of them is near the best choice."""
    monkeypatch.setattr(dynamic_programming, "ENTRIES_MAX", 0)
    monkeypatch.setattr(solve_module, "VARIABLES_MAX", 0)
    monkeypatch.setattr(solve_module, "DENSE_VARIABLES_MAX", 0)
    n, rng = 6, np.random.default_rng(5)
    clique = Problem(
        costs=(np.zeros(4),) * n,
        edges={(u, v): rng.random((4, 4)) for v in range(n) for u in range(v)},
    )
    wanted = best(clique)
    assert solve(clique).cost > wanted.cost
    assert solve(clique, known=[wanted.choice]).choice == wanted.choice


def test_without_a_program_repairs_overrun_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve_module, "VARIABLES_MAX", 0)
    solution = solve(crowded(7, caps=2))  # all on the first machine overrun it by 3.5
    assert solution.overrun == 2
    assert solution.solver == "repair"


# --- local search ---

FOREVER = time_left(math.inf)


@given(problems())
def test_descent_never_raises_cost_or_overrun(problem: Problem) -> None:
    start = independent(problem)
    end = descend(problem, start)
    assert problem.cost(end) <= problem.cost(start)
    limit = np.maximum(1 + TOLERANCE, problem.used(start) * (1 + TOLERANCE))
    assert (problem.used(end) <= limit).all()


@given(problems())
def test_repair_returns_nothing_or_what_fits(problem: Problem) -> None:
    if problem.shares is None:
        return
    start = independent(problem)
    mended = repair(problem, start, limit=1, left=FOREVER)
    if problem.overrun(start) <= 1:
        assert mended == start
    if mended is not None:
        assert problem.overrun(mended) <= 1 + TOLERANCE


def test_repair_takes_what_is_cheap_for_its_memory() -> None:
    problem = Problem(
        costs=(np.array([0.0, 9.0]), np.array([0.0, 1.0])),
        edges={},
        memory=(np.eye(2), np.eye(2)),
        caps=np.ones(2),
    )
    assert repair(problem, (0, 0), limit=1, left=FOREVER) == (0, 1)


def test_repair_gives_up_if_nothing_helps_or_time_is_over() -> None:
    assert repair(crowded(3, caps=1), (0, 0, 0), limit=1, left=FOREVER) is None
    assert repair(crowded(2, caps=1), (0, 0), limit=1, left=time_left(0)) is None
