from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from distbelief.errors import JobError
from distbelief.roles.role import Snapshot
from distbelief.run.checkpoints import CheckpointStore
from distbelief.run.directory import RunDirectory, Status
from distbelief.run.resume import check_same, read_previous_run
from distbelief.supervisor.view import JobView, Point, RoleView
from tests.distbelief.jobs import speech


def clients(**samples: int) -> str:
    known = {
        name.replace("_", "-"): {"incarnation": 3, "samples": n, "watermark": 1}
        for name, n in samples.items()
    }
    return msgspec.json.encode(known).decode()


def snapshot(label: str, facts: str, *, incarnation: int = 2) -> Snapshot:
    return Snapshot(
        label=label,
        arrays={"values": np.zeros(4, np.float32)},
        facts={"clients": facts, "incarnation": str(incarnation)},
    )


def fail(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def store(run: RunDirectory) -> CheckpointStore:
    return CheckpointStore(run.snapshots, report=fail)


def test_a_new_run_inherits_nothing(run: RunDirectory, store: CheckpointStore) -> None:
    previous = read_previous_run(run, store, n_shards=2)
    assert (previous.incarnation, previous.label) == (1, 1)
    assert previous.missing == ("shard-0", "shard-1")
    assert previous.before.samples == {}


def test_a_resumed_run_goes_on_from_what_every_shard_has(
    run: RunDirectory, store: CheckpointStore
) -> None:
    store.save("shard-0", snapshot("00007", clients(replica_0=70, replica_1=50)))
    facts = clients(replica_0=60, replica_1=55, evaluator=0)
    store.save("shard-1", snapshot("00006", facts, incarnation=5))
    history = (Point(seconds=1.0, samples=5),)
    view = JobView(
        seconds=20.0,
        training_seconds=15.0,
        step=30,
        best_metric=0.5,
        best_metric_seconds=9.0,
        history=history,
    )
    run.write_status(Status(name="x", pid=1, written=0.0, view=view))
    previous = read_previous_run(run, store, n_shards=2)
    assert previous.restored == {"shard-0": "00007", "shard-1": "00006"}
    assert previous.label == 8
    assert previous.incarnation == 6
    before = previous.before
    assert before.samples == {"replica-0": 60, "replica-1": 50}
    assert (before.seconds, before.training_seconds, before.step) == (20.0, 15.0, 30)
    assert (before.best_metric, before.history) == (0.5, history)


def test_a_replica_that_a_shard_knows_nothing_of_starts_from_scratch(
    run: RunDirectory, store: CheckpointStore
) -> None:
    store.save("shard-0", snapshot("00001", clients(replica_0=70)))
    store.save("shard-1", snapshot("00001", clients(replica_0=70, replica_1=50)))
    previous = read_previous_run(run, store, n_shards=2)
    assert previous.before.samples == {"replica-0": 70, "replica-1": 0}


def counted(*names: str, pushes_applied: int, pushes_lost: int = 7) -> Status:
    """Return the last view of a life with these roles."""
    view = JobView(
        pushes_applied=pushes_applied,
        pushes_lost=pushes_lost,
        pushes_refused=1,
        bytes_in=2,
        bytes_out=3,
        roles=tuple(RoleView(name=name, state="done", restarts=4) for name in names),
    )
    return Status(name="x", pid=1, written=0.0, view=view)


def at_clock(clock: int) -> Snapshot:
    whole = snapshot("00001", clients(replica_0=70))
    return replace(whole, facts={**whole.facts, "clock": str(clock)})


def test_pushes_and_restarts_are_counted_over_all_incarnations(
    run: RunDirectory, store: CheckpointStore
) -> None:
    """Samples and seconds were of all lives, and these of the last one only."""
    store.save("shard-0", at_clock(100))
    store.save("shard-1", at_clock(90))
    names = ("shard-0", "shard-0b", "shard-1", "shard-1b")
    run.write_status(counted(*names, pushes_applied=90))
    before = read_previous_run(run, store, n_shards=2).before
    assert before.clocks == {"shard-0": 100, "shard-1": 90}
    assert (before.pushes_lost, before.pushes_refused) == (7, 1)
    assert (before.bytes_in, before.bytes_out) == (2, 3)
    assert before.restarts == dict.fromkeys(names, 4)


def test_what_was_applied_after_the_checkpoints_of_a_killed_job_is_lost(
    run: RunDirectory, store: CheckpointStore
) -> None:
    store.save("shard-0", at_clock(100))
    store.save("shard-1", at_clock(90))
    run.write_status(counted("shard-0", "shard-1", pushes_applied=115))
    assert read_previous_run(run, store, n_shards=2).before.pushes_lost == 7 + 25


def test_clocks_of_shards_resharded_tell_nothing_of_what_is_lost(
    run: RunDirectory, store: CheckpointStore
) -> None:
    """A new shard begins at the largest clock of those that it is cut from."""
    store.save("shard-0", at_clock(100))
    run.write_status(counted("shard-0", "shard-1", pushes_applied=190))
    before = read_previous_run(run, store, n_shards=1).before
    assert (before.clocks, before.pushes_lost) == ({"shard-0": 100}, 7)


def test_where_a_shard_has_nothing_no_sample_counts(
    run: RunDirectory, store: CheckpointStore
) -> None:
    store.save("shard-0", snapshot("00001", clients(replica_0=70)))
    previous = read_previous_run(run, store, n_shards=2)
    assert previous.missing == ("shard-1",)
    assert previous.before.samples == {"replica-0": 0}


def measured(samples: int) -> Status:
    view = JobView(
        seconds=9.0, samples=samples, loss=0.1, metric=0.9, held_out_loss=0.2, best_metric=0.95
    )
    return Status(name="x", pid=1, written=0.0, view=view)


def test_a_metric_of_the_values_in_the_checkpoints_is_kept(
    run: RunDirectory, store: CheckpointStore
) -> None:
    for k in range(2):
        store.save(f"shard-{k}", snapshot("00001", clients(replica_0=70)))
    run.write_status(measured(70))
    before = read_previous_run(run, store, n_shards=2).before
    assert (before.loss, before.metric, before.held_out_loss) == (0.1, 0.9, 0.2)


@pytest.mark.parametrize(("n_kept", "samples"), [(1, 70), (1, 0), (2, 75)])
def test_a_metric_of_values_that_no_shard_holds_is_not(
    run: RunDirectory, store: CheckpointStore, n_kept: int, samples: int
) -> None:
    for k in range(n_kept):
        store.save(f"shard-{k}", snapshot("00001", clients(replica_0=70)))
    run.write_status(measured(samples))
    before = read_previous_run(run, store, n_shards=2).before
    assert (before.loss, before.metric, before.held_out_loss) == (None, None, None)
    assert (before.seconds, before.best_metric) == (9.0, 0.95)  # those were so


@pytest.mark.parametrize("content", ["", "{", '{"name": "x"}', "\0" * 40])
def test_a_damaged_status_is_as_good_as_none(
    run: RunDirectory, store: CheckpointStore, content: str
) -> None:
    """It holds figures; what a run goes on with is in its snapshots."""
    store.save("shard-0", snapshot("00001", clients(replica_0=70)))
    run.status_file.write_text(content)
    previous = read_previous_run(run, store, n_shards=1)
    assert previous.restored == {"shard-0": "00001"}
    assert previous.before.samples == {"replica-0": 70}
    assert previous.before.seconds == 0.0


@pytest.mark.parametrize(
    "override",
    [
        "stop.epochs=9",
        "cluster.replicas=3",
        "cluster.shards=3",
        "cluster.shard_copies=2",
        "algorithm.batch_size=9",
    ],
)
def test_a_job_may_go_on_with_other_ends_and_on_other_machines(override: str) -> None:
    check_same(speech(override), speech(), directory="runs/x")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.arguments.hidden=[9]", "[model]"),
        ('algorithm.rule={name="sgd", learning_rate=0.1}', "[algorithm] rule"),
    ],
)
def test_what_the_checkpoints_do_not_fit_is_refused(override: str, told: str) -> None:
    with pytest.raises(JobError) as caught:
        check_same(speech(override), speech(), directory="runs/x")
    assert told in str(caught.value)
    assert str(caught.value).startswith("--resume runs/x: ")
