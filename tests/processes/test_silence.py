"""A supervisor that says nothing for a while costs nothing: real processes, real disk.

In virtual time: `tests/simulation/test_job.py`.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes.commands import LONG, Command, poll, sets, train, write_job


pytestmark = [
    pytest.mark.processes,
    pytest.mark.soak,
    pytest.mark.untraced,
    pytest.mark.timeout(300),
]

MEGABYTE = 1 << 20

copies = pytest.mark.parametrize("n_copies", [1, 2])


@contextmanager
def whole_job(folder: Path, n_copies: int) -> Iterator[tuple[Command, list[int]]]:
    """Start a job; yield it and its processes as soon as it trains, with all backups."""
    options = sets(
        f"cluster.shard_copies={n_copies}", "stop.seconds=40", "output.snapshot_every=5 s"
    )
    write_job(folder)
    with train(folder, *LONG, *options) as command:
        poll(lambda: is_whole(command, n_copies))
        yield command, sorted(command.all_pids())


def is_whole(command: Command, n_copies: int) -> bool:
    states = [str(role["state"]) for role in command.roles().values()]
    return command.is_training() and states.count("backup") == 2 * (n_copies - 1)


def check(command: Command, pids: list[int], *, applied: dict[str, int]) -> None:
    """Let the job end; nobody was started again, and nothing is lost."""
    command.ends(seconds=120.0)
    summary = command.summary()
    assert summary["restarts"] == 0, command.output
    assert summary["pushes_lost"] == 0
    assert summary["pushes_applied"] >= max(applied.values())
    assert "silent" not in command.output
    assert sorted(command.all_pids()) == pids
    times = command.metrics("time")
    assert times == sorted(times)
    assert times[-1] > 40.0


@copies
@pytest.mark.parametrize(("n_stops", "seconds"), [(1, 25.0), (10, 2.0)])
def test_a_supervisor_that_was_stopped_finds_its_job_at_work(
    tmp_path: Path, n_copies: int, n_stops: int, seconds: float
) -> None:
    """After 15 s all its roles ended unsaved: 9,773 acknowledged pushes were lost."""
    with whole_job(tmp_path, n_copies) as (command, pids):
        applied: dict[str, int] = {}
        for _ in range(n_stops):
            command.signal(signal.SIGSTOP)
            time.sleep(0.8 * seconds)
            before = command.clocks()
            time.sleep(0.2 * seconds)
            applied = command.clocks()
            command.signal(signal.SIGCONT)
            if n_stops == 1:
                assert all(applied[shard] > before[shard] for shard in before)
            time.sleep(0.3)
        check(command, pids, applied=applied)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk, and make it hang")
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MEGABYTE)
    try:
        run("mkfs.ext4", "-q", str(image))
        run("mount", "-o", "loop", str(image), str(disk))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    try:
        yield disk
    finally:
        run("umount", "--lazy", str(disk))


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@copies
def test_a_run_directory_that_hangs_is_waited_for(disk: Path, n_copies: int) -> None:
    """Snapshots, too, cannot be written meanwhile; pushes wait for them."""
    with whole_job(disk, n_copies) as (command, pids):
        poll((command.run / "snapshots" / "shard-1" / "00001.safetensors").is_file)
        run("fsfreeze", "--freeze", str(disk))
        try:
            time.sleep(22.0)
            applied = command.clocks()
        finally:
            run("fsfreeze", "--unfreeze", str(disk))
        check(command, pids, applied=applied)
