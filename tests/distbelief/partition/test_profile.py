"""Measured costs: kept, read again, and used in between and elsewhere."""

from pathlib import Path

import pytest
import torch

from distbelief.graph.layer import LayerGraph
from distbelief.graph.region import Region
from distbelief.partition.costs import AnalyticCosts, signature
from distbelief.partition.measuring import Limits, profiled
from distbelief.partition.profile import (
    Host,
    Profile,
    ProfiledCosts,
    Slices,
    digest,
    load,
    this_host,
)
from tests.distbelief.graph.zoo.catalogue import ZOO
from tests.distbelief.partition.plans import equal, fully_connected, unequal, zoo


class Clock:
    """Each look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def limits(seconds: float = 1e3) -> Limits:
    return Limits(seconds=seconds, clock=Clock())


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def graph() -> LayerGraph:
    return fully_connected(12, 8, 8, 8, 6)


def test_alike_layers_are_measured_once_and_kept(graph: LayerGraph) -> None:
    told: list[str] = []

    def tell(n_done: int, n_wanted: int, name: str) -> None:
        assert n_done == len(told) < n_wanted
        told.append(name)

    first = profiled(graph, batch=3, limits=limits(), progress=tell)
    assert "2" in told
    assert "4" not in told  # as the one before
    assert load(this_host()) == first
    again = profiled(graph, batch=3, limits=limits(), progress=tell)
    assert again.layers == first.layers
    n_told = len(told)
    other = profiled(graph, batch=4, limits=limits(), progress=lambda *_: None)
    assert len(other.layers) == 2 * len(first.layers)
    assert len(told) == n_told
    slices = first.layers[digest(signature(graph["2"]), batch=3)]
    assert set(slices) == {"whole", "0", "inputs"}
    assert slices["0"].extents == (1, 2, 4, 8)
    assert slices["0"].operations[-1] == 3 * 2 * 8 * 8
    assert slices["0"].forward == pytest.approx([1e-3] * 4)
    assert slices["inputs"].backward == pytest.approx([1e-3] * 4)


def test_when_time_is_up_the_rest_is_left_for_another_time(graph: LayerGraph) -> None:
    first = profiled(graph, batch=3, limits=limits(0.25))
    n_first = len(first.layers)
    rest = profiled(graph, batch=3, limits=limits())
    assert 0 < n_first < len(rest.layers)
    assert profiled(graph, batch=5, limits=limits(0.0)).layers.keys() == (
        rest.layers.keys()
    )


def test_all_sorts_of_layers_can_be_measured() -> None:
    few = Limits(seconds=1e3, n_runs=1, clock=Clock())
    profile = profiled(zoo("vision transformer"), batch=2, limits=few)
    assert len(profile.layers) > 20


def test_layers_that_call_a_module_are_measured_if_it_is_given() -> None:
    graph = zoo("unet, transposed")
    few = Limits(seconds=1e3, n_runs=1, clock=Clock())
    without = profiled(graph, batch=2, limits=few)
    model = ZOO["unet, transposed"].model()
    paths = [x.text("module") for x in graph.layers if "module" in x.options]
    modules = {path: model.get_submodule(path) for path in paths}
    with_them = profiled(graph, batch=2, modules=modules, limits=few)
    assert len(with_them.layers) == len(without.layers) + len(modules)


def test_layers_larger_than_memory_are_left_to_arithmetic() -> None:
    graph = fully_connected(40_000, 40_000, 6)
    profile = profiled(graph, batch=1, limits=limits())
    assert digest(signature(graph["0"]), batch=1) not in profile.layers


def test_a_file_that_is_broken_or_of_another_version_is_measured_anew(
    graph: LayerGraph,
) -> None:
    profile = profiled(graph, batch=3, limits=limits())
    path = this_host().path
    assert path.name.startswith("profile-")
    text = path.read_bytes()
    path.write_bytes(text[:-5])
    assert load(this_host()) is None
    path.write_bytes(text.replace(b'"version": 1', b'"version": 0'))
    assert load(this_host()) is None
    assert profiled(graph, batch=3, limits=limits()).layers == profile.layers
    assert load(this_host()) is not None


def test_without_a_variable_caches_are_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert this_host().path.parent == Path.home() / ".cache" / "distbelief"
    assert this_host().n_threads == torch.get_num_threads()
    assert this_host().processor


def made_up(graph: LayerGraph) -> Profile:
    """A profile whose halves take three quarters of the whole."""
    slices = Slices(
        extents=(2, 4, 8),
        operations=(1.0, 2.0, 4.0),
        forward=(0.5, 0.75, 1.0),
        backward=(1.0, 1.5, 2.0),
    )
    rows = {"whole": slices, "0": slices, "inputs": slices}
    host = Host(torch="2", processor="abacus", n_threads=1)
    key = digest(signature(graph["2"]), batch=3)
    return Profile(host=host, date="2012-12-03", layers={key: rows})


def test_what_lies_between_slices_is_interpolated(graph: LayerGraph) -> None:
    machines = AnalyticCosts(unequal(), batch=3)
    costs = ProfiledCosts(made_up(graph), machines=machines)
    layer = graph["2"]
    found = [costs.forward(layer, Region.of(n), 0) for n in (8, 6, 4, 1, 0)]
    assert found == pytest.approx([1.0, 0.875, 0.75, 0.5, 0.0])
    assert costs.backward(layer, Region.of(4), 4) == pytest.approx(1.5)
    assert costs.forward(layer, Region.of(4), 0, partial=True) == pytest.approx(0.75)
    other = graph["0"]
    for mine, theirs in (
        (costs.forward, machines.forward),
        (costs.backward, machines.backward),
    ):
        assert mine(other, other.region, 2) == theirs(other, other.region, 2)


def test_other_machines_are_as_much_slower_than_by_arithmetic(
    graph: LayerGraph,
) -> None:
    machines = AnalyticCosts(unequal(), batch=3)
    host = AnalyticCosts(equal(1), batch=3)
    costs = ProfiledCosts(made_up(graph), machines=machines, host=host)
    layer, half = graph["2"], Region.of(4)
    assert costs.forward(layer, half, 0) == pytest.approx(0.75)
    slower = machines.forward(layer, half, 2) / machines.forward(layer, half, 0)
    assert costs.forward(layer, half, 2) == pytest.approx(0.75 * slower)
    assert slower > 1
    assert costs.backward(layer, half, 0) == pytest.approx(1.5)


def test_more_takes_longer_also_as_measured(graph: LayerGraph) -> None:
    costs = ProfiledCosts(made_up(graph), machines=AnalyticCosts(equal(1), batch=3))
    seconds = [costs.forward(graph["2"], Region.of(n), 0) for n in range(9)]
    assert seconds == sorted(seconds)
