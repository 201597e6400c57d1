"""The supervisor of shards in two copies: events in, actions out."""

from collections.abc import Sequence

import pytest

from distbelief.config.job import StopTable
from distbelief.protocol import (
    BackupInSync,
    BackupUnresponsive,
    CheckpointSaved,
    Failed,
    Finished,
    Peers,
    Promote,
    SaveCheckpoint,
    Stop,
)
from distbelief.roles.role import Action, Address, Launch, PeerLost, Terminate, TimerFired
from distbelief.supervisor.config import SupervisorConfig
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.view import RoleView
from tests.distbelief.supervisor.test_supervisor import Desk, ended, introduced, letters, sent


ROSTER: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("shard-0b", "shard"),
    ("replica-0", "replica"),
)
COPIES = ("shard-0", "shard-0b")
ALL = [name for name, _ in ROSTER]


def promoted(actions: Sequence[Action]) -> list[tuple[str, int, str]]:
    """Return receiver, term and backup of each `Promote`."""
    return [(who, lead.term, lead.backup) for who, lead in letters(actions, Promote)]


def rows(desk: Desk) -> dict[str, RoleView]:
    return {role.name: role for role in desk.supervisor.view(desk.now).roles}


def beat(desk: Desk, *names: str, **counters: float) -> list[Action]:
    actions: list[Action] = []
    for name in names:
        actions += desk.beat(name, "serving", **counters)
    return actions


def counts(desk: Desk) -> tuple[int, int]:
    """Return how many pushes are applied, and how many lost."""
    view = desk.supervisor.view(desk.now)
    assert view.pushes_lost is not None
    return view.pushes_applied, view.pushes_lost


def live(desk: Desk, seconds: float, *names: str) -> list[Action]:
    """Let time pass while these say that they live."""
    return desk.pass_time(seconds, beats=names)


@pytest.fixture
def desk() -> Desk:
    stop = StopRules(StopTable(epochs=1000), n_train=100)
    return Desk(SupervisorConfig(roster=ROSTER, stop=stop))


@pytest.fixture
def in_sync(desk: Desk) -> Desk:
    """A shard whose primary is shard-0 and whose backup shard-0b is in sync."""
    desk.join()
    beat(desk, "shard-0", term=2.0, clock=100.0, pushes_applied=100.0)
    desk.hear("shard-0b", BackupInSync(term=2))
    desk.progress()
    return desk


def test_the_first_copy_to_join_is_primary_and_the_other_its_backup(desk: Desk) -> None:
    assert promoted(desk.join("shard-0b")) == [("shard-0b", 1, "")]
    assert promoted(desk.join("shard-0")) == [("shard-0b", 2, "shard-0")]
    states = {name: row.state for name, row in rows(desk).items()}
    assert states["shard-0b"] == "primary"
    assert states["shard-0"] == "syncing"
    desk.hear("shard-0", BackupInSync(term=2))
    assert rows(desk)["shard-0"].state == "backup"


def test_clients_wait_for_one_copy_of_each_shard(desk: Desk) -> None:
    assert sent(desk.join("replica-0"), Peers) == []
    assert "replica-0" in sent(desk.join("shard-0b"), Peers)


def test_copies_of_one_shard_are_introduced_to_each_other(desk: Desk) -> None:
    newest = introduced(desk.join())
    assert newest["shard-0"] == {"shard-0b", "replica-0"}
    assert newest["shard-0b"] == {"shard-0", "replica-0"}
    assert newest["replica-0"] == {"shard-0", "shard-0b"}


def test_a_promote_is_repeated_until_it_has_arrived(desk: Desk) -> None:
    desk.join()
    assert promoted(beat(desk, "shard-0", term=1.0)) == [("shard-0", 2, "shard-0b")]
    assert promoted(beat(desk, "shard-0", term=2.0)) == []


def test_when_a_primary_dies_its_backup_takes_over_and_nothing_is_lost(in_sync: Desk) -> None:
    actions = in_sync.die("shard-0")
    assert promoted(actions) == [("shard-0b", 3, "")]
    assert Launch(name=Address("shard-0"), incarnation=2) in actions
    assert in_sync.told[1:] == [
        (
            "shard 0 was ended by signal SIGKILL: shard 0b takes over, nothing "
            "acknowledged is lost; restarting shard 0"
        )
    ]
    assert rows(in_sync)["shard-0b"].state == "primary"
    assert promoted(in_sync.join("shard-0")) == [("shard-0b", 4, "shard-0")]


def test_a_silent_primary_is_killed_and_replaced_within_a_second(in_sync: Desk) -> None:
    beat(in_sync, *COPIES, whole=2.0, term=2.0)
    assert promoted(live(in_sync, 0.75, "shard-0b", "replica-0")) == []
    actions = live(in_sync, 0.5, "shard-0b", "replica-0")
    assert promoted(actions)[0] == ("shard-0b", 3, "")
    assert Terminate(name=Address("shard-0")) in actions
    assert "shard 0b takes over" in in_sync.told[-1]
    assert in_sync.told[-1].startswith("shard 0 silent for 1.")


