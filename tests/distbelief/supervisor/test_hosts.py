"""Where roles run, and which hosts are faster for a job."""

import pytest
from hypothesis import given, strategies as st

from distbelief.protocol.role import Address
from distbelief.supervisor.hosts import Host, HostTable, StepTime
from tests.distbelief.simulation.forecast.jobs import small
from tests.distbelief.supervisor.hosts import offer_of


FAST, SLOW = 80e9, 20e9  # FLOP/s
GIGABIT, TENTH = 1.25e8, 1.25e7  # bytes/s


def table(here: int, *slots: int, grades: tuple[int | None, ...] = ()) -> HostTable:
    """Return the supervisor's host with so many slots, and hosts "a", "b", ... with these."""
    hosts = HostTable(slots_here=here)
    for index, (letter, n) in enumerate(zip("abcd", slots, strict=False)):
        host = Host.of(Address(letter), offer_of(letter), 0.0)
        host.ready, host.slots = True, n
        host.grade = grades[index] if grades else None
        hosts.joined[host.name] = host
    return hosts


def find(hosts: HostTable, *names: str, must: bool = False) -> list[str] | None:
    found = hosts.find([Address(name) for name in names], must=must)
    return None if found is None else [host.name for host in found]


def put(hosts: HostTable, name: str, at: str) -> None:
    host = hosts.here if at == "here" else hosts.joined[Address(at)]
    hosts.put(Address(name), 1, host, slots=1)


def filled(hosts: HostTable, n: int) -> list[list[str] | None]:
    found = []
    for k in range(n):
        rooms = find(hosts, f"replica-{k}")
        found.append(rooms)
        if rooms is not None:
            put(hosts, f"replica-{k}", rooms[0])
    return found


def test_the_emptiest_room_comes_first_and_one_that_is_full_never() -> None:
    hosts = table(1, 2)
    assert filled(hosts, 4) == [["a"], ["here"], ["a"], None]
    assert find(hosts, "replica-3", must=True) == ["a"]  # 3 of 2, not 2 of 1


def test_faster_rooms_are_filled_first_and_unknown_ones_count_as_fast() -> None:
    hosts = table(1, 3, 2, grades=(-10, -14))
    assert filled(hosts, 7) == [["b"], ["here"], ["b"], ["a"], ["a"], ["a"], None]


def test_hosts_of_one_replica_stay_together_where_they_can() -> None:
    hosts = table(1, 2, 3)
    assert find(hosts, "x.0", "x.1", "x.2") == ["b", "b", "b"]
    assert find(hosts, "x.0", "x.1", "x.2", "x.3") == ["b", "b", "b", "a"]
    assert find(table(0, 1, 3, grades=(-14, -10)), "x.0", "x.1") == ["b", "b"]  # though slower
    assert find(hosts, *"1234567") is None
    assert find(hosts, *"1234567", must=True) == ["b", "b", "b", "a", "a", "here", "b"]


def test_a_role_that_goes_back_to_its_host_looks_at_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each placement ranked all hosts: 2.2 times the time at 250 of them."""
    hosts = table(0, 2, 2)
    put(hosts, "x", "b")
    hosts.leave(Address("x"))
    monkeypatch.delattr(HostTable, "usable")
    with hosts.placing():
        assert find(hosts, "x") == ["b"]
    assert [host.name for host in hosts.changed] == ["b"]
    assert hosts.refusal is None


def test_a_restarted_role_goes_back_to_its_host_as_long_as_that_takes_roles() -> None:
    hosts = table(4, 2)
    put(hosts, "r", "a")
    host = hosts.leave(Address("r"))
    assert host is not None
    assert find(hosts, "r") == ["a"]
    host.is_silent = True
    assert find(hosts, "r") == ["here"]
    host.is_silent, host.ready = False, False
    assert find(hosts, "r") == ["here"]


@given(
    here=st.integers(0, 4),
    slots=st.lists(st.integers(0, 5), max_size=4),
    grades=st.lists(st.none() | st.integers(-3, 0), min_size=4, max_size=4),
    groups=st.lists(st.integers(1, 4), max_size=8),
)
def test_roles_that_are_placed_together_get_the_hosts_that_they_get_one_by_one(
    here: int, slots: list[int], grades: list[int | None], groups: list[int]
) -> None:
    one_by_one, together = (table(here, *slots, grades=tuple(grades)) for _ in range(2))
    with together.placing():
        for k, n in enumerate(groups):
            members = [f"replica-{k}.{m}" for m in range(n)]
            found = find(one_by_one, *members)
            assert find(together, *members) == found
            for name, room in zip(members, found or [], strict=False):
                put(one_by_one, name, room)
                put(together, name, room)


@given(
    here=st.integers(0, 4),
    slots=st.lists(st.integers(0, 5), max_size=4),
    groups=st.lists(st.integers(1, 4), max_size=8),
)
def test_no_room_takes_more_than_its_slots(here: int, slots: list[int], groups: list[int]) -> None:
    hosts = table(here, *slots)
    free = here + sum(slots)
    for k, n in enumerate(groups):
        members = [f"replica-{k}.{m}" for m in range(n)]
        found = find(hosts, *members)
        assert (found is None) == (n > free)
        for name, room in zip(members, found or [], strict=False):
            put(hosts, name, room)
        free -= n if found else 0
    for host in (hosts.here, *hosts.joined.values()):
        assert len(host.roles) == host.used <= host.slots


def test_a_large_batch_goes_by_the_processor_and_a_small_one_by_the_link() -> None:
    for batch, is_processor in ((4096, True), (16, False)):
        step = StepTime(operations=6.0 * batch, n_bytes=8.0)
        quick = step.grade(flops=FAST, bandwidth=TENTH)
        near = step.grade(flops=SLOW, bandwidth=GIGABIT)
        assert quick is not None
        assert near is not None
        assert (quick < near) == is_processor


def test_fewer_exchanges_weigh_less() -> None:
    each = StepTime.of(small())
    rare = StepTime.of(small("algorithm.exchange.every=4", "algorithm.local_learning_rate=0.1"))
    assert each.n_bytes == 8.0
    assert rare == StepTime(operations=each.operations, n_bytes=2.0)


def test_hosts_that_hardly_differ_are_alike_and_unmeasured_ones_have_no_grade() -> None:
    step = StepTime(operations=6.0 * 256, n_bytes=8.0)
    assert len({step.grade(flops=FAST * f, bandwidth=GIGABIT) for f in (0.99, 1.0, 1.01)}) == 1
    assert step.grade(flops=0.0, bandwidth=GIGABIT) is None
    no_link = StepTime(operations=6.0 * 256)
    assert step.grade(flops=FAST, bandwidth=0.0) == no_link.grade(flops=FAST, bandwidth=GIGABIT)


@given(flops=st.floats(0.0, 1e18), bandwidth=st.floats(0.0, 1e18))
def test_any_reported_speed_gives_a_grade(flops: float, bandwidth: float) -> None:
    """5e-324 operations a second took infinitely long, and the supervisor down."""
    grade = StepTime(operations=6.0, n_bytes=8.0).grade(flops=flops, bandwidth=bandwidth)
    assert (grade is None) == (flops == 0.0)
