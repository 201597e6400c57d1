"""The supervisor of a job whose replicas are split over machines."""

from collections.abc import Sequence

import pytest

from distbelief.config.job import StopTable
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import (
    CheckpointSaved,
    EvaluationDone,
    Failed,
    Finished,
    Peers,
    Progress,
    SaveCheckpoint,
    StartTraining,
    Stop,
)
from distbelief.roles.role import Action, Address, Exit, Launch
from distbelief.supervisor.config import SupervisorConfig
from distbelief.supervisor.membership import Kind, RoleRecord
from distbelief.supervisor.stop_rules import StopRules
from tests.distbelief.supervisor.test_supervisor import Desk, ended, introduced, letters, sent


ROSTER: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("replica-0.0", "replica"),
    ("replica-0.1", "machine"),
    ("replica-1.0", "replica"),
    ("replica-1.1", "machine"),
    ("evaluator", "evaluator"),
    ("evaluator.1", "machine"),
)
EVERYBODY = [name for name, _ in ROSTER]


@pytest.fixture
def desk() -> Desk:
    stop = StopRules(StopTable(epochs=1000), n_train=100)
    return Desk(SupervisorConfig(roster=ROSTER, stop=stop))


def peers_of(desk: Desk, name: str) -> set[str]:
    return introduced(desk.join())[name]


@pytest.mark.parametrize(
    ("name", "peers"),
    [
        ("replica-0.0", {"shard-0", "replica-0.1"}),
        ("replica-1.1", {"shard-0", "replica-1.0"}),
        ("evaluator.1", {"shard-0", "evaluator"}),
        ("shard-0", set(EVERYBODY) - {"shard-0"}),
    ],
)
def test_machines_need_their_group_and_the_shards(desk: Desk, name: str, peers: set[str]) -> None:
    assert peers_of(desk, name) == peers


def test_only_the_leader_is_told_to_begin_and_everybody_to_stop(desk: Desk) -> None:
    """A machine that was being built was waited for, only to end then."""
    assert sent(desk.join(), StartTraining) == ["replica-0.0", "replica-1.0"]
    desk.progress("replica-0.0")
    actions = desk.hear("user", Stop(reason="enough"))
    trains = {f"replica-{r}.{m}" for r in range(2) for m in range(2)}
    assert set(sent(actions, Stop)) == {*trains, "evaluator"}


def gone(actions: Sequence[Action]) -> dict[str, tuple[str, ...]]:
    """Return whom each was told to be gone for good."""
    return {who: peers.gone for who, peers in letters(actions, Peers)}


def test_a_machine_that_is_silent_at_the_end_is_named_and_ended_and_others_told(desk: Desk) -> None:
    """It was said to be restarted, and the others of its replica waited on: 40 s."""
    desk.join()
    desk.progress("replica-0.0")
    desk.supervisor.request_stop("enough")
    lively = [name for name in EVERYBODY if name != "replica-0.1"]
    actions = desk.pass_time(3.5, beats=lively)
    assert desk.told[-1] == "replica 0.1 silent for 3.2 s; counts as dead after 10 s"
    actions = desk.pass_time(7.0, beats=lively)
    assert desk.told[-1] == "replica 0.1 silent for 10.2 s while it was stopping"
    assert ended(actions) == ["replica-0.1"]
    assert gone(actions)["replica-0.0"] == ("replica-0.1",)
    assert gone(actions)["shard-0"] == ()


def test_a_machine_that_has_finished_is_gone_for_its_leader_alone(desk: Desk) -> None:
    desk.join()
    desk.progress("replica-0.0")
    told = gone(desk.hear("replica-0.1", Finished(counters={})))
    assert told == {"shard-0": (), "replica-0.0": ("replica-0.1",)}
    desk.die("replica-0.0")
    told = gone(desk.join("replica-0.0"))
    assert told["replica-0.0"] == ("replica-0.1",)


def test_an_evaluator_that_is_silent_at_the_very_end_is_named_and_ended(desk: Desk) -> None:
    """In the last stage nobody was named before 15 s were over."""
    desk.join()
    desk.progress("replica-0.0")
    desk.supervisor.request_stop("enough")
    desk.pass_time(0.25, beats=EVERYBODY)
    for replica in range(2):
        for machine in range(2):
            desk.hear(f"replica-{replica}.{machine}", Finished(counters={}))
    desk.hear("shard-0", CheckpointSaved(label="00001", clock=1))
    measured = EvaluationDone(request=1, loss=1.0, metric=0.5, n_samples=9, clock=1.0)
    told = sent(desk.hear("evaluator", measured), Stop)
    assert set(told) == {"shard-0", "evaluator", "evaluator.1"}
    desk.hear("shard-0", Finished(counters={}))
    desk.pass_time(3.5, beats=["evaluator"])
    assert desk.told[-1] == "evaluator.1 silent for 3.2 s; counts as dead after 10 s"
    actions = desk.pass_time(7.0, beats=["evaluator"])
    assert desk.told[-1] == "evaluator.1 silent for 10.2 s while it was stopping"
    assert ended(actions) == ["evaluator.1"]
    assert gone(actions)["evaluator"] == ("evaluator.1",)
    actions = desk.hear("evaluator", Finished(counters={}))
    assert Exit(error=None) in actions


