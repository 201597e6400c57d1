"""Candidates can be computed, tile their layer, and are few."""

import pytest
from torch import nn

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, GraphError, Layer
from distbelief.graph.region import Region
from distbelief.plans.cluster import Cluster
from distbelief.plans.planner.candidates import (
    N_CANDIDATES_MAX,
    candidates,
    check_pins,
    pinned,
    sizes,
    summed_dims,
)
from distbelief.plans.planner.grouping import groups
from tests.distbelief.graph.reference import tile
from tests.distbelief.plans.planner.plans import (
    NETS,
    convolutional,
    equal,
    fully_connected,
    unequal,
    zoo,
)


@pytest.mark.each_value
@pytest.mark.parametrize("cluster", [equal(4), unequal()], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", NETS)
def test_candidates_and_what_follows_them_tile_their_layers(name: str, cluster: Cluster) -> None:
    seen = set()
    for group in groups(zoo(name)):
        signature = [(layer.kind, layer.shape, layer.input_shapes) for layer in group.members]
        if str(signature) in seen:
            continue
        seen.add(str(signature))
        for candidate in candidates(group.root, cluster):
            placed = group.placements(candidate.placement)
            assert placed.keys() == {layer.name for layer in group.members}
            for layer in group.members:
                placement = placed[layer.name]
                placement.check(layer, n_machines=len(cluster))
                owned = [region for _, region in placement.owners(layer)]
                assert tile(layer.region, owned)
                if placement.combine is not None:
                    first = layer.input_shapes[0]
                    cells = [region for _, region in placement.cells(first)]
                    assert tile(Region.of(*first), cells)


@pytest.mark.parametrize("n_machines", [1, 5, 144])
def test_candidates_are_few_distinct_and_can_be_pinned(n_machines: int) -> None:
    cluster = equal(n_machines)
    for name in ("alexnet", "vision transformer") if n_machines == 5 else ("alexnet",):
        for layer in zoo(name).layers:
            if layer.kind == INPUT:
                continue
            found = candidates(layer, cluster)
            assert found[0].label == "whole"
            assert len(found) <= N_CANDIDATES_MAX
            assert len({c.placement for c in found}) == len(found)
            assert len({c.label for c in found}) == len(found)
            for candidate in found:
                if " of dimension " in candidate.label:
                    continue  # of several sums, pins mean the first
                pin = candidate.label.replace(" ", ":")
                assert pinned(layer, cluster, pin) == candidate


def test_numbers_of_parts_are_few_and_end_with_all() -> None:
    assert sizes(1) == []
    assert sizes(5) == [2, 3, 4, 5]
    assert sizes(20) == [2, 3, 4, 5, 6, 8, 10, 12, 16, 20]
    assert sizes(144)[-1] == 144
    assert len(sizes(144)) < 20


def test_images_are_cut_in_every_way_and_neurons_by_inputs_too() -> None:
    conv = convolutional()["0"]
    labels = [c.label for c in candidates(conv, equal(8))]
    assert {"whole", "units 8", "rows 4", "columns 3", "grid 2x4"} <= set(labels)
    assert "grid 4x2x1" in labels or "grid 2x4x1" in labels
    dense = fully_connected(440, 64, 32, 10)["2"]
    labels = [c.label for c in candidates(dense, equal(4))]
    assert labels == [
        "whole", "units 2", "units 3", "units 4", "inputs 2", "inputs 3", "inputs 4"
    ]  # fmt: skip
    assert summed_dims(dense) == (0,)


def test_too_many_candidates_leave_those_on_most_machines() -> None:
    layer = Layer(
        name="x",
        kind="call",
        inputs=("y",),
        input_shapes=((192, 200, 201),),
        shape=(192, 200, 201),
        options={"along": ()},
    )
    labels = [candidate.label for candidate in candidates(layer, equal(144))]
    assert len(labels) <= N_CANDIDATES_MAX
    assert {"whole", "units 144", "rows 144", "columns 144", "grid 12x12"} <= set(labels)


def test_slow_machines_get_less() -> None:
    dense = fully_connected(440, 64, 32, 10)["0"]
    placement = pinned(dense, unequal(), "units:5").placement
    cells = [region.n_elements for _, region in placement.cells(dense.shape)]
    assert cells[0] == cells[1] > 2 * cells[2]
    assert sum(cells) == 64


def test_whole_layers_may_be_anywhere_if_machines_differ_or_memory_is_short() -> None:
    dense = fully_connected(440, 64, 32, 10)["0"]

    def wholes(cluster: Cluster) -> list[str]:
        labels = [c.label for c in candidates(dense, cluster)]
        return [label for label in labels if label.startswith("whole")]

    assert wholes(equal(4)) == ["whole"]
    assert wholes(unequal()) == ["whole", "whole@1", "whole@2"]
    assert len(wholes(equal(4, memory=1e6))) == 4


@pytest.mark.parametrize(
    "pin", ["units:9", "rows:2", "grid:2x2", "whole@8", "inputs:0", "by hand", "units:99"]
)
def test_an_impossible_pin_lists_what_is_possible(pin: str) -> None:
    dense = fully_connected(440, 8, 32, 10)["0"]
    with pytest.raises(GraphError) as caught:
        pinned(dense, equal(8), pin)
    assert str(caught.value) == (
        f"'0' cannot be pinned to {pin!r} on 8 machines: use whole, "
        "whole@0 to whole@7, units:2 to units:8, inputs:2 to inputs:8"
    )


def test_an_impossible_grid_names_the_limits_and_a_whole_layer_its_reason() -> None:
    conv = convolutional()["0"]
    with pytest.raises(GraphError, match=r"grid:AxB with rows A <= 8, columns B <= 8"):
        pinned(conv, equal(8), "grid:3x3")
    assert pinned(conv, equal(8), "grid:2x4").label == "grid 2x4"
    assert pinned(conv, equal(8), "grid:1x1").label == "whole"
    shuffled = capture(nn.PixelShuffle(2), [InputSpec(shape=(4, 3, 3))]).layers[-1]
    with pytest.raises(GraphError, match="pixel_shuffle has no split"):
        pinned(shuffled, equal(2), "units:2")


def test_pins_of_layers_that_are_not_computed_are_rejected() -> None:
    graph = zoo("resnet18")
    with pytest.raises(GraphError, match="do you mean 'conv1'"):
        check_pins(graph, {"conv01": "whole"})
    inputs = next(layer.name for layer in graph.layers if layer.kind == INPUT)
    with pytest.raises(GraphError, match="it is an input"):
        check_pins(graph, {inputs: "whole"})
    check_pins(graph, {"conv1": "whole"})
