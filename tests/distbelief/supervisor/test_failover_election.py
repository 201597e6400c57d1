"""Who leads: decisions against the story of a shard's two copies."""

import pytest
from hypothesis import given, strategies as st

from distbelief.protocol import Promote
from distbelief.roles.role import Address
from distbelief.supervisor.failover import REST_SECONDS, Decision, PrimaryElection


A, B = Address("shard-0"), Address("shard-0b")


def told(decision: Decision) -> list[tuple[str, int, str]]:
    """Return receiver, number and second of each Lead."""
    found: list[tuple[str, int, str]] = []
    for send in decision.sends:
        assert isinstance(send.message, Promote)
        found.append((send.receiver, send.message.pairing, send.message.second))
    return found


def lives(decision: Decision) -> list[tuple[int, int]]:
    """Return the life of receiver and second of each Lead."""
    return [
        (send.message.receiver_incarnation, send.message.second_incarnation)
        for send in decision.sends
        if isinstance(send.message, Promote)
    ]


def paired() -> PrimaryElection:
    pairing = PrimaryElection((A, B), first=1)
    pairing.joined(A, 1, 0.0)
    pairing.joined(B, 1, 0.0)
    return pairing


def test_who_joins_first_leads_and_the_other_one_is_its_second() -> None:
    pairing = PrimaryElection((A, B), first=7)
    assert told(pairing.joined(B, 1, 0.0)) == [(B, 7, "")]
    assert told(pairing.joined(A, 1, 0.1)) == [(B, 8, A)]
    assert (pairing.leader, pairing.second, pairing.is_whole) == (B, A, False)


def test_a_whole_second_takes_over_and_the_old_leader_comes_back_as_its_second() -> None:
    pairing = paired()
    pairing.whole(B, 2, 0.2)
    assert told(pairing.lost(A, 0.5)) == [(B, 3, "")]
    assert told(pairing.joined(A, 2, 1.0)) == [(B, 4, A)]
    assert not pairing.is_whole


def test_a_second_that_is_not_whole_does_not_take_over() -> None:
    pairing = paired()
    pairing.whole(B, 1, 0.2)  # of an earlier pairing
    pairing.whole(A, 2, 0.2)  # not the second
    assert told(pairing.lost(A, 0.5)) == []
    assert pairing.leader is None
    assert told(pairing.joined(A, 2, 1.0)) == [(A, 3, "")]
    assert told(pairing.heard(B, {}, 1.1)) == [(A, 4, B)]


def test_without_its_second_a_leader_goes_on_alone_until_there_is_one_again() -> None:
    pairing = paired()
    pairing.whole(B, 2, 0.2)
    assert told(pairing.lost(B, 0.5)) == [(A, 3, "")]
    assert told(pairing.joined(B, 2, 1.0)) == [(A, 4, B)]


def test_a_second_that_does_not_answer_is_let_go_for_a_while() -> None:
    pairing = paired()
    assert told(pairing.alone(A, 1, 0.3)) == [(A, 2, B)]  # of an earlier pairing
    assert told(pairing.alone(A, 2, 5.0)) == [(A, 3, "")]
    assert told(pairing.alone(A, 2, 5.1)) == [(A, 3, "")]
    assert told(pairing.heard(B, {}, 5.0 + 0.9 * REST_SECONDS)) == []
    assert told(pairing.heard(B, {}, 5.0 + REST_SECONDS)) == [(A, 4, B)]


def test_a_lead_that_was_lost_is_repeated_and_wholeness_is_heard_twice() -> None:
    pairing = paired()
    assert told(pairing.heard(A, {"pairing": 1.0}, 0.5)) == [(A, 2, B)]
    assert told(pairing.heard(A, {"pairing": 2.0}, 0.6)) == []
    assert told(pairing.heard(B, {"pairing": 2.0, "whole": 2.0}, 0.7)) == []
    assert pairing.is_whole


