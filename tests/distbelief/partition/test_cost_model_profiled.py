"""Measured costs, used in between slices and on other machines."""

import msgspec
import pytest

from distbelief.graph.graph import LayerGraph
from distbelief.graph.region import Region
from distbelief.partition.cost_model import AnalyticCosts, ProfiledCosts, signature
from distbelief.partition.profiling.profile import Host, Profile, Slices, digest
from tests.distbelief.partition.plans import equal, fully_connected, unequal


@pytest.fixture
def graph() -> LayerGraph:
    return fully_connected(12, 8, 8, 8, 6)


def made_up(
    graph: LayerGraph,
    *,
    forward: tuple[float, ...] = (0.5, 0.75, 1.0),
    backward: tuple[float, ...] = (1.0, 1.5, 2.0),
) -> Profile:
    """A profile whose halves take three quarters of the whole."""
    slices = Slices(extents=(2, 4, 8), forward=forward, backward=backward)
    rows = {"whole": slices, "0": slices, "inputs": slices}
    host = Host(torch="2", processor="abacus", n_threads=1)
    key = digest(signature(graph["2"]), batch=3)
    return Profile(host=host, date="2012-12-03", layers={key: rows})


def test_what_lies_between_slices_is_interpolated(graph: LayerGraph) -> None:
    machines = AnalyticCosts(unequal(), batch=3)
    costs = ProfiledCosts(made_up(graph), machines=machines)
    layer = graph["2"]
    found = [costs.passes(layer, Region.of(n), 0).forward for n in (8, 6, 4, 1, 0)]
    assert found == pytest.approx([1.0, 0.875, 0.75, 0.5, 0.0])
    assert costs.passes(layer, Region.of(4), 4).backward == pytest.approx(1.5)
    assert costs.passes(layer, Region.of(4), 0, partial=True).forward == pytest.approx(0.75)
    other = graph["0"]
    theirs = machines.passes(other, other.region, 2)
    assert costs.passes(other, other.region, 2) == theirs


def test_other_machines_are_as_much_slower_than_by_arithmetic(graph: LayerGraph) -> None:
    machines = AnalyticCosts(unequal(), batch=3)
    host = AnalyticCosts(equal(1), batch=3)
    costs = ProfiledCosts(made_up(graph), machines=machines, host=host)
    layer, half = graph["2"], Region.of(4)
    assert costs.passes(layer, half, 0).forward == pytest.approx(0.75)
    slower = machines.passes(layer, half, 2).forward / machines.passes(layer, half, 0).forward
    assert costs.passes(layer, half, 2).forward == pytest.approx(0.75 * slower)
    assert slower > 1
    assert costs.passes(layer, half, 0).backward == pytest.approx(1.5)


def test_a_part_never_takes_less_than_its_share(graph: LayerGraph) -> None:
    profile = made_up(graph, forward=(0.1, 0.2, 1.0), backward=(0.0, 0.0, 2.0))
    costs = ProfiledCosts(profile, machines=AnalyticCosts(equal(1), batch=3))
    layer, half = graph["2"], Region.of(4)
    assert costs.passes(layer, half, 0).forward == pytest.approx(0.5)
    assert costs.passes(layer, half, 0).backward == pytest.approx(1.0)
    assert costs.passes(layer, half, 0, partial=True).forward == pytest.approx(0.5)


def test_more_takes_longer_also_as_measured(graph: LayerGraph) -> None:
    costs = ProfiledCosts(made_up(graph), machines=AnalyticCosts(equal(1), batch=3))
    seconds = [costs.passes(graph["2"], Region.of(n), 0).forward for n in range(9)]
    assert seconds == sorted(seconds)


def test_fewer_samples_take_the_share_that_was_measured(graph: LayerGraph) -> None:
    profile = made_up(graph)
    ((key, rows),) = profile.layers.items()
    samples = Slices(extents=(1, 3), forward=(0.5, 1.0), backward=(0.5, 2.0))
    layers = {key: {**rows, "samples": samples}}
    known = msgspec.structs.replace(profile, layers=layers)
    costs = ProfiledCosts(known, machines=AnalyticCosts(equal(1), batch=3))
    assert costs.shares(graph["2"], 1) == pytest.approx((0.5, 0.25))
    assert costs.shares(graph["2"], 2) == pytest.approx((0.75, 0.625))
    assert costs.shares(graph["0"], 1) is None
    unmeasured = ProfiledCosts(profile, machines=AnalyticCosts(equal(1), batch=3))
    assert unmeasured.shares(graph["2"], 1) is None
