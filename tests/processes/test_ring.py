"""Replicas of real processes that sum their gradients over a ring."""

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.processes.commands import TABLES, poll, sets, train, write_job
from tests.processes.test_train import has_restarted


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

JOB = f"""{TABLES}
[algorithm]
name = "downpour"
preset = "horovod"
loss = "cross_entropy"
batch_size = 20

[stop]
epochs = 10
"""
SLOW = sets("stop.epochs=1000000", "data.train.arguments={ pause = 0.01 }")


def test_a_job_of_the_preset_learns_over_a_ring(folder: Path) -> None:
    write_job(folder, job=JOB)
    with train(folder, *sets("cluster.replicas=3")) as command:
        command.ends()
    summary = command.summary()
    assert summary["samples"] >= 20_000
    assert summary["metric"] > 0.9
    assert summary["restarts"] == 0
    assert "warning" not in command.output


@pytest.mark.untraced
def test_hv3_a_ring_survives_a_death_and_an_interrupted_run_goes_on(folder: Path) -> None:
    write_job(folder, job=JOB)
    with train(folder, *SLOW) as command:
        poll(command.is_training)
        command.trains(1000)
        command.kill("replica-0")  # the one that sets the shards' values
        poll(partial(has_restarted, command, "replica-0"))
        command.trains(1000)
        command.kill("shard-1")
        poll(partial(has_restarted, command, "shard-1"))
        command.trains(1000)
        command.signal(signal.SIGINT)
        assert command.wait() == 130, command.output
    first = command.summary()
    goal = sets(f"stop.samples={first['samples'] + 2000}")
    with train(folder, "--resume", "runs/tiny", *SLOW, *goal, job=()) as command:
        assert command.wait() == 0, command.output
    second = command.summary()
    assert first["samples"] + 2000 <= second["samples"] < first["samples"] + 12_000
