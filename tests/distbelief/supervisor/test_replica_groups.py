"""Replicas that are formed by the hosts that have joined: which hosts, and how many ranks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings, strategies as st

from distbelief.plans.step_cost import PlanCost
from distbelief.protocol.role import Address
from distbelief.supervisor.hosts import ClusterConfig, Host
from distbelief.supervisor.role_placement import replica_groups
from tests.distbelief.supervisor.hosts import Town, config_of, offer_of
from tests.distbelief.supervisor.test_scheduler import roster


GB = 1 << 30
# A net of 8 GB: three ranks take 0.4 of the seconds that one takes, and 3 GB each.
COSTS = {
    1: PlanCost(memory_bytes=8 * GB, seconds=1.0, flops=1e9),
    2: PlanCost(memory_bytes=5 * GB, seconds=0.6, flops=1e9),
    3: PlanCost(memory_bytes=3 * GB, seconds=0.4, flops=1e9),
}
CONFIG = replace(config_of(slots_here=0), costs=COSTS, forms=True)


def a_host(name: str, memory: int, flops: float = 1e9, domain: str = "", slots: int = 1) -> Host:
    offer = offer_of(name, memory_bytes=memory * GB, flops=flops, domain=domain)
    host = Host.of(Address(name), offer, 0.0)
    host.ready, host.slots = True, slots
    return host


def names(groups: Sequence[Sequence[Host]]) -> list[str]:
    return ["".join(host.name for host in group) for group in groups]


def test_a_large_host_holds_a_whole_replica_and_small_ones_share_one() -> None:
    hosts = [a_host("a", 3), a_host("b", 3), a_host("c", 3), a_host("d", 8)]
    assert names(replica_groups(hosts, 2, CONFIG)) == ["d", "abc"]
    # More replicas than there are hosts for wait.
    assert names(replica_groups(hosts, 5, CONFIG)) == ["d", "abc"]
    assert names(replica_groups(hosts[1:], 2, CONFIG)) == ["dbc"]  # faster than d alone
    assert names(replica_groups(hosts[2:], 2, CONFIG)) == ["d"]


def test_idle_hosts_make_replicas_faster_and_few_replicas_are_no_aim() -> None:
    hosts = [a_host(name, 8) for name in "abcd"]
    assert names(replica_groups(hosts, 4, CONFIG)) == ["a", "b", "c", "d"]
    assert sorted(map(len, replica_groups(hosts, 2, CONFIG))) == [1, 3]
    assert names(replica_groups(hosts, 1, CONFIG)) == ["abc"]


def test_nobody_waits_for_a_slow_host_that_is_not_needed() -> None:
    hosts = [a_host("a", 8, 1e8), a_host("b", 8), a_host("c", 8)]
    assert names(replica_groups(hosts, 1, CONFIG)) == ["bc"]  # not all three
    assert names(replica_groups(hosts, 3, CONFIG)) == ["b", "c", "a"]


def test_a_group_is_of_one_domain_where_it_costs_little() -> None:
    pairs = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"), ("e", "x"), ("f", "y")]
    hosts = [a_host(name, 3, 1e9 * (1 + 0.01 * k), rack) for k, (name, rack) in enumerate(pairs)]
    found = replica_groups(hosts, 2, CONFIG)
    assert sorted(map(sorted, names(found))) == [["a", "c", "e"], ["b", "d", "f"]]
    # Across domains rather than not at all.
    assert len(replica_groups([*hosts[:2], hosts[2]], 1, CONFIG)) == 1


@st.composite
def host_sets(draw: st.DrawFn) -> list[Host]:
    n = draw(st.integers(0, 7))
    return [
        a_host(
            f"h{index}",
            draw(st.integers(1, 10)),
            draw(st.sampled_from([0.0, 2e8, 1e9, 1.1e9])),
            draw(st.sampled_from(["", "x", "y"])),
            slots=draw(st.sampled_from([0, 1, 4])),
        )
        for index in range(n)
    ]


def most_groups(sizes: tuple[int, ...]) -> int:
    """Return how many replicas hosts of so much memory can hold, by trying all groups."""
    if not sizes:
        return 0
    found = [most_groups(sizes[1:])]  # without the first host
    for n, cost in COSTS.items():
        for others in combinations(range(1, len(sizes)), n - 1):
            if min(sizes[k] for k in (0, *others)) * GB >= cost.memory_bytes:
                rest = [size for k, size in enumerate(sizes) if k and k not in others]
                found.append(1 + most_groups(tuple(rest)))
    return max(found)


@given(host_sets(), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_no_host_is_in_two_groups_or_lacks_memory_whatever_the_order(
    hosts: list[Host], n_max: int, data: st.DataObject
) -> None:
    groups = replica_groups(hosts, n_max, CONFIG)
    used = [host for group in groups for host in group]
    assert len(used) == len(set(used))
    assert len(groups) <= n_max
    for group in groups:
        assert all(host.slots for host in group)
        needed = COSTS[len(group)].memory_bytes
        assert min(host.offer.memory_bytes for host in group) >= needed
    shuffled = data.draw(st.permutations(hosts))
    assert names(replica_groups(shuffled, n_max, CONFIG)) == names(groups)
    sizes = [host.offer.memory_bytes // GB for host in hosts if host.slots]
    assert len(groups) == min(n_max, most_groups(tuple(sizes)))


# ------------------------------------------------------------------- of a supervisor


def town(n_replicas: int, config: ClusterConfig = CONFIG, *hosts: tuple[str, int]) -> Town:
    made = Town(roster(n_replicas, 3), replace(config, n_hosts=len(hosts)))
    for name, memory in hosts:
        made.come(name, memory_bytes=memory * GB)
    return made


FOUR = (("a", 3), ("b", 8), ("c", 3), ("d", 3))


def test_a_job_forms_its_replicas_once_its_hosts_are_there() -> None:
    made = town(2, CONFIG, *FOUR)
    assert made.runs() == {
        "here": ["evaluator", "shard-0"],
        "host-a": ["replica-1.0"],
        "host-b": ["replica-0.0"],
        "host-c": ["replica-1.1"],
        "host-d": ["replica-1.2"],
    }
    assert "replica 0 is formed of b (host-b)" in made.said
    assert "replica 1 is formed of a (host-a), c (host-c), d (host-d)" in made.said
    ranks = {m.name: m.ranks for m in made.supervisor.members}
    assert (ranks[Address("replica-0.0")], ranks[Address("replica-1.1")]) == (1, 3)
    shown = {role.name: role.at for role in made.supervisor.view(made.now).roles}
    assert (shown["replica-0.0"], shown["replica-1.2"]) == ("b", "d")


def test_a_rank_whose_host_is_lost_waits_for_one_that_holds_it_and_no_other_rank_ends() -> None:
    made = town(2, CONFIG, *FOUR)
    before = made.runs()
    made.kill(made.machines[Address("host-c")])
    made.pass_time(15.0)
    assert made.runs() == {name: roles for name, roles in before.items() if name != "host-c"}
    made.come("e", memory_bytes=2 * GB)
    assert made.runs()["host-e"] == []
    made.come("f", memory_bytes=3 * GB)
    assert made.runs()["host-f"] == ["replica-1.1"]
    restarts = {r.name: r.restarts for r in made.supervisor.members if r.restarts}
    assert list(restarts) == ["replica-1.1"]


def test_the_supervisors_own_host_is_one_of_them() -> None:
    config = replace(CONFIG, slots_here=4, memory_here=8 * GB)
    made = town(2, config, *FOUR[2:], FOUR[0])
    assert made.runs()["here"] == ["evaluator", "replica-0.0", "shard-0"]


def test_a_replica_without_hosts_waits_for_as_many_small_ones() -> None:
    made = town(2, CONFIG, ("b", 8))
    assert "replica 1 waits for 3 hosts" in made.said
    for name in "xyz":
        made.come(name, memory_bytes=3 * GB)
    assert [made.runs()[f"host-{name}"] for name in "xyz"] == [
        ["replica-1.0"],
        ["replica-1.1"],
        ["replica-1.2"],
    ]


def test_a_run_that_goes_on_keeps_its_ranks() -> None:
    config = replace(CONFIG, forms=False, n_hosts=4)
    made = Town([*roster(0), ("replica-0.0", "replica"), *roster(2, 3)[4:7]], config)
    for name, memory in FOUR:
        made.come(name, memory_bytes=memory * GB)
    assert made.runs()["host-b"] == ["replica-0.0"]
    assert [made.runs()[f"host-{name}"] for name in "acd"] == [
        ["replica-1.0"],
        ["replica-1.1"],
        ["replica-1.2"],
    ]
