import math

import numpy as np
import pytest

from distbelief.graph.graph import GraphError
from distbelief.plans.planner.solvers.problem import TOLERANCE, Problem, first_lowest, trivial_bound
from tests.distbelief.plans.planner.solvers.problems import crowded


PAIR = Problem(
    costs=(np.array([1.0, 2.0]), np.array([3.0, 5.0, 7.0])),
    edges={(0, 1): np.array([[0.0, 1.0, 2.0], [4.0, 0.5, 0.0]])},
)


def test_a_choice_costs_its_nodes_and_its_edges() -> None:
    assert PAIR.cost((0, 1)) == 1 + 5 + 1
    assert trivial_bound(PAIR) == 1 + 3 + 0


def test_neighbours_see_an_edge_from_both_ends() -> None:
    [(other, table)] = PAIR.neighbours[1]
    assert other == 0
    np.testing.assert_array_equal(table, PAIR.edges[0, 1].T)


def test_a_choice_says_how_far_it_is_over_a_cap() -> None:
    solution = crowded(3, caps=2).solution((0, 0, 0), bound=0, solver="hand")
    assert solution.overrun == 1.5
    assert solution.overrun > 1 + TOLERANCE
    assert crowded(3, caps=2).solution((0, 0, 1), bound=0, solver="hand").overrun <= 1 + TOLERANCE


def test_rounding_breaks_no_cap() -> None:
    problem = Problem(
        costs=(np.zeros(1),) * 10,
        edges={},
        memory=(np.full((1, 1), 0.1),) * 10,
        caps=np.ones(1) - 1e-15,
    )
    assert problem.solution((0,) * 10, bound=0, solver="hand").overrun <= 1 + TOLERANCE


def test_a_solution_is_exact_if_its_bound_says_so() -> None:
    assert PAIR.solution((0, 0), bound=4, solver="hand").exact
    assert not PAIR.solution((0, 0), bound=4, solver="hand", proven=False).exact
    loose = PAIR.solution((0, 0), bound=3, solver="hand")
    assert not loose.exact


def test_the_first_of_ties_is_lowest_despite_rounding() -> None:
    assert first_lowest(np.array([3.0, 0.1 + 0.2, 0.3])) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"costs": ()}, "each node costs"),
        ({"costs": (np.zeros(0), np.zeros(2))}, "each node costs"),
        ({"costs": (np.zeros(2), np.array([math.nan]))}, "each node costs"),
        ({"costs": (np.zeros(2), np.array([math.inf]))}, "each node costs"),
        ({"edges": {(1, 0): np.zeros((3, 2))}}, r"edge \(1, 0\).* ascending"),
        ({"edges": {(0, 1): np.zeros((3, 2))}}, "costs of all pairs"),
        ({"edges": {(0, 1): np.full((2, 3), -math.inf)}}, "costs of all pairs"),
        ({"caps": np.ones(2)}, "or neither"),
        ({"caps": np.zeros(2), "memory": ()}, "above 0"),
        ({"caps": np.ones(2), "memory": ()}, "memory of each node"),
        ({"caps": np.ones(2), "memory": (np.ones((2, 2)), np.ones((2, 2)))}, "node 1: give finite"),
        ({"caps": np.ones(1), "memory": (np.full((2, 1), -1.0), np.ones((3, 1)))}, "node 0: give"),
    ],
)
def test_numbers_that_do_not_fit_together_are_rejected(
    fields: dict[str, object], message: str
) -> None:
    whole = {"costs": PAIR.costs, "edges": PAIR.edges, "memory": None, "caps": None} | fields
    with pytest.raises(GraphError, match=message):
        Problem(**whole)  # type: ignore[arg-type]
