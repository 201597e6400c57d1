"""Model and data of a job: any function that returns a module or a data set will do."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


N_TEST = 360  # of 1797 scans of 8 x 8 pixels


def net(channels: int = 16) -> nn.Module:
    """Return a small convolutional net: (n, 1, 8, 8) -> (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 2 * 2, 10),
    )


def images(part: str) -> TensorDataset:
    """Return the "train" or "test" part, shuffled once: pixels from 0 to 1, digits."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    order = order[:N_TEST] if part == "test" else order[N_TEST:]
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(pixels[order], torch.tensor(digits.target)[order])
