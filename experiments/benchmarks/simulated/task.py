"""A small net and its data, the same object for all roles of a simulation."""

import itertools
from functools import lru_cache

import torch
from torch import nn
from torch.utils.data import TensorDataset


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
