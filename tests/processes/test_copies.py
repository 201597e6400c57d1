"""Shards in two copies, as real processes: a leader that is lost costs nothing."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import distbelief
from tests.processes.commands import SLOW, Command, poll, sets, train


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]


def copies(command: Command) -> dict[str, str]:
    """Return the names of the copies by what they do: {"primary": "shard-0", ...}."""
    rows = command.roles().items()
    return {str(row["state"]): name for name, row in rows if name.startswith("shard")}


def leader_of(command: Command) -> str:
    """Wait until the job trains on a shard of which both copies are whole."""
    poll(lambda: command.is_training() and {"primary", "backup"} <= {*copies(command)})
    return copies(command)["primary"]


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("blow", "shared_memory"),
    [
        (signal.SIGKILL, "true"),
        (signal.SIGSTOP, "true"),
        pytest.param(signal.SIGKILL, "false", marks=pytest.mark.soak),
    ],
)
def test_lost_leaders_cost_nothing(folder: Path, blow: signal.Signals, shared_memory: str) -> None:
    options = sets(
        "cluster.shard_copies=2", "cluster.shards=1", f"cluster.shared_memory={shared_memory}"
    )
    with train(folder, *SLOW, *options) as command:
        leader = leader_of(command)
        other = copies(command)["backup"]
        before = command.samples()
        command.kill(leader, blow)
        poll(lambda: copies(command).get("primary") == other, seconds=60.0)
        poll(lambda: command.samples() > before + 1000)
        poll(lambda: copies(command).get("backup") == leader)  # as soon as it is back
        command.interrupt()
    summary = command.summary()
    assert summary["pushes_lost"] == 0
    assert 1 <= summary["restarts"] <= 2, command.output  # on a slow machine, one more
    assert summary["shard_copies"] == 2
    label = other.replace("-", " ")
    assert f"{label} takes over, nothing acknowledged is lost" in command.output


@pytest.mark.soak
def test_a_loop_of_ones_own_goes_on_without_its_leader(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(7, 3)
    generator = torch.Generator().manual_seed(1)

    def take_steps(n_steps: int) -> None:
        for _ in range(n_steps):
            inputs = torch.randn(16, 7, generator=generator)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs[:, :3].sin()).backward()
            optimizer.step()

    def read(role: str) -> str:
        log = tmp_path / f"{role}.log"
        return log.read_text() if log.is_file() else ""

    def n_times_whole() -> int:
        return read("supervisor").count("is in sync: it holds every acknowledged push")

    with distbelief.ParameterServer(
        model.parameters(),
        rule=distbelief.SGD(learning_rate=0.1),
        shard_copies=2,
        directory=tmp_path,
    ) as server:
        optimizer = distbelief.DownpourSGD(model.parameters(), server=server.address)
        # Whoever leads at first: of these two kills one hits it.
        for n_kills, copy in enumerate(("shard-0", "shard-0b")):
            begun = time.monotonic()
            while n_times_whole() <= n_kills:
                take_steps(1)
                assert time.monotonic() - begun < 30.0
            os.kill(int(re.findall(r"process (\d+) begins", read(copy))[-1]), signal.SIGKILL)
            take_steps(50)
        optimizer.finish()
        counters = optimizer.counters()
        assert counters["pushes_lost"] == 0
        assert counters["pushes_acknowledged"] == counters["pushes_sent"]
        optimizer.close()
