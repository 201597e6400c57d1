from pathlib import Path

import pytest

from experiments.figures import drawing
from experiments.figures.courses import TARGET
from experiments.figures.entries import NAMES
from experiments.figures.findings import PAPERS_ORDER
from tests.experiments.figures.courses import course


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(drawing, "FOLDER", tmp_path)
    return tmp_path


def test_figure_4_is_drawn(folder: Path) -> None:
    courses = [
        course(label.rpartition(" ")[0], 20, [0.1, 0.2, 0.3], seed=seed)
        for label in PAPERS_ORDER
        for seed in range(2)
    ]
    drawing.draw_methods(courses)
    assert (folder / "figure4.png").stat().st_size > 1000


def test_figure_5_is_drawn_without_those_that_missed_the_target(folder: Path) -> None:
    courses = [
        course(name, replicas, [TARGET] if replicas < 40 else [0.0], seed=seed)
        for name in NAMES.values()
        for replicas in (10, 20, 40)
        for seed in range(2)
    ]
    drawing.draw_crossings(courses, target=TARGET)
    assert (folder / "figure5.png").stat().st_size > 1000
