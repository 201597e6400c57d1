"""Members of a ring: a generation for each list of replicas."""

from collections.abc import Sequence

from distbelief.protocol import Heartbeat
from distbelief.protocol.ring import RingMembers
from distbelief.protocol.role import Action
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.ring_generations import GENERATION
from tests.distbelief.supervisor.test_supervisor import Desk, a_job, letters


NAMES = ["replica-0", "replica-1", "replica-2"]
ROSTER: list[tuple[str, Kind]] = [("shard-0", "shard"), *((name, "replica") for name in NAMES)]


def ring() -> Desk:
    desk = a_job(ROSTER, in_ring=True)
    desk.join("shard-0", *NAMES[:2])
    return desk


def lists_in(actions: Sequence[Action]) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Return receiver, generation, and members with their incarnations of each message."""
    return [
        (receiver, message.generation, [(one.name, one.incarnation) for one in message.members])
        for receiver, message in letters(actions, RingMembers)
    ]


def passed(desk: Desk, generation: int = 0) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Let half a second pass, in which all replicas say which generation they know."""
    for name in NAMES:
        desk.hear(name, Heartbeat(state="busy", counters={GENERATION: float(generation)}))
    return lists_in(desk.pass_time(0.25))


ALL = [(name, 1) for name in NAMES]


def test_the_first_generation_waits_for_every_replica() -> None:
    desk = ring()
    assert lists_in(desk.pass_time(3.0, beats=["shard-0", *NAMES[:2]])) == []
    desk.join(NAMES[2])
    assert passed(desk) == [(name, 1, ALL) for name in NAMES]


def test_a_list_is_told_until_it_is_known_and_then_no_more() -> None:
    desk = ring()
    desk.join(NAMES[2])
    assert passed(desk) == passed(desk) != []
    assert passed(desk, generation=1) == []


def test_hv3_a_death_ends_the_generation_and_a_restart_begins_another() -> None:
    desk = ring()
    desk.join(NAMES[2])
    passed(desk)
    passed(desk, generation=1)
    desk.die(NAMES[1])
    left = [ALL[0], ALL[2]]
    assert lists_in(desk.pass_time(0.25)) == [(NAMES[0], 2, left), (NAMES[2], 2, left)]
    desk.join(NAMES[1])
    again = [ALL[0], (NAMES[1], 2), ALL[2]]
    assert passed(desk, generation=2)[0] == (NAMES[0], 3, again)


def test_one_that_has_ended_stays_on_the_list_unless_another_dies() -> None:
    desk = ring()
    desk.join(NAMES[2])
    passed(desk)
    passed(desk, generation=1)
    desk.finish(NAMES[0])
    assert lists_in(desk.pass_time(0.5)) == []
    desk.die(NAMES[1])
    assert lists_in(desk.pass_time(0.25)) == [(NAMES[2], 2, [ALL[2]])]


def test_generations_rise_beyond_what_members_know_of_another_supervisor() -> None:
    desk = ring()
    desk.join(NAMES[2])
    assert {generation for _, generation, _ in passed(desk, generation=7)} == {8}
