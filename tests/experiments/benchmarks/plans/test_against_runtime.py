"""Profiles brought to the pace of a moment, turns that count, and how predictions are judged."""

from pathlib import Path

import pytest

from distbelief.plans.cluster import Cluster, Machine
from distbelief.plans.planner.baselines import whole_layers
from distbelief.plans.planner.cost_model import AnalyticCosts, ProfiledCosts, single_sample
from distbelief.plans.planner.profile import Host, Profile, Slices, digest
from distbelief.plans.planner.search import PlanningRequest
from experiments.benchmarks.measuring.workload import Workload
from experiments.benchmarks.planner_against_runtime import (
    Paces,
    Plans,
    Turn,
    Verdict,
    at_pace,
    compared,
    counting,
    mean_pace,
    regret,
    verdict,
)
from experiments.benchmarks.plans.machines import Way, by_units, on_one_machine, plan_of, ways
from tests.experiments.benchmarks.bare.test_machine import order_of


def slices(*forward: float) -> Slices:
    return Slices(
        extents=tuple(range(1, len(forward) + 1)),
        forward=forward,
        backward=tuple(2 * seconds for seconds in forward),
    )


PROFILE = Profile(
    host=Host(torch="2", processor="any", n_threads=1),
    date="",
    layers={
        "a": {"whole": slices(2.0), "0": slices(1.5, 2.5)},
        "b": {"whole": slices(1.0)},
        "c": {"whole": slices(0.0)},
    },
)


def test_slices_become_slower_as_the_whole_layer_has() -> None:
    found = at_pace(PROFILE, {"a": (4.0, 2.0), "c": (1.0, 1.0), "unknown": (1.0, 1.0)})
    assert found.layers["a"]["0"].forward == pytest.approx((3.0, 5.0))
    assert found.layers["a"]["0"].backward == pytest.approx((1.5, 2.5))
    assert found.layers["a"]["whole"].forward == (4.0,)
    assert found.layers["b"] == PROFILE.layers["b"]
    assert found.layers["c"] == PROFILE.layers["c"]  # took no time at all
    means = mean_pace([{"a": (1.0, 2.0)}, {"a": (3.0, 2.0), "b": (1.0, 1.0)}])
    assert means == {"a": (2.0, 2.0)}
    paces = Paces(alone={"a": (1.0, 2.0)}, together={"a": (2.0, 6.0)})
    assert (paces.at(0.0), paces.at(1.0)) == (paces.alone, paces.together)
    assert paces.at(0.5) == {"a": (1.5, 4.0)}  # half of the time beside others
    assert paces.seconds == 11.0


@pytest.mark.parametrize(
    ("before", "after", "others", "void"),
    [
        (1.0, 1.1, 0.1, False),
        (1.0, 1.4, 0.1, True),
        (1.4, 1.0, 0.1, True),
        (2.0, 2.0, 0.1, False),
        (1.0, 1.0, 0.3, True),
    ],
)
def test_a_turn_does_not_count_if_the_machine_was_another_afterwards(
    *, before: float, after: float, others: float, void: bool
) -> None:
    assert turn_of("any", before=before, after=after, others=others).is_void == void


def turn_of(plan: str, *, before: float, after: float, others: float) -> Turn:
    return Turn(
        plan=plan,
        seconds=1.0,
        cpu_seconds=1.0,
        others=others,
        before=paces(before),
        after=paces(after),
    )


def paces(seconds: float) -> Paces:
    pace = {"layer": (0.4 * seconds, 0.6 * seconds)}
    return Paces(alone=pace, together=pace)


def test_a_plan_of_which_no_turn_counts_is_not_left_out() -> None:
    a, b = (turn_of(plan, before=1.0, after=1.0, others=0.5) for plan in "ab")
    good = turn_of("a", before=1.0, after=1.0, others=0.0)
    assert counting([a, b, good]) == [b, good]


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
        brought={"a": 3.0, "b": 2.0, "c": 1.0, "d": 4.0},
    )
    assert found.finalists == ["a", "c", "b"]
    final = {"a": [2.2, 2.1, 2.0], "b": [2.5, 2.0, 2.0], "c": [2.3, 2.4, 1.0]}
    assert regret(found.preferred, final) == pytest.approx(2.1 / 2.0 - 1.0)


def test_what_takes_twice_as_long_at_half_the_pace_is_as_predicted() -> None:
    workload = Workload(net="speech", batch_size=4, small=True)
    graph, batch = workload.graph(), workload.batch_size
    machine = Machine(flops=1e11, memory_rate=2e10, overhead=0.0, bandwidth=1e12)
    cluster = Cluster(name="two", machines=(machine,) * 2, latency=0.0)
    keys = [digest(layer.signature, batch=batch) for layer in graph.layers]
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
    # Machines that compute in turn have the pace of one that is alone.
    assert found.brought["one"] == pytest.approx(15.0, rel=1e-3)
    assert found.brought["layers"] == pytest.approx(15.0, rel=1e-3)
    # Those that compute at once have that of both, but for a layer that is not cut.
    assert found.brought["units"] == pytest.approx(10.0, rel=0.1)
    assert found.predicted["units"] < found.predicted["one"]
    assert found.preferred == "units"


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_plans_take_turns_in_the_same_processes(tmp_path: Path) -> None:
    workload = Workload(net="image", batch_size=4, small=True)
    order = order_of(workload)
    found = ways(order)
    plans = {
        name: plan_of(found[name], order, loss=workload.loss)
        for name in ("one", "rows", "layers, 4 parts")
    }
    with Plans(workload, plans, tmp_path) as machines:
        one, two = machines.paces(1), machines.paces(2)
        turns = list(machines.rounds(n_rounds=2, n_steps=2, seconds_max=60.0))
        first = list(machines.rounds(n_rounds=2, n_steps=2, seconds_max=0.0))
    assert one.alone is one.together
    assert two.alone.keys() == two.together.keys() == one.alone.keys()
    assert len(two.alone) >= 4
    names = list(plans)
    assert [turn.plan for turn in turns] == [*names, *reversed(names)]
    assert all(turn.seconds > 0 and turn.cpu_seconds > 0 for turn in turns)
    assert len(first) == 3  # one round there is
