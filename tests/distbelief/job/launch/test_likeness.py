"""Hosts that join do what the supervisor's host does, or are refused with what differs."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.job.launch.likeness import Likeness, likeness_of
from tests.distbelief.jobs import small


CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from helping import width

def net():
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Dropout(0.5), nn.Linear(width, 2))

class Noisy(TensorDataset):
    def __getitem__(self, index):
        return torch.randn(3), self.tensors[1][index]

def points():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 3, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * 1.0
"""
HELPING = "width = 4\n"
FILES = {"letting.py": CODE, "helping.py": HELPING}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    _forget()


def _forget() -> None:
    for file in FILES:
        sys.modules.pop(file.removesuffix(".py"), None)
    importlib.invalidate_caches()


def like(folder: Path, *overrides: str, **other: str) -> tuple[Likeness, Job]:
    """Return the likeness of a host with this code; `other` replaces text in it."""
    _forget()
    folder.mkdir()
    for file, text in FILES.items():
        old, _, new = other.get(file.removesuffix(".py"), "").partition(" -> ")
        (folder / file).write_text(text.replace(old, new) if old else text)
    job = small("letting:net", "letting:points")
    made = parse_job(
        job, path=folder / "job.toml", overrides=("algorithm.loss=letting:loss", *overrides)
    )
    sys.path[:] = [str(folder), *sys.path]
    try:
        return likeness_of(made, ("letting",)), made
    finally:
        sys.path.remove(str(folder))


def refused(first: Likeness, other: Likeness, *, may_round: bool = False) -> str:
    with pytest.raises(JobError) as found:
        first.check(other, may_round=may_round)
    return str(found.value)


def test_two_hosts_with_the_same_are_alike(tmp_path: Path) -> None:
    one, _ = like(tmp_path / "a")
    other, _ = like(tmp_path / "b")
    assert one == other
    assert one.loss is not None
    assert one.n_samples > 1
    assert set(one.sources) >= {"letting", "helping"}
    assert not [name for name in one.sources if name.startswith(("torch", "distbelief"))]
    assert len(one.gradients) == 4
    one.check(other, may_round=False)
    one.check(msgspec.json.decode(msgspec.json.encode(other), type=Likeness), may_round=False)


@pytest.mark.parametrize(
    ("file", "change", "name"),
    [
        ("letting", "targets) * 1.0 -> targets) * 1.5", "letting"),
        ("letting", "Tanh -> Sigmoid", "letting"),
        ("helping", "4 -> 4  # wide", "helping"),
    ],
)
def test_a_host_with_other_code_is_refused(
    tmp_path: Path, file: str, change: str, name: str
) -> None:
    """A host whose loss had another constant trained with the job: "done, 0 pushes lost"."""
    one, _ = like(tmp_path / "a")
    other, _ = like(tmp_path / "b", **{file: change})
    assert f"module {name} has another source here" in refused(one, other, may_round=True)


@pytest.mark.parametrize("change", ["targets) * 1.0 -> targets) * 1.01", "Tanh -> ReLU"])
def test_what_it_computes_tells_where_sources_do_not(tmp_path: Path, change: str) -> None:
    """The code may be compiled, or read what it does from elsewhere."""
    one, _ = like(tmp_path / "a")
    other, _ = like(tmp_path / "b", letting=change)
    same = msgspec.structs.replace(other, sources=one.sources)
    text = refused(one, same, may_round=True)
    assert "the loss of the first" in text
    assert "use the same code and data" in text
    assert torch.__version__ in text


def test_other_data_are_refused_by_name(tmp_path: Path) -> None:
    one, _ = like(tmp_path / "a")
    other, _ = like(tmp_path / "b", letting="manual_seed(0) -> manual_seed(1)")
    same = msgspec.structs.replace(other, sources=one.sources)
    assert "[data.train] has other samples here" in refused(one, same, may_round=True)


def test_differences_of_rounding_alone_are_allowed_by_a_key(tmp_path: Path) -> None:
    one, _ = like(tmp_path / "a")
    assert one.loss is not None
    rounded = msgspec.structs.replace(
        one, loss=one.loss * (1 + 1e-7), bits="other", build="torch 2.6, AVX512, 2 threads"
    )
    text = refused(one, rounded)
    assert "rounds otherwise than the job's (here torch 2.6, AVX512, 2 threads; there" in text
    assert '[cluster] rounding = "any"' in text
    one.check(rounded, may_round=True)


def test_random_data_and_split_models_are_compared_by_their_sources(tmp_path: Path) -> None:
    one, _ = like(tmp_path / "a", letting="return TensorDataset -> return Noisy")
    assert one.loss is None
    assert one.marks is None
    split, _ = like(tmp_path / "b", "cluster.partitions=2")
    assert split.loss is None
    other, _ = like(tmp_path / "c", "cluster.partitions=2", letting="Tanh -> ReLU")
    assert "module letting" in refused(split, other)
