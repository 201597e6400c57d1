"""The supervisor of shards in two copies: events in, actions out."""

from collections.abc import Sequence

import pytest

from distbelief import protocol as wire
from distbelief.protocol.role import Action, Address, Launch, PeerLost, TimerFired
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.view import RoleView
from tests.distbelief.supervisor.test_supervisor import (
    Desk,
    a_job,
    ended,
    introduced,
    letters,
    pushes as counts,
    sent,
)


ROSTER: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("shard-0b", "shard"),
    ("replica-0", "replica"),
)
COPIES = ("shard-0", "shard-0b")
ALL = [name for name, _ in ROSTER]


def promoted(actions: Sequence[Action]) -> list[tuple[str, int, str]]:
    return [(who, lead.term, lead.backup) for who, lead in letters(actions, wire.Promote)]


def rows(desk: Desk) -> dict[str, RoleView]:
    return {role.name: role for role in desk.view.roles}


def beat(desk: Desk, *names: str, **counters: float) -> list[Action]:
    actions: list[Action] = []
    for name in names:
        actions += desk.beat(name, "serving", **counters)
    return actions


def live(desk: Desk, seconds: float, *names: str) -> list[Action]:
    return desk.pass_time(seconds, beats=names)


@pytest.fixture
def desk() -> Desk:
    return a_job(ROSTER)


@pytest.fixture
def in_sync(desk: Desk) -> Desk:
    """A shard whose primary is shard-0 and whose backup shard-0b is in sync."""
    desk.join()
    beat(desk, "shard-0", term=2.0, clock=100.0, pushes_applied=100.0)
    desk.hear("shard-0b", wire.BackupInSync(term=2))
    desk.progress()
    return desk


def test_the_first_copy_to_join_is_primary_and_the_other_its_backup(desk: Desk) -> None:
    assert sent(desk.join("replica-0"), wire.Peers) == []  # it waits for one copy of each shard
    actions = desk.join("shard-0b")
    assert promoted(actions) == [("shard-0b", 1, "")]
    assert "replica-0" in sent(actions, wire.Peers)
    actions = desk.join("shard-0")
    assert promoted(actions) == [("shard-0b", 2, "shard-0")]
    assert introduced(actions) == {
        "shard-0": {"shard-0b", "replica-0"},
        "shard-0b": {"shard-0", "replica-0"},
        "replica-0": {"shard-0", "shard-0b"},
    }
    assert rows(desk)["shard-0b"].state == "primary"
    assert rows(desk)["shard-0"].state == "syncing"
    desk.hear("shard-0", wire.BackupInSync(term=2))
    assert rows(desk)["shard-0"].state == "backup"


def test_when_a_primary_dies_its_backup_takes_over_and_nothing_is_lost(in_sync: Desk) -> None:
    actions = in_sync.die("shard-0")
    assert promoted(actions) == [("shard-0b", 3, "")]
    assert Launch(name=Address("shard-0"), incarnation=2) in actions
    (told,) = in_sync.told[1:]
    assert told == (
        "shard 0 was ended by signal SIGKILL: shard 0b takes over, nothing "
        "acknowledged is lost; restarting shard 0"
    )
    assert rows(in_sync)["shard-0b"].state == "primary"
    assert promoted(in_sync.join("shard-0")) == [("shard-0b", 4, "shard-0")]


def test_of_two_silent_copies_the_primary_is_given_twice_as_long(in_sync: Desk) -> None:
    """Each was said to go on for the other, and both were put down at once."""
    beat(in_sync, *COPIES, term=2.0, whole=2.0, clock=100.0)
    assert ended(live(in_sync, 19.5, "replica-0")) == ["shard-0b"]
    assert in_sync.told[1:] == [
        "shard 0 silent for 3.2 s; counts as dead after 20 s",
        "shard 0b silent for 3.2 s; counts as dead after 10 s",
        "shard 0b silent for 10.2 s: restarting it; shard 0, which is in sync, is silent",
    ]
    assert ended(live(in_sync, 1.0, "replica-0")) == ["shard-0"]
    assert in_sync.told[-1] == (
        "shard 0 silent for 20.2 s: restarting it from its initial values; about 100 "
        "acknowledged pushes will be lost"
    )


