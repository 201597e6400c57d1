"""Layers that follow another one without messages."""

import pytest

from distbelief.graph.operator import operator_of
from distbelief.graph.region import Region
from distbelief.plans.placement import Placement
from distbelief.plans.planner.candidates import candidates
from distbelief.plans.planner.grouping import Follower, groups, reads_its_own
from tests.distbelief.plans.planner.plans import NETS, equal, fully_connected, zoo


def reads_of_leader(follower: Follower, placement: Placement) -> list[tuple[int, Region]]:
    """What each machine reads of the leader."""
    layer, kind = follower.layer, operator_of(follower.layer)
    index = layer.inputs.index(follower.leader.name)
    if placement.combine is None:
        cells = placement.cells(layer.shape)
        return [(m, kind.reads(layer, cell)[index]) for m, cell in cells]
    assert kind.partial is not None
    cells = placement.cells(layer.input_shapes[0])
    return [(m, kind.partial.reads(layer, cell)[index]) for m, cell in cells]


@pytest.mark.parametrize("name", NETS)
def test_followers_read_what_their_machine_has(name: str) -> None:
    for group in groups(zoo(name)):
        for candidate in candidates(group.root, equal(3)):
            placed = group.placements(candidate.placement)
            for follower in group.followers:
                if follower.layer.options.get("function") == "maximum":
                    continue  # with a gradient it may have to be whole
                owned = dict(placed[follower.leader.name].owners(follower.leader))
                for machine, read in reads_of_leader(follower, placed[follower.layer.name]):
                    assert read in owned[machine]


@pytest.mark.parametrize("name", NETS)
def test_every_layer_is_in_one_group(name: str) -> None:
    graph = zoo(name)
    members = [layer.name for group in groups(graph) for layer in group.members]
    assert sorted(members) == sorted(layer.name for layer in graph.layers if layer.kind != "input")


def test_few_nodes_are_left_of_a_residual_net() -> None:
    graph = zoo("resnet50")
    found = groups(graph)
    assert len(graph.layers) > 300
    assert len(found) < 70
    kinds = {layer.kind for group in found for layer in group.members[1:]}
    assert {"call", "normalise", "reduction", "running_average"} <= kinds


def test_norms_activations_and_losses_follow() -> None:
    found = groups(fully_connected(440, 64, 32, 10))
    assert [[layer.name for layer in group.members] for group in found] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "loss.maximum", "loss.sums", "loss"],
    ]
    placed = found[-1].placements(Placement(cuts=((5,),), machines=(0, 1)))
    assert placed["loss.sums"].combine == Placement.whole(1, 0)
    assert placed["loss"] == Placement.whole(0, 0)


def test_pinned_layers_are_roots() -> None:
    graph = fully_connected(440, 64, 32, 10)
    roots = [group.root.name for group in groups(graph, pinned={"1"})]
    assert roots == ["0", "1", "2", "4"]


def test_sums_over_what_is_not_cut_are_not_partial() -> None:
    group = next(g for g in groups(zoo("resnet18")) if g.root.name == "conv1")
    mean = next(f for f in group.followers if f.layer.kind == "reduction")
    channels, rows, columns = group.root.shape
    by_channel = Placement(cuts=((channels // 2,), (), ()), machines=(0, 1))
    assert mean.placement(by_channel).combine is None
    grid = Placement(cuts=((channels // 2,), (rows // 2,), ()), machines=(0, 1, 2, 3))
    combine = mean.placement(grid).combine
    assert combine is not None
    assert combine.machines == (0, 2)
    assert combine.cuts[0] == (channels // 2,)
    assert columns > 1


def test_windows_and_permutations_do_not_follow() -> None:
    graph = zoo("resnet18")
    convolution = next(x for x in graph.layers if x.name.endswith("conv2"))
    assert not reads_its_own(convolution, 0)
    assert all(
        not reads_its_own(layer, 0)
        for layer in zoo("vision transformer").layers
        if layer.kind in {"attention", "linear"}
    )
