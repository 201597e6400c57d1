"""Jobs with a coordinator: what is otherwise for them."""

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from distbelief import protocol as wire
from distbelief.config.algorithms import Verdict, done
from distbelief.config.job import StopTable
from distbelief.core.errors import StorageError
from distbelief.job.run.checkpoints import SET_ASIDE, CheckpointStore, agreed_label, set_aside
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.job.run.resume import read_previous_run
from distbelief.protocol.role import Action, Exit, Snapshot
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import JobView
from tests.distbelief.supervisor.test_supervisor import Desk, introduced, sent


ROSTER: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("shard-1", "shard"),
    ("coordinator", "coordinator"),
    ("replica-0", "replica"),
    ("replica-1", "replica"),
    ("evaluator", "evaluator"),
)


def verdict(counters: Mapping[str, float]) -> Verdict:
    return Verdict(reason="no step is better", failed=counters["reason"] > 0)


def config(*, stop: StopTable | None = None, shard_restarts_max: int = 5) -> SupervisorConfig:
    return SupervisorConfig(
        roster=ROSTER,
        stop=StopRules(stop or StopTable(), n_train=100, has_test=False),
        fields=("iteration", "gradient_norm"),
        verdict=verdict,
        shard_restarts_max=shard_restarts_max,
    )


@pytest.fixture
def desk() -> Desk:
    desk = Desk(config())
    desk.join()
    return desk


def iterate(desk: Desk, step: int, *, loss: float = 1.0) -> list[Action]:
    progress = wire.Progress(
        step=step, samples=100 * step, loss=loss, seconds_computing=0.0, seconds_waiting=0.0
    )
    return desk.hear("coordinator", progress)


def end(desk: Desk, name: str, **counters: float) -> list[Action]:
    return desk.hear(name, wire.Finished(counters=counters))


def test_coordinator_and_replicas_meet_and_all_begin() -> None:
    actions = Desk(config()).join()
    newest = introduced(actions)
    assert newest["coordinator"] == {"shard-0", "shard-1", "replica-0", "replica-1"}
    assert newest["replica-0"] == {"shard-0", "shard-1", "coordinator"}
    assert newest["evaluator"] == {"shard-0", "shard-1"}
    assert sent(actions, wire.StartTraining) == ["coordinator", "replica-0", "replica-1"]


def test_its_progress_is_that_of_the_job(desk: Desk) -> None:
    iterate(desk, 3, loss=2.0)
    iterate(desk, 4, loss=1.5)
    iterate(desk, 4, loss=math.nan)  # no number: it changes nothing
    assert (desk.view.step, desk.view.samples, desk.view.loss) == (4, 400, 1.5)
    desk.beat("coordinator", iteration=4.0, gradient_norm=math.nan, reason=-1.0)
    assert desk.view.figures == {"iteration": 4.0}  # what is shown, and is a number
    assert desk.view.roles[2].counters == {"iteration": 4.0, "reason": -1.0}
    desk.beat("replica-0", samples=10.0)
    desk.now += 1.0
    desk.beat("replica-0", samples=60.0)
    assert desk.view.roles[3].rate == 50.0
    desk.die("coordinator")  # a new incarnation goes on counting
    assert desk.told[-1] == "coordinator was ended by signal SIGKILL: restarting it"
    assert sent(desk.join("coordinator"), wire.StartTraining) == ["coordinator"]
    iterate(desk, 5)
    assert desk.view.step == 5


def test_it_is_asked_for_checkpoints_as_long_as_it_lives(desk: Desk) -> None:
    iterate(desk, 1)
    actions = desk.pass_time(31.0, beats=[name for name, _ in ROSTER])
    assert sent(actions, wire.SaveCheckpoint)
    assert set(sent(actions, wire.SaveCheckpoint)) == {"coordinator"}
    desk.hear("coordinator", wire.CheckpointSaved(label="00001", clock=1, error=None))
    desk.die("shard-0")
    assert "restarting it from checkpoint 00001" in desk.told[-1]
    assert "the run goes on from there" in desk.told[-1]
    assert "lost" not in desk.told[-1]


@pytest.mark.parametrize("failed", [False, True])
def test_the_job_ends_with_it(desk: Desk, *, failed: bool) -> None:
    iterate(desk, 7)
    actions = end(desk, "coordinator", reason=float(failed))
    assert sent(actions, wire.Stop) == ["replica-0", "replica-1"]
    assert not sent(actions, wire.SaveCheckpoint)
    end(desk, "replica-0")
    actions = end(desk, "replica-1")
    assert sent(actions, wire.SaveCheckpoint) == ["shard-0", "shard-1"]
    assert sent(actions, wire.Evaluate) == ([] if failed else ["evaluator"])
    assert desk.view.stop_reason == "no step is better"
    assert desk.supervisor.shutdown.error == ("no step is better" if failed else None)


def test_it_is_stopped_first_by_a_rule_of_the_job() -> None:
    desk = Desk(config(stop=StopTable(loss=0.5)))
    desk.join()
    iterate(desk, 1, loss=0.6)
    actions = iterate(desk, 2, loss=0.4)
    assert sent(actions, wire.Stop) == ["coordinator", "replica-0", "replica-1"]
    assert desk.view.stop_reason == "training loss 0.40 reached"