def test_nothing_is_promised_of_a_copy_that_is_silent_or_dead(in_sync: Desk) -> None:
    beat(in_sync, *COPIES, term=2.0, whole=2.0, clock=100.0)
    live(in_sync, 2.0, "replica-0")
    in_sync.die("shard-0")
    assert in_sync.told[-1] == (
        "shard 0 was ended by signal SIGKILL: restarting it; shard 0b, which is in sync, is silent"
    )


def test_two_copies_that_die_at_once_are_said_to_be_dead(in_sync: Desk) -> None:
    beat(in_sync, *COPIES, term=2.0, whole=2.0, clock=100.0)
    for name in COPIES:
        in_sync.handle(PeerLost(peer=Address(name), incarnation=1, reason="was killed"))
    in_sync.now += 0.1
    for name in COPIES:
        in_sync.handle(TimerFired(name=f"supervisor:lost:{name}"))
    first, second = in_sync.told[1:]
    assert first == "shard 0 was killed: restarting it; shard 0b is dead too"
    assert second == (
        "shard 0b was killed: restarting it from its initial values; about 100 "
        "acknowledged pushes will be lost"
    )


def test_a_primary_whose_backup_is_not_in_sync_comes_back_from_its_checkpoint(desk: Desk) -> None:
    desk.join()
    beat(desk, "shard-0", term=2.0, clock=50.0)
    assert promoted(desk.die("shard-0")) == []
    (told,) = desk.told
    assert told == (
        "shard 0 was ended by signal SIGKILL: restarting it from its initial "
        "values; about 50 acknowledged pushes will be lost"
    )
    assert promoted(live(desk, 1.0, "shard-0b", "replica-0")) == []
    assert promoted(desk.join("shard-0"))[0][0] == "shard-0"


def test_a_backup_that_dies_leaves_its_primary_alone_and_comes_back(in_sync: Desk) -> None:
    assert promoted(in_sync.die("shard-0b")) == [("shard-0", 3, "")]
    (told,) = in_sync.told[1:]
    assert told == (
        "shard 0b was ended by signal SIGKILL: shard 0 goes on alone, nothing "
        "acknowledged is lost; restarting shard 0b"
    )
    assert promoted(in_sync.join("shard-0b")) == [("shard-0", 4, "shard-0b")]


@pytest.mark.parametrize("how", ["silence", "death"])
def test_checkpoints_are_asked_of_the_primary_and_survive_its_loss(in_sync: Desk, how: str) -> None:
    beat(in_sync, *COPIES, term=2.0, whole=2.0)
    assert set(sent(live(in_sync, 30.25, *ALL), wire.SaveCheckpoint)) == {"shard-0"}
    if how == "death":
        beat(in_sync, *COPIES, term=2.0, whole=2.0)
        actions = in_sync.die("shard-0")
    else:
        actions = live(in_sync, 1.5, "shard-0b", "replica-0")
    assert sent(actions, wire.SaveCheckpoint) == ["shard-0b"]
    in_sync.saved("shard-0b")
    assert sent(live(in_sync, 5.0, "shard-0b", "replica-0"), wire.SaveCheckpoint) == []


def test_a_fault_that_no_restart_fixes_leaves_a_primary_to_save(in_sync: Desk) -> None:
    actions = in_sync.hear("shard-0", wire.Failed(error="bad numbers", culprit_is_job=True))
    assert promoted(actions) == [("shard-0b", 3, "")]
    assert sent(in_sync.finish("replica-0"), wire.SaveCheckpoint) == ["shard-0b"]


def test_a_copy_that_no_restart_restores_is_left_out_and_the_job_goes_on(in_sync: Desk) -> None:
    wrong = "RestoreError: snapshot '00001' is of another shard"
    failed = wire.Failed(error=wrong, culprit_is_job=False, restart_helps=False)
    actions = in_sync.hear("shard-0", failed)
    assert promoted(actions) == [("shard-0b", 3, "")]
    assert not [action for action in actions if isinstance(action, Launch)]
    assert in_sync.supervisor.shutdown.error is None


