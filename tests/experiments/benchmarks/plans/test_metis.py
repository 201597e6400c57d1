"""METIS as a planner."""

import pytest

from distbelief.graph.graph import LayerGraph
from distbelief.partition.cost_model import AnalyticCosts
from distbelief.program.compiler import compile_plan
from experiments.benchmarks.plans.metis import IS_INSTALLED, cells_of, metis
from tests.distbelief.partition.plans import convolutional, equal, fully_connected


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
