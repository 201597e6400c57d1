"""A run that is resumed goes on where it was: everything that a checkpoint or the status has."""

from pathlib import Path

import msgspec
import pytest
import torch

from distbelief.config.job import StopTable
from distbelief.parameter_server.optimizers import SGD, Cosine, Momentum
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.roles.role import Address
from distbelief.run.checkpoints import CheckpointStore
from distbelief.run.directory import RunDirectory, Status
from distbelief.run.resume import DEALT, read_previous_run
from distbelief.simulation.faults import Kill
from distbelief.worker.config import DownpourSettings
from tests.simulation.jobs import TASK, JobCluster
from tests.simulation.test_downpour import same


LONG = StopTable(seconds=1e6)
BATCH = 4


def job_of(settings: DownpourSettings, stop: StopTable = LONG, **options: object) -> JobCluster:
    return JobCluster(stop=stop, settings=settings, snapshot_every=0.5, **options)  # type: ignore[arg-type]


def downpour(**choices: object) -> DownpourSettings:
    table = {"loss": TASK.loss, "batch_size": BATCH, "rule": SGD(learning_rate=0.05)} | choices
    return DownpourSettings(**table)  # type: ignore[arg-type]


def resumed(
    job: JobCluster, directory: Path, stop: StopTable = LONG, **options: object
) -> JobCluster:
    """Return the job of another session, after everything has died in this one."""
    run = RunDirectory.create(directory / "run")
    store = CheckpointStore(run.snapshots, report=pytest.fail)
    for name in job.shards:
        snapshot = job.simulation.disk.newest(name)
        if snapshot is not None:
            store.save(name, snapshot)
    run.write_status(Status(name="x", pid=1, written=0.0, view=job.view))
    previous = read_previous_run(run, store, n_shards=len(job.shards))
    again = job_of(
        job.settings,
        stop,
        n_replicas=len(job.replicas),
        before=previous.before,
        first_incarnation=previous.incarnation,
        first_label=previous.label,
        **options,
    )
    for name in job.shards:
        snapshot = store.newest(name)
        if snapshot is not None:
            again.simulation.disk.save(name, snapshot)
    return again


def n_saved(job: JobCluster) -> int:
    """Return the rounds of checkpoints that all shards have."""
    return min(len(job.simulation.disk.snapshots(name)) for name in job.shards)


# --- the warm start


@pytest.mark.parametrize("order", ["parts", "dealt"])
def test_a_warm_start_goes_on_at_the_step_where_it_was(tmp_path: Path, order: str) -> None:
    """It began anew: replica 0 took all its steps once more before the others began."""
    job = job_of(downpour(warm_start_steps=40, order=order), n_replicas=3)
    job.run_until(lambda: n_saved(job) >= 2)
    assert job.view.phase == "warm start"
    again = resumed(job, tmp_path)
    again.run_until(lambda: again.view.phase == "warm start")
    done = again.view.samples
    assert 10 * BATCH <= done < 30 * BATCH
    again.run_until(lambda: again.view.phase == "training")
    assert 40 * BATCH <= again.samples("replica-0") <= 42 * BATCH
    assert [again.samples(name) for name in again.replicas[1:]] == [0, 0]
    again.run_until(lambda: min(map(again.samples, again.replicas)) > 0)


@pytest.mark.parametrize("order", ["parts", "dealt"])
def test_a_warm_start_that_is_over_is_not_repeated(tmp_path: Path, order: str) -> None:
    job = job_of(downpour(warm_start_steps=5, order=order), n_replicas=3)
    job.run_until(lambda: job.view.phase == "training")
    job.run_until(lambda: n_saved(job) == 3)
    again = resumed(job, tmp_path)
    again.run_until(lambda: again.view.phase in {"warm start", "training"})
    assert again.view.phase == "training"


def test_a_warm_start_counts_short_batches_as_the_replica_does() -> None:
    """A pass of 30 samples has 8 steps, the last of 2 samples."""
    settings = downpour(warm_start_steps=20)
    left = [
        settings.warm_start_left(n, n_samples=60, n_replicas=2) for n in (0, 4, 28, 30, 60, 76, 99)
    ]
    assert left == [20, 19, 13, 12, 4, 0, 0]
    dealt = downpour(warm_start_steps=20, order="dealt")
    assert dealt.warm_start_left(60, n_samples=60, n_replicas=100) == 5
