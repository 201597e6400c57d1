"""Tar files of samples as a stream, in the order in which they were written: webdataset.

    [data.train]
    factory = "web_stream:samples"
    arguments = { folder = "./shards", n = 50000 }

With several replicas, and `order = "parts"` in [algorithm], each reads its own files. Shuffle the
samples before you write them: the library's `shuffle` draws by the time of day, so that no run
could resume to the sample, and a job refuses it.
"""

from pathlib import Path

import torch
import webdataset as wds


def sample(number: int) -> dict[str, object]:
    """Return what `wds.TarWriter` writes as one sample."""
    return {"__key__": f"{number:06d}", "x.pth": torch.tensor([float(number)]), "y.cls": number % 3}


def samples(folder: str, n: int, replica: int = 0, replicas: int = 1) -> "wds.WebDataset":
    files = [str(file) for file in sorted(Path(folder).glob("*.tar"))]
    if replicas > 1 and len(files) % replicas:
        raise ValueError(f"{len(files)} files for {replicas} replicas: write a multiple of them")
    data = wds.WebDataset(files[replica::replicas], shardshuffle=False)
    return data.decode().to_tuple("x.pth", "y.cls").with_length(n // replicas, silent=True)
