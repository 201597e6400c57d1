import dataclasses

import msgspec
import pytest
from torch import nn

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.graph.losses import append_loss
from distbelief.partition.baselines import even
from distbelief.partition.cost_model import AnalyticCosts, single_sample
from distbelief.partition.planner import Planned, plan
from distbelief.partition.search import PlanningRequest
from distbelief.program.cluster import Cluster, Machine, uniform
from tests.distbelief.graph.reference import tile
from tests.distbelief.partition.plans import zoo
from tests.distbelief.partition.requests import make_request as request_for, simulated


pytestmark = pytest.mark.untraced


MACHINE = Machine(flops=2e10, memory_rate=1e10, overhead=1e-5, jitter=0.2, bandwidth=1.25e8)
CLUSTER = uniform("tests", MACHINE, 16, latency=1e-4)


def net() -> LayerGraph:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16 * 16, 256),
        nn.ReLU(),
        nn.Linear(256, 64),
    )
    graph = capture(module, [InputSpec(shape=(3, 32, 32))])
    return append_loss(graph, "cross_entropy")


GRAPH = net()


def make_request(cluster: Cluster = CLUSTER, **changes: object) -> PlanningRequest:
    costs = AnalyticCosts(cluster, batch=64, single=single_sample(GRAPH))
    made = PlanningRequest(graph=GRAPH, cluster=cluster, batch=64, costs=costs, pins={})
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def medians(planned: list[Planned]) -> list[float]:
    return [done.median for done in planned]


def test_every_layer_is_tiled_by_what_the_plan_says() -> None:
    for done in plan(make_request(), [1, 3, 8]):
        placements = done.best.placements
        for layer in GRAPH.layers:
            if layer.kind != INPUT:
                owners = placements[layer.name].owners(layer)
                assert tile(layer.region, [region for _, region in owners])


def test_more_machines_are_never_slower_and_baselines_never_faster() -> None:
    planned = plan(make_request(), [1, 2, 3, 4, 8, 16])
    found = medians(planned)
    assert found == sorted(found, reverse=True)
    assert found[0] == planned[0].one_machine_seconds
    for done in planned:
        assert done.median <= min(done.baselines.values())
        assert done.lower_bound <= done.best.cost.step_seconds
        gap = done.gap
        assert gap is None or gap >= 0
        assert sum(done.shares) == pytest.approx(1.0)


def test_a_plan_for_fewer_machines_is_kept_if_none_is_faster() -> None:
    uneven = uniform("uneven", msgspec.structs.replace(MACHINE, jitter=0.4, bandwidth=1e8), 8)
    request = dataclasses.replace(request_for(zoo("alexnet"), uneven), search=False)
    three, four = plan(request, [3, 4])
    assert four.used == three.used
    assert four.median == three.median


def test_counts_are_planned_in_ascending_order_whatever_their_order() -> None:
    once, again = plan(make_request(), [1, 4]), plan(make_request(), [4, 1, 4])
    assert medians(once) == medians(again)
    assert [done.n_machines for done in again] == [1, 4]


def test_equal_requests_have_equal_plans() -> None:
    one, other = plan(make_request(), [5]), plan(make_request(), [5])
    assert one[0].best.seconds == other[0].best.seconds
    assert one[0].best.placements == other[0].best.placements


def test_a_network_that_costs_nothing_gives_nearly_all_of_the_speed() -> None:
    free = msgspec.structs.replace(MACHINE, bandwidth=1e15, jitter=0.0, overhead=0.0)
    (done,) = plan(make_request(uniform("free", free, 4)), [4])
    assert done.speed_up > 3.6


def test_a_slow_network_leaves_machines_idle_unless_exactly_is_set() -> None:
    slow = uniform("slow", msgspec.structs.replace(MACHINE, bandwidth=1e3), 4)
    (done,) = plan(make_request(slow), [4])
    assert done.used == (0,)
    (done,) = plan(make_request(slow, exactly=True), [4])
    assert len(done.used) == 4
    assert done.speed_up < 1


def test_a_slow_machine_gets_less() -> None:
    half = msgspec.structs.replace(MACHINE, flops=1e10, memory_rate=5e9, jitter=0.0)
    fast = msgspec.structs.replace(MACHINE, bandwidth=1e12, jitter=0.0)
    cluster = Cluster(name="mixed", machines=(fast, msgspec.structs.replace(half, bandwidth=1e12)))
    (done,) = plan(make_request(cluster), [2])
    busy = [seconds.compute for seconds in done.best.cost.seconds]
    assert busy[1] == pytest.approx(busy[0], rel=0.2)
    assert done.speed_up > 1.3


