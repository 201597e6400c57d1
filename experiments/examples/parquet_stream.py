"""Rows of parquet files as a stream, of which each replica reads some files: pyarrow.

    [data.train]
    factory = "parquet_stream:rows"
    arguments = { folder = "./rows" }

With several replicas, and `order = "parts"` in [algorithm], each reads its own files.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import torch


class Rows:
    def __init__(self, files: list[Path]) -> None:
        self.files = [pq.ParquetFile(file) for file in files]

    def __len__(self) -> int:
        return sum(file.metadata.num_rows for file in self.files)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for file in self.files:
            for batch in file.iter_batches(1024):
                for row in batch.to_pylist():
                    yield torch.tensor(row["x"]), row["y"]


def rows(folder: str, replica: int = 0, replicas: int = 1) -> Rows:
    return Rows(sorted(Path(folder).glob("*.parquet"))[replica::replicas])
