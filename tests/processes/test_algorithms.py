"""Algorithms of other packages: the example of CONTRIBUTING.md, as its reader installs it."""

import json
from pathlib import Path

import pytest

from distbelief.config.algorithms import Algorithm
from distbelief.worker.downpour import DOWNPOUR
from distbelief.worker.downpour_settings import DownpourSettings
from sandblaster.algorithm import SANDBLASTER
from sandblaster.settings import SandblasterSettings
from tests.docs.pages import ROOT, blocks
from tests.processes.commands import COMMAND, TABLES, ended, said, write_job


pytestmark = [pytest.mark.processes, pytest.mark.slow]

OWN: tuple[Algorithm[DownpourSettings], Algorithm[SandblasterSettings]] = DOWNPOUR, SANDBLASTER
JOB = """
[algorithm]
name = "averaging"
loss = "cross_entropy"
batch_size = 20
learning_rate = 0.5
epochs = 5

[stop]
epochs = 8
"""


@pytest.mark.timeout(180)
def test_an_algorithm_of_another_package_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a key that it calls `epochs` was called as Downpour's method."""
    page = blocks(ROOT / "CONTRIBUTING.md")
    (code,) = (block.text for block in page if "class Averaging" in block.text)
    (table,) = (block.text for block in page if "entry-points" in block.text)
    installed = folder / "installed"
    facts = installed / "averaging-1.0.dist-info"
    facts.mkdir(parents=True)
    (installed / "averaging.py").write_text(
        code.replace("every: int", "epochs: int").replace("self.every", "self.epochs")
    )
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: averaging\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[distbelief.algorithms]\n" + table.splitlines()[1].replace('"', "")
    )
    monkeypatch.setenv("PYTHONPATH", str(installed))
    write_job(folder, job=TABLES + JOB)
    done = ended(folder, COMMAND, "train", "tiny.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "runs" / "tiny" / "summary.json").read_text())
    assert found["algorithm"] == "averaging"
    assert found["metric"] > 0.8


@pytest.mark.timeout(180)
@pytest.mark.parametrize("preset", ["hogwild", pytest.param("adam-2014", marks=pytest.mark.soak)])
def test_threads_without_locks_learn_from_each_sample_once(folder: Path, preset: str) -> None:
    """AD-2, HG-1: in real processes, where threads do race."""
    given = (
        TABLES
        + f"""
[algorithm]
name = "downpour"
preset = "{preset}"
loss = "cross_entropy"
batch_size = 20

[stop]
epochs = 4
"""
    )
    write_job(folder, job=given)
    told = said(folder, "train", "tiny.toml")
    assert "Copies of the model for 4 threads compute what it does alone" in told
    found = json.loads((folder / "runs" / "tiny" / "summary.json").read_text())
    assert found["samples"] == 4 * 2000
    assert found["metric"] > 0.8