def test_a_machine_that_leads_nobody_reports_no_progress(desk: Desk) -> None:
    desk.join()
    with pytest.raises(RemoteProtocolError, match=r"replica-0\.1 sent the supervisor Progress"):
        desk.progress("replica-0.1")


def test_a_dead_machine_alone_is_started_again(desk: Desk) -> None:
    desk.join()
    actions = desk.die("replica-0.1")
    launched = [action.name for action in actions if isinstance(action, Launch)]
    assert launched == ["replica-0.1"]
    assert sent(actions, Peers) == ["shard-0", "replica-0.0"]
    assert desk.told[-1] == "replica 0.1 was ended by signal SIGKILL: restarting it"


def test_a_replica_without_one_of_its_machines_is_left_out_whole(desk: Desk) -> None:
    desk.join()
    desk.progress("replica-1.0")
    killed: list[str] = []
    for _ in range(4):
        actions = desk.die("replica-0.1")
        desk.join("replica-0.1")
        killed = ended(actions)
    assert killed == ["replica-0.1", "replica-0.0"]
    assert desk.told[-1] == ("replica 0.0 left out with replica 0.1: they are of one model")
    view = desk.supervisor.view(desk.now)
    states = {role.name: role.state for role in view.roles}
    assert states["replica-0.0"] == states["replica-0.1"] == "lost, left out"
    assert view.phase == "training"  # the other one goes on


def test_without_any_whole_replica_the_job_fails(desk: Desk) -> None:
    desk.join()
    for replica in (0, 1):
        for _ in range(4):
            desk.die(f"replica-{replica}.1")
            desk.join(f"replica-{replica}.1")
    assert desk.supervisor.error is not None
    assert desk.supervisor.error.startswith("every replica is lost")


def test_evaluators_are_left_out_together_and_the_job_goes_on(desk: Desk) -> None:
    desk.join()
    desk.progress("replica-0.0")
    for _ in range(3):
        desk.die("evaluator.1")
        desk.join("evaluator.1")
    states = {r.name: r.state for r in desk.supervisor.view(desk.now).roles}
    assert states["evaluator"] == states["evaluator.1"] == "lost, left out"
    assert desk.supervisor.error is None


def test_the_end_waits_for_every_machine(desk: Desk) -> None:
    desk.join()
    desk.progress("replica-0.0")
    failed = Failed(error="no such column", culprit_is_job=True)
    desk.hear("replica-1.1", failed)  # so the job is to end
    assert desk.supervisor.view(desk.now).phase == "stopping"
    desk.hear("replica-0.0", Finished(counters={}))
    assert desk.supervisor.status()[0] == "stopping"
    actions = desk.hear("replica-0.1", Finished(counters={}))
    assert sent(actions, SaveCheckpoint) == ["shard-0"]  # the next stage


def test_a_machine_that_dies_at_the_end_is_not_restarted(desk: Desk) -> None:
    desk.join()
    desk.progress("replica-0.0")
    desk.hear("replica-1.0", Failed(error="x", culprit_is_job=True))
    actions = desk.die("replica-0.1")
    assert not [action for action in actions if isinstance(action, Launch)]
    assert "while it was stopping" in desk.told[-1]


def test_warm_start_counts_steps_of_the_first_replica() -> None:
    stop = StopRules(StopTable(epochs=1000), n_train=100)
    config = SupervisorConfig(roster=ROSTER, stop=stop, warm_start_steps=5)
    desk = Desk(config)
    assert sent(desk.join(), StartTraining) == ["replica-0.0"]
    desk.progress("replica-0.0", 1)
    assert sent(desk.progress("replica-0.0", 6), StartTraining) == ["replica-1.0"]


def test_pushes_that_any_machine_misses_are_counted(desk: Desk) -> None:
    desk.join()
    desk.beat("replica-0.1", pushes_lost=3)
    assert desk.supervisor.view(desk.now).pushes_lost == 3


@pytest.mark.parametrize(
    ("name", "kind", "group", "trains"),
    [
        ("replica-2", "replica", "replica-2", True),
        ("replica-2.0", "replica", "replica-2", True),
        ("replica-2.3", "machine", "replica-2", True),
        ("evaluator", "evaluator", "evaluator", False),
        ("evaluator.1", "machine", "evaluator", False),
        ("shard-0b", "shard", "shard-0b", False),
        ("guest-7", "guest", "guest-7", False),
    ],
)
def test_groups(
    name: str,
    kind: Kind,
    group: str,
    trains: bool,  # noqa: FBT001 -- of the table above
) -> None:
    record = RoleRecord(name=Address(name), kind=kind, index=0, incarnation=1)
    assert record.group == group
    assert record.trains is trains


def test_progress_is_of_the_whole_replica(desk: Desk) -> None:
    desk.join()
    message = Progress(step=3, samples=96, loss=0.5, seconds_computing=0.0, seconds_waiting=0.0)
    desk.hear("replica-1.0", message)
    assert desk.supervisor.view(desk.now).samples == 96
