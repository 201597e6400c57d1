"""A run that is resumed goes on where it was: everything that a checkpoint or the status has."""

from pathlib import Path
from typing import Any

import pytest

from distbelief.config.job import StopTable
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.job.run.resume import read_previous_run
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.rules import SGD, Momentum
from distbelief.parameter_server.schedules import Cosine
from distbelief.protocol.role import Address, Computed
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Kill
from distbelief.task.data import BatchCursor, DataShard
from distbelief.worker.batches import BatchSlice
from distbelief.worker.downpour_settings import DownpourSettings
from tests.simulation.dealt import DealtJob
from tests.simulation.jobs import TASK, JobCluster
from tests.simulation.test_downpour import same


LONG = StopTable(seconds=1e6)
BATCH = 4
N_TRAIN = 60  # samples


def job_of(settings: DownpourSettings, stop: StopTable = LONG, **options: object) -> JobCluster:
    return JobCluster(stop=stop, settings=settings, snapshot_every=0.5, **options)  # type: ignore[arg-type]


def downpour(**choices: object) -> DownpourSettings:
    table = {"loss": TASK.loss, "batch_size": BATCH, "rule": SGD(learning_rate=0.05)} | choices
    return DownpourSettings(**table)  # type: ignore[arg-type]


def session_after(job: JobCluster, directory: Path) -> tuple[dict[str, Any], CheckpointStore]:
    """Return what the next session of this run begins with: options, and checkpoints."""
    run = RunDirectory.create(directory / "run")
    store = CheckpointStore(run.snapshots, report=pytest.fail)
    for name in job.shards:
        store.save(name, job.newest(name))
    run.write_status(Status(name="x", pid=1, written=0.0, view=job.view))
    previous = read_previous_run(run, store, n_shards=len(job.shards))
    options = {
        "before": previous.before,
        "first_incarnation": previous.incarnation,
        "first_label": previous.label,
    }
    return options, store


def restored(job: JobCluster, store: CheckpointStore) -> JobCluster:
    for name in job.shards:
        snapshot = store.newest(name)
        assert snapshot is not None
        job.cluster.disk.save(name, snapshot)
    return job


def resumed(job: JobCluster, directory: Path, stop: StopTable = LONG) -> JobCluster:
    """Return the job of another session, after everything has died in this one."""
    options, store = session_after(job, directory)
    again = job_of(job.downpour, stop, n_replicas=len(job.replicas), **options)
    return restored(again, store)


def n_saved(job: JobCluster) -> int:
    """Return the rounds of checkpoints that all shards have."""
    return min(len(job.cluster.disk.snapshots(name)) for name in job.shards)


# --- the warm start


@pytest.mark.parametrize("order", ["parts", "dealt"])
def test_a_warm_start_goes_on_at_the_step_where_it_was(tmp_path: Path, order: str) -> None:
    """It began anew: replica 0 took all its steps once more before the others began."""
    job = job_of(downpour(warm_start_steps=40, order=order), n_replicas=3)
    job.run_until(lambda: n_saved(job) >= 2)
    assert job.view.phase == "warm start"
    again = resumed(job, tmp_path)
    again.run_until(lambda: again.phase == "warm start")
    done = again.view.samples
    assert 10 * BATCH <= done < 30 * BATCH
    again.run_until(lambda: again.phase == "training")
    assert 40 * BATCH <= again.samples("replica-0") <= 42 * BATCH
    assert [again.samples(name) for name in again.replicas[1:]] == [0, 0]
    again.run_until(lambda: min(map(again.samples, again.replicas)) > 0)


@pytest.mark.parametrize("order", ["parts", "dealt"])
def test_a_warm_start_that_is_over_is_not_repeated(tmp_path: Path, order: str) -> None:
    job = job_of(downpour(warm_start_steps=5, order=order), n_replicas=3)
    job.run_until(lambda: job.phase == "training")
    job.run_until(lambda: n_saved(job) == 3)
    again = resumed(job, tmp_path)
    again.run_until(lambda: again.phase in {"warm start", "training"})
    assert again.view.phase == "training"


def test_a_warm_start_counts_short_batches_as_the_replica_does() -> None:
    """A pass of 30 samples has 8 steps, the last of 2 samples."""
    settings = downpour(warm_start_steps=20)
    left = [settings.warm_start_left(n, 60, 2) for n in (0, 4, 28, 30, 60, 76, 99)]
    assert left == [20, 19, 13, 12, 4, 0, 0]
    dealt = downpour(warm_start_steps=20, order="dealt")
    assert dealt.warm_start_left(60, 60, 100) == 5


# --- one blocking replica: the same bits as without a stop


