"""Streams and torch's loaders as data of jobs of real processes."""

import importlib
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.processes import test_dealt as dealt
from tests.processes.commands import poll, sets, train


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(240),
]

N_SAMPLES = dealt.N_SAMPLES

MORE = """

from torch.utils.data import DataLoader, IterableDataset


class Items(IterableDataset):
    def __init__(self, n, first=0, step=1, known=True):
        self.numbers, self.known = range(first, n, step), known

    def __iter__(self):
        return ((torch.tensor(k), torch.tensor(1.0)) for k in self.numbers)

    def __len__(self):
        if not self.known:
            raise TypeError
        return len(self.numbers)


def generated(n):
    yield from Items(n)


def part(n, replica, replicas):
    return Items(n, replica, replicas, known=False)


class Words:
    def __len__(self):
        return 203

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 30, (index % 7 + 1,), generator=generator), index % 3


def padded(samples):
    words, labels = zip(*samples)
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.tensor(labels)


def loader():
    return DataLoader(Words(), batch_size=10, collate_fn=padded, num_workers=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.embedding(words).mean(1))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dealt.write(tmp_path, dealt.JOB.replace("replicas = 3", "replicas = 2"))
    with (tmp_path / "tiny.py").open("a") as file:
        file.write(MORE)
    return tmp_path


def test_a_job_of_a_loader_has_the_bits_of_a_plain_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its order, joined by its collate_fn, read by two processes as it asks for."""
    options = sets(
        "model.factory=tiny:Net",
        "model.arguments={}",
        "data.train.factory=tiny:loader",
        "data.train.arguments={}",
        "algorithm.loss=cross_entropy",
        "algorithm.rule={ name = 'sgd', learning_rate = 0.1 }",
        "algorithm.blocking=true",
        "cluster.replicas=1",
        "cluster.shards=1",
        "stop.epochs=2",
    )
    with train(folder, *options) as command:
        command.ends()
    assert "read its samples" in (command.run / "logs" / "replica-0.log").read_text()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "tiny", raising=False)
    tiny = importlib.import_module("tiny")

    torch.manual_seed(0)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    net = tiny.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for words, labels in tiny.loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(words), labels).backward()
            optimizer.step()
    torch.set_num_threads(n_threads)
    ours = load_file(command.run / "model.safetensors")
    for name, value in net.state_dict().items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    ("factory", "option"),
    [
        pytest.param("Items", "", marks=pytest.mark.soak),
        ("Items", "data.train.num_workers=1"),
        ("generated", f"data.train.limit={N_SAMPLES}"),
    ],
)
def test_no_sample_of_a_stream_is_lost_or_repeated(folder: Path, factory: str, option: str) -> None:
    """Ended by SIGTERM in the middle, resumed, and a replica killed there."""
    options = sets(f"data.train.factory=tiny:{factory}", *[option] * bool(option))
    with train(folder, *options) as command:
        poll(lambda: command.samples() > N_SAMPLES // 2)
        command.signal(signal.SIGTERM)
        command.wait()
        assert "each of 2 replicas reads all of it" in command.told()
    n_before = command.samples()
    assert 0 < n_before < 4 * N_SAMPLES
    with train(folder, *options, "--resume", "runs/tiny") as command:
        poll(lambda: command.samples() > n_before + N_SAMPLES // 2)
        command.kill("replica-1")
        command.ends()
    found = dealt.counts(command)
    assert (found == 4.0).all(), (found - 4.0).unique(return_counts=True)


def test_replicas_read_parts_that_the_function_makes(folder: Path) -> None:
    """Pass after pass, and from where they were when the job goes on."""
    options = sets("data.train.factory=tiny:part", "algorithm.order=parts", "cluster.shards=1")
    job = (folder / "tiny.toml").read_text().replace("epochs = 4", "samples = 3333")
    (folder / "tiny.toml").write_text(job)
    with train(folder, *options) as command:
        poll(lambda: command.samples() > N_SAMPLES)
        command.signal(signal.SIGTERM)
        command.wait()
    with train(folder, *options, "--resume", "runs/tiny") as command:
        command.ends()
    found = dealt.counts(command)[0]
    assert found.sum() == command.summary()["samples"]
    for part in (found[0::2], found[1::2]):
        n_passes, rest = divmod(int(part.sum()), len(part))
        assert (part[:rest] == n_passes + 1).all()
        assert (part[rest:] == n_passes).all()