def test_a_silent_backup_is_left_its_time(in_sync: Desk) -> None:
    beat(in_sync, *COPIES, term=2.0)
    actions = live(in_sync, 2.0, "shard-0", "replica-0")
    assert ended(actions) == []


def test_of_two_silent_copies_the_primary_is_given_twice_as_long(in_sync: Desk) -> None:
    """Each was said to go on for the other, and both were put down at once."""
    beat(in_sync, *COPIES, term=2.0, whole=2.0, clock=100.0)
    actions = live(in_sync, 19.5, "replica-0")
    assert ended(actions) == ["shard-0b"]
    assert in_sync.told[1:] == [
        "shard 0 silent for 3.2 s; counts as dead after 20 s",
        "shard 0b silent for 3.2 s; counts as dead after 10 s",
        ("shard 0b silent for 10.2 s: restarting it; shard 0, which is in sync, is silent"),
    ]
    actions = live(in_sync, 1.0, "replica-0")
    assert ended(actions) == ["shard-0"]
    assert in_sync.told[-1] == (
        "shard 0 silent for 20.2 s: restarting it from its initial values; about 100 "
        "acknowledged pushes will be lost"
    )


def test_a_primary_that_comes_back_in_that_time_has_lost_nothing(in_sync: Desk) -> None:
    beat(in_sync, *COPIES, term=2.0, whole=2.0, clock=100.0)
    live(in_sync, 16.0, "replica-0")
    beat(in_sync, "shard-0", clock=100.0, pushes_applied=100.0, term=2.0)
    assert promoted(in_sync.join("shard-0b")) == [("shard-0", 4, "shard-0b")]
    assert rows(in_sync)["shard-0"].restarts == 0
    assert counts(in_sync) == (100, 0)


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
        lost = PeerLost(peer=Address(name), incarnation=1, reason="was killed")
        in_sync.handle(lost)
    in_sync.now += 0.1
    for name in COPIES:
        in_sync.handle(TimerFired(name=f"supervisor:lost:{name}"))
    assert in_sync.told[1:] == [
        "shard 0 was killed: restarting it; shard 0b is dead too",
        (
            "shard 0b was killed: restarting it from its initial values; about 100 "
            "acknowledged pushes will be lost"
        ),
    ]


def test_a_primary_whose_backup_is_not_in_sync_comes_back_from_its_checkpoint(desk: Desk) -> None:
    desk.join()
    beat(desk, "shard-0", term=2.0, clock=50.0)
    actions = desk.die("shard-0")
    assert promoted(actions) == []
    assert desk.told == [
        (
            "shard 0 was ended by signal SIGKILL: restarting it from its initial "
            "values; about 50 acknowledged pushes will be lost"
        )
    ]
    assert promoted(live(desk, 1.0, "shard-0b", "replica-0")) == []
    assert promoted(desk.join("shard-0"))[0][0] == "shard-0"


def test_a_backup_that_dies_leaves_its_primary_alone_and_comes_back(in_sync: Desk) -> None:
    actions = in_sync.die("shard-0b")
    assert promoted(actions) == [("shard-0", 3, "")]
    assert in_sync.told[1:] == [
        (
            "shard 0b was ended by signal SIGKILL: shard 0 goes on alone, nothing "
            "acknowledged is lost; restarting shard 0b"
        )
    ]
    assert promoted(in_sync.join("shard-0b")) == [("shard-0", 4, "shard-0b")]


def test_a_primary_that_gets_no_answer_is_released_and_paired_again_later(in_sync: Desk) -> None:
    assert promoted(in_sync.hear("shard-0", BackupUnresponsive(term=2))) == [("shard-0", 3, "")]
    beat(in_sync, "shard-0", term=3.0)
    in_sync.now += 0.5
    assert promoted(beat(in_sync, "shard-0b")) == []
    in_sync.now += 1.0
    beat(in_sync, "shard-0", term=3.0)
    again = beat(in_sync, "shard-0b") + live(in_sync, 0.5, *ALL)
    assert ("shard-0", 4, "shard-0b") in promoted(again)
    assert any("shard 0b does not answer shard 0" in text for text in in_sync.told)


def test_checkpoints_are_asked_of_the_primary_and_survive_its_loss(in_sync: Desk) -> None:
    beat(in_sync, *COPIES, term=2.0, whole=2.0)
    actions = live(in_sync, 30.25, *ALL)
    assert set(sent(actions, SaveCheckpoint)) == {"shard-0"}
    beat(in_sync, *COPIES, term=2.0, whole=2.0)
    actions = in_sync.die("shard-0")
    assert sent(actions, SaveCheckpoint) == ["shard-0b"]
    in_sync.hear("shard-0b", CheckpointSaved(label="00001", clock=100))
    assert sent(live(in_sync, 5.0, "shard-0b", "replica-0"), SaveCheckpoint) == []