def test_a_watchers_stop_is_done_at_the_next_tick_and_saves_no_point_on_trial(desk: Desk) -> None:
    iterate(desk, 1)
    desk.supervisor.request_stop("enough")
    desk.supervisor.request_stop("too late")
    assert sent(desk.pass_time(0.25), wire.Stop) == ["coordinator", "replica-0", "replica-1"]
    assert desk.view.stop_reason == "enough"
    assert not desk.supervisor.shutdown.interrupted
    desk.die("coordinator")  # it does not end in order
    end(desk, "replica-0")
    actions = end(desk, "replica-1")
    assert not sent(actions, wire.SaveCheckpoint)
    assert "the run resumes from its last checkpoint" in desk.told[-1]
    assert desk.supervisor.shutdown.error is not None
    assert sent(actions, wire.Stop) == ["shard-0", "shard-1", "evaluator"]


def test_without_it_there_is_no_job() -> None:
    desk = Desk(config(shard_restarts_max=1))
    desk.join()
    desk.restart("coordinator")
    actions = desk.die("coordinator")
    assert desk.supervisor.shutdown.error is not None
    assert "the coordinator cannot be kept alive after 1 restart" in (
        desk.supervisor.shutdown.error
    )
    assert not [action for action in actions if isinstance(action, Exit)]


def test_a_job_that_computes_a_large_batch_stands_not_still(desk: Desk) -> None:
    names = [name for name, _ in ROSTER]
    for index in range(70):
        desk.beat("replica-0", samples=10.0 * index)
        desk.pass_time(1.0, beats=[name for name in names if name != "replica-0"])
    assert not [text for text in desk.told if "no step" in text]
    assert done({}).reason == "the coordinator is done"


# ------------------------------------------------------------------------ what fits


def save(store: CheckpointStore, role: str, label: str, **facts: str) -> None:
    arrays = {"values": np.zeros(4, np.float32)}
    store.save(role, Snapshot(label=label, arrays=arrays, facts=facts))


def test_only_checkpoints_of_one_round_fit_together(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, report=print)
    shards = ["shard-0", "shard-1"]
    assert set_aside(store, shards) == ()
    for label in ("00001", "00002", "00003"):
        save(store, "shard-0", label)
    assert agreed_label(store, shards) is None
    for label in ("00001", "00002"):
        save(store, "shard-1", label)
    assert agreed_label(store, shards) == "00002"
    Path(store.path("shard-1", "00002")).write_bytes(b"cut short")
    (told,) = set_aside(store, shards)
    lacks = Path(store.path("shard-1", "00003"))
    assert told.startswith(f"checkpoint 00003 is incomplete: {lacks} (it is missing)")
    assert "the run resumes from 00001, the newest complete one" in told
    assert store.labels("shard-0") == store.labels("shard-1") == ["00001"]
    left = Path(store.path("shard-0", "00003"))
    assert left.with_name(f"{left.name}{SET_ASIDE}").is_file()
    assert set_aside(store, shards) == ()


def test_without_one_shards_checkpoints_those_of_others_are_not_put_away(tmp_path: Path) -> None:
    """A directory was deleted: the run began anew, and put the others' away."""
    store = CheckpointStore(tmp_path, report=print)
    for label in ("00001", "00002"):
        save(store, "shard-0", label)
    with pytest.raises(StorageError) as caught:
        set_aside(store, ["shard-0", "shard-1"])
    lacks = Path(store.path("shard-1", "00002"))
    assert f"{lacks} (it is missing)" in str(caught.value)
    assert store.labels("shard-0") == ["00001", "00002"]


def test_a_run_killed_in_its_first_round_starts_from_scratch_unless_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, report=print)
    shards = ["shard-0", "shard-1"]
    save(store, "shard-0", "00001")
    (told,) = set_aside(store, shards)
    assert "it was the first, so the run starts from scratch" in told
    assert not store.labels("shard-0")
    for shard in shards:
        save(store, shard, "00001")
    damaged = Path(store.path("shard-1", "00001"))
    damaged.write_bytes(b"")
    with pytest.raises(StorageError, match=f"{damaged} .*it ends within its header"):
        set_aside(store, shards)
    assert store.labels("shard-0") == store.labels("shard-1") == ["00001"]


def test_a_run_goes_on_above_all_incarnations_of_its_coordinator(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    store = CheckpointStore(run.snapshots, report=print)
    save(store, "shard-0", "00004", incarnation="1", clock="9")
    fresh = read_previous_run(run, store, n_shards=1, coordinator="coordinator")
    assert fresh.before.samples == {}
    save(store, "coordinator", "000000000007", incarnation="3")
    run.write_status(Status(name="x", pid=1, written=0.0, view=JobView(samples=500, step=5)))
    legacy = read_previous_run(run, store, n_shards=1, coordinator="coordinator")
    assert legacy.incarnation == 4
    assert legacy.label == 5
    assert legacy.before.samples == {"coordinator": 500}
    assert legacy.trained
    run.status_file.write_bytes(b"{")
    legacy = read_previous_run(run, store, n_shards=1, coordinator="coordinator")
    assert legacy.before.samples == {"coordinator": 0}
    run.close()


def test_a_run_killed_in_its_warm_start_counts_the_samples_of_its_replicas(tmp_path: Path) -> None:
    """They were the coordinator's, and once more the replicas': [stop] samples came too early."""
    run = RunDirectory.create(tmp_path / "run")
    store = CheckpointStore(run.snapshots, report=print)
    clients = {f"replica-{r}": {"incarnation": 1, "samples": 60 + r} for r in range(2)}
    save(store, "shard-0", "00001", clients=msgspec.json.encode(clients).decode())
    run.write_status(Status(name="x", pid=1, written=0.0, view=JobView(samples=130)))
    previous = read_previous_run(run, store, n_shards=1, coordinator="coordinator")
    assert previous.before.samples == {"replica-0": 60, "replica-1": 61}
