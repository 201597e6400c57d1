"""Forecasts beside what really happens, on processes of this host."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from distbelief.simulation.chaos.local_faults import run_local_chaos
from experiments.benchmarks.simulated.truth import both_ways
from tests.distbelief.simulation.forecast.jobs import TEXT, small


pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2])]))


def test_bytes_are_the_same_in_virtual_time_and_for_real() -> None:
    """How near the times are says a benchmark: this machine may be busy."""
    without_test = TEXT.replace(TEXT[TEXT.index("[data.test]") : TEXT.index("[algorithm]")], "")
    found = both_ways(small("algorithm.max_steps=20", "stop.samples=1000000", text=without_test))
    assert found.simulated.error is None
    assert found.real.error is None
    assert found.simulated.steps == found.real.steps == 40
    assert found.error_of("pushed_bytes") == 0.0
    assert found.error_of("fetched_bytes") == 0.0
    assert found.error_of("step_seconds") is not None


def test_a_job_that_is_broken_for_real_comes_to_its_end() -> None:
    job = small("stop.samples=100000000", "stop.seconds=12", "cluster.shard_copies=2")
    report = run_local_chaos(job, seed=5, console=Console(quiet=True))
    assert report.error is None
    assert report.real
    assert any(line.what == "fault" for line in report.lines)
    assert report.digest is None
