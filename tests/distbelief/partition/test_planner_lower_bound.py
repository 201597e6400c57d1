from typing import cast

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from distbelief.graph.graph import INPUT, Layer
from distbelief.graph.region import Region
from distbelief.partition.cost_model import AnalyticCosts, single_sample
from distbelief.partition.planner import lower_bound
from distbelief.partition.problem import build
from distbelief.program.cluster import Cluster, uniform
from distbelief.program.placement import Placement
from distbelief.program.step_cost import Costs, Passes
from tests.distbelief.partition.plans import MACHINE, equal, unequal, zoo
from tests.distbelief.partition.requests import make_request, simulated


GRAPH = zoo("alexnet")
CLUSTERS = {"equal": equal(4), "unequal": unequal()}
DECODERS = {name: build(GRAPH, cluster, batch=32)[1] for name, cluster in CLUSTERS.items()}


def bound(cluster: Cluster) -> float:
    costs = AnalyticCosts(cluster, batch=32, single=single_sample(GRAPH))
    return lower_bound(GRAPH, cluster, costs)


@pytest.mark.parametrize("name", CLUSTERS)
@settings(max_examples=15)
@given(data=st.data())
def test_no_plan_of_the_candidates_is_faster(name: str, data: st.DataObject) -> None:
    cluster, decoder = CLUSTERS[name], DECODERS[name]
    choice = [data.draw(st.integers(0, len(node.candidates) - 1)) for node in decoder.nodes]
    done = simulated(make_request(GRAPH, cluster), decoder(choice), n_machines=len(cluster))
    assert done.step_seconds >= bound(cluster) * (1 - 1e-9)


def test_one_machine_does_exactly_that() -> None:
    whole = {
        layer.name: Placement.whole(len(layer.shape), 0)
        for layer in GRAPH.layers
        if layer.kind != INPUT
    }
    done = simulated(make_request(GRAPH, equal(1)), whole, n_machines=1)
    assert done.step_seconds == pytest.approx(bound(equal(1)))


def test_more_machines_never_have_a_higher_bound() -> None:
    for cluster in (equal(8), unequal()):
        found = [bound(cluster.first(n)) for n in range(1, len(cluster) + 1)]
        assert found == sorted(found, reverse=True)


def test_machines_twice_as_fast_halve_it() -> None:
    fast = msgspec.structs.replace(
        MACHINE,
        flops=2 * MACHINE.flops,
        memory_rate=2 * MACHINE.memory_rate,
        overhead=MACHINE.overhead / 2,
    )
    faster = bound(uniform("fast", fast, 4))
    assert faster == pytest.approx(bound(equal(4)) / 2)


class Tiny:
    """Measured costs of layers that take less than the machine's overhead per layer."""

    def passes(self, layer: Layer, part: Region, machine: int) -> Passes:
        del layer, part, machine
        return Passes(1e-6, 1e-6)


@pytest.mark.parametrize("n_machines", [1, 4])
def test_layers_faster_than_the_overhead_keep_it_a_bound(n_machines: int) -> None:
    """Regression: the whole overhead counted for each of them, and the bound exceeded the
    measured time of a step on a fast host."""
    machine = msgspec.structs.replace(MACHINE, overhead=1e-3)
    layers = [layer for layer in GRAPH.layers if layer.kind != INPUT]
    found = lower_bound(GRAPH, uniform("tiny", machine, n_machines), cast("Costs", Tiny()))
    assert 0 < found <= 2e-6 * len(layers)