def test_what_two_copies_apply_is_counted_once(in_sync: Desk) -> None:
    beat(in_sync, "shard-0b", clock=90.0, pushes_applied=90.0, whole=2.0)
    beat(in_sync, "shard-0", clock=120.0, pushes_applied=120.0, term=2.0)
    assert counts(in_sync) == (120, 0)
    in_sync.die("shard-0")
    beat(in_sync, "shard-0b", clock=118.0, pushes_applied=118.0, term=3.0)
    assert counts(in_sync) == (120, 0)
    beat(in_sync, "shard-0b", clock=130.0, pushes_applied=130.0, term=3.0)
    assert counts(in_sync) == (130, 0)


def test_what_a_shard_had_and_has_no_more_is_lost_and_not_applied(desk: Desk) -> None:
    """Pushes applied and then lost were counted as applied ever after."""
    desk.join()
    beat(desk, "shard-0", clock=100.0, pushes_applied=100.0, term=2.0)
    desk.restart("shard-0")
    desk.beat("shard-0", "starting", clock=0.0, pushes_applied=0.0, term=0.0)
    assert counts(desk) == (100, 0)  # what is restored it does not know yet
    beat(desk, "shard-0", clock=65.0, pushes_applied=5.0, term=4.0)
    assert counts(desk) == (65, 40)
    beat(desk, "shard-0", clock=130.0, pushes_applied=70.0, term=4.0)
    assert counts(desk) == (130, 40)


def test_a_backup_that_takes_over_loses_nothing_until_it_dies_too(in_sync: Desk) -> None:
    in_sync.die("shard-0")
    beat(in_sync, "shard-0b", clock=99.0, pushes_applied=99.0, term=3.0)
    assert counts(in_sync) == (100, 0)  # what only its primary had was not acknowledged
    in_sync.die("shard-0b")
    in_sync.join(*COPIES)
    beat(in_sync, "shard-0", clock=0.0, pushes_applied=0.0, term=4.0)
    assert counts(in_sync) == (0, 100)


def test_a_promote_names_the_incarnations_that_copies_count_together(in_sync: Desk) -> None:
    """A message to a dead incarnation may reach the next one.

    A restored checkpoint is of an earlier incarnation, whichever copy took it.
    """
    in_sync.die("shard-0")
    ((_, lead),) = letters(in_sync.join("shard-0"), wire.Promote)
    assert (lead.backup, lead.backup_incarnation) == ("shard-0", 2)
    assert lead.receiver_incarnation == 1
    in_sync.hear("shard-0", wire.BackupInSync(term=4))
    assert Launch(name=Address("shard-0b"), incarnation=3) in in_sync.die("shard-0b")


def test_a_copy_left_out_does_not_end_the_job(in_sync: Desk) -> None:
    for _ in range(6):
        in_sync.restart("shard-0b", "ended with status 1")
    assert rows(in_sync)["shard-0b"].state == "lost, left out"
    assert in_sync.view.phase == "training"
    for _ in range(6):
        in_sync.restart("shard-0", "ended with status 1")
    assert "shard 0 cannot be kept alive after 5 restarts" in str(in_sync.supervisor.shutdown.error)


def test_a_part_of_a_copy_is_given_up_when_its_primary_is_left_out(desk: Desk) -> None:
    desk.train()
    for _ in range(5):
        desk.restart("shard-0", "ended with status 1")
    actions = desk.die("shard-0", "ended with status 1")
    assert Launch(name=Address("shard-0b"), incarnation=7) in actions
    assert promoted(desk.join("shard-0b"))[0][0] == "shard-0b"
    assert desk.view.phase == "training"


def test_a_backup_that_ends_first_does_not_hold_up_its_primary(in_sync: Desk) -> None:
    in_sync.progress("replica-0", 10_000)
    assert sent(in_sync.finish("replica-0"), wire.SaveCheckpoint) == ["shard-0"]
    assert set(sent(in_sync.saved("shard-0"), wire.Stop)) == {"shard-0", "shard-0b"}
    assert promoted(in_sync.finish("shard-0b")) == [("shard-0", 3, "")]
    in_sync.finish("shard-0")
    assert in_sync.view.phase == "done"
