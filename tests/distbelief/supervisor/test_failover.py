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
from distbelief.roles.role import Action, Address, Launch, PeerLost, Send, Terminate, TimerFired
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.state import SupervisorConfig
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.view import RoleView
from tests.distbelief.supervisor.test_supervisor import Desk, sent


ROSTER: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("shard-0b", "shard"),
    ("replica-0", "replica"),
)
COPIES = ("shard-0", "shard-0b")
ALL = [name for name, _ in ROSTER]


def leads(actions: Sequence[Action]) -> list[tuple[str, int, str]]:
    """Return whom it told to lead, under which number, and with which second."""
    return [
        (action.receiver, action.message.pairing, action.message.second)
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, Promote)
    ]


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
def whole(desk: Desk) -> Desk:
    """A shard that shard-0 leads, and of which shard-0b holds all."""
    desk.join()
    beat(desk, "shard-0", pairing=2.0, clock=100.0, pushes_applied=100.0)
    desk.hear("shard-0b", BackupInSync(pairing=2))
    desk.progress()
    return desk


def test_whoever_joins_first_leads_and_the_other_becomes_its_second(desk: Desk) -> None:
    assert leads(desk.join("shard-0b")) == [("shard-0b", 1, "")]
    assert leads(desk.join("shard-0")) == [("shard-0b", 2, "shard-0")]
    states = {name: row.state for name, row in rows(desk).items()}
    assert states["shard-0b"] == "primary"
    assert states["shard-0"] == "syncing"
    desk.hear("shard-0", BackupInSync(pairing=2))
    assert rows(desk)["shard-0"].state == "backup"


def test_clients_wait_for_one_copy_of_each_shard(desk: Desk) -> None:
    assert sent(desk.join("replica-0"), Peers) == []
    assert "replica-0" in sent(desk.join("shard-0b"), Peers)


def test_copies_of_one_shard_are_introduced_to_each_other(desk: Desk) -> None:
    actions = desk.join()
    newest = {
        str(action.receiver): {entry.name for entry in action.message.entries}
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, Peers)
    }
    assert newest["shard-0"] == {"shard-0b", "replica-0"}
    assert newest["shard-0b"] == {"shard-0", "replica-0"}
    assert newest["replica-0"] == {"shard-0", "shard-0b"}


def test_to_lead_is_said_again_until_it_has_come(desk: Desk) -> None:
    desk.join()
    assert leads(beat(desk, "shard-0", pairing=1.0)) == [("shard-0", 2, "shard-0b")]
    assert leads(beat(desk, "shard-0", pairing=2.0)) == []


def test_when_a_leader_dies_its_second_takes_over_and_nothing_is_lost(whole: Desk) -> None:
    actions = whole.die("shard-0")
    assert leads(actions) == [("shard-0b", 3, "")]
    assert Launch(name=Address("shard-0"), incarnation=2) in actions
    assert whole.told[1:] == [
        (
            "shard 0 was ended by signal SIGKILL: shard 0b takes over, nothing "
            "acknowledged is lost; restarting shard 0"
        )
    ]
    assert rows(whole)["shard-0b"].state == "primary"
    assert leads(whole.join("shard-0")) == [("shard-0b", 4, "shard-0")]


def test_a_silent_leader_is_ended_after_a_second_and_replaced(whole: Desk) -> None:
    beat(whole, *COPIES, whole=2.0, pairing=2.0)
    assert leads(live(whole, 0.75, "shard-0b", "replica-0")) == []
    actions = live(whole, 0.5, "shard-0b", "replica-0")
    assert leads(actions)[0] == ("shard-0b", 3, "")
    assert Terminate(name=Address("shard-0")) in actions
    assert "shard 0b takes over" in whole.told[-1]
    assert whole.told[-1].startswith("shard 0 silent for 1.")


def test_a_silent_second_is_left_its_time(whole: Desk) -> None:
    beat(whole, *COPIES, pairing=2.0)
    actions = live(whole, 2.0, "shard-0", "replica-0")
    assert not [action for action in actions if isinstance(action, Terminate)]


def test_of_two_silent_copies_the_one_that_leads_is_given_twice_as_long(whole: Desk) -> None:
    """Each was said to go on for the other, and both were put down at once."""
    beat(whole, *COPIES, pairing=2.0, whole=2.0, clock=100.0)
    actions = live(whole, 19.5, "replica-0")
    assert [a.name for a in actions if isinstance(a, Terminate)] == ["shard-0b"]
    assert whole.told[1:] == [
        (
            "shard 0 silent for 3.2 s: so is shard 0b; if neither comes back, in 17 s "
            "restarting it from its initial values; about 100 acknowledged pushes will "
            "be lost"
        ),
        ("shard 0b silent for 3.2 s: in 7 s restarting it; shard 0, which is in sync, is silent"),
        ("shard 0b silent for 10.2 s: restarting it; shard 0, which is in sync, is silent"),
    ]
    actions = live(whole, 1.0, "replica-0")
    assert [a.name for a in actions if isinstance(a, Terminate)] == ["shard-0"]
    assert whole.told[-1] == (
        "shard 0 silent for 20.2 s: restarting it from its initial values; about 100 "
        "acknowledged pushes will be lost"
    )