def test_a_silent_leader_is_deposed_if_its_second_talks_and_is_whole() -> None:
    pairing = paired()
    for tenth in range(1, 8):
        assert pairing.heard(B, {"whole": 2.0}, 0.1 * tenth) == Decision()
        assert pairing.tick(0.1 * tenth) == Decision()
    pairing.heard(B, {"whole": 2.0}, 1.0)
    decision = pairing.tick(1.0)
    assert told(decision) == [(B, 3, "")]
    assert decision.deposed == A
    # It may come to its senses before it is ended: it is not there until it joins.
    assert pairing.heard(A, {"pairing": 2.0}, 1.1) == Decision()
    assert pairing.alone(A, 2, 1.1) == Decision()
    assert pairing.lost(A, 1.2) == Decision()
    assert told(pairing.joined(A, 2, 1.5)) == [(B, 4, A)]


def test_a_silent_leader_stays_if_nobody_could_take_its_place() -> None:
    pairing = paired()
    for tenth in range(1, 30):
        pairing.heard(B, {}, 0.1 * tenth)  # not whole
        assert pairing.tick(0.1 * tenth) == Decision()
    assert pairing.silent(A, 3.0) == Decision()
    pairing.whole(B, 2, 3.0)
    assert pairing.silent(B, 3.0) == Decision()
    assert pairing.silent(A, 9.0) == Decision()  # nor does its second talk
    assert pairing.leader == A


def test_a_supervisor_that_did_not_listen_deposes_nobody() -> None:
    pairing = paired()
    pairing.whole(B, 2, 0.1)
    pairing.tick(0.1)
    assert pairing.tick(5.0) == Decision()
    assert pairing.leader == A


def test_a_second_that_is_mute_is_not_taken_back_before_it_talks() -> None:
    pairing = paired()
    pairing.alone(A, 2, 0.1)
    for tenth in range(2, 30):
        pairing.heard(A, {"pairing": 3.0}, 0.1 * tenth)
        assert pairing.tick(0.1 * tenth) == Decision()
    assert told(pairing.heard(B, {}, 3.0)) == [(A, 4, B)]


def test_a_life_that_nobody_saw_end_is_over_when_the_next_one_joins() -> None:
    pairing = paired()
    pairing.whole(B, 2, 0.1)
    assert told(pairing.joined(A, 2, 0.2)) == [(B, 4, A)]


def test_each_lead_names_the_lives_that_it_is_about() -> None:
    """A late one was obeyed by the next life of its receiver (seed 7237)."""
    pairing = PrimaryElection((A, B), first=1)
    assert lives(pairing.joined(A, 3, 0.0)) == [(3, 0)]
    assert lives(pairing.joined(B, 1, 0.0)) == [(3, 1)]
    assert lives(pairing.heard(A, {"pairing": 1.0}, 0.1)) == [(3, 1)]
    assert lives(pairing.joined(B, 2, 0.2)) == [(3, 2)]
    pairing.lost(A, 0.3)
    assert lives(pairing.joined(A, 4, 0.4)) == [(4, 0)]


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="both copies are called 'shard-0'"):
        PrimaryElection((A, A), first=1)
    with pytest.raises(ValueError, match="first is 0"):
        PrimaryElection((A, B), first=0)
    with pytest.raises(ValueError, match=r"takeover_seconds is 0\.0"):
        PrimaryElection((A, B), first=1, takeover_seconds=0.0)
    with pytest.raises(ValueError, match="'shard-1' is no copy of this shard"):
        paired().lost(Address("shard-1"), 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "lose", "whole", "alone"]), st.sampled_from([A, B])),
        max_size=40,
    )
)
def test_numbers_rise_and_only_a_present_copy_leads_or_follows(
    story: list[tuple[str, Address]],
) -> None:
    pairing, present, numbers = PrimaryElection((A, B), first=1), set[Address](), [0]
    for step, (what, copy) in enumerate(story):
        now = 0.7 * step
        match what:
            case "join" if copy not in present:
                present.add(copy)
                decision = pairing.joined(copy, 1, now)
            case "lose":
                present.discard(copy)
                decision = pairing.lost(copy, now)
            case "whole":
                decision = pairing.whole(copy, pairing.number, now)
            case _:
                decision = pairing.alone(copy, pairing.number, now)
        for receiver, number, second in told(decision):
            assert number >= numbers[-1]  # the latest is repeated
            assert receiver in present
            assert second in {"", *present} - {receiver}
            numbers.append(number)
        assert pairing.leader is None or pairing.leader in present
        assert pairing.second is None or pairing.second in present - {pairing.leader}
        assert not pairing.is_whole or pairing.second is not None
