"""A supervisor that is killed, and another that takes over: processes, pushes, counts."""

import os
import signal
from pathlib import Path

import pytest

from tests.processes.commands import poll, sets, train
from tests.processes.test_dealt import JOB, N_SAMPLES, counts, write


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(240),
]


def test_another_supervisor_takes_over_and_each_sample_counts_once(tmp_path: Path) -> None:
    """Without supervisor one replica dies, too; the others go on in the same processes."""
    write(tmp_path, JOB.replace("epochs = 4", "epochs = 8"))
    with train(tmp_path) as command:
        poll(lambda: command.samples() > N_SAMPLES)
        command.signal(signal.SIGKILL)
        command.wait()
        before = command.clocks()
        poll(lambda: command.clocks()["shard-0"] > before["shard-0"] + 10)
        os.kill(command.pids("replica-1")[-1], signal.SIGKILL)
        with train(tmp_path, job=("--resume", "runs/tiny")) as again:
            again.ends()
    for role in ("replica-0", "replica-2", "shard-0", "shard-1"):
        assert len(command.pids(role)) == 1
    assert len(command.pids("replica-1")) == 2
    summary = command.summary()
    assert (summary["samples"], summary["pushes_lost"]) == (8 * N_SAMPLES, 0), again.output
    assert (counts(command) == 8.0).all(), (counts(command) - 8.0).unique(return_counts=True)
    assert not command.shared_memory()


def test_a_run_that_is_ended_for_another_job_runs_none_of_its_own_callbacks(tmp_path: Path) -> None:
    """Those of the killed job may be what the user has repaired, or removed."""
    write(tmp_path, JOB.replace("epochs = 4", "epochs = 8"))
    watching = tmp_path / "watching.py"
    watching.write_text("def watch(view):\n    pass\n")
    with train(tmp_path, *sets('output.callbacks=["watching:watch"]')) as command:
        poll(lambda: command.samples() > N_SAMPLES)
        command.signal(signal.SIGKILL)
        command.wait()
        watching.unlink()
        resumed = ("--resume", "runs/tiny", *sets("output.callbacks=[]"))
        with train(tmp_path, job=resumed) as again:
            again.ends()
    summary = command.summary()
    assert (summary["samples"], summary["pushes_lost"]) == (8 * N_SAMPLES, 0), again.output
