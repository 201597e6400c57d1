"""Roles on the machines of a cluster file, and the outages of the machines."""

import math
from collections.abc import Mapping
from itertools import count, takewhile

import msgspec
import pytest

from distbelief.graph.graph import GraphError
from distbelief.plans.cluster import Cluster, Lost, Machine, Outages, OutageTrace, Switch
from distbelief.plans.cluster_file import load_cluster, names
from distbelief.protocol.role import Address, Launch, PeerLost, Started, TimerFired
from distbelief.simulation.cluster_options import options_for, outages, several
from distbelief.simulation.faults import Outage
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.network import Ports
from tests.distbelief.simulation.toys import STEADY, A, B, Scripted, cluster_of, on_start


S0, R0, R1 = Address("shard-0"), Address("replica-0"), Address("replica-1")
MACHINE = Machine(
    flops=8e9, cores=4, memory_rate=1e9, message_rate=4e9, memory=2**30, bandwidth=1e6
)


def cluster(n: int = 6, **more: object) -> Cluster:
    made = Cluster(name="lab", machines=(MACHINE,) * n)
    return msgspec.structs.replace(made, **more)


def test_roles_of_one_machine_share_cores_memory_and_card() -> None:
    options = options_for(cluster(latency=1e-3), {S0: 0, R0: 0, R1: 1}, threads=2)
    machine = options.machines[R0]
    assert machine.host == options.machines[S0].host == "machine-0"
    assert machine.flops_per_second == 4e9
    assert machine.threads == 2
    assert machine.handling_bytes_per_second == 1e9
    assert options.processors["machine-0"].cores == 4
    assert options.fabric is not None
    assert set(options.fabric.cards) == {"machine-0", "machine-1"}
    assert options.fabric.latency_seconds == 1e-3


def test_threads_may_differ_by_role_and_are_no_more_than_cores() -> None:
    options = options_for(cluster(), {S0: 0, R0: 1}, threads={R0: 99})
    assert options.machines[S0].flops_per_second == 2e9
    assert options.machines[R0].flops_per_second == 8e9


def test_a_role_on_several_machines_has_all_their_cores_and_cards() -> None:
    machine = several(MACHINE, 3)
    assert machine.memory == 3 * MACHINE.memory
    assert machine.overhead == MACHINE.overhead
    lab = msgspec.structs.replace(cluster(), machines=(MACHINE, machine))
    options = options_for(lab, {S0: 0, R0: 1}, threads={R0: machine.cores})
    assert options.machines[R0].flops_per_second == 24e9
    assert options.machines[R0].threads == 12
    assert options.machines[R0].handling_bytes_per_second == 1e9
    assert options.fabric is not None
    assert options.fabric.cards["machine-1"].bytes_per_second == 3e6


def test_switches_and_links_lie_between_hosts() -> None:
    switches = (Switch(first=0, last=3, bandwidth=5e6), Switch(first=0, last=1, bandwidth=2e6))
    lab = cluster(switches=switches, links={"0-2": 1e5, "4-5": 1.0})
    fabric = options_for(lab, {S0: 0, R0: 1, R1: 2}).fabric
    assert fabric is not None
    inner, outer = fabric.uplinks
    assert inner.hosts == {"machine-0", "machine-1"}
    assert outer.hosts == {"machine-0", "machine-1", "machine-2"}
    assert fabric.links == {("machine-0", "machine-2"): 1e5, ("machine-2", "machine-0"): 1e5}


def test_a_cluster_that_cannot_hold_the_job_says_which_machine_and_why() -> None:
    with pytest.raises(GraphError, match=r"machine-0 of cluster 'lab' cannot hold shar"):
        options_for(cluster(), {S0: 0, R0: 0}, memory={S0: 2**29, R0: 2**29 + 1})
    with pytest.raises(GraphError, match=r"replica-0 is put on machine 6 .* has 6"):
        options_for(cluster(), {R0: 6})
    with pytest.raises(GraphError, match=r"replica-0 is put on machine -1 "):
        options_for(cluster(), {R0: -1})


@pytest.mark.parametrize("name", names())
def test_every_cluster_that_comes_along_can_be_simulated(name: str) -> None:
    found = load_cluster(name)
    options = options_for(found, {S0: 0, R0: len(found) - 1})
    assert isinstance(options, ClusterOptions)
    assert found.machines[0].cores > 1
    drawn(found, {S0: 0}, until=1.0)


