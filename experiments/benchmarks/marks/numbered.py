"""A net that counts how often each sample was applied, and learns; for `cluster_chaos.py`.

The model has a parameter `counts`, one per sample. The gradient of a batch is -1 at the numbers of
its samples, and shards apply SGD at rate 1: the parameter counts applications.
"""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from typing_extensions import override


N_INPUTS, N_CLASSES = 16, 8
LEARNING_RATE = 0.05  # of the net; the counts need the rule's to be 1
NOISE = 2.0  # of the targets: without it the loss would approach 0

Item = tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]


class Numbered(Dataset[Item]):
    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(n, N_INPUTS, generator=generator)
        scores = self.inputs @ torch.randn(N_INPUTS, N_CLASSES, generator=generator)
        noise = NOISE * torch.randn(n, N_CLASSES, generator=generator)
        self.targets = (scores + noise).argmax(1)

    def __len__(self) -> int:
        return len(self.targets)

    @override
    def __getitem__(self, index: int) -> Item:
        return (torch.tensor(index), self.inputs[index]), self.targets[index]


class CountingNet(nn.Module):
    """Its forward sleeps in place of the work of a large net."""

    def __init__(self, n: int, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(N_INPUTS, N_CLASSES)
        self.counts = nn.Parameter(torch.zeros(n))
        self._seconds = seconds

    @override
    def forward(
        self, numbers: torch.Tensor, inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._seconds)
        return self.layer(inputs), self.counts[numbers]


def loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    scores, counts = outputs
    return LEARNING_RATE * functional.cross_entropy(scores, targets) - counts.sum()


def judge(model_file: Path) -> tuple[int, float]:
    """Return how many samples were not applied exactly once, and the loss of all."""
    net = load_file(model_file)
    data = Numbered(len(net["counts"]))
    scores = data.inputs @ net["layer.weight"].T + net["layer.bias"]
    found = float(functional.cross_entropy(scores, data.targets))
    return int((net["counts"] != 1.0).sum()), found
