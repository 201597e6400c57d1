import math

import numpy as np
from hypothesis import given

from distbelief.partition.solvers.local_search import descend, exchange, independent, repair
from distbelief.partition.solvers.problem import TOLERANCE, Deadline, Problem
from tests.distbelief.partition.solvers.problems import crowded, problems


FOREVER = Deadline(math.inf)


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
    mended = repair(problem, start, limit=1, deadline=FOREVER)
    if problem.overrun(start) <= 1:
        assert mended == start
    if mended is not None:
        assert problem.overrun(mended) <= 1 + TOLERANCE
        swapped = exchange(problem, mended, deadline=FOREVER)
        assert problem.overrun(swapped) <= 1 + TOLERANCE
        assert problem.cost(swapped) <= problem.cost(mended)


def test_repair_takes_what_is_cheap_for_its_memory() -> None:
    problem = Problem(
        costs=(np.array([0.0, 9.0]), np.array([0.0, 1.0])),
        edges={},
        memory=(np.eye(2), np.eye(2)),
        caps=np.ones(2),
    )
    assert repair(problem, (0, 0), limit=1, deadline=FOREVER) == (0, 1)


def test_repair_gives_up_if_nothing_helps_or_time_is_over() -> None:
    assert repair(crowded(3, caps=1), (0, 0, 0), limit=1, deadline=FOREVER) is None
    assert repair(crowded(2, caps=1), (0, 0), limit=1, deadline=Deadline(0)) is None


def test_two_nodes_change_places_where_neither_can_move_alone() -> None:
    problem = Problem(
        costs=(np.array([0.0, 1.0]), np.array([5.0, 0.0])),
        edges={},
        memory=(np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])),
        caps=np.ones(1),
    )
    start = (0, 0)
    assert descend(problem, start) == start
    assert exchange(problem, start, deadline=FOREVER) == (1, 1)


def test_neighbours_move_together() -> None:
    tied = Problem(
        costs=(np.array([1.0, 0.0]), np.array([1.0, 0.0])),
        edges={(0, 1): np.array([[0.0, 9.0], [9.0, 0.0]])},
    )
    assert descend(tied, (0, 0)) == (0, 0)
    assert exchange(tied, (0, 0), deadline=FOREVER) == (1, 1)