# ------------------------------------------------------------------------- outages


def drawn(
    lab: Cluster, placement: Mapping[Address, int], *, until: float, seed: int = 1
) -> list[Outage]:
    found = outages(lab, placement, seed=seed)
    return list(takewhile(lambda outage: outage.at < until, found))


def test_outages_are_drawn_by_seed_and_only_for_machines_in_use() -> None:
    lab = cluster(failures=Outages(mean_time=100.0, away=5.0))
    placement = {S0: 0, R0: 1, R1: 2}
    found = drawn(lab, placement, until=10_000.0)
    assert found == drawn(lab, placement, until=10_000.0)
    assert found != drawn(lab, placement, until=10_000.0, seed=2)
    assert {fault.roles for fault in found} == {(S0,), (R0,), (R1,)}
    assert [fault.at for fault in found] == sorted(fault.at for fault in found)
    assert len(found) == pytest.approx(300, rel=0.2)  # three machines, 100 each


def test_machines_of_a_group_go_together() -> None:
    lab = cluster(preemptions=Outages(mean_time=100.0, away=5.0, group=4))
    found = drawn(lab, {S0: 0, R0: 3, R1: 4}, until=1000.0)
    times = {name: [fault.at for fault in found if name in fault.roles] for name in (S0, R0, R1)}
    assert times[S0] == times[R0] != times[R1]


def test_spot_machines_are_taken_back_and_the_others_stay() -> None:
    spot = msgspec.structs.replace(MACHINE, preemptions=Outages(mean_time=100.0, away=5.0))
    lab = cluster(machines=(MACHINE, spot, spot, MACHINE))
    found = drawn(lab, {S0: 0, R0: 1, R1: 2}, until=10_000.0)
    assert {fault.roles for fault in found} == {(R0,), (R1,)}
    assert len(found) == pytest.approx(200, rel=0.25)


def test_no_group_of_spot_machines_spans_two_regions() -> None:
    """With equal preemptions, the last machine of one region went with the first of the next."""
    spot = msgspec.structs.replace(MACHINE, preemptions=Outages(mean_time=9.0, away=1.0, group=2))
    eu, us = (msgspec.structs.replace(spot, region=region) for region in ("eu", "us"))
    found = drawn(cluster(machines=(eu, us, us)), {S0: 0, R0: 1, R1: 2}, until=1000.0)
    times = {name: [fault.at for fault in found if name in fault.roles] for name in (S0, R0, R1)}
    assert times[S0] != times[R0] == times[R1]


def test_machines_join_and_leave() -> None:
    comes = msgspec.structs.replace(MACHINE, join=10.0, leave=50.0)
    lab = cluster(machines=(MACHINE, comes), failures=Outages(mean_time=1.0, away=1.0))
    found = drawn(lab, {R0: 1}, until=1e9)
    assert found[0] == Outage(at=0.0, roles=(R0,), seconds=10.0)
    assert Outage(at=50.0, roles=(R0,), seconds=math.inf) in found
    assert max(fault.at for fault in found) == 50.0
    with pytest.raises(GraphError, match="join after 10 s and leave after 5 s"):
        msgspec.structs.replace(comes, leave=5.0).__post_init__()


def test_the_search_for_outages_ends_with_the_machines_in_use() -> None:
    """A machine that left had spares which stay: the outages of these were drawn for ever."""
    spot = msgspec.structs.replace(MACHINE, preemptions=Outages(mean_time=1.0, away=1.0, group=2))
    leaves = msgspec.structs.replace(spot, leave=5.0)
    lab = cluster(machines=(leaves, spot, MACHINE))
    *_, last = outages(lab, {R0: 0, R1: 2}, seed=0)
    assert last == Outage(at=5.0, roles=(R0,), seconds=math.inf)


def test_a_trace_is_followed() -> None:
    trace = OutageTrace(outages=(Lost(at=3.0, machine=1, away=2.0),), covers=10.0)
    assert list(outages(cluster(trace=trace), {R0: 1}, seed=0, restarts=True)) == [
        Outage(at=3.0, roles=(R0,), seconds=2.0, restarts=True)
    ]


def test_outages_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.simulation.cluster_options.N_OUTAGES_MAX", 100)
    lab = cluster(failures=Outages(mean_time=1e-9, away=1e-9))
    with pytest.raises(GraphError, match="more than 100 outages within"):
        drawn(lab, {R0: 1}, until=1000.0)


