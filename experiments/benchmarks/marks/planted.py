"""A net and data whose speed does not depend on the processors, with causes of slowness to plant.

For `culprits.py`. The net sleeps in place of the work of a large one. The data lie in a file of the
process, mapped into memory, at places all over it; `folder/slow-PID` makes reading slow in a
process, `folder/small-PID` throws its pages out of memory once.
"""

import mmap
import os
import time
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from typing_extensions import override


N_INPUTS, N_HIDDEN, N_CLASSES = 64, 2048, 8  # 600 kB: a quarter second at 20 Mbit/s
FILE_BYTES, PAGE_BYTES = 1 << 26, 4096
PAGES_PER_SAMPLE = 64
SLOW_SECONDS = 0.006  # of reading one sample
_MADV_PAGEOUT = 21  # from Linux's mman.h

Item = tuple[torch.Tensor, torch.Tensor]


class PacedNet(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(N_INPUTS, N_HIDDEN), nn.Tanh(), nn.Linear(N_HIDDEN, N_CLASSES)
        )
        self._seconds = seconds

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        scores: torch.Tensor = self.layers(inputs)
        return scores


class Scattered(Dataset[Item]):
    def __init__(self, folder: str, n: int) -> None:
        self._folder, self._n = Path(folder), n

    def __len__(self) -> int:
        return self._n

    @cached_property
    def _file(self) -> mmap.mmap:
        path = self._folder / f"data-{os.getpid()}"
        path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found.madvise(mmap.MADV_RANDOM)
        return found

    @override
    def __getitem__(self, index: int) -> Item:
        if (self._folder / f"slow-{os.getpid()}").exists():
            time.sleep(SLOW_SECONDS)
        if (small := self._folder / f"small-{os.getpid()}").exists():
            small.unlink()
            self._file.madvise(_MADV_PAGEOUT)
        random = np.random.default_rng(index)
        pages = random.integers(0, FILE_BYTES // PAGE_BYTES, PAGES_PER_SAMPLE)
        found = [self._file[PAGE_BYTES * int(page)] for page in pages]
        inputs = torch.tensor(found[:N_INPUTS], dtype=torch.float32) / 128.0 - 1.0
        return inputs, torch.tensor(index % N_CLASSES)
