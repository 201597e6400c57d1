import os
import subprocess

import pytest

from experiments.benchmarks.network import hosts
from experiments.benchmarks.network.hosts import HERE


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def namespaces() -> list[str]:
    return [line for line in told("ip", "netns", "list").splitlines() if f"-{os.getpid()}-" in line]


def test_here_is_no_namespace_and_only_root_may_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [host.prefix for host in HERE] == [[], []]
    assert {host.interface for host in HERE} == {"lo"}
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert hosts.obstacle() == "only root may make network namespaces"


@pytest.mark.root
def test_hosts_reach_each_other_by_their_link_and_are_gone_afterwards() -> None:
    obstacle = hosts.obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with hosts.switched(2, bits_per_second=1e8) as lan:
        one, other = lan.hosts
        assert one.name in "".join(namespaces())
        route = told(*one.prefix, "ip", "route", "get", other.address)
        assert f"dev {one.interface}" in route
        bucket = told("tc", "-n", other.name, "qdisc", "show", "dev", other.interface)
        assert "tbf" in bucket
        assert "rate 100Mbit" in bucket
    assert not namespaces()
    with pytest.raises(OSError, match="tbf"), hosts.switched(2, bits_per_second=0.0):
        pass
    assert not namespaces()
