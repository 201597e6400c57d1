from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.figures import task
from experiments.figures.warm_start import warm_start


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.figures.warm_start.STEPS", 3)


def data(seed: int) -> task.Held:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 440, generator=generator)
    return task.Held(inputs, torch.arange(64))


def test_a_warm_start_is_kept_and_the_same_again(tmp_path: Path) -> None:
    first = warm_start(3, data=data(0), folder=tmp_path)
    written = Path(first.path).stat().st_mtime_ns
    again = warm_start(3, data=data(0), folder=tmp_path)
    assert again == first
    assert Path(again.path).stat().st_mtime_ns == written
    assert first.squares > 0


def test_other_data_and_other_seeds_have_other_warm_starts(tmp_path: Path) -> None:
    one = warm_start(3, data=data(0), folder=tmp_path)
    assert warm_start(3, data=data(1), folder=tmp_path).of != one.of
    assert warm_start(4, data=data(0), folder=tmp_path).of != one.of


def test_a_file_that_is_of_something_else_is_refused(tmp_path: Path) -> None:
    """A sigmoid net's warm start was once gone on with by a ReLU net."""
    found = warm_start(3, data=data(0), folder=tmp_path)
    save_file(load_file(found.path), found.path, {"of": "sigmoid", "squares": "1"})
    with pytest.raises(ValueError, match=r"is of sigmoid, not of .*: remove it"):
        warm_start(3, data=data(0), folder=tmp_path)
