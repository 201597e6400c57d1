"""Pushes that leave marks, and ledgers that outlive a kill: who was applied how often?

The model has one more parameter, `marks`, of shape (shards, workers, residues): every
shard holds a full set, because the layout cuts it into equal contiguous ranges. Push
number i of worker w has the gradient -1 at [:, w, i mod residues] of it, and shards
apply SGD at rate 1: the parameter counts applications. What a worker has issued, and
what it knows to be acknowledged, it writes into a mapped file; no kill takes it back.

    acknowledged pushes of a residue  <=  its mark  <=  issued pushes of that residue
    (else one was lost)                             (else one was applied twice)

All of a worker is here, a module of its own, so that a process can be forked to run it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.serve.optimizer import DownpourSGD


N_WORKERS, N_SHARDS = 4, 2
N_RESIDUES = 512
N_LIVES_MAX = 4096  # of one worker
N_INPUTS, N_HIDDEN, N_CLASSES = 784, 32, 10
BATCH_SIZE, N_BATCHES = 64, 50
LEARNING_RATE = 0.05  # of the net; the marks need the rule's to be 1
_ISSUED, _ACKNOWLEDGED = range(2)
_SHAPE = (N_LIVES_MAX, 2)
Counts = NDArray[np.int64]


class MarkedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(N_INPUTS, N_HIDDEN), nn.ReLU(), nn.Linear(N_HIDDEN, N_CLASSES)
        )
        self.marks = nn.Parameter(torch.zeros(N_SHARDS, N_WORKERS, N_RESIDUES))

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, N_CLASSES); the marks have no part in them."""
        logits: torch.Tensor = self.layers(inputs)
        return logits

    def mark(self, worker: int, number: int) -> None:
        gradient = torch.zeros_like(self.marks)
        gradient[:, worker, number % N_RESIDUES] = -1.0
        self.marks.grad = gradient


class Ledger:
    """What one worker has issued, and knows to be acknowledged, in each of its lives."""

    def __init__(self, path: Path) -> None:
        self._counts = np.memmap(path, dtype=np.int64, mode="r+", shape=_SHAPE)

    @classmethod
    def make(cls, path: Path) -> Self:
        np.memmap(path, dtype=np.int64, mode="w+", shape=_SHAPE).flush()
        return cls(path)

    def issue(self, life: int) -> int:
        number = int(self._counts[:, _ISSUED].sum())
        self._counts[life, _ISSUED] += 1
        return number

    def acknowledge(self, life: int, n_acknowledged: int) -> None:
        self._counts[life, _ACKNOWLEDGED] = n_acknowledged

    @property
    def n_acknowledged(self) -> int:
        return int(self._counts[:, _ACKNOWLEDGED].sum())

    def by_residue(self) -> tuple[Counts, Counts]:
        """Return acknowledged and issued pushes per residue, each (N_RESIDUES,)."""
        issued, acknowledged = self._counts.T
        first = np.cumsum(issued) - issued  # number of the first push of each life
        numbers = [np.arange(n) + begin for begin, n in zip(first, acknowledged, strict=True) if n]
        known = np.concatenate([np.zeros(0, np.int64), *numbers])
        return _per_residue(known), _per_residue(np.arange(issued.sum()))


def _per_residue(numbers: Counts) -> Counts:
    return np.bincount(numbers % N_RESIDUES, minlength=N_RESIDUES)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the marks say, over all shards, workers and residues."""

    n_lost: int  # acknowledged, but not in the values
    n_twice: int  # applications beyond one each
    n_applied: int  # on the shard that has applied most


def judge(marks: torch.Tensor, ledgers: list[Ledger]) -> Verdict:
    """Compare the marks, (shards, workers, N_RESIDUES), with the ledgers."""
    applied = marks.detach().double().numpy()
    if not np.array_equal(applied, np.rint(applied)):
        raise ValueError("a mark is no whole number: a push was applied in part")
    n_lost = n_twice = 0
    for worker, ledger in enumerate(ledgers):
        acknowledged, issued = ledger.by_residue()
        n_lost += int(np.maximum(acknowledged - applied[:, worker], 0).sum())
        n_twice += int(np.maximum(applied[:, worker] - issued, 0).sum())
    return Verdict(n_lost=n_lost, n_twice=n_twice, n_applied=int(applied.sum(axis=(1, 2)).max()))


def work(address: str, ledger_path: str, stop_path: str, *, worker: int, life: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(worker)
    ledger, stop = Ledger(Path(ledger_path)), Path(stop_path)
    inputs = torch.randn(N_BATCHES, BATCH_SIZE, N_INPUTS)
    targets = torch.randint(N_CLASSES, (N_BATCHES, BATCH_SIZE))
    net = MarkedNet()
    optimizer = DownpourSGD(net.parameters(), server=address)

    def note() -> None:
        n_acknowledged = optimizer.counters()["pushes_acknowledged"]
        ledger.acknowledge(life, int(n_acknowledged))

    step = 0
    while not stop.exists():
        batch = step % N_BATCHES
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(inputs[batch]), targets[batch])
        (LEARNING_RATE * loss).backward()
        net.mark(worker, ledger.issue(life))
        optimizer.step(samples=BATCH_SIZE)
        note()
        step += 1
    optimizer.finish()
    note()
    optimizer.close()
