import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distbelief.core.signals import EXIT_CODES
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


FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$NOTES"
"""
PROGRAM = """
import sys, time
from experiments.benchmarks.network.hosts import switched
with switched(2, bits_per_second=1e8):
    print("ready", flush=True)
    time.sleep(60)
"""


# A benchmark that a time limit ended left its namespaces behind, one switch for each try.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_hosts_are_gone_too_if_a_signal_ends_the_program(
    tmp_path: Path, number: signal.Signals
) -> None:
    for name in ("ip", "tc"):
        (tmp_path / name).write_text(FAKE)
        (tmp_path / name).chmod(0o755)
    notes = tmp_path / "notes"
    more = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(notes)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | more) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(30.0) == EXIT_CODES[number]
    lines = [line.split() for line in notes.read_text().splitlines()]
    made, gone = (
        sorted(line[-1] for line in lines if line[:3] == ["ip", "netns", verb])
        for verb in ("add", "del")
    )
    assert len(made) == 3
    assert made == gone
