from itertools import combinations
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from torch import nn

from distbelief.core.errors import StorageError
from distbelief.graph.capture import InputSpec, capture
from distbelief.plans.placement import Placement, grid
from distbelief.plans.planner import plan_picture
from distbelief.plans.planner.baselines import even
from distbelief.plans.planner.plan_picture import LEGEND, colour, draw_plan
from tests.distbelief.plans.planner.plans import equal, fully_connected, zoo


def drawn(path: Path, name: str, *, n_machines: int = 4) -> np.ndarray:
    graph = zoo(name)
    placements = even(graph, equal(n_machines))
    draw_plan(path, graph, placements, traffic=(), title=name)
    return np.asarray(matplotlib.image.imread(path))[:, :, :3]


def test_every_machine_is_seen_in_its_colour(tmp_path: Path) -> None:
    pixels = drawn(tmp_path / "plan.png", "alexnet").reshape(-1, 3)
    for machine in range(4):
        near = np.abs(pixels - colour(machine)[:3]).max(axis=1) < 0.02
        assert near.sum() > 100, machine
    absent = np.abs(pixels - colour(4)[:3]).max(axis=1) < 0.02
    assert absent.sum() < 100


def test_the_largest_of_many_layers_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_picture, "UNFOLDED_MAX", 100)
    full = drawn(tmp_path / "full.png", "alexnet")
    monkeypatch.setattr(plan_picture, "ROWS_MAX", 5)
    assert len(drawn(tmp_path / "short.png", "alexnet")) < 0.5 * len(full)


def test_equal_blocks_are_drawn_once_and_what_lies_alike_is_one_strip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transformer was 60 rows, most of them equal, or views of the row below."""
    figures: list[Figure] = []

    def save(figure: Figure, path: Path, **_: str) -> None:
        figures.append(figure)
        path.write_bytes(b"")

    monkeypatch.setattr(Figure, "savefig", save)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(20)))
    graph = capture(net, [InputSpec(shape=(16,))])
    whole = {layer.name: Placement.whole(1, 0) for layer in graph.computed}
    even_ones = {
        layer.name: grid((16,), [[1, 1]], (0, 1)) if layer.kind == "linear" else whole[layer.name]
        for layer in graph.computed
    }
    for placements in (whole, even_ones):
        draw_plan(tmp_path / "plan.png", graph, placements, traffic=(), title="")
    texts = [[text.get_text() for text in figure.axes[0].texts] for figure in figures]
    assert [text for text in texts[0] if text.startswith("0.0")] == ["0.0 and 39 more  16"]
    assert [text for text in texts[1] if "times" in text] == [
        "2 on 2 machines; 20 times",
        "whole on machine 0; 20 times",
    ]
    assert all(LEGEND in each for each in texts)


def test_neighbours_have_different_colours() -> None:
    for start in (0, 40, 137):
        colours = [np.array(colour(machine)) for machine in range(start, start + 6)]
        for one, other in combinations(colours, 2):
            assert np.abs(one - other).max() > 0.1
        assert all((c >= 0).all() and (c <= 1).all() for c in colours)


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    graph = fully_connected(4, 3, 2)
    path = tmp_path / "absent" / "plan.png"
    (tmp_path / "absent").write_text("a file where a folder should be")
    with pytest.raises(StorageError):
        draw_plan(path, graph, even(graph, equal(2)), traffic=(), title="")
