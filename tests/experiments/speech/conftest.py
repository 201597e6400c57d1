"""One tiny cache for all tests of speech; it takes some seconds to synthesise."""

import os
from pathlib import Path

import pytest

from experiments.speech.builder import ensure
from experiments.speech.recipe import Recipe
from experiments.speech.volume import Volume, open_volume


BEGINNING = Recipe(part="train", hours=0.005)
TRAIN = Recipe(part="train", hours=0.03)  # two sessions
TEST = Recipe(part="test", hours=0.01)
CLEAN = Recipe(part="train", hours=0.01, clean=True)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the four recipes above, the same for all workers of pytest."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "speech"
    folder.mkdir(exist_ok=True)
    ensure([BEGINNING, TRAIN, TEST, CLEAN], cache=folder)
    return folder


@pytest.fixture(scope="session")
def train_volume(cache: Path) -> Volume:
    return open_volume(cache / TRAIN.name)


@pytest.fixture(scope="session")
def test_volume(cache: Path) -> Volume:
    return open_volume(cache / TEST.name)
