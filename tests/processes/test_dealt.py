"""Dealt data in real processes: each sample of an epoch counts once, even if processes die."""

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distbelief.transport.keys import KeyFiles
from tests.processes.commands import Command, poll, sets, train
from tests.processes.test_join import Land, allow


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(240),
]

N_SAMPLES = 1000

COUNTS = '''
import time


class Numbered:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor(index), torch.tensor(1.0)


class Counts(nn.Module):
    """One weight per sample and row: at rate 1, how often each sample has counted."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, n))

    def forward(self, numbers):
        time.sleep(0.03)
        return self.weight[:, numbers].sum(0)


def minus_sum(outputs, targets):
    return -(outputs * targets).sum()
'''

JOB = f"""
[model]
factory = "tiny:Counts"
arguments = {{ n = {N_SAMPLES} }}

[data.train]
factory = "tiny:Numbered"
arguments = {{ n = {N_SAMPLES} }}

[algorithm]
name = "downpour"
loss = "tiny:minus_sum"
batch_size = 10
order = "dealt"
rule = {{ name = "sgd", learning_rate = 1.0 }}

[cluster]
replicas = 3
shards = 2

[stop]
epochs = 4

[output]
directory = "runs/tiny"
snapshot_every = "500 ms"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, JOB)
    return tmp_path


def write(folder: Path, job: str) -> None:
    (folder / "tiny.py").write_text(f"import torch\nfrom torch import nn\n{COUNTS}")
    (folder / "tiny.toml").write_text(job)


def test_replicas_come_and_go_with_hosts(tmp_path: Path) -> None:
    """One leaves as it was asked to, one is killed; a third place is never filled."""
    land = Land(tmp_path / "here", tmp_path / "there")
    job = JOB.replace("replicas = 3", "replicas = { min = 2, max = 3 }").replace("= 4", "= 6")
    for folder in (land.here, land.there):
        folder.mkdir()
        KeyFiles(folder / "keys").make()
        write(folder, job)
    allow(land.here, land.there, "host")
    allow(land.there, land.here, "server")
    listen = ("--listen", "tcp://127.0.0.1:0", "--keys", "keys", "--cores", "1")
    with train(land.here, *listen) as command:
        poll(lambda: "replica 1 waits for a host" in command.told())
        assert command.samples() == 0  # it has fewer than two
        with land.joined(command) as machine:
            poll(lambda: command.samples() > N_SAMPLES // 2)
            machine.process.send_signal(signal.SIGTERM)
            assert machine.wait() == 128 + signal.SIGTERM, machine.said
        before = command.samples()
        poll(lambda: command.samples() > before + N_SAMPLES // 10)
        with land.joined(command) as machine:
            poll(lambda: command.samples() > 4 * N_SAMPLES)
            machine.kill()
        command.ends(seconds=120.0)
    assert (counts(command) == 6.0).all(), (counts(command) - 6.0).unique(return_counts=True)


def counts(command: Command) -> torch.Tensor:
    return load_file(command.run / "model.safetensors")["weight"]


def has_passed(command: Command, n_samples: int) -> bool:
    return command.samples() > n_samples


def kill_each(command: Command, *roles: str) -> None:
    """Kill one after the other, as the job goes on."""
    for number, role in enumerate(roles, 1):
        poll(partial(has_passed, command, number * N_SAMPLES // 2))
        command.kill(role)


@pytest.mark.parametrize(
    "option", ["cluster.shard_copies=2", pytest.param("algorithm.n_push=3", marks=pytest.mark.soak)]
)
def test_each_sample_counts_once_although_roles_are_killed(folder: Path, option: str) -> None:
    with train(folder, *sets(option)) as command:
        kill_each(command, "replica-1", "replica-0", "shard-1", "replica-1")
        command.ends()
    assert command.summary()["restarts"] >= 4, command.output
    assert command.summary()["samples"] == 4 * N_SAMPLES
    assert (counts(command) == 4.0).all(), (counts(command) - 4.0).unique(return_counts=True)


def test_so_does_what_a_killed_replica_holds_back_if_durable(folder: Path) -> None:
    """Regression: replicas of a real job had no place to save it."""
    push = ("algorithm.exchange.push={codec='top-k',share=0.3}", "algorithm.exchange.durable=true")
    with train(folder, *sets(*push, "cluster.shards=1")) as command:
        kill_each(command, "replica-1", "replica-0", "replica-1")
        command.ends()
    assert command.summary()["restarts"] >= 3, command.output
    assert (counts(command) == 4.0).all(), (counts(command) - 4.0).unique(return_counts=True)


def test_so_it_does_after_everything_is_killed(folder: Path) -> None:
    """The run resumes with other numbers of replicas; before, a shard had no other copy."""
    with train(folder) as command:
        kill_each(command, "replica-1", "shard-1")
        poll(lambda: command.samples() > 3 * N_SAMPLES // 2)
        command.signal(signal.SIGKILL)
        for role in ("shard-0", "shard-1"):
            command.kill(role)
        command.wait()
    again = ("--resume", "runs/tiny")
    with train(folder, *sets("cluster.replicas=2"), job=again) as command:
        command.ends()
    assert (counts(command) == 4.0).all(), (counts(command) - 4.0).unique(return_counts=True)
