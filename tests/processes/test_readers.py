"""Jobs whose samples are read by processes of their own (`num_workers`)."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import test_dealt as dealt
from tests.processes.commands import Command, alive, poll, sets, train


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(240),
]

MODULE = '''
import random
import time

import numpy as np
import torch
from torch import nn


class Augmented:
    """Two classes; each read of a sample draws from all three generators."""

    def __init__(self, n, bad=-1, pause=0.0):
        self.n, self.bad, self.pause = n, bad, pause

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        time.sleep(self.pause)
        if index == self.bad:
            raise OSError("no such image")
        noise = torch.randn(8) + random.random() + float(np.random.standard_normal())
        label = index % 2
        return {"x": noise + 2 * label, "deep": (torch.tensor(label),)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 2))

    def forward(self, x):
        return self.body(x)


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["deep"][0])
'''

JOB = """
[model]
factory = "tiny:Net"

[data.train]
factory = "tiny:Augmented"
arguments = { n = 605 }

[data.test]
factory = "tiny:Augmented"
arguments = { n = 205 }

[algorithm]
name = "downpour"
loss = "tiny:loss"
batch_size = 10
blocking = true
rule = { name = "momentum", learning_rate = 0.05, momentum = 0.9 }

[evaluation]
metric = "loss"

[cluster]
replicas = 1
shards = 1

[stop]
epochs = 2

[output]
directory = "runs/tiny"
snapshot_every = "500 ms"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(MODULE)
    (tmp_path / "tiny.toml").write_text(JOB)
    return tmp_path


def readers_of(command: Command, role: str = "*") -> list[int]:
    """Return the readers that roles have had, the newest of each last."""
    return [
        int(pid)
        for log in (command.run / "logs").glob(f"{role}.log")
        for line in re.findall(r"processes ([\d, ]+) read its samples", log.read_text())
        for pid in line.split(",")
    ]


def with_readers(n: int, *, test: int = 0) -> list[str]:
    return sets(f"data.train.num_workers={n}", f"data.test.num_workers={test}")


def test_weights_and_figures_have_the_bits_of_a_job_without_readers(folder: Path) -> None:
    values: list[dict[str, torch.Tensor]] = []
    figures: list[object] = []
    for n, test in ((0, 0), (2, 1)):
        run = ("--set", f"output.directory=runs/{n}")
        with train(folder, *with_readers(n, test=test), *run, run=str(n)) as command:
            command.ends()
        readers = readers_of(command)
        assert len(readers) == n + test
        assert not alive(readers)
        values.append(load_file(command.run / "model.safetensors"))
        figures.append(command.summary()["held_out_loss"])
    assert figures[0] == figures[1]
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        assert torch.equal(value, values[1][name]), name


def test_an_error_names_the_sample_as_without_readers(folder: Path) -> None:
    bad = sets("data.train.arguments={ n = 605, bad = 423 }")
    said = set[str]()
    for n in (0, 2):
        run = ("--set", f"output.directory=runs/{n}")
        with train(folder, *with_readers(n), *bad, *run, run=str(n)) as command:
            command.ends(1)
        said.update(re.findall(r"\[data\.train\] reading samples .*", command.told())[:1])
    assert len(said) == 1
    assert "(10 in all) failed: OSError: no such image" in said.pop()


def test_each_sample_counts_once_although_readers_and_replicas_are_killed(folder: Path) -> None:
    dealt.write(folder, dealt.JOB.replace("replicas = 3", "replicas = 2"))
    with train(folder, *sets("data.train.num_workers=2")) as command:
        poll(lambda: dealt.has_passed(command, dealt.N_SAMPLES // 2))
        os.kill(readers_of(command, "replica-0")[-1], signal.SIGKILL)
        poll(lambda: dealt.has_passed(command, dealt.N_SAMPLES))
        command.kill("replica-1")
        lost = readers_of(command, "replica-1")
        poll(lambda: not alive(lost[-2:]))
        # On a busy machine replica 0 reads all that is left before this one is back.
        poll(lambda: len(readers_of(command)) >= 8 or not alive([command.process.pid]))
        command.ends()
    assert (dealt.counts(command) == 4.0).all()
    assert command.summary()["restarts"] >= 1
    assert "was ended by signal SIGKILL (out of memory?)" in command.told()
    assert not alive(readers_of(command))
    assert not command.shared_memory()


@pytest.mark.parametrize("end", ["Ctrl+C", "kill -9"])
def test_no_reader_is_left(folder: Path, end: str) -> None:
    slow = sets("stop.epochs=1000000", "data.train.arguments={ n = 605, pause = 0.003 }")
    patience = sets("cluster.patience=2 s")
    with train(folder, *with_readers(2, test=1), *slow, *patience) as command:
        command.trains(50)
        readers = readers_of(command)
        assert sorted(alive(readers)) == sorted(readers)
        assert len(readers) == 3
        if end == "Ctrl+C":
            command.interrupt()
        else:
            command.signal(signal.SIGKILL)
            command.wait()
            poll(lambda: not alive(command.all_pids()))
    poll(lambda: not alive(readers) and not command.shared_memory())


def test_ranks_of_a_split_replica_have_readers_too(folder: Path) -> None:
    plain = """
def pairs(n):
    inputs = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
"""
    (folder / "tiny.py").write_text(MODULE + plain)
    job = JOB.replace("tiny:Augmented", "tiny:pairs").replace("tiny:Net", "tiny:net")
    job = job.replace("tiny:loss", "cross_entropy").replace("shards = 1", "partitions = 2")
    job = job.replace("n = 605", "n = 205").replace("epochs = 2", "epochs = 1")
    (folder / "tiny.toml").write_text(job)
    values: list[dict[str, torch.Tensor]] = []
    for n in (0, 1):
        run = ("--set", f"output.directory=runs/{n}")
        with train(folder, *with_readers(n, test=n), *run, run=str(n)) as command:
            command.ends(seconds=120.0)
        assert len(readers_of(command)) == 4 * n
        values.append(load_file(command.run / "model.safetensors"))
    for name, value in values[0].items():
        assert torch.equal(value, values[1][name]), name
