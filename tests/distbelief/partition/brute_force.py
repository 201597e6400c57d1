"""Enumerates all choices: slow, and simple enough to be the reference for other solvers."""

import math
from typing import Final

import numpy as np

from distbelief.graph.graph import GraphError
from distbelief.partition.solvers.problem import (
    TOLERANCE,
    Array,
    Problem,
    Solution,
    first_lowest,
    no_choice,
)


CHOICES_MAX: Final = 5_000_000


def enumerate_all(problem: Problem) -> Solution:
    """Return the best of all choices; of equals, the one of lowest indices.

    If none fits the caps, the cheapest of those that overrun them least.

    Raises:
        GraphError: there are too many choices, or all are forbidden.
    """
    n_choices = math.prod(problem.sizes)
    if n_choices > CHOICES_MAX:
        raise GraphError(
            f"{n_choices} choices are too many to look at, of {CHOICES_MAX} at most; "
            "eliminate instead"
        )
    costs = np.zeros(problem.sizes)
    for node, own in enumerate(problem.costs):
        costs += _spread(own, (node,), problem)
    for pair, table in problem.edges.items():
        costs += _spread(table, pair, problem)
    overrun = np.where(np.isinf(costs), math.inf, _overrun(problem))
    least = float(overrun.min())
    if math.isinf(least):
        raise no_choice()
    costs[overrun > max(1.0, least) * (1 + TOLERANCE)] = math.inf
    choice = [int(i) for i in np.unravel_index(first_lowest(costs), costs.shape)]
    return problem.solution(choice, bound=problem.cost(choice), solver="enumeration")


def _overrun(problem: Problem) -> Array:
    """The largest share of its cap that any machine uses, of shape `sizes`."""
    largest = np.zeros(problem.sizes)
    if problem.shares is None:
        return largest
    for machine in range(problem.shares[0].shape[1]):
        used = np.zeros(problem.sizes)
        for node, shares in enumerate(problem.shares):
            used += _spread(shares[:, machine], (node,), problem)
        np.maximum(largest, used, out=largest)
    return largest


def _spread(table: Array, nodes: tuple[int, ...], problem: Problem) -> Array:
    """Give the table the dimensions of all nodes; missing ones have extent 1."""
    shape = [problem.sizes[v] if v in nodes else 1 for v in range(len(problem.sizes))]
    return table.reshape(shape)
