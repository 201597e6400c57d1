"""Threads of one replica on the same parameters, with and without a lock: updates/s, and loss.

    alone       one thread
    lockfree    `[algorithm] lockfree`: each thread adds its updates as they come
    locked      the same threads, and one lock that each holds while it adds
    in_torch    one thread, whose operations torch spreads over as many threads

    dense       a net of 256-1024-1024-16, small batches of 64 samples
    small       a net of 16-32-4, small batches of 16: Python's interpreter lock counts most
    sparse      logistic regression on 40 of 200,000 columns, small batches of 256, sparse gradients

All begin with the same values and read the same samples; they take turns. The loss is held out,
after as many samples. Threads of torch: 1, but for `in_torch`.

    python experiments/benchmarks/lockfree.py [--threads 2]
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from threading import Lock
from typing import Final
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from distbelief.task import dry_run
from distbelief.transport.node import in_threads
from distbelief.worker import lockfree
from distbelief.worker.batches import BatchIndices
from distbelief.worker.downpour_settings import LockFree
from distbelief.worker.local_executor import FlatModel, LocalExecutor
from experiments.benchmarks.measuring import measurement


CONTESTANTS: Final = ("alone", "lockfree", "locked", "in_torch")
N_SMALL: Final = 16  # small batches of a step


class Columns(nn.Module):
    """Logistic regression: the weights of the columns that a sample has."""

    def __init__(self, n_columns: int) -> None:
        super().__init__()
        self.weight = nn.Embedding(n_columns, 1, sparse=True)
        nn.init.zeros_(self.weight.weight)

    @override
    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.weight(columns).sum((1, 2))
        return logits


def net(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width, wanted in pairwise(sizes):
        layers += [nn.Linear(width, wanted), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def classes(width: int, n_classes: int, n: int) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(n, width)
    return torch.utils.data.TensorDataset(inputs, net(width, n_classes)(inputs).argmax(1))


def rows(n_columns: int, n: int) -> torch.utils.data.TensorDataset:
    # A few columns are in many samples, as words are.
    drawn = torch.rand(n, 40).pow(4).mul(n_columns).long()
    logits = torch.randn(n_columns)[drawn].sum(1)
    return torch.utils.data.TensorDataset(drawn, (logits > 0).float())


@dataclass(frozen=True, kw_only=True)
class Problem:
    model: Callable[[], nn.Module]
    data: Callable[[int], torch.utils.data.TensorDataset]  # of so many samples
    samples: int  # of a small batch
    rate: float
    steps: int
    loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy


PROBLEMS: Final[Mapping[str, Problem]] = {
    "dense": Problem(
        model=partial(net, 256, 1024, 1024, 16),
        data=partial(classes, 256, 16),
        samples=64,
        rate=0.2,
        steps=12,
    ),
    "small": Problem(
        model=partial(net, 16, 32, 4), data=partial(classes, 16, 4), samples=16, rate=0.1, steps=60
    ),
    "sparse": Problem(
        model=partial(Columns, 200_000),
        data=partial(rows, 200_000),
        samples=256,
        rate=0.2,
        steps=25,
        loss=nn.functional.binary_cross_entropy_with_logits,
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    updates_per_second: float
    loss: float  # held out


def run(problem: Problem, contestant: str, *, n_threads: int, n_steps: int) -> Run:
    torch.manual_seed(0)
    module = problem.model().train()
    n_step = N_SMALL * problem.samples
    data = problem.data(n_step * (n_steps + 2))
    lanes = 1 if contestant in {"alone", "in_torch"} else n_threads
    model = FlatModel(module)
    small = lockfree.LockFreeSteps(
        model,
        LockFree(threads=lanes, samples=problem.samples),
        batch_size=n_step,
        together=in_threads,
        name="net",
        inner={"name": "SGD", "lr": problem.rate},
    )
    names = dry_run.Names(model="net", loss="loss", data="data.train")
    executor = LocalExecutor(model, data, loss=problem.loss, names=names, small=small)
    samples = [
        BatchIndices(position=at, indices=np.arange(at, at + n_step))
        for at in range(0, n_step * (n_steps + 1), n_step)
    ]
    batches = [executor.batches.read(0, step, each) for step, each in enumerate(samples)]
    torch.set_num_threads(n_threads if contestant == "in_torch" else 1)
    lock, descend = Lock(), lockfree.descend

    def locked(*arguments: object, **keywords: object) -> None:
        with lock:
            descend(*arguments, **keywords)  # type: ignore[arg-type] # as they come

    with patch.object(lockfree, "descend", locked if contestant == "locked" else descend):
        ends = []
        for number, batch in enumerate(batches):
            small.begin(number=number, rate=lambda: 0.0, counts=True)
            executor.run(batch, lambda *_: None)
            ends.append(time.perf_counter())
    seconds = ends[-1] - ends[0]  # the first step warms up
    torch.set_num_threads(1)
    inputs, targets = data[-n_step:]
    with torch.no_grad():
        loss = float(problem.loss(module(inputs), targets))
    return Run(n_steps * N_SMALL / seconds, loss)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Threads of one replica, without locks.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps")
    small = {"threads": 2, "rounds": 1, "share": 0.05}
    options = measurement.options_of(parser, arguments, small=small)
    figures: dict[str, float] = {"threads": options.threads}
    table: dict[str, dict[str, str]] = {}
    for name, problem in PROBLEMS.items():
        n_steps = max(1, round(options.share * problem.steps))
        contestants = {
            each: partial(run, problem, each, n_threads=options.threads, n_steps=n_steps)
            for each in CONTESTANTS
        }
        found = measurement.interleaved(contestants, n_rounds=options.rounds)
        alone = measurement.Spread.of(one.updates_per_second for one in found["alone"]).median
        for contestant, runs in found.items():
            speed = measurement.Spread.of(one.updates_per_second for one in runs)
            loss = fmean(one.loss for one in runs)
            figures[f"{name}_{contestant}_loss"] = loss
            figures[f"{name}_{contestant}_updates_per_second"] = speed.median
            if contestant != "alone":
                figures[f"{name}_{contestant}_over_alone"] = speed.median / alone
            table[f"{name} {contestant}"] = {
                "updates/s": speed.show(0),
                "over alone": f"{speed.median / alone:.2f}",
                "loss": f"{loss:.4f}",
            }
    measurement.show(f"{options.threads} threads", table)
    measurement.conclude("lockfree", figures)


if __name__ == "__main__":
    main()
