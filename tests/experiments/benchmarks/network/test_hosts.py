import os
import subprocess

import pytest

from experiments.benchmarks.network import hosts
from experiments.benchmarks.network.hosts import HERE


def namespaces() -> str:
    told = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    mine = [line for line in told.splitlines() if f"-{os.getpid()}-" in line]
    return "\n".join(mine)


def test_here_is_no_namespace() -> None:
    assert [host.prefix for host in HERE] == [[], []]
    assert {host.interface for host in HERE} == {"lo"}


@pytest.mark.root
def test_hosts_reach_each_other_by_their_link_and_are_gone_afterwards() -> None:
    obstacle = hosts.obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with hosts.linked(bits_per_second=1e8) as (one, other):
        assert one.name in namespaces()
        route = subprocess.run(
            [*one.prefix, "ip", "route", "get", other.address],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f"dev {one.interface}" in route
        bucket = subprocess.run(
            ["tc", "-n", other.name, "qdisc", "show", "dev", other.interface],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "tbf" in bucket
        assert "rate 100Mbit" in bucket
    assert not namespaces()


@pytest.mark.root
def test_a_link_that_cannot_be_made_is_told_and_leaves_nothing() -> None:
    if hosts.obstacle():
        pytest.skip("no namespaces here")
    with pytest.raises(OSError, match="tbf"), hosts.linked(bits_per_second=0.0):
        pass
    assert not namespaces()


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert hosts.obstacle() == "only root may make network namespaces"
