from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from distbelief.partition.solvers.dynamic_programming import eliminate
from distbelief.partition.solvers.lagrangian import Messages
from distbelief.partition.solvers.problem import Problem, permitted
from tests.distbelief.partition.solvers.problems import best, chain, choices, problems


@given(problems(caps=False))
def test_bounds_rise_and_hold_for_every_choice(problem: Problem) -> None:
    if best(problem) is None:
        return
    small = problem.restricted(permitted(problem))
    messages = Messages(small)
    bounds = [messages.bound]
    for _ in range(5):
        messages.sweep()
        bounds.append(messages.bound)
    scale = 1e-9 * (1 + abs(bounds[-1]))
    assert all(after >= before - scale for before, after in pairwise(bounds))
    for choice in choices(small):
        cost = small.cost(choice)
        assert messages.bound <= cost + scale
        for node, index in enumerate(choice):
            assert messages.floors[node][index] <= cost + scale


def test_on_a_chain_one_sweep_finds_the_optimum() -> None:
    problem = chain(30, 6, seed=3)
    messages = Messages(problem)
    messages.sweep()
    optimum = eliminate(problem)
    assert messages.bound == pytest.approx(optimum.cost)
    assert problem.cost(messages.sweep()) == pytest.approx(optimum.cost)


def test_new_costs_leave_the_bound_valid() -> None:
    problem = chain(6, 3, seed=1, skip=3)
    messages = Messages(problem)
    messages.sweep()
    costs = tuple(own + np.arange(3) for own in problem.costs)
    messages.reprice(costs)
    messages.sweep()
    optimum = eliminate(Problem(costs=costs, edges=problem.edges))
    assert messages.bound <= optimum.cost + 1e-12
    assert messages.bound == pytest.approx(optimum.cost, rel=0.05)
