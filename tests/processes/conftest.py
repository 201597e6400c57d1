"""What tests of real processes share."""

from pathlib import Path

import pytest

from tests.processes import nursery
from tests.processes.commands import write_job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path)
    return tmp_path


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each `ParameterServer` begin at once, forked from the nursery."""
    monkeypatch.setattr("distbelief.serve.server.subprocess", nursery.Services)
