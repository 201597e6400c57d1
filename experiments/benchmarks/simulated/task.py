"""A small net and its data, the same object for all roles of a simulation."""

import itertools
import time
from functools import lru_cache

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from typing_extensions import override


N_CLASSES = 8


def net(width: int = 16, hidden: int = 24, layers: int = 1) -> nn.Module:
    sizes = [width, *[hidden] * layers]
    inner = [
        module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), nn.Sigmoid())
    ]
    return nn.Sequential(*inner, nn.Linear(sizes[-1], N_CLASSES))


@lru_cache(maxsize=8)
def samples(width: int = 16, n_samples: int = 4096) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n_samples, width, generator=generator)
    directions = torch.randn(width, N_CLASSES, generator=generator)
    return TensorDataset(inputs, (inputs @ directions).argmax(1))


sleeps = True


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take a while to read, a batch at a time, and no processor."""

    def __init__(self, samples: TensorDataset, seconds: float) -> None:
        self._tensors = samples.tensors
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._tensors[0])

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tensors[0][index], self._tensors[1][index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if sleeps:
            time.sleep(self._seconds)
        return self._tensors[0][indices], self._tensors[1][indices]


def slow_samples(*, seconds: float, width: int = 16, n_samples: int = 4096) -> Slow:
    return Slow(samples(width, n_samples), seconds)
