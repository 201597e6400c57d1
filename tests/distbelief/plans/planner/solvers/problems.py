"""Small random problems, with ties and caps."""

from itertools import combinations, product

import numpy as np
from hypothesis import strategies as st

from distbelief.plans.planner.solvers.problem import TOLERANCE, Array, Choice, Problem, Solution


@st.composite
def problems(draw: st.DrawFn, *, caps: bool = True) -> Problem:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    seed = draw(st.integers(0, 2**32 - 1))
    highest = draw(st.sampled_from([2, 1000]))  # ties, or none
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> Array:
        return rng.integers(0, highest, shape).astype(float)

    density = draw(st.sampled_from([0.3, 0.8]))
    edges = {
        (u, v): numbers(sizes[u], sizes[v])
        for u, v in combinations(range(len(sizes)), 2)
        if rng.random() < density
    }
    costs = tuple(numbers(size) for size in sizes)
    if not caps:
        return Problem(costs=costs, edges=edges)
    n_machines = draw(st.integers(1, 3))
    memory = (rng.integers(0, 10, (size, n_machines)).astype(float) for size in sizes)
    return Problem(
        costs=costs,
        edges=edges,
        memory=tuple(memory),
        caps=rng.choice([np.inf, 4.0, 8.0, 10.0, 15.0, 20.0], n_machines),
    )


def best(problem: Problem) -> Solution:
    """The best of all choices, looked at one by one.

    If none fits the caps, the cheapest of those that overrun them least; of equals, the one of
    lowest indices.
    """
    every = choices(problem)
    limit = max(1.0, min(map(problem.overrun, every))) * (1 + TOLERANCE)
    allowed = [choice for choice in every if problem.overrun(choice) <= limit]
    choice = min(allowed, key=lambda choice: (problem.cost(choice), choice))
    return problem.solution(choice, bound=problem.cost(choice), solver="enumeration")


def choices(problem: Problem) -> list[Choice]:
    return list(product(*map(range, problem.sizes)))


def chain(n_nodes: int, n_candidates: int, *, seed: int, skip: int = 0) -> Problem:
    """A chain; with `skip`, every second node has an edge to the node that far ahead."""
    rng = np.random.default_rng(seed)
    shape = (n_candidates, n_candidates)
    pairs = [(v, v + 1) for v in range(n_nodes - 1)]
    if skip:
        pairs += [(v, v + skip) for v in range(0, n_nodes - skip, 2)]
    return Problem(
        costs=tuple(rng.random(n_candidates) for _ in range(n_nodes)),
        edges={pair: rng.random(shape) for pair in pairs},
    )


def crowded(n_nodes: int, *, caps: float) -> Problem:
    """Each node on one of two machines; all prefer the first, each takes one byte."""
    return Problem(
        costs=(np.array([1.0, 2.0]),) * n_nodes,
        edges={},
        memory=(np.eye(2),) * n_nodes,
        caps=np.array([caps, caps]),
    )
