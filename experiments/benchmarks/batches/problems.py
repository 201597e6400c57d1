"""What `sandblaster` and its peers minimise, as functions of one flat vector.

logistic   two classes, 50,000 x 500, l2: the optimum is unique
digits     an MLP on 1,437 scans of digits, l2
speech     the speech net of the paper, random frames
paced      a linear model whose processes sleep instead of computing; one of them is
           slower. For measuring how batches are dealt, on fewer cores than replicas
"""

import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset
from typing_extensions import override

from distbelief.task.losses import Loss
from distbelief.task.tensor_pairs import TensorPairs
from experiments.benchmarks.measuring.workload import Workload


Doubles = np.ndarray[tuple[int], np.dtype[np.float64]]
SLOW_REPLICA = "replica-3"


def logistic_data(n: int = 50_000, width: int = 500) -> TensorPairs:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, width, generator=generator, dtype=torch.float64)
    inputs /= width**0.5
    weights = torch.randn(width, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return TensorPairs(inputs, (inputs @ weights + noise).sign())


def logistic_net(width: int = 500) -> nn.Module:
    net = nn.Linear(width, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    return nn.Sequential(net, nn.Flatten(0))


def logistic_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.softplus(-targets * outputs).mean()


def digits_data() -> TensorDataset:
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float64) / 16
    return TensorDataset(pixels[:1437], torch.tensor(digits.target)[:1437])


def digits_net(width: int = 32) -> nn.Module:
    layers = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))
    return layers.double()


def speech_net(*, small: bool = False) -> nn.Module:
    return Workload(net="speech", batch_size=1, small=small).module()


def speech_data(n: int, *, small: bool = False) -> TensorPairs:
    inputs, targets = Workload(net="speech", batch_size=n, small=small).samples()
    return TensorPairs(inputs, targets.to(torch.int64))


def paced_data(n: int = 2000) -> TensorPairs:
    inputs = torch.linspace(-1.0, 1.0, n)[:, None]
    return TensorPairs(inputs, 2.0 * inputs + 1.0)


def paced_net(seconds: float = 1e-3, slowness: float = 5.0) -> nn.Module:
    """Return a line that takes so many seconds per sample, in one process more."""
    log = Path("/proc/self/fd/1").readlink()  # of a role: its log
    is_slow = log.name == f"{SLOW_REPLICA}.log"
    return Paced(seconds * (slowness if is_slow else 1.0))


class Paced(nn.Module):
    """Sleeps, then computes next to nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._line = nn.Linear(1, 1)

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self._seconds * len(inputs))
        outputs: torch.Tensor = self._line(inputs)
        return outputs


class Objective:
    """Loss and gradient of one flat vector, by torch alone; counts its evaluations."""

    def __init__(
        self, net: nn.Module, data: tuple[torch.Tensor, torch.Tensor], *, loss: Loss, l2: float
    ) -> None:
        self.net = net
        self.n_evaluations = 0
        self._inputs, self._targets = data
        self._loss = loss
        self._l2 = l2

    @property
    def initial(self) -> Doubles:
        flat = parameters_to_vector(self.net.parameters())
        return flat.detach().numpy().copy()

    def __call__(self, point: Doubles) -> tuple[float, Doubles]:
        parameters = list(self.net.parameters())
        vector_to_parameters(torch.from_numpy(point.copy()), parameters)
        value = self.backward()
        gradient = [p.grad.reshape(-1) for p in parameters if p.grad is not None]
        return value, torch.cat(gradient).numpy().copy()

    def backward(self) -> float:
        """Return the loss of the net as it is; leave the gradient in it."""
        self.n_evaluations += 1
        self.net.zero_grad()
        value = self._loss(self.net(self._inputs), self._targets)
        square = sum(((p * p).sum() for p in self.net.parameters()), torch.zeros(()).double())
        value = value + 0.5 * self._l2 * square
        value.backward()
        return value.item()
