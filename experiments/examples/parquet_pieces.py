"""Row groups of parquet files as pieces, of which each host has some files: pyarrow.

    [data.train]
    factory = "parquet_pieces:RowGroups"
    arguments = { folder = "/data/rows", counts = "./counts.json" }

`counts` has the rows of each row group of all hosts, by file: `write_counts`, once, where all files
can be seen. The files on this host are those in its `folder`.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch


def write_counts(folder: str, counts: str) -> None:
    found: dict[str, int] = {}
    for file in sorted(Path(folder).glob("*.parquet")):
        data = pq.ParquetFile(file).metadata
        found |= {
            f"{file.name}:{k:05d}": data.row_group(k).num_rows for k in range(data.num_row_groups)
        }
    Path(counts).write_text(json.dumps(found))


class RowGroups:
    def __init__(self, folder: str, counts: str) -> None:
        self.folder = Path(folder)
        self.counts: dict[str, int] = json.loads(Path(counts).read_text())
        self.open = "", torch.empty(0), torch.empty(0)  # the row group that is being read

    def pieces(self) -> dict[str, int]:
        return self.counts

    def here(self) -> Iterable[str]:
        files = {file.name for file in self.folder.glob("*.parquet")}
        return [name for name in self.counts if name.rpartition(":")[0] in files]

    def read(self, piece: str, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.open[0] != piece:
            name, _, group = piece.rpartition(":")
            table = pq.ParquetFile(self.folder / name).read_row_group(int(group))
            inputs = torch.tensor(table["x"].to_pylist())
            self.open = piece, inputs, torch.tensor(table["y"].to_pylist())
        _, inputs, targets = self.open
        return inputs[list(rows)], targets[list(rows)]
