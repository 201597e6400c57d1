"""Planning requests for tests: a small net on a few machines."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from distbelief.graph.graph import LayerGraph
from distbelief.plans.cluster import Cluster
from distbelief.plans.placement import Placement
from distbelief.plans.planner.cost_model import AnalyticCosts, single_sample
from distbelief.plans.planner.planner import Planned, plan
from distbelief.plans.planner.profile import Figures, add, this_host
from distbelief.plans.planner.profiling import this_host as profiling
from distbelief.plans.planner.search import PlanningRequest, PlanSimulator
from distbelief.plans.step_cost import StepCost
from tests.distbelief.plans.planner.plans import equal, fully_connected


def make_request(graph: LayerGraph, cluster: Cluster, *, batch: int = 32) -> PlanningRequest:
    costs = AnalyticCosts(cluster, batch=batch, single=single_sample(graph))
    return PlanningRequest(graph=graph, cluster=cluster, batch=batch, costs=costs, pins={})


def simulated(
    request: PlanningRequest, placements: Mapping[str, Placement], *, n_machines: int
) -> StepCost:
    return PlanSimulator(request).cost(placements, n_machines=n_machines)


@cache
def planned(*counts: int, memory: float | None = None) -> tuple[Planned, ...]:
    """Three layers on equal machines."""
    graph = fully_connected(40, 600, 400, 50)
    return tuple(plan(make_request(graph, equal(max(counts), memory=memory)), counts))


def permuted(placements: Mapping[str, Placement], to: Mapping[int, int]) -> dict[str, Placement]:
    """The same plan with other machine numbers."""
    return {name: _permuted(placement, to) for name, placement in placements.items()}


def _permuted(placement: Placement, to: Mapping[int, int]) -> Placement:
    combine = placement.combine
    return Placement(
        cuts=placement.cuts,
        machines=tuple(to[machine] for machine in placement.machines),
        combine=None if combine is None else _permuted(combine, to),
    )


def known_figures(*, jitter: float) -> Figures:
    return Figures(
        flops=1e10, memory_rate=1e10, message_rate=1e9, memory=1e9, overhead=1e-5, jitter=jitter
    )


def know_host(figures: Figures, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate cache that has this machine's figures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(profiling, "seconds", lambda: 1e-3)
    add(this_host(), figures=figures)
