from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from distbelief.core.errors import JobError
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.job.run.resume import PreviousRun, check_same, read_previous_run
from distbelief.protocol.role import Snapshot
from distbelief.supervisor.view import JobView, Point, RoleView
from tests.distbelief.jobs import speech


class Past:
    """A run directory, and what its earlier sessions left there."""

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory.create(path)
        self.store = CheckpointStore(self.run.snapshots, report=pytest.fail)

    def save(
        self, k: int, *, label: str = "00001", incarnation: int = 2, clock: int = 0, **samples: int
    ) -> None:
        """Save a checkpoint of shard k, with so many samples of each client."""
        clients = {
            name.replace("_", "-"): {"incarnation": 3, "samples": n, "watermark": 1}
            for name, n in (samples or {"replica_0": 70}).items()
        }
        facts = {
            "clients": msgspec.json.encode(clients).decode(),
            "incarnation": str(incarnation),
            "clock": str(clock),
        }
        values = np.zeros(4, np.float32)
        self.store.save(f"shard-{k}", Snapshot(label=label, arrays={"values": values}, facts=facts))

    def shown(self, view: JobView) -> None:
        self.run.write_status(Status(name="x", pid=1, written=0.0, view=view))

    def read(self, n_shards: int = 2) -> PreviousRun:
        return read_previous_run(self.run, self.store, n_shards=n_shards)


@pytest.fixture
def past(tmp_path: Path) -> Past:
    return Past(tmp_path / "run")


def test_a_new_run_inherits_nothing(past: Past) -> None:
    previous = past.read()
    assert (previous.incarnation, previous.label) == (1, 1)
    assert previous.missing == ("shard-0", "shard-1")
    assert previous.before.samples == {}


def test_a_resumed_run_goes_on_from_what_every_shard_has(past: Past) -> None:
    past.save(0, label="00007", replica_0=70, replica_1=50)
    past.save(1, label="00006", incarnation=5, replica_0=60, replica_1=55, evaluator=0)
    view = JobView(seconds=20.0, step=30, history=(Point(seconds=1.0, samples=5),))
    past.shown(view)
    previous = past.read()
    assert previous.restored == {"shard-0": "00007", "shard-1": "00006"}
    assert (previous.label, previous.incarnation) == (8, 6)
    assert previous.before.samples == {"replica-0": 60, "replica-1": 50}
    assert previous.before.view == view


def test_a_replica_that_a_shard_knows_nothing_of_starts_from_scratch(past: Past) -> None:
    past.save(0, replica_0=70)
    previous = past.read()  # shard-1 has nothing at all
    assert previous.missing == ("shard-1",)
    assert previous.before.samples == {"replica-0": 0}
    past.save(1, replica_0=70, replica_1=50)
    assert past.read().before.samples == {"replica-0": 70, "replica-1": 0}


@pytest.mark.parametrize(
    ("clocks", "applied", "lost"),
    [
        pytest.param((100, 90), 90, 0, id="all in the checkpoints"),
        pytest.param((100, 90), 115, 25, id="applied after the checkpoints of a killed job"),
        # A new shard begins at the largest clock of those that it is cut from.
        pytest.param((100,), 190, 0, id="resharded: its clock tells nothing"),
    ],
)
def test_pushes_and_restarts_are_counted_over_all_incarnations(
    past: Past, clocks: tuple[int, ...], applied: int, lost: int
) -> None:
    """Samples and seconds were of all lives, and these of the last one only."""
    for k, clock in enumerate(clocks):
        past.save(k, clock=clock)
    names = ("shard-0", "shard-0b", "shard-1", "shard-1b")
    view = JobView(
        pushes_applied=applied,
        pushes_lost=7,
        roles=tuple(RoleView(name=name, state="done", restarts=4) for name in names),
    )
    past.shown(view)
    before = past.read(len(clocks)).before
    assert before.clocks == {f"shard-{k}": clock for k, clock in enumerate(clocks)}
    assert before.view == replace(view, pushes_lost=7 + lost)


@pytest.mark.parametrize(
    ("n_kept", "samples", "kept"), [(2, 70, True), (1, 70, False), (1, 0, False), (2, 75, False)]
)
def test_metrics_of_held_values_stay(past: Past, n_kept: int, samples: int, *, kept: bool) -> None:
    for k in range(n_kept):
        past.save(k)
    view = JobView(
        seconds=9.0, samples=samples, loss=0.1, metric=0.9, held_out_loss=0.2, best_metric=0.95
    )
    past.shown(view)
    expected = view if kept else replace(view, loss=None, metric=None, held_out_loss=None)
    assert past.read().before.view == expected  # what was best was so


def test_a_job_may_go_on_with_other_ends_and_on_other_machines() -> None:
    ends_and_machines = (
        *("stop.epochs=9", "algorithm.batch_size=9"),
        *("cluster.replicas=3", "cluster.shards=3", "cluster.shard_copies=2"),
    )
    for override in ends_and_machines:
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
