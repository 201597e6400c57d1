"""A replica of Downpour that becomes one of Sandblaster: the corners of it."""

from collections.abc import Sequence

import pytest

from distbelief.core.memory import PrivateMemory
from distbelief.protocol import (
    Assignment,
    Finished,
    Message,
    StartTraining,
    Stop,
    WorkReport,
    role as rl,
)
from sandblaster.chunks import COORDINATOR
from sandblaster.warm_start_worker import WarmStartWorker
from tests.simulation.sandblasts import Sandblast


class Stage:
    """One replica, before it has met any shard."""

    def __init__(self, *, await_begin: bool = True) -> None:
        run = Sandblast(warm_steps=3, n_replicas=1, await_begin=await_begin)
        role = run.roles()[run.replicas[0]](PrivateMemory())
        assert isinstance(role, WarmStartWorker)
        self.role = role

    def starts(self) -> Sequence[rl.Action]:
        return self.role.handle(rl.Started(incarnation=2, restored=None), 0.0)

    def hears(self, message: Message, sender: rl.Address = COORDINATOR) -> list[rl.Action]:
        event = rl.Received(sender=sender, incarnation=1, message=message)
        return list(self.role.handle(event, 1.0))

    @property
    def word(self) -> str:
        return self.role.status()[0]


def sent(actions: Sequence[rl.Action], receiver: rl.Address = COORDINATOR) -> list[type]:
    return [
        type(action.message)
        for action in actions
        if isinstance(action, rl.Send) and action.receiver == receiver
    ]


def assignment() -> Assignment:
    return Assignment(
        series=1,
        replica_incarnation=2,
        version=1,
        evaluation=0,
        versions=(),
        n_examples=0,
        tasks=(),
    )


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.starts()
    return stage


def test_it_reports_until_it_is_answered() -> None:
    stage = Stage()
    assert sent(stage.starts()) == []  # the supervisor has not let it begin
    assert sent(stage.hears(StartTraining(), rl.SUPERVISOR)) == [WorkReport]
    resend = rl.TimerFired(name="warm:report")
    assert sent(stage.role.handle(resend, 2.0)) == [WorkReport]
    assert stage.word == "waiting for the coordinator"
    stage.hears(StartTraining())
    assert sent(stage.role.handle(resend, 3.0)) == [WorkReport]  # set before
    joined = rl.PeerJoined(peer=COORDINATOR, incarnation=2)
    assert sent(stage.role.handle(joined, 4.0)) == [WorkReport]  # it may have to know
    assert stage.hears(StartTraining()) == []
    assert stage.word == "waiting for shard-0"


def test_stop_before_training_ends_it(stage: Stage) -> None:
    actions = stage.hears(Stop(reason="over"), rl.SUPERVISOR)
    assert sent(actions, rl.SUPERVISOR) == [Finished]
    assert any(isinstance(action, rl.Exit) for action in actions)


def test_assignments_during_training_are_ignored(stage: Stage) -> None:
    stage.hears(StartTraining(), rl.SUPERVISOR)
    stage.hears(StartTraining())
    assert stage.hears(assignment()) == []


def test_a_worker_restarted_after_the_warm_start_does_not_train(stage: Stage) -> None:
    stage.hears(StartTraining(), rl.SUPERVISOR)
    actions = stage.hears(assignment())
    assert sent(actions) == [Finished]
    assert stage.word == "waiting for shard-0"
    assert sent(stage.hears(StartTraining())) == [Finished]  # the first one may be lost
    assert stage.hears(Stop(reason="the warm start is over")) == []


def test_it_takes_over_when_nothing_of_the_first_part_is_under_way(stage: Stage) -> None:
    stage.hears(StartTraining(), rl.SUPERVISOR)
    stage.hears(StartTraining())
    stage.role._n_under_way = 1  # a batch that is read in advance
    actions = stage.hears(Stop(reason="the warm start is over"))
    assert sent(actions) == []
    assert stage.word == "ending the warm start"
    read = rl.Computed(name="replica:read", result=None, error=None, seconds=0.1)
    assert sent(stage.role.handle(read, 5.0)) == [Finished]
    assert stage.word == "waiting for shard-0"
