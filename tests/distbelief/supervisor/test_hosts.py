"""Where roles run, and which hosts are faster for a job."""

from hypothesis import given, strategies as st

from distbelief.roles.role import Address
from distbelief.supervisor.hosts import ClusterConfig, Host, HostTable
from tests.distbelief.supervisor.hosts import offer_of


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


def grade_of(flops: float, *, device: str = "cpu") -> int | None:
    config = ClusterConfig(run="", job_spec=b"", slots_here=0, device=device)
    return config.grade_of(offer_of("a", flops=flops))


def test_hosts_that_hardly_differ_are_alike_and_unmeasured_ones_have_no_grade() -> None:
    assert len({grade_of(70e9 * factor) for factor in (0.99, 1.0, 1.01)}) == 1
    fast, slow = grade_of(80e9), grade_of(20e9)
    assert fast is not None
    assert slow is not None
    assert fast < slow
    assert grade_of(0.0) is None
    assert grade_of(80e9, device="cuda") is None  # only CPU cores are measured


@given(flops=st.floats(0.0, 1e18))
def test_any_reported_speed_gives_a_grade(flops: float) -> None:
    """5e-324 operations a second took infinitely long, and the supervisor down."""
    assert (grade_of(flops) is None) == (flops < 1.0)
