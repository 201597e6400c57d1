"""PrimaryTracker: terms order the primaries, incarnations order the processes of one copy."""

from distbelief.parameter_server.client.link import PrimaryTracker
from distbelief.roles.role import Address


PRIMARY, BACKUP = Address("shard-0"), Address("shard-0b")


def tracker() -> PrimaryTracker:
    return PrimaryTracker((PRIMARY, BACKUP))


def test_the_first_copy_is_the_primary_until_one_is_known() -> None:
    new = tracker()
    assert (new.primary, new.term, new.others) == (PRIMARY, 0, (BACKUP,))
    assert PrimaryTracker((PRIMARY,)).others == ()


def test_a_higher_term_replaces_a_lower_one_and_never_the_reverse() -> None:
    known = tracker()
    assert [known.note_term(term) for term in (3, 3, 2, 5, 4)] == [
        True, False, False, True, False,
    ]  # fmt: skip
    assert known.term == 5


def test_a_new_incarnation_of_the_primary_ends_its_term_and_one_of_the_backup_does_not() -> None:
    known = tracker()
    assert not known.note_incarnation(PRIMARY, 4)  # the first one known
    assert not known.note_incarnation(BACKUP, 1)
    assert not known.note_incarnation(BACKUP, 2)
    assert not known.note_incarnation(PRIMARY, 4)
    assert known.note_incarnation(PRIMARY, 6)
    assert known.is_stale(PRIMARY, 5)
    assert not known.is_stale(PRIMARY, 6)
    assert not known.is_stale(BACKUP, 2)  # incarnations of the copies are independent
    assert not known.note_incarnation(PRIMARY, 5)
    assert known.is_stale(PRIMARY, 5)
