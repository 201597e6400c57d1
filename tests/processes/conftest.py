"""What tests of real processes share."""

from pathlib import Path

import pytest

from tests.processes import nursery
from tests.processes.commands import is_measured, write_job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path)
    return tmp_path


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each `ParameterServer` begin at once, forked from the nursery."""
    monkeypatch.setattr("distbelief.serve.server.subprocess", nursery.Services)


@pytest.fixture
def forked_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let roles of a job that the test's own process trains be forked from that, if unmeasured."""
    if not is_measured():
        monkeypatch.setattr("distbelief.job.launch.local._spawned", nursery.spawned)
