"""Row groups of parquet files, and tar files, as pieces of which a host has some."""

import io
import tarfile
from pathlib import Path

import pytest
import torch

from distbelief.task.data import DataSource, read_batch
from distbelief.task.task import DataSpec, build_dataset
from experiments.examples import web_pieces


HERE = "experiments.examples.parquet_pieces"


def test_row_groups_of_parquet_files_are_pieces(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    example = pytest.importorskip(HERE)
    for k in range(2):
        numbers = range(30 * k, 30 * k + 30)
        table = pa.table({"x": [[float(n)] for n in numbers], "y": [n % 3 for n in numbers]})
        pq.write_table(table, tmp_path / f"{k}.parquet", row_group_size=20)
    counts = tmp_path / "counts.json"
    example.write_counts(str(tmp_path), str(counts))
    (tmp_path / "1.parquet").unlink()  # it is on another host
    arguments: dict[str, object] = {"folder": str(tmp_path), "counts": str(counts)}
    source = DataSource.of(
        build_dataset(DataSpec(factory=f"{HERE}:RowGroups", arguments=arguments))
    )
    assert source.placed is not None
    assert source.placed.pieces.rows == (20, 10, 20, 10)
    assert source.placed.here == (0, 2)
    batch = read_batch(source, [3, 25, 0, 29])
    assert torch.equal(batch.tensors()["inputs",], torch.tensor([[3.0], [25.0], [0.0], [29.0]]))
    assert batch.tensors()["targets",].tolist() == [0, 1, 0, 2]


def test_tar_files_are_pieces_that_a_host_fetches(tmp_path: Path) -> None:
    folder, store = tmp_path / "here", tmp_path / "store"
    folder.mkdir()
    store.mkdir()
    for k in range(2):
        with tarfile.open(store / f"{k}.tar", "w") as tar:
            for n in range(10 * k, 10 * k + 10):
                x = io.BytesIO()
                torch.save(torch.tensor([float(n)]), x)
                for name, content in (("x.pth", x.getvalue()), ("y.cls", str(n % 3).encode())):
                    member = tarfile.TarInfo(f"{n:06d}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    counts = tmp_path / "counts.json"
    web_pieces.write_counts(str(store), str(counts))
    (folder / "0.tar").symlink_to(store / "0.tar")
    arguments: dict[str, object] = {"folder": str(folder), "store": str(store)}
    spec = DataSpec(
        factory=f"{web_pieces.__name__}:Shards", arguments=arguments | {"counts": str(counts)}
    )
    source = DataSource.of(build_dataset(spec))
    assert source.placed is not None
    assert source.placed.pieces.rows == (10, 10)
    assert source.placed.here == (0, 1)
    assert source.placed.pieces.can_fetch
    batch = read_batch(source, [3, 15, 0, 19])
    assert torch.equal(batch.tensors()["inputs",], torch.tensor([[3.0], [15.0], [0.0], [19.0]]))
    assert batch.tensors()["targets",].tolist() == [0, 0, 0, 1]
    assert sorted(file.name for file in folder.iterdir()) == ["0.tar", "1.tar"]
