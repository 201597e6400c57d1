"""A supervisor that takes over from one that was killed: events in, actions out."""

import msgspec
import pytest

from distbelief import protocol as wire
from distbelief.protocol import role as rl
from distbelief.supervisor.handover import Handover, handover_of
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.supervisor import Supervisor
from tests.distbelief.supervisor.test_supervisor import Desk, a_job, introduced, letters, sent


PAIRED: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("shard-0b", "shard"),
    ("replica-0", "replica"),
)


def taken_over(killed: Desk, *dead: str) -> Desk:
    """Return another supervisor of this job, whose roles live but for these."""
    old, config = killed.supervisor, killed.supervisor._config
    handover = msgspec.json.decode(
        msgspec.json.encode(handover_of(old, config, killed.view)), type=Handover
    )
    alive = {rl.Address(n): i for n, i in killed.incarnations.items() if n not in dead}
    desk = Desk.__new__(Desk)
    desk.supervisor = Supervisor(config, handover=msgspec.structs.replace(handover, alive=alive))
    desk.now, desk.names = 1000.0, killed.names
    desk.incarnations = dict(killed.incarnations)
    desk.start = desk.handle(rl.Started(incarnation=1))
    return desk


def launched(actions: list[rl.Action]) -> list[tuple[str, int]]:
    return [(a.name, a.incarnation) for a in actions if isinstance(a, rl.Launch)]


def test_it_starts_nothing_and_all_goes_on() -> None:
    killed = a_job()
    killed.train()
    killed.progress("replica-0", 7)
    killed.restart("replica-1")
    killed.beat("shard-0", "serving", clock=70.0, pushes_applied=70.0)
    desk = taken_over(killed)
    assert launched(desk.start) == []
    assert (desk.view.samples, desk.view.step, desk.view.pushes_lost) == (70, 7, 0)
    joined = desk.join()
    assert set(introduced(joined)) == set(desk.names)
    begin = letters(joined, wire.StartTraining)
    assert [name for name, _ in begin] == ["replica-0", "replica-1"]
    desk.progress("replica-0", 9)
    assert (desk.view.samples, desk.view.step, desk.view.phase) == (90, 9, "training")
    assert launched(desk.pass_time(9.0)) == []
    assert {role.name: role.restarts for role in desk.view.roles}["replica-1"] == 1


def test_the_time_in_which_roles_went_on_counts() -> None:
    """Without it, 320 samples a second at most were shown as 565."""
    killed = a_job()
    killed.train()
    killed.progress("replica-0", 7)
    killed.pass_time(3.0, beats=killed.names)
    desk = taken_over(killed)
    before, gap = killed.view, desk.now - killed.now
    assert desk.view.seconds == pytest.approx(before.seconds + gap)
    assert desk.view.training_seconds == pytest.approx(before.training_seconds + gap)
    assert before.training_seconds > 2.0


def test_roles_that_ended_meanwhile_are_restarted() -> None:
    killed = a_job()
    killed.train()
    desk = taken_over(killed, "replica-1")
    started = desk.handle(rl.TimerFired(name="supervisor:lost:replica-1"))
    assert launched(started) == [("replica-1", 2)]
    assert desk.told == ["replica 1 ended while there was no supervisor: restarting it"]


def test_one_that_was_started_just_before_counts_by_its_process() -> None:
    """What the supervisor wrote may be a second old."""
    killed = a_job()
    killed.train()
    old = killed.incarnations["replica-1"]
    killed.incarnations["replica-1"] = old + 1
    desk = taken_over(killed)
    assert launched(desk.start) == []
    desk.join()
    assert "replica-1" in sent(desk.beat("replica-1"), wire.HeartbeatAck)


def test_the_primary_stays_primary_and_a_dead_one_is_replaced() -> None:
    killed = a_job(PAIRED)
    killed.join()
    killed.beat("shard-0", "serving", term=2.0, clock=100.0, pushes_applied=100.0)
    killed.hear("shard-0b", wire.BackupInSync(term=2))
    desk = taken_over(killed)
    assert letters(desk.join(), wire.Promote) == []
    rest = desk.pass_time(3.0, beats=("shard-0", "shard-0b", "replica-0"))
    assert not any(isinstance(action, rl.Terminate) for action in rest)

    desk = taken_over(killed, "shard-0")
    actions = desk.handle(rl.TimerFired(name="supervisor:lost:shard-0"))
    ((name, promote),) = letters(actions, wire.Promote)
    assert (name, promote.term, promote.backup) == ("shard-0b", 3, "")
    assert launched(actions) == [("shard-0", 2)]


def test_evaluations_and_checkpoints_go_on_and_are_numbered_on() -> None:
    """After a takeover there were none until the job ended: "training" had begun before.

    An evaluator answers no number below its newest, so the last evaluation would never come. Where
    there were eight a second, that came true: the state that is handed over is some seconds old.
    """
    killed = a_job()
    killed.train()
    killed.pass_time(12.0, beats=killed.names)
    killed.measured()
    desk = taken_over(killed)
    desk.train()
    actions = desk.pass_time(31.0, beats=desk.names)
    (request,) = {ask.request for _, ask in letters(actions, wire.Evaluate)}
    assert request > 1000
    assert {*sent(actions, wire.SaveCheckpoint)} == {"shard-0", "shard-1"}


def test_a_warm_start_is_not_repeated() -> None:
    """Replica 0 began it anew: the others came to their bounds, and waited for all its steps."""
    killed = a_job(warm_start_steps=5)
    killed.train()
    killed.progress("replica-0", 5)
    desk = taken_over(killed)
    assert sent(desk.join(), wire.StartTraining) == ["replica-0", "replica-1"]
    killed = a_job(warm_start_steps=5)
    killed.train()
    desk = taken_over(killed)
    assert sent(desk.join(), wire.StartTraining) == ["replica-0"]
    assert sent(desk.progress("replica-0", 5), wire.StartTraining) == ["replica-1"]
