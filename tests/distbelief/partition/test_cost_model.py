"""Costs by arithmetic."""

import math

import msgspec
import pytest
from hypothesis import given, strategies as st

from distbelief.graph.graph import Layer
from distbelief.graph.region import Region
from distbelief.partition.cost_model import AnalyticCosts, signature, single_sample
from distbelief.partition.cost_tables import sync_seconds
from distbelief.program.cluster import Cluster
from tests.distbelief.partition.plans import convolutional, equal, fully_connected, unequal, zoo


DENSE = fully_connected(440, 64, 32, 10)["0"]
CONV = convolutional()["0"]


@given(layer=st.sampled_from([DENSE, CONV]), data=st.data())
def test_more_takes_longer(layer: Layer, data: st.DataObject) -> None:
    costs = AnalyticCosts(unequal(), batch=32)
    ends = [data.draw(st.integers(1, n), "extent") for n in layer.shape]
    smaller = [data.draw(st.integers(0, n), "less") for n in ends]
    large, small = Region.of(*ends), Region.of(*smaller)
    less, more, slower = (
        costs.passes(layer, region, machine)
        for region, machine in ((small, 0), (large, 0), (large, 2))
    )
    for times in zip(less, more, slower, strict=True):
        assert list(times) == sorted(times)


def test_a_large_product_takes_its_operations_and_a_small_one_its_bytes() -> None:
    dense = fully_connected(440, 2560, 2560, 8192)["2"]
    costs = AnalyticCosts(equal(1), batch=1000)
    operations = 2 * 2560 * 2560 * 1000
    assert costs.passes(dense, dense.region, 0).forward == pytest.approx(operations / 1e10 + 1e-5)
    one = AnalyticCosts(equal(1), batch=1)
    n_bytes = 4 * (2560 * 2560 + 2560 + 2560 + 2560)
    assert one.passes(dense, dense.region, 0).forward == pytest.approx(n_bytes / 1e10 + 1e-5)


def test_parts_of_the_inputs_share_the_work() -> None:
    dense = fully_connected(440, 2560, 2560, 8192)["2"]
    costs = AnalyticCosts(equal(4), batch=1000)
    halves = Region.of(2560).cut(0, [1.0, 1.0])
    seconds = [costs.passes(dense, half, 0, partial=True).forward for half in halves]
    whole = costs.passes(dense, dense.region, 0).forward
    assert math.fsum(seconds) == pytest.approx(whole + 1e-5)
    assert costs.passes(dense, Region.of(0), 0).forward == 0.0


def test_what_reads_statistics_only_is_computed_for_one_sample() -> None:
    graph = zoo("resnet18")
    single = single_sample(graph)
    assert {graph[name].kind for name in single} == {"running_average"}
    layer = graph[min(single)]
    few, many = (AnalyticCosts(equal(1), batch=batch, single=single) for batch in (1, 100))
    assert few.passes(layer, layer.region, 0).forward == many.passes(layer, layer.region, 0).forward


def test_equal_layers_have_equal_signatures_whatever_their_names() -> None:
    graph = fully_connected(440, 64, 64, 64, 10)
    assert signature(graph["2"]) == signature(graph["4"])
    assert signature(graph["0"]) != signature(graph["2"])


WEIGHT = Region.of(64, 10)
HALVES = WEIGHT.cut(0, [1.0, 1.0])


def sync(cluster: Cluster, *used: Region, trains: bool = True) -> float:
    uses = [(machine, {"weight": region}) for machine, region in enumerate(used)]
    return sync_seconds(uses, cluster, trains={"weight": trains})


def test_a_weight_that_all_use_is_sent_and_summed_once_to_each() -> None:
    all_use = [WEIGHT] * 4
    assert sync(equal(4), *all_use) == pytest.approx(2 * 2560 * 0.75 / 1e8)
    busy = msgspec.structs.replace(equal(4), message_overhead=1.0)
    assert sync(busy, *all_use) - sync(equal(4), *all_use) == pytest.approx(6.0)
    assert sync(equal(4, latency=1.0), *all_use) == pytest.approx(2.0, abs=1e-3)


def test_private_parts_of_a_weight_cost_nothing() -> None:
    assert sync(unequal(), *HALVES) == 0.0


def test_two_ranges_with_users_of_their_own_are_synchronised_side_by_side() -> None:
    one, other = HALVES
    found = sync(equal(4), one, one, other, other, trains=False)
    assert found == pytest.approx(1280 * 0.5 / 1e8)


def test_a_single_number_has_one_owner_and_the_slowest_link_decides() -> None:
    uses = [(0, {"b": Region(())}), (3, {"b": Region(())})]
    found = sync_seconds(uses, unequal(), trains={"b": True})
    assert found == pytest.approx(2 * (4 / 1e6 + 1e-4))