def test_a_demoted_primaries_checkpoint_is_asked_of_its_successor(in_sync: Desk) -> None:
    beat(in_sync, *COPIES, term=2.0, whole=2.0)
    assert sent(live(in_sync, 30.25, *ALL), SaveCheckpoint) == ["shard-0"]
    actions = live(in_sync, 1.5, "shard-0b", "replica-0")
    assert sent(actions, SaveCheckpoint) == ["shard-0b"]


def test_a_fault_that_no_restart_fixes_leaves_a_primary_to_save(in_sync: Desk) -> None:
    actions = in_sync.hear("shard-0", Failed(error="bad numbers", culprit_is_job=True))
    assert promoted(actions) == [("shard-0b", 3, "")]
    actions = in_sync.hear("replica-0", Finished(counters={}))
    assert sent(actions, SaveCheckpoint) == ["shard-0b"]


def test_what_two_copies_apply_is_counted_once(in_sync: Desk) -> None:
    beat(in_sync, "shard-0b", clock=90.0, pushes_applied=90.0, whole=2.0)
    beat(in_sync, "shard-0", clock=120.0, pushes_applied=120.0, term=2.0)
    assert in_sync.supervisor.view(in_sync.now).pushes_applied == 120
    in_sync.die("shard-0")
    beat(in_sync, "shard-0b", clock=118.0, pushes_applied=118.0, term=3.0)
    assert in_sync.supervisor.view(in_sync.now).pushes_applied == 120
    beat(in_sync, "shard-0b", clock=130.0, pushes_applied=130.0, term=3.0)
    assert in_sync.supervisor.view(in_sync.now).pushes_applied == 130


def test_what_a_shard_had_and_has_no_more_is_lost_and_not_applied(desk: Desk) -> None:
    """Pushes applied and then lost were counted as applied ever after."""
    desk.join()
    beat(desk, "shard-0", clock=100.0, pushes_applied=100.0, term=2.0)
    desk.die("shard-0")
    desk.join("shard-0")
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


def test_a_promote_names_the_incarnation_of_its_receiver(in_sync: Desk) -> None:
    """A message to a dead incarnation may reach the next one."""
    in_sync.die("shard-0")
    actions = in_sync.join("shard-0")
    ((_, lead),) = letters(actions, Promote)
    assert (lead.backup, lead.backup_incarnation) == ("shard-0", 2)
    assert lead.receiver_incarnation == 1


def test_copies_count_their_incarnations_together(in_sync: Desk) -> None:
    """A restored checkpoint is of an earlier incarnation, whichever copy took it."""
    in_sync.die("shard-0")
    in_sync.join("shard-0")
    in_sync.hear("shard-0", BackupInSync(term=4))
    actions = in_sync.die("shard-0b")
    assert Launch(name=Address("shard-0b"), incarnation=3) in actions


def test_a_copy_left_out_does_not_end_the_job(in_sync: Desk) -> None:
    for _ in range(6):
        in_sync.die("shard-0b", "ended with status 1")
        in_sync.join("shard-0b")
    assert rows(in_sync)["shard-0b"].state == "lost, left out"
    assert in_sync.supervisor.view(in_sync.now).phase == "training"
    for _ in range(6):
        in_sync.die("shard-0", "ended with status 1")
        in_sync.join("shard-0")
    assert in_sync.supervisor.error is not None
    assert "shard 0 cannot be kept alive after 5 restarts" in in_sync.supervisor.error


def test_a_part_of_a_copy_is_given_up_when_its_primary_is_left_out(desk: Desk) -> None:
    desk.join()
    desk.progress()
    for _ in range(5):
        desk.die("shard-0", "ended with status 1")
        desk.join("shard-0")
    actions = desk.die("shard-0", "ended with status 1")
    assert Launch(name=Address("shard-0b"), incarnation=7) in actions
    assert promoted(desk.join("shard-0b"))[0][0] == "shard-0b"
    assert desk.supervisor.view(desk.now).phase == "training"


def test_a_backup_that_ends_first_does_not_hold_up_its_primary(in_sync: Desk) -> None:
    in_sync.progress("replica-0", 10_000)
    actions = in_sync.hear("replica-0", Finished(counters={}))
    assert sent(actions, SaveCheckpoint) == ["shard-0"]
    actions = in_sync.hear("shard-0", CheckpointSaved(label="00001", clock=1))
    assert set(sent(actions, Stop)) == {"shard-0", "shard-0b"}
    actions = in_sync.hear("shard-0b", Finished(counters={}))
    assert promoted(actions) == [("shard-0", 3, "")]
    in_sync.hear("shard-0", Finished(counters={}))
    assert in_sync.supervisor.view(in_sync.now).phase == "done"