def test_a_leader_that_comes_back_in_that_time_has_lost_nothing(whole: Desk) -> None:
    beat(whole, *COPIES, pairing=2.0, whole=2.0, clock=100.0)
    live(whole, 16.0, "replica-0")
    beat(whole, "shard-0", clock=100.0, pushes_applied=100.0, pairing=2.0)
    assert leads(whole.join("shard-0b")) == [("shard-0", 4, "shard-0b")]
    assert rows(whole)["shard-0"].restarts == 0
    assert counts(whole) == (100, 0)


def test_nothing_is_promised_of_a_copy_that_is_silent_or_dead(whole: Desk) -> None:
    beat(whole, *COPIES, pairing=2.0, whole=2.0, clock=100.0)
    live(whole, 2.0, "replica-0")
    whole.die("shard-0")
    assert whole.told[-1] == (
        "shard 0 was ended by signal SIGKILL: restarting it; shard 0b, which is in sync, is silent"
    )


def test_two_copies_that_die_at_once_are_said_to_be_dead(whole: Desk) -> None:
    beat(whole, *COPIES, pairing=2.0, whole=2.0, clock=100.0)
    for name in COPIES:
        lost = PeerLost(peer=Address(name), incarnation=1, reason="was killed")
        whole.handle(lost)
    whole.now += 0.1
    for name in COPIES:
        whole.handle(TimerFired(name=f"supervisor:lost:{name}"))
    assert whole.told[1:] == [
        "shard 0 was killed: restarting it; shard 0b is dead too",
        (
            "shard 0b was killed: restarting it from its initial values; about 100 "
            "acknowledged pushes will be lost"
        ),
    ]


def test_a_leader_whose_second_is_not_whole_comes_back_from_its_snapshot(desk: Desk) -> None:
    desk.join()
    beat(desk, "shard-0", pairing=2.0, clock=50.0)
    actions = desk.die("shard-0")
    assert leads(actions) == []
    assert desk.told == [
        (
            "shard 0 was ended by signal SIGKILL: restarting it from its initial "
            "values; about 50 acknowledged pushes will be lost"
        )
    ]
    assert leads(live(desk, 1.0, "shard-0b", "replica-0")) == []
    assert leads(desk.join("shard-0"))[0][0] == "shard-0"


def test_a_second_that_dies_leaves_its_leader_alone_and_comes_back(whole: Desk) -> None:
    actions = whole.die("shard-0b")
    assert leads(actions) == [("shard-0", 3, "")]
    assert whole.told[1:] == [
        (
            "shard 0b was ended by signal SIGKILL: shard 0 goes on alone, nothing "
            "acknowledged is lost; restarting shard 0b"
        )
    ]
    assert leads(whole.join("shard-0b")) == [("shard-0", 4, "shard-0b")]


def test_a_leader_that_gets_no_answer_is_released_and_paired_again_later(whole: Desk) -> None:
    assert leads(whole.hear("shard-0", BackupUnresponsive(pairing=2))) == [("shard-0", 3, "")]
    beat(whole, "shard-0", pairing=3.0)
    whole.now += 0.5
    assert leads(beat(whole, "shard-0b")) == []
    whole.now += 1.0
    beat(whole, "shard-0", pairing=3.0)
    again = beat(whole, "shard-0b") + live(whole, 0.5, *ALL)
    assert ("shard-0", 4, "shard-0b") in leads(again)
    assert any("shard 0b does not answer shard 0" in text for text in whole.told)


def test_snapshots_are_asked_of_the_leader_and_survive_its_loss(whole: Desk) -> None:
    beat(whole, *COPIES, pairing=2.0, whole=2.0)
    actions = live(whole, 30.25, *ALL)
    assert set(sent(actions, SaveCheckpoint)) == {"shard-0"}
    beat(whole, *COPIES, pairing=2.0, whole=2.0)
    actions = whole.die("shard-0")
    assert sent(actions, SaveCheckpoint) == ["shard-0b"]
    whole.hear("shard-0b", CheckpointSaved(label="00001", clock=100))
    assert sent(live(whole, 5.0, "shard-0b", "replica-0"), SaveCheckpoint) == []


def test_a_deposed_leaders_snapshot_is_asked_of_its_successor(whole: Desk) -> None:
    beat(whole, *COPIES, pairing=2.0, whole=2.0)
    assert sent(live(whole, 30.25, *ALL), SaveCheckpoint) == ["shard-0"]
    actions = live(whole, 1.5, "shard-0b", "replica-0")
    assert sent(actions, SaveCheckpoint) == ["shard-0b"]


