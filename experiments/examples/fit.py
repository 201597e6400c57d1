"""Handwritten digits, from Python: two replicas, the best values kept."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split
from typing_extensions import override

import distbelief


class Net(nn.Module):
    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, n_channels, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.scores = nn.Linear(9 * n_channels, 10)

    @override
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(self.features(pixels).flatten(1))
        return scores


digits = load_digits()
pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
data = TensorDataset(pixels, torch.tensor(digits.target))
train, test = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
run = distbelief.fit(
    Net(16),
    train,
    test=test,
    loss=nn.CrossEntropyLoss(label_smoothing=0.05),
    batch_size=32,
    rule=distbelief.Adam(learning_rate=0.003),
    replicas=2,
    epochs=10,
    overrides={"output.keep": "best", "evaluation.every": "1 epoch"},
)
print(run)
print(f"best {run.summary.best_metric:.1%}: {sum(p.numel() for p in run.best_model.parameters())}")