def test_lack_of_memory_splits_the_model_or_names_the_machines() -> None:
    (free,) = plan(make_request(), [4])
    need = max(free.best.cost.memory_bytes)
    slow = msgspec.structs.replace(MACHINE, bandwidth=1e5)  # one machine is best
    capped = msgspec.structs.replace(slow, memory=1.5 * need)
    (done,) = plan(make_request(uniform("capped", capped, 4)), [4])
    assert not done.lacking
    assert len(done.used) > 1
    tiny = msgspec.structs.replace(MACHINE, memory=1e4)
    (done,) = plan(make_request(uniform("tiny", tiny, 4)), [4])
    assert list(done.lacking) == [0, 1, 2, 3]


def test_pins_are_respected() -> None:
    (done,) = plan(make_request(pins={"4": "units:3", "0": "rows:2"}), [4])
    assert done.best.placements["4"].grid == (3,)
    assert done.best.placements["0"].grid == (1, 2, 1)
    assert done.baselines == {}


def test_the_estimate_is_the_simulation() -> None:
    (done,) = plan(make_request(), [4])
    again = simulated(make_request(), done.best.placements, n_machines=4)
    assert again.step_seconds == done.best.cost.step_seconds
    assert dict(again.link_bytes) == dict(done.best.cost.link_bytes)


def test_impossible_requests_are_rejected() -> None:
    with pytest.raises(GraphError, match="has 16 machines, but 17 are requested"):
        plan(make_request(), [1, 17])
    with pytest.raises(GraphError, match="machines is empty: give"):
        plan(make_request(), [])
    with pytest.raises(GraphError, match="cannot be pinned to 'grid:2x3'"):
        plan(make_request(pins={"4": "grid:2x3"}), [8])


def test_stages_win_if_layers_cannot_be_split_well() -> None:
    """A deep chain, a network too slow to split layers over: a pipeline is best."""
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    graph = append_loss(capture(module, [InputSpec(shape=(512,))]), "mse")
    slow = msgspec.structs.replace(
        MACHINE, memory_rate=1e12, bandwidth=2e7, jitter=0.0, overhead=0.0
    )
    cluster = uniform("slow", slow, 4)

    def costs_for(n_samples: int) -> AnalyticCosts:
        return AnalyticCosts(cluster, batch=n_samples)

    asked = PlanningRequest(
        graph=graph, cluster=cluster, batch=64, costs=costs_for(64), costs_for=costs_for, pins={}
    )
    without, with_stages = (
        plan(dataclasses.replace(asked, costs_for=costs_or_none), [4])[0]
        for costs_or_none in (None, costs_for)
    )
    assert with_stages.best.cost.micro_batches > 1
    assert with_stages.median < 0.8 * without.median
    assert with_stages.best.method.startswith("stages")


def test_search_begins_from_the_fastest_plan_even_a_baseline() -> None:
    # The search once began with the solver's choice only, and never improved `even`.
    asked = make_request(solver_seconds=1.0)
    for done, plain in zip(
        plan(asked, [2, 3]), plan(dataclasses.replace(asked, search=False), [2, 3]), strict=True
    ):
        assert done.median <= plain.median
        assert done.median <= min(done.baselines.values())
        even_choice = done.solved.decoder.choice(even(GRAPH, CLUSTER.first(3)))
        assert done.n_machines != 3 or even_choice is not None


def test_every_phase_is_reported() -> None:
    told: list[str] = []
    plan(make_request(), [2], notify=told.append)
    assert told[0] == "1 machine"
    of_two = told[told.index("2 machines") :]
    assert of_two[1] == "2 machines: what each split of a layer costs"
    assert of_two[2].startswith("2 machines: the best choice among ")
    assert of_two[3] == "2 machines: search, 0 of 300 plans"
    assert of_two[4] == "2 machines: search, 5 of 300 plans"


def test_a_pin_impossible_for_all_counts_is_rejected_at_once() -> None:
    told: list[str] = []
    with pytest.raises(GraphError, match="cannot be pinned to 'rows:9' on 4 machines"):
        plan(make_request(pins={"0": "rows:9"}), [2, 4], notify=told.append)
    assert not told
