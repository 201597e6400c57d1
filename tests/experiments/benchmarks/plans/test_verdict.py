"""How predictions are judged."""

import pytest

from distbelief.partition.baselines import whole_layers
from distbelief.partition.cost_model import AnalyticCosts, ProfiledCosts, signature, single_sample
from distbelief.partition.profiling.profile import Host, Profile, Slices, digest
from distbelief.partition.search import PlanningRequest
from distbelief.program.cluster import Cluster, Machine
from experiments.benchmarks.measuring.workload import Workload
from experiments.benchmarks.plans.machines import plan_of
from experiments.benchmarks.plans.pace import Paces
from experiments.benchmarks.plans.turn import Turn
from experiments.benchmarks.plans.verdict import Verdict, compared, regret, verdict
from experiments.benchmarks.plans.ways import Way, by_units, on_one_machine


def test_predictions_are_judged_by_error_and_rank() -> None:
    predicted = {"a": 1.0, "b": 2.0, "c": 4.0}
    measured = {"a": 1.25, "b": 1.0, "c": 4.0}
    found = compared(predicted, measured)
    assert found["error"] == pytest.approx((0.2 + 1.0 + 0.0) / 3)
    assert found["rank"] == pytest.approx(0.5)


def test_who_is_preferred_meets_the_fastest_again() -> None:
    """The luckiest of thirteen turns is no measure of the others."""
    found = Verdict(
        predicted={"a": 1.0, "b": 2.0, "c": 4.0, "d": 3.0},
        measured={},
        brought={"a": 3.0, "b": 2.0, "c": 1.0, "d": 4.0},
        slower=[1.0],
    )
    assert found.finalists == ["a", "c", "b"]
    final = {"a": [2.2, 2.1, 2.0], "b": [2.5, 2.0, 2.0], "c": [2.3, 2.4, 1.0]}
    assert regret(found.preferred, final) == pytest.approx(2.1 / 2.0 - 1.0)


def test_what_takes_twice_as_long_at_half_the_pace_is_as_predicted() -> None:
    workload = Workload(net="speech", batch_size=4, small=True)
    graph, batch = workload.graph(), workload.batch_size
    machine = Machine(flops=1e11, memory_rate=2e10, overhead=0.0, bandwidth=1e12)
    cluster = Cluster(name="two", machines=(machine,) * 2, latency=0.0)
    keys = [digest(signature(layer), batch=batch) for layer in graph.layers]
    whole = Slices(extents=(1,), forward=(1.0,), backward=(2.0,))
    profile = Profile(
        host=Host(torch="2", processor="any", n_threads=1),
        date="",
        layers={key: {"whole": whole} for key in keys},
    )

    def order_by(profile: Profile) -> PlanningRequest:
        machines = AnalyticCosts(cluster, batch=batch, single=single_sample(graph))
        costs = ProfiledCosts(profile, machines=machines)
        return PlanningRequest(graph=graph, cluster=cluster, batch=batch, costs=costs, pins={})

    order = order_by(profile)
    layers = whole_layers(graph, cluster, costs=order.costs)
    found_ways = {
        "one": on_one_machine(graph),
        "units": by_units(graph, cluster),
        "layers": Way(placements=layers),
    }
    plans = {name: plan_of(way, order, loss=workload.loss) for name, way in found_ways.items()}
    slow, slower = (dict.fromkeys(keys, (n, 2 * n)) for n in (2.0, 4.0))
    paces = Paces(alone=slow, together=slower)
    seconds = {"one": 30.0, "units": 40.0, "layers": 30.0}
    turns = [
        Turn(
            plan=name, seconds=seconds[name], cpu_seconds=0.0, others=0.0, before=paces, after=paces
        )
        for name in plans
    ]
    found = verdict(turns, plans, profile, order_by)
    assert found.measured == seconds
    # Machines that compute in turn have the pace of one that is alone.
    assert found.brought["one"] == pytest.approx(15.0, rel=1e-3)
    assert found.brought["layers"] == pytest.approx(15.0, rel=1e-3)
    # Those that compute at once have that of both, but for a layer that is not cut.
    assert found.brought["units"] == pytest.approx(10.0, rel=0.1)
    assert found.predicted["units"] < found.predicted["one"]
    assert found.preferred == "units"
    assert sorted(found.slower) == pytest.approx([2.0, 2.0, 4.0], rel=0.1)
