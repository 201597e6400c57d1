"""A user's own job, in a folder that knows nothing of this project."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import experiments.digits


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

EXAMPLE = Path(experiments.digits.__path__[0])
COMMAND = Path(sys.executable).with_name("distbelief")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("digits.py", "digits.toml", "loop.py"):
        shutil.copy(EXAMPLE / name, tmp_path / name)
    return tmp_path


def test_a_job_file_in_a_folder_of_its_own_learns_digits(folder: Path) -> None:
    ended = subprocess.run(
        [COMMAND, "train", "digits.toml"],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((folder / "runs" / "digits" / "summary.json").read_bytes())
    assert summary["metric"] >= 0.95, ended.stdout


def test_an_ordinary_loop_becomes_a_worker_and_a_second_one_helps(folder: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "loop.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    with first:
        try:
            told = re.match(r"python loop.py '(.*)'", first.stdout.readline())
            assert told is not None
            second = subprocess.run(
                [sys.executable, "loop.py", told[1]],
                cwd=folder,
                check=False,
                capture_output=True,
                text=True,
                timeout=150,
            )
            rest, _ = first.communicate(timeout=150)
        finally:
            first.kill()
    assert first.returncode == 0, rest
    assert second.returncode == 0, second.stdout + second.stderr
    accuracy = re.search(r"held-out accuracy ([\d.]+)%", rest)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95.0, second.stdout + rest