INNER = {"name": "SGD", "lr": 0.05, "schedule": {"name": "StepLR", "step_size": 7, "gamma": 0.8}}
EXACT: dict[str, dict[str, Any]] = {
    "schedule of the shards": {
        "rule": Momentum(learning_rate=0.05, schedule=Cosine(n_pushes=60, n_warm_up=10))
    },
    "schedule of local steps": {
        "rule": SGD(learning_rate=1.0),
        "exchange": ExchangePolicy(send="delta", every=4),
        "inner": INNER,
    },
}


@pytest.mark.parametrize("name", [*EXACT, "interrupted"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """Order and place in the data, schedules and the rule's state go on; short batches, too."""
    choices = EXACT.get(name, EXACT["schedule of the shards"])
    settings, stop = downpour(blocking=True, **choices), StopTable(samples=4 * N_TRAIN + 20)
    whole = job_of(settings, stop, n_replicas=1)
    assert whole.run() is None
    job = job_of(settings, stop, n_replicas=1)
    job.run_until(lambda: n_saved(job) >= 2)
    if name == "interrupted":
        job.interrupt()
        job.run()
    again = resumed(job, tmp_path, stop)
    again.run_until(lambda: again.phase == "training")
    assert BATCH <= again.view.samples < 4 * N_TRAIN
    assert again.run() is None
    assert again.view.samples == whole.view.samples
    assert same(again.saved(), whole.saved())


PUSHES: dict[str, dict[str, Any]] = {
    "gradients": {"n_push": 3},
    "local steps": {**EXACT["schedule of local steps"], "blocking": False},
}


@pytest.mark.parametrize("choices", PUSHES.values(), ids=PUSHES)
def test_each_replica_reads_on_where_its_last_saved_push_ended(
    tmp_path: Path, choices: dict[str, object]
) -> None:
    """What it had not pushed, or the shards not saved, is read again, and nothing else."""
    job = job_of(downpour(**choices), n_replicas=3)
    first = read_by(job)
    job.run_until(lambda: n_saved(job) >= 3)
    again = resumed(job, tmp_path)
    second = read_by(again)
    again.run_until(lambda: all(len(read) > 20 for read in second.values()))
    for index, name in enumerate(job.replicas):
        begin = min(second[name])
        assert 0 < begin <= max(first[name])
        cursor = BatchCursor(DataShard(N_TRAIN, replica_index=index, n_replicas=3, seed=0))
        position = 0
        read = {p: first[name][p] for p in first[name] if p < begin} | second[name]
        while position <= max(second[name]):
            expected = cursor.batch(position, BATCH).tolist()
            assert read.pop(position) == expected
            position += len(expected)
        assert not read


def read_by(job: JobCluster) -> dict[str, dict[int, list[int]]]:
    """Return the samples that each replica reads from now on, by position."""
    found: dict[str, dict[int, list[int]]] = {name: {} for name in job.replicas}

    def see(happening: HandledEvent) -> None:
        event = happening.event
        if isinstance(event, Computed) and isinstance(event.result, BatchSlice):
            samples = event.result.samples
            if happening.name in found:
                found[happening.name][samples.position] = samples.indices.tolist()

    job.cluster.observe(see)
    return found


def test_dealt_samples_of_a_killed_run_each_count_once(tmp_path: Path) -> None:
    job = DealtJob(n_epochs=8, n_push=2, snapshot_every=0.5)
    job.job.run_until(lambda: n_saved(job.job) >= 2)
    options, store = session_after(job.job, tmp_path)
    again = DealtJob(n_epochs=8, n_push=2, snapshot_every=0.5, session=options)
    restored(again.job, store)
    again.run()
    assert again.job.view.samples == again.total
    assert sum(map(again.job.samples, again.job.replicas)) < again.total + 100


# --- what the status has


def test_time_and_totals_are_of_all_sessions(tmp_path: Path) -> None:
    stop = StopTable(seconds=3.0)
    kill = Kill(at=1.8, role=Address("replica-1"))
    job = job_of(downpour(), stop, faults=[kill])
    job.run_until(lambda: job.view.training_seconds > 2.0)
    last = job.view
    assert last.best_metric is not None
    again = resumed(job, tmp_path, stop)
    assert again.run() is None
    view = again.view
    assert view.stop_reason == "3.0 s of training are over"
    assert 3.0 <= view.training_seconds < 3.5
    assert view.training_seconds < view.seconds < last.seconds + again.now
    assert view.pushes_lost is not None
    assert view.step > last.step
    # A killed replica does not report its last step.
    assert 0 <= view.pushes_applied + view.pushes_lost - view.step <= 1
    assert view.bytes_in > last.bytes_in > 0
    assert again.restarts("replica-1") == 1
    assert (view.best_metric or 0.0) >= last.best_metric
    assert view.history[: len(last.history)] == last.history
