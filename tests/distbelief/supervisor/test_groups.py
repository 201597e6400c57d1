"""The supervisor of a job whose replicas are split over machines."""

from collections.abc import Sequence

import pytest

from distbelief import protocol as wire
from distbelief.core.errors import RemoteProtocolError
from distbelief.protocol.role import Action, Exit, Launch
from distbelief.supervisor.membership import Kind
from tests.distbelief.supervisor.test_supervisor import (
    Desk,
    a_job,
    ended,
    introduced,
    letters,
    sent,
)


ROSTER: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("replica-0.0", "replica"),
    ("replica-0.1", "rank"),
    ("replica-1.0", "replica"),
    ("replica-1.1", "rank"),
    ("evaluator", "evaluator"),
    ("evaluator.1", "rank"),
)
EVERYBODY = [name for name, _ in ROSTER]


@pytest.fixture
def desk() -> Desk:
    return a_job(ROSTER)


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
    assert introduced(desk.join())[name] == peers


def test_only_the_leader_is_told_to_begin_and_everybody_to_stop(desk: Desk) -> None:
    """A machine that was being built was waited for, only to end then."""
    assert sent(desk.join(), wire.StartTraining) == ["replica-0.0", "replica-1.0"]
    desk.progress("replica-0.0")
    actions = desk.hear("user", wire.Stop(reason="enough"))
    trains = {f"replica-{r}.{m}" for r in range(2) for m in range(2)}
    assert set(sent(actions, wire.Stop)) == {*trains, "evaluator"}


def gone(actions: Sequence[Action]) -> dict[str, tuple[str, ...]]:
    """Return whom each was told to be gone for good."""
    return {who: peers.gone for who, peers in letters(actions, wire.Peers)}


def test_a_machine_that_is_silent_at_the_end_is_named_and_ended_and_others_told(desk: Desk) -> None:
    """It was said to be restarted, and the others of its replica waited on: 40 s."""
    desk.train("replica-0.0")
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
    desk.train("replica-0.0")
    assert gone(desk.finish("replica-0.1")) == {"shard-0": (), "replica-0.0": ("replica-0.1",)}
    desk.die("replica-0.0")
    assert gone(desk.join("replica-0.0"))["replica-0.0"] == ("replica-0.1",)


def test_an_evaluator_that_is_silent_at_the_very_end_is_named_and_ended(desk: Desk) -> None:
    """In the last stage nobody was named before 15 s were over."""
    desk.train("replica-0.0")
    desk.supervisor.request_stop("enough")
    desk.pass_time(0.25, beats=EVERYBODY)
    desk.finish(*(f"replica-{replica}.{machine}" for replica in range(2) for machine in range(2)))
    desk.saved("shard-0")
    assert set(sent(desk.measured(), wire.Stop)) == {"shard-0", "evaluator", "evaluator.1"}
    desk.finish("shard-0")
    desk.pass_time(3.5, beats=["evaluator"])
    assert desk.told[-1] == "evaluator.1 silent for 3.2 s; counts as dead after 10 s"
    actions = desk.pass_time(7.0, beats=["evaluator"])
    assert desk.told[-1] == "evaluator.1 silent for 10.2 s while it was stopping"
    assert ended(actions) == ["evaluator.1"]
    assert gone(actions)["evaluator"] == ("evaluator.1",)
    assert Exit(error=None) in desk.finish("evaluator")


def test_a_dead_machine_alone_is_started_again(desk: Desk) -> None:
    desk.join()
    actions = desk.die("replica-0.1")
    assert [action.name for action in actions if isinstance(action, Launch)] == ["replica-0.1"]
    assert sent(actions, wire.Peers) == ["shard-0", "replica-0.0"]
    assert desk.told[-1] == "replica 0.1 was ended by signal SIGKILL: restarting it"


def test_a_replica_without_one_of_its_machines_is_left_out_whole(desk: Desk) -> None:
    desk.train("replica-1.0")
    for _ in range(3):
        desk.restart("replica-0.1")
    assert ended(desk.die("replica-0.1")) == ["replica-0.1", "replica-0.0"]
    assert desk.told[-1] == "replica 0.0 left out with replica 0.1: they are of one model"
    states = {role.name: role.state for role in desk.view.roles}
    assert states["replica-0.0"] == states["replica-0.1"] == "lost, left out"
    assert desk.view.phase == "training"  # the other one goes on


def test_without_any_whole_replica_the_job_fails(desk: Desk) -> None:
    desk.join()
    for name in ("replica-0.1", "replica-1.1"):
        for _ in range(4):
            desk.restart(name)
    assert str(desk.supervisor.shutdown.error).startswith("every replica is lost")


def test_evaluators_are_left_out_together_and_the_job_goes_on(desk: Desk) -> None:
    desk.train("replica-0.0")
    for _ in range(3):
        desk.restart("evaluator.1")
    states = {r.name: r.state for r in desk.view.roles}
    assert states["evaluator"] == states["evaluator.1"] == "lost, left out"
    assert desk.supervisor.shutdown.error is None


def test_the_end_waits_for_every_machine_and_restarts_none(desk: Desk) -> None:
    desk.train("replica-0.0")
    failed = wire.Failed(error="no such column", culprit_is_job=True)
    desk.hear("replica-1.1", failed)  # so the job is to end
    assert desk.view.phase == "stopping"
    desk.finish("replica-0.0")
    assert desk.supervisor.status()[0] == "stopping"
    assert sent(desk.finish("replica-0.1"), wire.SaveCheckpoint) == ["shard-0"]  # the next stage
    other = a_job(ROSTER)
    other.train("replica-0.0")
    other.hear("replica-1.0", failed)
    assert not [action for action in other.die("replica-0.1") if isinstance(action, Launch)]
    assert "while it was stopping" in other.told[-1]


def test_warm_start_counts_steps_of_the_first_replica() -> None:
    desk = a_job(ROSTER, warm_start_steps=5)
    assert sent(desk.join(), wire.StartTraining) == ["replica-0.0"]
    desk.progress("replica-0.0", 1)
    assert sent(desk.progress("replica-0.0", 6), wire.StartTraining) == ["replica-1.0"]


def test_progress_is_of_the_whole_replica_and_missed_pushes_of_any_machine(desk: Desk) -> None:
    desk.join()
    desk.beat("replica-0.1", pushes_lost=3)
    with pytest.raises(RemoteProtocolError, match=r"replica-0\.1 sent the supervisor Progress"):
        desk.progress("replica-0.1")  # it leads nobody
    desk.progress("replica-1.0", step=9)
    assert (desk.view.samples, desk.view.pushes_lost) == (90, 3)
