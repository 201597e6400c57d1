"""What tests of real processes share."""

from pathlib import Path

import pytest

from tests.processes.commands import write_job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path)
    return tmp_path
