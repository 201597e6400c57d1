"""Streams of other libraries: each sample once in each epoch, whole and in parts."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from distbelief.task.data import Dataset, DataSource, read_batch
from distbelief.task.task import DataSpec, build_dataset


HERE = "experiments.examples"
N, N_FILES = 60, 4
Of = Callable[[int, int], Dataset]


def parquet(folder: Path) -> DataSpec:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    for k in range(N_FILES):
        numbers = range(k, N, N_FILES)
        table = pa.table({"x": [[float(n)] for n in numbers], "y": [n % 3 for n in numbers]})
        pq.write_table(table, folder / f"{k}.parquet")
    return DataSpec(factory=f"{HERE}.parquet_stream:rows", arguments={"folder": str(folder)})


def web(folder: Path) -> DataSpec:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    example = pytest.importorskip(f"{HERE}.web_stream")
    for k in range(N_FILES):
        with wds.TarWriter(str(folder / f"{k}.tar")) as file:
            for number in range(k, N, N_FILES):
                file.write(example.sample(number))
    return DataSpec(factory=f"{HERE}.web_stream:samples", arguments={"folder": str(folder), "n": N})


def hugging_face(folder: Path) -> DataSpec:
    pytest.importorskip("datasets", reason="datasets is not installed")
    for k in range(N_FILES):
        lines = [json.dumps({"x": [float(n)], "y": n % 3}) for n in range(k, N, N_FILES)]
        (folder / f"{k}.jsonl").write_text("\n".join(lines))
    return DataSpec(
        factory=f"{HERE}.hugging_face_stream:rows",
        arguments={"files": str(folder / "*.jsonl")},
        limit=N,
    )


def numbers(dataset: Dataset, positions: range) -> list[int]:
    tensors = read_batch(dataset, positions).tensors()
    (x,) = (tensor for path, tensor in tensors.items() if path in {("inputs",), ("batch", "x")})
    (y,) = (tensor for path, tensor in tensors.items() if path in {("targets",), ("batch", "y")})
    assert torch.equal(x[:, 0].long() % 3, y)
    return x[:, 0].int().tolist()


MAKES = [parquet, web, hugging_face]
# webdataset leaves the file open that it reads when a pass ends early.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    gc.collect()  # what is left open is found here, not in the test of something else


@pytest.mark.parametrize("make", MAKES)
def test_each_epoch_has_each_sample_once(make: Callable[[Path], DataSpec], tmp_path: Path) -> None:
    dataset = build_dataset(make(tmp_path))
    assert DataSource.of(dataset).is_stream
    assert len(dataset) == N
    for epoch in range(2):
        found = numbers(dataset, range(epoch * N, (epoch + 1) * N))
        assert sorted(found) == list(range(N))


@pytest.mark.each_value
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("stop", [1, 29, 59, 61])
def test_a_position_has_the_same_sample_in_another_process(
    make: Callable[[Path], DataSpec], stop: int, tmp_path: Path
) -> None:
    spec = make(tmp_path)
    whole = numbers(build_dataset(spec), range(2 * N))
    assert numbers(build_dataset(spec), range(stop, 2 * N)) == whole[stop:]


@pytest.mark.parametrize("make", [parquet, web])
@pytest.mark.parametrize("n_replicas", [1, 2, 4])
def test_parts_are_the_whole(
    make: Callable[[Path], DataSpec], n_replicas: int, tmp_path: Path
) -> None:
    spec, found = make(tmp_path), list[int]()
    for r in range(n_replicas):
        part = build_dataset(spec, part=(r, n_replicas))
        found += numbers(part, range(len(part)))
    assert sorted(found) == list(range(N))
