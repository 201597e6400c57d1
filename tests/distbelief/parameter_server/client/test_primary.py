"""Which copy leads: numbers order leaders, incarnations the lives of each copy."""

from distbelief.parameter_server.client.link import PrimaryTracker
from distbelief.roles.role import Address


FIRST, SECOND = Address("shard-0"), Address("shard-0b")


def ranking() -> PrimaryTracker:
    return PrimaryTracker((FIRST, SECOND))


def test_before_anybody_leads_the_first_copy_stands_for_the_shard() -> None:
    new = ranking()
    assert (new.leader, new.number, new.others) == (FIRST, 0, (SECOND,))
    assert PrimaryTracker((FIRST,)).others == ()


def test_a_higher_number_replaces_a_lower_one_and_never_the_reverse() -> None:
    known = ranking()
    assert [known.rise(number) for number in (3, 3, 2, 5, 4)] == [
        True, False, False, True, False,
    ]  # fmt: skip
    assert known.number == 5


def test_a_later_life_of_the_leader_ends_its_lead_and_one_of_the_other_does_not() -> None:
    known = ranking()
    assert not known.meet(FIRST, 4)  # the first that is heard of it
    assert not known.meet(SECOND, 1)
    assert not known.meet(SECOND, 2)
    assert not known.meet(FIRST, 4)
    assert known.meet(FIRST, 6)
    assert known.is_over(FIRST, 5)
    assert not known.is_over(FIRST, 6)
    assert not known.is_over(SECOND, 2)  # lives of one copy say nothing of the other
    assert not known.meet(FIRST, 5)
    assert known.is_over(FIRST, 5)
