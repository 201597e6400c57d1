"""Where roles run."""

from hypothesis import given, strategies as st

from distbelief.cluster.host_table import HERE, SlotTable
from distbelief.roles.role import Address


A, B = Address("host-a"), Address("host-b")


def names(*texts: str) -> list[Address]:
    return [Address(text) for text in texts]


def test_the_emptiest_room_comes_first_and_one_that_is_full_never() -> None:
    places = SlotTable(slots_here=1)
    places.open(A, slots=2)
    found = []
    for k in range(4):
        rooms = places.find(names(f"replica-{k}"))
        found.append(rooms)
        if rooms is not None:
            places.put(Address(f"replica-{k}"), rooms[0], slots=1)
    assert found == [[A], [HERE], [A], None]
    assert places.find(names("replica-3"), must=True) == [A]  # 3 of 2, not 2 of 1


def test_faster_rooms_are_filled_first_and_unknown_ones_count_as_fast() -> None:
    places = SlotTable(slots_here=1)
    places.open(A, slots=3, grade=-10)
    places.open(B, slots=2, grade=-14)
    found = []
    for k in range(6):
        rooms = places.find(names(f"replica-{k}")) or [HERE]
        found.append(rooms[0])
        places.put(Address(f"replica-{k}"), rooms[0], slots=1)
    assert found == [B, HERE, B, A, A, A]


def test_hosts_of_one_replica_stay_together_where_they_can() -> None:
    places = SlotTable(slots_here=1)
    places.open(A, slots=2)
    places.open(B, slots=3)
    assert places.find(names("x.0", "x.1", "x.2")) == [B, B, B]
    assert places.find(names("x.0", "x.1", "x.2", "x.3")) == [B, B, B, A]
    assert places.find(names(*"1234567")) is None
    assert places.find(names(*"1234567"), must=True) == [B, B, B, A, A, HERE, B]


def test_a_restarted_role_goes_back_to_its_host() -> None:
    places = SlotTable(slots_here=4)
    places.open(A, slots=2)
    places.put(Address("r"), A, slots=1)
    places.leave(Address("r"))
    assert places.find(names("r")) == [A]
    places.shut(A)
    assert places.find(names("r")) == [HERE]
    places.shut(A, is_open=True)
    places.remove(A)
    assert places.find(names("r")) == [HERE]


def test_what_ran_on_a_host_that_is_gone_is_nowhere() -> None:
    places = SlotTable(slots_here=0)
    places.open(A, slots=1)
    places.put(Address("r"), A, slots=1)
    assert places.roles_at(A) == ["r"]
    places.remove(A)
    assert places.at(Address("r")) is None
    assert places.find(names("r"), must=True) is None  # there is no slot at all
    places.leave(Address("r"))


@given(
    here=st.integers(0, 4),
    slots=st.lists(st.integers(0, 5), max_size=4),
    groups=st.lists(st.integers(1, 4), max_size=8),
)
def test_no_room_takes_more_than_it_has_slots(
    here: int, slots: list[int], groups: list[int]
) -> None:
    places = SlotTable(slots_here=here)
    rooms = {HERE: here}
    for k, n in enumerate(slots):
        rooms[Address(f"host-{k}")] = n
        places.open(Address(f"host-{k}"), slots=n)
    free = sum(rooms.values())
    for k, n in enumerate(groups):
        members = names(*(f"replica-{k}.{m}" for m in range(n)))
        found = places.find(members)
        assert (found is None) == (n > free)
        for name, room in zip(members, found or [], strict=False):
            places.put(name, room, slots=1)
        free -= n if found else 0
    assert all(len(places.roles_at(room)) <= n for room, n in rooms.items())
