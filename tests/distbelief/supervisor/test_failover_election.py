"""Who leads: decisions against the story of a shard's two copies."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, strategies as st

from distbelief.protocol import Promote
from distbelief.protocol.role import Action, Address, Send, Terminate
from distbelief.supervisor.failover import REST_SECONDS, PrimaryElection


A, B = Address("shard-0"), Address("shard-0b")


def promotes(actions: Sequence[Action]) -> list[tuple[str, Promote]]:
    sends = [action for action in actions if isinstance(action, Send)]
    return [(s.receiver, s.message) for s in sends if isinstance(s.message, Promote)]


def promoted(actions: Sequence[Action]) -> list[tuple[str, int, str]]:
    return [(receiver, p.term, p.backup) for receiver, p in promotes(actions)]


def incarnations(actions: Sequence[Action]) -> list[tuple[int, int]]:
    return [(p.receiver_incarnation, p.backup_incarnation) for _, p in promotes(actions)]


def paired(*, in_sync: bool = False) -> PrimaryElection:
    election = PrimaryElection((A, B), first=1)
    election.joined(A, 1, 0.0)
    election.joined(B, 1, 0.0)
    if in_sync:
        election.heard(B, {"in_sync": 2}, 0.2)
    return election


Story = list[tuple[Callable[[PrimaryElection], list[Action]], list[tuple[str, int, str]]]]

# Each begins with A as the primary and B as its backup, which is in sync, in term 2.
STORIES: dict[str, Story] = {
    "a backup that does not answer is dropped for a while": [
        (lambda e: e.backup_unresponsive(A, 1, 0.3), [(A, 2, B)]),  # of an earlier term
        (lambda e: e.backup_unresponsive(A, 2, 5.0), [(A, 3, "")]),
        (lambda e: e.backup_unresponsive(A, 2, 5.1), [(A, 3, "")]),
        (lambda e: e.heard(B, {}, 5.0 + 0.9 * REST_SECONDS), []),
        (lambda e: e.heard(B, {}, 5.0 + REST_SECONDS), [(A, 4, B)]),
    ],
    "a mute backup is not taken back before it is heard": [
        (lambda e: e.backup_unresponsive(A, 2, 0.3), [(A, 3, "")]),
        *((lambda e, t=t: e.heard(A, {"term": 3.0}, 0.1 * t), []) for t in range(2, 30)),
        (lambda e: e.tick(2.9), []),
        (lambda e: e.heard(B, {}, 3.0), [(A, 4, B)]),
    ],
    "an incarnation is over when the next one joins": [
        (lambda e: e.joined(A, 2, 0.3), [(B, 4, A)])
    ],
    "a suspended supervisor demotes nobody": [
        (lambda e: e.tick(0.2), []),
        (lambda e: e.tick(5.0), []),
        (lambda e: e.heard(A, {"term": 2.0}, 5.1), []),
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_decisions(story: Story) -> None:
    election = paired(in_sync=True)
    for step, expected in story:
        assert promoted(step(election)) == expected


def test_a_backup_that_is_not_in_sync_does_not_take_over() -> None:
    election = paired()
    election.heard(B, {"in_sync": 1}, 0.2)  # of an earlier term
    election.heard(A, {"in_sync": 2}, 0.2)  # not the backup
    assert promoted(election.lost(A)) == []
    assert election.primary is None
    assert promoted(election.joined(A, 2, 1.0)) == [(A, 3, "")]
    assert promoted(election.heard(B, {}, 1.1)) == [(A, 4, B)]


def test_a_silent_primary_is_demoted_if_its_backup_answers_and_is_in_sync() -> None:
    election = paired()
    for tenth in range(1, 8):  # in sync may come by heartbeat
        assert election.heard(B, {"in_sync": 2.0}, 0.1 * tenth) == []
        assert election.tick(0.1 * tenth) == []
    election.heard(B, {"in_sync": 2.0}, 1.0)
    actions = election.tick(1.0)
    assert promoted(actions) == [(B, 3, "")]
    assert Terminate(name=A) in actions
    # It may wake up before it is killed; it does not count until it joins.
    assert election.heard(A, {"term": 2.0}, 1.1) == []
    assert election.backup_unresponsive(A, 2, 1.1) == []
    assert election.lost(A) == []
    assert promoted(election.joined(A, 2, 1.5)) == [(B, 4, A)]


def test_a_silent_primary_stays_if_no_backup_could_take_over() -> None:
    election = paired()
    for tenth in range(1, 30):
        election.heard(B, {}, 0.1 * tenth)  # not in sync
        assert election.tick(0.1 * tenth) == []
    both_silent = paired(in_sync=True)
    both_silent.heard(A, {"term": 2.0}, 0.2)
    for tenth in range(1, 30):
        assert both_silent.tick(0.1 * tenth) == []
    assert election.primary == A


def test_each_promote_names_its_incarnations() -> None:
    """A late one was obeyed by the next incarnation of its receiver (seed 7237)."""
    election = PrimaryElection((A, B), first=7)
    first = election.joined(A, 3, 0.0)
    assert (promoted(first), incarnations(first)) == ([(A, 7, "")], [(3, 0)])
    assert incarnations(election.joined(B, 1, 0.0)) == [(3, 1)]
    assert incarnations(election.heard(A, {"term": 1.0}, 0.1)) == [(3, 1)]
    assert incarnations(election.joined(B, 2, 0.2)) == [(3, 2)]
    election.lost(A)
    assert incarnations(election.joined(A, 4, 0.4)) == [(4, 0)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "lose", "in_sync", "alone"]), st.sampled_from([A, B])),
        max_size=40,
    )
)
def test_terms_rise_and_only_present_copies_have_a_part(story: list[tuple[str, Address]]) -> None:
    election, present, terms = PrimaryElection((A, B), first=1), set[Address](), [0]
    for step, (what, copy) in enumerate(story):
        now = 0.7 * step
        match what:
            case "join" if copy not in present:
                present.add(copy)
                actions = election.joined(copy, 1, now)
            case "lose":
                present.discard(copy)
                actions = election.lost(copy)
            case "in_sync":
                actions = election.heard(copy, {"in_sync": election.term}, now)
            case _:
                actions = election.backup_unresponsive(copy, election.term, now)
        for receiver, term, backup in promoted(actions):
            assert term >= terms[-1]  # the latest is repeated
            assert receiver in present
            assert backup in {"", *present} - {receiver}
            terms.append(term)
        assert election.primary is None or election.primary in present
        assert election.backup is None or election.backup in present - {election.primary}
        assert not election.in_sync or election.backup is not None
