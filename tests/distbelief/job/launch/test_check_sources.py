"""Streams, loaders and collate functions that contradict a job file are refused."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.job.launch.preflight import PreflightResult, answer_to
from distbelief.job.launch.role_process import RoleSpec, readers_of
from distbelief.job.launch.supervised_job import check_data, read_again
from distbelief.parameter_server.layout import Layout
from distbelief.task.data import Wanted
from tests.distbelief.jobs import small


HERE = __name__


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def points() -> TensorDataset:
    return TensorDataset(torch.zeros(40, 3), torch.zeros(40, dtype=torch.int64))


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((torch.zeros(3), 0) for _ in range(40))


class Sized(Stream):
    def __len__(self) -> int:
        return 40


def endless() -> Stream:
    return Stream()


def stream() -> Stream:
    return Sized()


class Unseeded(Sized):
    generator = torch.Generator()

    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((torch.rand(3, generator=self.generator), 0) for _ in range(40))


class Seeded(Sized):
    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((torch.rand(3), 0) for _ in range(40))


def unseeded() -> Stream:
    return Unseeded()


class UnseededLater(Unseeded):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return super().__iter__() if self.epoch else ((torch.zeros(3), 0) for _ in range(40))


def unseeded_later() -> Stream:
    return UnseededLater()


def seeded() -> Stream:
    return Seeded()


def parts(replica: int, replicas: int) -> Stream:
    assert (replica, replicas) == (0, 1)  # the check is of the whole
    return Sized()


def loader(size: int = 8, workers: int = 0) -> "DataLoader[object]":
    return DataLoader(points(), size, num_workers=workers)


def padded(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """As long as the batch is large, as if a longer sample were in it."""
    return torch.zeros(len(samples), 3 + (len(samples) > 1)), torch.zeros(len(samples)).long()


def job_of(folder: Path, factory: str, *overrides: str) -> Job:
    given = f"data.train.factory={HERE}:{factory}", "algorithm.batch_size=8", *overrides
    text = small(f"{HERE}:net", f"{HERE}:points")
    if any("stop.samples" in override for override in overrides):
        text = text.replace("epochs = 1", "")
    return parse_job(text, path=folder / "j", overrides=given)


def checked(job: Job, folder: Path) -> PreflightResult:
    found = answer_to(job, initial_file=str(folder / "i.safetensors"), plan=str(folder / "plan"))
    check_data(job, found)
    return found


@pytest.mark.parametrize(
    ("factory", "overrides", "message"),
    [
        ("loader", ["algorithm.batch_size=4"], "DataLoader of batch_size 8, and [algorithm] batch"),
        (
            "loader",
            ["data.train.arguments={ workers = 2 }", "data.train.num_workers=1"],
            "a DataLoader of 2 workers, and num_workers is 1: leave one of them out",
        ),
        ("stream", ["data.train.num_workers=2"], "is a stream, which each of num_workers = 2"),
        ("stream", [f"data.test.factory={HERE}:endless"], "[data.test]"),
        ("unseeded", [], "sample 0 of the stream differs each time it begins: let it draw from"),
        ("unseeded_later", [], "sample 0 of pass 1 of the stream differs each time it begins"),
        (
            "points",
            [f"data.test.factory={HERE}:unseeded"],
            "[data.test] tests.distbelief.job.launch.test_check_sources:unseeded: sample 0 of the",
        ),
        (
            "parts",
            ["cluster.replicas=2"],
            'replicas, so that each replica has data of its own, and [algorithm] order is "dealt"',
        ),
        (
            "endless",
            ["cluster.replicas=2", "algorithm.order=parts"],
            'is a stream without length, and [algorithm] order "parts" gives each of 2 replicas',
        ),
        ("endless", ["stop.epochs=1"], "[stop] epochs is given, and the stream of [data.train]"),
        ("endless", ["stop.samples=9", "evaluation.every=1 epoch"], "[evaluation] every ="),
        ("points", ["data.train.collate=nowhere:f"], "there is no module 'nowhere'"),
        (
            "points",
            [f"data.train.collate={HERE}:padded", "cluster.partitions=2"],
            "split replicas need one shape: pad all samples alike, or split nothing",
        ),
    ],
)
def test_a_contradiction_is_refused_with_the_way(
    tmp_path: Path, factory: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(JobError) as caught:
        checked(job_of(tmp_path, factory, *overrides), tmp_path)
    assert message in str(caught.value)


def sandblast_of(folder: Path, factory: str, *overrides: str) -> Job:
    text = small(f"{HERE}:net", f"{HERE}:points")
    head = text[: text.index("[algorithm]")]
    batch = '[algorithm]\nname = "sandblaster"\nloss = "cross_entropy"\nl2 = 1e-3\n'
    given = f"data.train.factory={HERE}:{factory}", *overrides
    return parse_job(head + batch, path=folder / "j", overrides=given)


def numbered_part(replica: int, replicas: int) -> TensorDataset:
    numbers = torch.arange(40)[replica::replicas]
    return TensorDataset(numbers[:, None].expand(-1, 3).float(), numbers % 2)


def test_readers_of_a_batch_method_read_all_data(tmp_path: Path) -> None:
    """They read the part of their replica, at places that the coordinator meant for the whole."""
    job = sandblast_of(tmp_path, "numbered_part", "data.train.num_workers=1", "cluster.replicas=2")
    spec = RoleSpec(job=msgspec.Raw(job.to_json()), layout=Layout.of([], n_shards=1).spec)
    readers = readers_of("replica-1", spec, job)
    assert readers is not None
    wanted = Wanted(seed=0, epoch=0, indices=np.array([3, 39], np.int64).tobytes())
    with readers:
        inputs = readers.read(wanted, []).tensors()["inputs",]
    assert inputs[:, 0].tolist() == [3.0, 39.0]
    train = answer_to(job, initial_file=str(tmp_path / "i.safetensors"), plan="").task.train
    assert train is not None
    assert train.has_parts is msgspec.UNSET  # it resumes with any number of replicas


def test_batch_methods_refuse_orders_of_the_data(tmp_path: Path) -> None:
    for factory, order in (("stream", "stream"), ("loader", "in the order of the data")):
        job = sandblast_of(tmp_path, factory)
        with pytest.raises(JobError, match=f"gives samples {order}, and a batch method reads all"):
            checked(job, tmp_path)


@pytest.mark.parametrize(
    ("factory", "overrides"),
    [
        ("loader", []),
        ("stream", ["cluster.replicas=2"]),
        ("stream", ["data.train.num_workers=1"]),
        ("seeded", []),
        ("parts", ["cluster.replicas=2", "algorithm.order=parts"]),
        ("endless", ["stop.samples=100", "cluster.replicas=2"]),
        ("endless", ["data.train.limit=9", "stop.epochs=1"]),
        ("points", [f"data.test.factory={HERE}:stream"]),
    ],
)
def test_what_fits_passes(tmp_path: Path, factory: str, overrides: list[str]) -> None:
    job = job_of(tmp_path, factory, *overrides)
    found = checked(job, tmp_path)
    is_read_again = factory in {"stream", "endless"} and job.cluster.n_replicas > 1
    assert (read_again(job, found) is not None) == is_read_again


def test_the_workers_of_a_loader_are_those_of_the_job(tmp_path: Path) -> None:
    job = job_of(tmp_path, "loader", "data.train.arguments={ workers = 2 }")
    assert checked(job, tmp_path).num_workers == {"data.train": 2}
