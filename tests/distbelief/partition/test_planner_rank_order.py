"""Machines behind slow links come last."""

import dataclasses

import msgspec

from distbelief.partition.planner import machine_orders, plan
from distbelief.program.cluster import Cluster, uniform
from tests.distbelief.partition.plans import MACHINE, SLOW, equal, fully_connected
from tests.distbelief.partition.requests import make_request


GRAPH = fully_connected(400, 600, 600, 600, 100)


def far_away(n: int, *, machine: int, rate: float) -> Cluster:
    """Equal machines, one of which has slow links to all others."""
    ends = [sorted((machine, other)) for other in range(n) if other != machine]
    links = {f"{low}-{high}": rate for low, high in ends}
    return msgspec.structs.replace(equal(n), links=links)


def test_equal_machines_have_one_order() -> None:
    assert machine_orders(equal(4)) == [(0, 1, 2, 3)]
    assert machine_orders(equal(1)) == [(0,)]


def test_a_machine_behind_slow_links_comes_last() -> None:
    assert machine_orders(far_away(4, machine=1, rate=1e6)) == [(0, 1, 2, 3), (0, 2, 3, 1)]


def test_a_machine_with_a_slow_network_is_last() -> None:
    slow = msgspec.structs.replace(MACHINE, bandwidth=1e6)
    cluster = Cluster(name="tests", machines=(slow, MACHINE, MACHINE))
    assert machine_orders(cluster) == [(0, 1, 2), (1, 2, 0)]


def test_the_slower_end_of_a_slow_link_is_last() -> None:
    machines = (MACHINE, MACHINE, SLOW, SLOW, SLOW)
    cluster = Cluster(name="tests", machines=machines, links={"0-3": 1e5})
    assert machine_orders(cluster)[1][-1] == 3


def test_a_rack_stays_together() -> None:
    links = {f"{low}-{high}": 1e6 for low in (0, 2, 4) for high in (1, 3, 5)}
    links = {"-".join(sorted(ends.split("-"))): rate for ends, rate in links.items()}
    cluster = msgspec.structs.replace(equal(6), links=links)
    assert machine_orders(cluster)[1][:3] in {(0, 2, 4), (1, 3, 5)}


def test_one_slow_link_does_not_stop_the_others() -> None:
    # Once only the first k machines were tried, and machine 1 is among them.
    asked = make_request(GRAPH, far_away(4, machine=1, rate=1e6), batch=256)
    asked = dataclasses.replace(asked, search=False)
    done = plan(asked, [4])[0]
    assert done.used == (0, 2, 3)
    three = plan(make_request(GRAPH, uniform("tests", MACHINE, 3), batch=256), [3])[0]
    assert done.speed_up > 0.95 * three.speed_up > 1.5