def test_faults_are_played_as_time_goes_by() -> None:
    """They may have no end: a job was run twice, first to know how long it takes."""
    roles = {A: Scripted()}
    simulation = cluster_of(roles, options=ClusterOptions(machine=STEADY))
    simulation.play(
        Outage(at=float(at), roles=(A,), seconds=1.0, restarts=True) for at in count(2, 10)
    )
    simulation.run(until=30.0)
    begins = [now for now, event in roles[A].seen if isinstance(event, Started)]
    assert begins == [0.0, 3.0, 13.0, 23.0]


def test_latencies_are_those_of_two_hosts_or_of_their_regions() -> None:
    eu, us = (msgspec.structs.replace(MACHINE, region=name, upload=2e5) for name in ("eu", "us"))
    lab = cluster(
        machines=(eu, eu, us, us, MACHINE),
        latency=1e-4,
        latencies={"eu-us": 0.04, "us-us": 0.002, "1-2": 0.5},
    )
    fabric = options_for(lab, {f"replica-{n}": n for n in range(5)}).fabric  # type: ignore[misc]
    assert fabric is not None

    def latency(a: int, b: int) -> float:
        found = fabric.latency(f"machine-{a}", f"machine-{b}")
        assert found == fabric.latency(f"machine-{b}", f"machine-{a}")
        return found

    assert [latency(0, 1), latency(0, 2), latency(2, 3)] == [1e-4, 0.04, 0.002]
    assert [latency(1, 2), latency(0, 4)] == [0.5, 1e-4]
    out, *_, into = Ports(fabric).between("machine-0", "machine-2")
    assert (out.bytes_per_second, into.bytes_per_second) == (2e5, 1e6)
    assert lab.rate(0, 2) == 2e5
    with pytest.raises(GraphError, match="plans know one latency"):
        lab.check_plannable()


def test_one_more_machine_is_like_its_own_and_leaves_links_where_they_were() -> None:
    """The copy had none of the slow links, and the outages of a trace hit other machines."""
    trace = OutageTrace(
        outages=tuple(Lost(at=1.0, machine=n, away=2.0) for n in (0, 1, 2)), covers=10.0
    )
    lab = cluster(
        trace=trace,
        links={"0-2": 1e5, "1-3": 2e5},
        latencies={"1-2": 0.5, "eu-us": 0.1},
        switches=(Switch(first=0, last=1, bandwidth=1.0), Switch(first=2, last=3, bandwidth=2.0)),
    ).with_copy(1)
    assert len(lab) == 7
    assert lab.links == {"0-3": 1e5, "1-4": 2e5, "2-4": 2e5}
    assert lab.latencies == {"1-3": 0.5, "2-3": 0.5, "eu-us": 0.1}
    assert lab.trace is not None
    assert [lost.machine for lost in lab.trace.outages] == [0, 1, 2, 3]
    assert [(one.first, one.last) for one in lab.switches] == [(0, 2), (3, 4)]


def test_a_machine_that_is_away_takes_its_roles_with_it() -> None:
    roles = {A: Scripted(), B: Scripted()}
    faults = (
        Outage(at=1.0, roles=(A, Address("nobody")), seconds=2.0, restarts=True),
        Outage(at=2.0, roles=(A,), seconds=5.0, restarts=True),
    )
    cluster_of(roles, options=ClusterOptions(machine=STEADY, faults=faults)).run()
    begins = [now for now, event in roles[A].seen if isinstance(event, Started)]
    assert begins == [0.0, 7.0]


def test_whoever_is_launched_waits_for_its_machine() -> None:
    def launcher(event: object, now: float) -> list[Launch]:
        first = isinstance(event, Started)
        if first or isinstance(event, PeerLost):
            return [Launch(name=B, incarnation=1 if first else 2)]
        del now
        return []

    roles = {A: Scripted(launcher), B: Scripted(on_start())}
    faults = (Outage(at=1.0, roles=(B,), seconds=9.0),)
    options = ClusterOptions(machine=STEADY, faults=faults, start=(A,))
    cluster_of(roles, options=options).run()
    begins = [now for now, event in roles[B].seen if isinstance(event, Started)]
    assert begins == [0.5, 10.0]
    assert not any(isinstance(event, TimerFired) for _, event in roles[A].seen)