def test_a_fault_that_no_restart_mends_leaves_a_leader_to_save(whole: Desk) -> None:
    actions = whole.hear("shard-0", Failed(error="bad numbers", culprit_is_job=True))
    assert leads(actions) == [("shard-0b", 3, "")]
    actions = whole.hear("replica-0", Finished(counters={}))
    assert sent(actions, SaveCheckpoint) == ["shard-0b"]


def test_what_two_copies_apply_is_counted_once(whole: Desk) -> None:
    beat(whole, "shard-0b", clock=90.0, pushes_applied=90.0, whole=2.0)
    beat(whole, "shard-0", clock=120.0, pushes_applied=120.0, pairing=2.0)
    assert whole.supervisor.view(whole.now).pushes_applied == 120
    whole.die("shard-0")
    beat(whole, "shard-0b", clock=118.0, pushes_applied=118.0, pairing=3.0)
    assert whole.supervisor.view(whole.now).pushes_applied == 120
    beat(whole, "shard-0b", clock=130.0, pushes_applied=130.0, pairing=3.0)
    assert whole.supervisor.view(whole.now).pushes_applied == 130


def test_what_a_shard_had_and_has_no_more_is_lost_and_not_applied(desk: Desk) -> None:
    """Pushes applied and then lost were counted as applied ever after."""
    desk.join()
    beat(desk, "shard-0", clock=100.0, pushes_applied=100.0, pairing=2.0)
    desk.die("shard-0")
    desk.join("shard-0")
    desk.beat("shard-0", "starting", clock=0.0, pushes_applied=0.0, pairing=0.0)
    assert counts(desk) == (100, 0)  # what is restored it does not know yet
    beat(desk, "shard-0", clock=65.0, pushes_applied=5.0, pairing=4.0)
    assert counts(desk) == (65, 40)
    beat(desk, "shard-0", clock=130.0, pushes_applied=70.0, pairing=4.0)
    assert counts(desk) == (130, 40)


def test_a_second_that_takes_over_loses_nothing_until_it_dies_too(whole: Desk) -> None:
    whole.die("shard-0")
    beat(whole, "shard-0b", clock=99.0, pushes_applied=99.0, pairing=3.0)
    assert counts(whole) == (100, 0)  # what only its leader had was not acknowledged
    whole.die("shard-0b")
    whole.join(*COPIES)
    beat(whole, "shard-0", clock=0.0, pushes_applied=0.0, pairing=4.0)
    assert counts(whole) == (0, 100)


def test_who_is_to_lead_is_told_as_the_life_that_it_is(whole: Desk) -> None:
    """What was meant for a life that died may reach the next one."""
    whole.die("shard-0")
    actions = whole.join("shard-0")
    (lead,) = [
        action.message
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, Promote)
    ]
    assert (lead.second, lead.second_incarnation) == ("shard-0", 2)
    assert lead.receiver_incarnation == 1


def test_copies_count_their_lives_together(whole: Desk) -> None:
    """A snapshot that one restores is of an earlier life, whoever took it."""
    whole.die("shard-0")
    whole.join("shard-0")
    whole.hear("shard-0", BackupInSync(pairing=4))
    actions = whole.die("shard-0b")
    assert Launch(name=Address("shard-0b"), incarnation=3) in actions


def test_a_copy_left_out_does_not_end_the_job(whole: Desk) -> None:
    for _ in range(6):
        whole.die("shard-0b", "ended with status 1")
        whole.join("shard-0b")
    assert rows(whole)["shard-0b"].state == "lost, left out"
    assert whole.supervisor.view(whole.now).phase == "training"
    for _ in range(6):
        whole.die("shard-0", "ended with status 1")
        whole.join("shard-0")
    assert whole.supervisor.error is not None
    assert "shard 0 cannot be kept alive after 5 restarts" in whole.supervisor.error


def test_a_part_of_a_copy_is_given_up_when_its_leader_is_left_out(desk: Desk) -> None:
    desk.join()
    desk.progress()
    for _ in range(5):
        desk.die("shard-0", "ended with status 1")
        desk.join("shard-0")
    actions = desk.die("shard-0", "ended with status 1")
    assert Launch(name=Address("shard-0b"), incarnation=7) in actions
    assert leads(desk.join("shard-0b"))[0][0] == "shard-0b"
    assert desk.supervisor.view(desk.now).phase == "training"


def test_a_second_that_ends_first_does_not_hold_up_its_leader(whole: Desk) -> None:
    whole.progress("replica-0", 10_000)
    actions = whole.hear("replica-0", Finished(counters={}))
    assert sent(actions, SaveCheckpoint) == ["shard-0"]
    actions = whole.hear("shard-0", CheckpointSaved(label="00001", clock=1))
    assert set(sent(actions, Stop)) == {"shard-0", "shard-0b"}
    actions = whole.hear("shard-0b", Finished(counters={}))
    assert leads(actions) == [("shard-0", 3, "")]
    whole.hear("shard-0", Finished(counters={}))
    assert whole.supervisor.view(whole.now).phase == "done"
