"""The scaled-down task of Figures 4 and 5: synthetic speech, 41,874 parameters.

The paper's net has 41,777,152, so ours is to it as 1 to 998. Data are frames of the corpus in
`experiments.speech`: 65,536 to train on, 4,096 of them and as many held-out ones to measure.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from typing_extensions import override

from experiments.cache import find_cache
from experiments.figures.results import fingerprint
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


# The warm start that all methods of one seed begin from: plain SGD on one machine. In Dean et al.
# 2012 all runs of Figure 4 begin from one, of some ten hours. Kept are its weights, and how large
# gradients were while it learnt: Adagrad counts those as seen (`initial_accumulator`), since the
# first pushes of 200 replicas, all from one point, would else all be taken in full, and undo it.
STEPS: Final = 5_000
RATE: Final = 0.01
BATCH: Final = 8
SETTINGS: Final = {"steps": STEPS, "rate": RATE, "batch": BATCH}


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What was learnt before the methods part."""

    path: str  # file of its weights
    of: str  # fingerprint of the net, its first weights, the data, steps, rate and seed
    squares: float  # sum of squared gradients over its steps: mean of all parameters


def warm_start(seed: int, *, data: Held | None = None, folder: Path | None = None) -> WarmStart:
    """Return the warm start of a seed; it is made unless one of just this is kept."""
    torch.manual_seed(seed)
    model, data = net(), train() if data is None else data
    initial = torch.nn.utils.parameters_to_vector(model.parameters())
    of = fingerprint(identity(), initial.tolist(), data.digest, SETTINGS, {"seed": seed})
    path = find_cache("figures", folder) / f"warm-{of}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        squares = _learn(model, data, seed=seed)
        facts = {"of": of, "squares": repr(squares)}
        save_file(dict(model.state_dict()), path, metadata=facts)
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    if facts["of"] != of:
        raise ValueError(f"{path} is of {facts['of']}, not of {of}: remove it")
    return WarmStart(str(path), of, float(facts["squares"]))


def _learn(model: nn.Module, data: Held, *, seed: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    squares = 0.0
    for step in range(STEPS):
        rows = order[step * BATCH % len(data) :][:BATCH]
        optimizer.zero_grad()
        loss(model(data.inputs[rows]), data.targets[rows]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            squares += float(parameter.grad.square().sum())
        optimizer.step()
    return squares / sum(p.numel() for p in model.parameters())
