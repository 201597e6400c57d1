"""A user's own job, in a folder that knows nothing of this project."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distbelief
import experiments.digits
from experiments.digits.digits import net
from tests.processes.commands import ended, said


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

EXAMPLE = Path(experiments.digits.__path__[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("digits.py", "digits.toml", "loop.py"):
        shutil.copy(EXAMPLE / name, tmp_path / name)
    return tmp_path


def accuracy(text: str) -> float:
    found = re.search(r"held-out accuracy ([\d.]+)%", text)
    return float(found[1]) if found else 0.0


@pytest.mark.soak
@pytest.mark.untraced
def test_a_job_file_in_a_folder_of_its_own_learns_digits(folder: Path) -> None:
    told = said(folder, "train", "digits.toml")
    summary = json.loads((folder / "runs" / "digits" / "summary.json").read_bytes())
    assert summary["metric"] >= 0.95, told
    status = json.loads((folder / "runs" / "digits" / "status.json").read_bytes())
    shards = [one for one in status["view"]["roles"] if one["name"].startswith("shard-")]
    for shard in shards:
        at_work, handling = (
            shard["counters"][name] for name in ("spent_applying", "seconds_handling")
        )
        assert 0.0 < at_work < status["view"]["seconds"]
        assert 0.0 < handling < status["view"]["seconds"]


@pytest.mark.soak
def test_two_ordinary_loops_share_one_server(folder: Path) -> None:
    model = net()
    rule = distbelief.Adagrad(learning_rate=0.03)
    with distbelief.ParameterServer(model.parameters(), rule=rule, shards=2) as server:
        command = [sys.executable, "loop.py", server.address]
        loops = [
            subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        try:
            texts = [loop.communicate(timeout=150)[0] for loop in loops]
        finally:
            for loop in loops:
                loop.kill()
    for loop, text in zip(loops, texts, strict=True):
        assert loop.returncode == 0, text
        assert accuracy(text) >= 95.0, text


@pytest.mark.soak
def test_a_loop_that_starts_the_server_trains_alone_too(folder: Path) -> None:
    done = ended(folder, sys.executable, "loop.py")
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= 95.0, done.stdout
