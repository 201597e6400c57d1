"""Tar files as webdataset writes them, as pieces that a host brings from a store to read them.

    [data.train]
    factory = "web_pieces:Shards"
    arguments = { folder = "/data/shards", store = "/mnt/store", counts = "./counts.json" }

`counts` has the samples of each file: `write_counts`, once. Without `fetch` hosts read only what
lies in their own `folder`.
"""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch


class Tar:
    """Where the samples of a tar file are: `KEY.x.pth` and `KEY.y.cls` of each key."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with tarfile.open(file) as tar:
            self.places = {one.name: (one.offset_data, one.size) for one in tar}
        self.keys = list(dict.fromkeys(name.split(".", 1)[0] for name in self.places))

    def read(self, name: str) -> bytes:
        start, size = self.places[name]
        with self.file.open("rb") as content:
            content.seek(start)
            return content.read(size)


def write_counts(folder: str, counts: str) -> None:
    found = {file.name: len(Tar(file).keys) for file in sorted(Path(folder).glob("*.tar"))}
    Path(counts).write_text(json.dumps(found))


class Shards:
    def __init__(self, folder: str, store: str, counts: str) -> None:
        self.folder, self.store = Path(folder), Path(store)
        self.counts: dict[str, int] = json.loads(Path(counts).read_text())
        self.index: dict[str, Tar] = {}

    def pieces(self) -> dict[str, int]:
        return self.counts

    def here(self) -> Iterable[str]:
        return {file.name for file in self.folder.glob("*.tar")} & {*self.counts}

    def fetch(self, piece: str) -> None:
        part = self.folder / f"{piece}.{os.getpid()}"
        shutil.copyfile(self.store / piece, part)
        part.replace(self.folder / piece)

    def read(self, piece: str, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if piece not in self.index:
            self.index = {piece: Tar(self.folder / piece)}
        tar = self.index[piece]
        keys = [tar.keys[row] for row in rows]
        x = [torch.load(io.BytesIO(tar.read(f"{key}.x.pth"))) for key in keys]
        return torch.stack(x), torch.tensor([int(tar.read(f"{key}.y.cls")) for key in keys])
