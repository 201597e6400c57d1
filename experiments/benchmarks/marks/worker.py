"""One worker of the chaos benchmark: an ordinary loop, with a ledger.

It lives in a module of its own, so that a process can be forked to run it.
"""

from pathlib import Path

import torch
from torch.nn import functional

from distbelief.optimizer import DownpourSGD
from experiments.benchmarks.marks.ledger import (
    LEARNING_RATE,
    N_CLASSES,
    N_INPUTS,
    Ledger,
    MarkedNet,
)


BATCH_SIZE = 64
N_BATCHES = 50


def work(
    address: str,
    ledger_path: str,
    stop_path: str,
    *,
    worker: int,
    life: int,
    n_workers: int,
    n_shards: int,
) -> None:
    """Train until the file `stop_path` exists, then leave in order."""
    torch.set_num_threads(1)
    torch.manual_seed(worker)
    ledger, stop = Ledger(Path(ledger_path)), Path(stop_path)
    inputs = torch.randn(N_BATCHES, BATCH_SIZE, N_INPUTS)
    targets = torch.randint(N_CLASSES, (N_BATCHES, BATCH_SIZE))
    net = MarkedNet(n_shards=n_shards, n_workers=n_workers)
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
