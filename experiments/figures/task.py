"""The scaled-down task of Figures 4 and 5: synthetic speech, 41,874 parameters.

The paper's net has 41,777,152, so ours is to it as 1 to 998. Data are frames of the corpus in
`experiments.speech`: 65,536 to train on, 4,096 of them and as many held-out ones to measure.
"""

import hashlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from typing_extensions import override

from experiments.speech.data import PhoneFrames, frames
from experiments.speech.model import acoustic_net


N_STATES = 210
N_TRAIN = 65_536
N_MEASURED = 4_096
PART = 10_000  # added to the target of a measured sample that is one of those trained on


class Held(Dataset[tuple[torch.Tensor, int]]):
    """Samples in memory, shared by all who read them."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs = inputs  # (n, 440)
        self.targets = targets  # (n,)

    def __len__(self) -> int:
        return len(self.targets)

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], int(self.targets[index])

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.as_tensor(indices)
        return self.inputs[rows], self.targets[rows]

    @property
    def digest(self) -> str:
        found = hashlib.sha256(self.inputs.numpy().tobytes())
        found.update(self.targets.numpy().tobytes())
        return found.hexdigest()[:16]


def net() -> nn.Module:
    """Return 440 - 64 - 210, with ReLU: it learns in fewer samples than sigmoid."""
    return acoustic_net(hidden=[64], states=N_STATES, activation="relu")


def identity() -> tuple[str, int, int]:
    """Return what the task is, as far as that can be told without its data."""
    return repr(net()), N_TRAIN, N_MEASURED


@cache
def train() -> Held:
    everything = frames("train", hours=1.0)
    return _picked(everything, N_TRAIN)


@cache
def held_out() -> Held:
    """Return frames of voices and sentences that are not trained on."""
    return _picked(frames("test", hours=0.5), N_MEASURED)


@cache
def measured() -> Held:
    """Return held-out frames, and as many that are trained on, which are marked."""
    test, trained = held_out(), train()
    every = len(trained) // N_MEASURED
    return Held(
        torch.cat([test.inputs, trained.inputs[::every][:N_MEASURED]]),
        torch.cat([test.targets, trained.targets[::every][:N_MEASURED] + PART]),
    )


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets % PART)


def both(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return two accuracies in one number: held out, and behind it trained on.

    An evaluator knows one figure, a mean. With n samples measured of each part, h and t
    of them right, it is (h + t / (n + 1)) / n: the accuracy held out and less than one
    sample more, so that [stop] may ask for it; and `parts_of` finds both again.
    """
    right = outputs.argmax(1) == targets % PART
    trained = targets >= PART
    of_trained = (right & trained).sum().to(torch.float64)
    counted = (right & ~trained).sum() + of_trained / (N_MEASURED + 1)
    return 2.0 * counted / len(targets)


def parts_of(mean: float) -> tuple[float, float]:
    """Return the accuracies of training and held out that `both` has put together."""
    n = N_MEASURED
    test, trained = divmod(round(mean * n * (n + 1)), n + 1)
    return trained / n, test / n


def _picked(dataset: PhoneFrames, n: int) -> Held:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(dataset), generator=generator)[:n]
    inputs, targets = dataset.__getitems__(order)
    return Held(inputs, targets)
