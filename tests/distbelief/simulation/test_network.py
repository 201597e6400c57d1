"""Faults of messages and links: lost, late, duplicated, cut off."""

import pytest

from distbelief.protocol.role import Action, Event, Seconds, Send, SetTimer, Started, TimerFired
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import CutOff, Delay, Drop, Duplicate, Fault
from distbelief.simulation.machines import ClusterOptions
from tests.distbelief.simulation.toys import STEADY, A, B, C, Scripted, cluster_of, push


def talk(event: Event, now: Seconds) -> list[Action]:
    """Send number n at second n - 1 to B and C, ten times."""
    if not isinstance(event, (Started, TimerFired)) or now > 9:
        return []
    n = int(now) + 1
    return [
        *(Send(receiver=peer, message=push(n)) for peer in (B, C)),
        SetTimer(name="next", at=now + 1),
    ]


def heard(*faults: Fault) -> tuple[SimulatedCluster, list[int], list[int]]:
    """Return what B and C hear of ten messages, sent one a second."""
    b, c = Scripted(), Scripted()
    options = ClusterOptions(introduce=True, machine=STEADY, faults=faults)
    cluster = cluster_of({A: Scripted(talk), B: b, C: c}, options=options)
    cluster.run()
    return cluster, b.sequences, c.sequences


ALL = list(range(1, 11))


def test_without_faults_everything_arrives_in_order() -> None:
    _, b, c = heard()
    assert b == c == ALL


def test_dropped_messages_are_lost_between_those_two_only() -> None:
    cluster, b, c = heard(Drop(probability=0.5, between=(A, B)))
    assert 0 < len(b) < 10
    assert b == sorted(b)
    assert c == ALL
    assert cluster.counts.lost == 10 - len(b)


def test_a_fault_ends_when_its_time_has_passed() -> None:
    _, b, c = heard(Drop(probability=1.0, at=2.5, seconds=3.0))
    assert b == c == [1, 2, 3, 7, 8, 9, 10]


def test_duplicates_arrive_after_the_first_perhaps_much_later() -> None:
    _, b, _ = heard(Duplicate(probability=1.0, seconds_max=3.0))
    assert sorted(b) == sorted(ALL * 2)
    assert b != sorted(b)
    firsts = list(dict.fromkeys(b))
    assert firsts == ALL


def test_a_delayed_message_holds_up_those_behind_it() -> None:
    _, b, _ = heard(Delay(probability=0.5, seconds_max=5.0))
    assert b == ALL


def test_a_delayed_message_is_overtaken_if_its_fault_says_so() -> None:
    _, b, _ = heard(Delay(probability=0.5, seconds_max=5.0, overtaken=True))
    assert sorted(b) == ALL
    assert b != ALL


def test_what_a_cut_link_holds_arrives_after_the_cut_in_order() -> None:
    cut = CutOff(at=1.5, a=B, b=A, seconds=3.0)
    cluster, b, c = heard(cut)
    assert b == c == ALL
    times = [now for now, _ in _times(cluster)]
    assert times.count(4.5) == 3


def _times(cluster: SimulatedCluster) -> list[tuple[Seconds, Event]]:
    role = cluster.role(B)
    assert isinstance(role, Scripted)
    return role.seen


def test_overlapping_cuts_keep_the_order() -> None:
    _, b, _ = heard(CutOff(at=1.5, a=A, b=B, seconds=3.0), CutOff(at=2.5, a=A, seconds=4.0))
    assert b == ALL


def test_a_cut_that_loses_loses() -> None:
    _, b, c = heard(CutOff(at=1.5, a=B, seconds=3.0, loses=True))
    assert b == [1, 2, 6, 7, 8, 9, 10]
    assert c == ALL


@pytest.mark.parametrize(("a", "lost"), [(A, 3), (B, 0)])
def test_a_one_way_cut_holds_only_what_its_first_end_sends(a: str, lost: int) -> None:
    first, second = (A, B) if a == A else (B, A)
    cut = CutOff(at=1.5, a=first, b=second, seconds=3.0, loses=True, one_way=True)
    _, b, _ = heard(cut)
    assert len(b) == 10 - lost


def test_a_fault_that_never_strikes_changes_no_other_chance() -> None:
    calm, never = heard()[0], heard(Drop(probability=0.0))[0]
    assert calm.trace.digest == never.trace.digest
