"""What jobs of these tests name: models, a loss, a function of bytes."""

import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override


def linear(inputs: int = 20, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def grid() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 6), nn.Unflatten(1, (2, 3)))


def problem(n: int) -> dict[str, object]:
    """Three classes that lines separate."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 20, generator=generator)
    y = (x @ torch.randn(20, 3, generator=generator)).argmax(1)
    return {"features": [*x.numpy()], "label": y.numpy()}


def local_data(n: int) -> TensorDataset:
    data = problem(n)
    x = torch.tensor(np.array(data["features"]))
    return TensorDataset(x, torch.tensor(data["label"]))


class Counts(nn.Module):
    """One weight per row: at rate 1, how often each row has counted."""

    def __init__(self, n: int, seconds: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, n))
        self.seconds = seconds

    @override
    def forward(self, numbers: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.weight[:, numbers].sum(0)


def minus_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(outputs * targets).sum()


def pixels(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.float32) / 16)
