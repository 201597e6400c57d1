from collections.abc import Iterator
from pathlib import Path

import pytest

from distbelief.core.errors import JobError
from distbelief.job.launch import preflight_client
from distbelief.job.launch.local import LocalLauncher
from tests.distbelief.jobs import speech
from tests.processes.nursery import spawned


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    monkeypatch.setattr("distbelief.job.launch.local._spawned", spawned)
    with LocalLauncher(log_of=lambda name: tmp_path / f"{name}.process.log") as launcher:
        yield launcher


def test_what_takes_too_long_is_told_with_the_end_of_its_log(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named a log that had been removed by then."""
    monkeypatch.setattr(preflight_client, "CHECK_SECONDS_MAX", 0.0)
    (tmp_path / ".prepared").touch()
    log = tmp_path / "check.log"
    log.write_text("downloading the data ...\n")
    said: list[str] = []
    with pytest.raises(
        JobError, match=r"check of model and data took more than 0 s.*ends:\ndownload"
    ) as caught:
        preflight_client.run_preflight(
            launcher,
            speech(),
            tmp_path / "request.json",
            initial_file=tmp_path / "initial.safetensors",
            plan=tmp_path / "plan.json",
            log=log,
            tell=said.append,
        )
    assert said == []
    assert str(log) not in str(caught.value)
