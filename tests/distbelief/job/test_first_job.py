"""`distbelief init`: the job runs at once; what cannot be told is refused with the way."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import distbelief
from distbelief.cli.main import app
from distbelief.config.load import load_job
from distbelief.core.errors import JobError
from distbelief.job.first_job import first_job, write_first_job


NETS = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, 3)

    def forward(self, x):
        return self.scores(x)

class Softmax(Net):
    def forward(self, x):
        return self.scores(x).softmax(1)

class Sized(Net):
    def __init__(self, n):
        super().__init__()

class Loss(Net):
    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.scores(x), labels)}

class Scalar(Net):
    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.scores(x), labels)

class Number(Net):
    def forward(self, x):
        return self.scores(x)[:, 0]

class Broken(Net):
    def forward(self, x):
        return self.scores(x[:, :3])
"""
SETS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def inputs(n):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n))

def train(n=300):
    return TensorDataset(inputs(n), inputs(n)[:, :3].argmax(1))

def test():
    return train(100)

def few():
    return train(5)

def numbers():
    return TensorDataset(inputs(50), inputs(50)[:, 0].sin())

def yes():
    return TensorDataset(inputs(50), (inputs(50)[:, 0] > 0).float())

def dicts():
    return [{"x": x, "labels": y} for x, y in train()]

def loader():
    return DataLoader(train(), batch_size=20)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from train()

def stream():
    return Stream()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shown_nets.py").write_text(NETS)
    (tmp_path / "shown_sets.py").write_text(SETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("shown_nets", "shown_sets"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def made(model: str, data: str, **options: str) -> str:
    return first_job(f"shown_nets:{model}", f"shown_sets:{data}", **options)


@pytest.mark.parametrize(
    ("model", "data", "loss", "batch_size", "test"),
    [
        ("Net", "train", "cross_entropy", 32, "shown_sets:test"),
        ("Net", "few", "cross_entropy", 5, None),
        ("Number", "numbers", "mse", 32, None),
        ("Loss", "dicts", "model", 32, None),
        ("Scalar", "dicts", "model", 32, None),
        ("Net", "loader", "cross_entropy", 20, None),
    ],
)
def test_loss_batch_size_and_test_set_are_found(
    model: str, data: str, loss: str, batch_size: int, test: str | None
) -> None:
    write_first_job(made(model, data), Path("job.toml"))
    job = load_job("job.toml")
    task = job.task
    assert task.loss == loss
    assert f"batch_size = {batch_size} " in Path("job.toml").read_text()
    assert (task.test and task.test.factory) == test
    keys = [line for line in Path("job.toml").read_text().splitlines() if " = " in line]
    assert all("  # " in line for line in keys)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("Softmax", "train", "outputs are probabilities.*leave the softmax out"),
        ("Sized", "train", "takes n: .*name a function that needs no arguments"),
        ("Number", "yes", "--loss binary_cross_entropy_with_logits.*or numbers .--loss mse"),
        ("Net", "numbers", r"gives \[50, 3\] and targets are \[50\]: let them have the same shape"),
        ("Number", "train", r"of torch.int64: for classes give a score for each.*--loss"),
        ("Net", "dicts", "a loss or metric with a name takes one tensor of targets.*--loss"),
        ("Net", "stream", "a stream without a length.*limit = "),
        ("Broken", "train", "Broken failed on 256 samples: RuntimeError"),
        ("Net", "tests", "has no 'tests'. Did you mean 'test'"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_way(model: str, data: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        made(model, data)


def test_a_loss_that_is_given_counts_and_is_tried() -> None:
    text = made("Number", "yes", loss="binary_cross_entropy_with_logits")
    assert 'loss = "binary_cross_entropy_with_logits"' in text
    with pytest.raises(JobError):
        made("Net", "train", loss="mse")


@pytest.mark.processes
@pytest.mark.slow
def test_the_command_writes_a_job_that_runs_at_once() -> None:
    words = ["init", "shown_nets:Net", "shown_sets:train", "-o", "shown.toml"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "distbelief train shown.toml" in done.output
    assert CliRunner().invoke(app, words).exit_code == 2  # it is there
    assert CliRunner().invoke(app, [*words[:-1], "shown.json"]).exit_code == 2
    run = distbelief.train("shown.toml", {"stop.epochs": 1.0}, show=False)
    assert run.exit_code == 0
    assert run.summary.best_metric is not None
