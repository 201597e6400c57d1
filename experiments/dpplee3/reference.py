"""Dpplee3's three modes from their equations, in one process of plain torch.

    worker        x := w, then n steps of its own optimizer on its own part, and push w - x
    server        w := w - rate * (w - x), by plain SGD
    synchronous   all workers begin with the same w; their differences are applied in turn
    asynchronous  each worker's difference is applied when it comes; then this worker fetches
    hogwild       threads take steps on one x without locks

The server's optimizer has no momentum, and a fetch loses nothing, as it follows each push: what
Dpplee3 of 2018 loses at other fetches is no equation of its design. Workers keep their velocity.
"""

import heapq
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

import torch
from torch.nn import functional

from experiments.digits import digits


BATCH: Final = 32
N_WORKERS: Final = 2
RATE: Final = 0.05  # of workers' SGD
MOMENTUM: Final = 0.5  # of the original's example
SERVER_RATE: Final = 1.0 / N_WORKERS  # 1.0 would add up what all of them have learnt twice
# Without velocity, which threads do not share; and there is no server that halves it.
HOGWILD_RATE: Final = RATE / (1 - MOMENTUM) * SERVER_RATE
SPEEDS: Final = (1.0, 0.9)  # of workers, so that they do not go in step

Values = dict[str, torch.Tensor]


@cache
def images(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = digits.images(part).tensors
    return inputs, targets


class Worker:
    """A worker with a part of the data, and an optimizer that it keeps."""

    def __init__(self, index: int, n_epochs: int, *, seed: int, is_hogwild: bool = False) -> None:
        self.net, self.speed = digits.net(), SPEEDS[index]
        rate, momentum = (HOGWILD_RATE, 0.0) if is_hogwild else (RATE, MOMENTUM)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=rate, momentum=momentum)
        self.inputs, self.targets = images("train")
        n = len(self.targets)
        part = torch.arange(n * index // N_WORKERS, n * (index + 1) // N_WORKERS)
        generator = torch.Generator().manual_seed(1000 * seed + index)
        epochs = [part[torch.randperm(len(part), generator=generator)] for _ in range(n_epochs)]
        # The last batch of an epoch may be short.
        self.left = [rows for order in epochs for rows in order.split(BATCH)][::-1]

    def step(self) -> None:
        rows = self.left.pop()
        self.optimizer.zero_grad()
        functional.cross_entropy(self.net(self.inputs[rows]), self.targets[rows]).backward()
        self.optimizer.step()

    def difference(self, values: Values, n_steps: int) -> Values:
        """Take so many steps from these values, or those that are left, and return w - x."""
        self.net.load_state_dict(values)
        for _ in range(min(n_steps, len(self.left))):
            self.step()
        return {name: values[name] - x for name, x in self.net.state_dict().items()}


def steps_of_epoch() -> int:
    return len(Worker(0, 1, seed=0).left)  # as many as of the others


def train(mode: str, every: int, *, n_epochs: int, seed: int) -> tuple[float, float]:
    """Train with so many steps between exchanges; return the held-out loss and accuracy."""
    torch.manual_seed(seed)
    values = {name: value.clone() for name, value in digits.net().state_dict().items()}
    is_hogwild = mode == "hogwild"
    workers = [Worker(k, n_epochs, seed=seed, is_hogwild=is_hogwild) for k in range(N_WORKERS)]
    run = {"synchronous": _synchronous, "asynchronous": _asynchronous, "hogwild": _hogwild}[mode]
    run(workers, values, every)
    return score(values)


def _apply(values: Values, difference: Values) -> None:
    for name, moved in difference.items():
        values[name] -= SERVER_RATE * moved


def _synchronous(workers: list[Worker], values: Values, every: int) -> None:
    while workers[0].left:
        begun = {name: value.clone() for name, value in values.items()}
        for difference in [worker.difference(begun, every) for worker in workers]:
            _apply(values, difference)


def _asynchronous(workers: list[Worker], values: Values, every: int) -> None:
    pushes = [
        (every / one.speed, k, one.difference(values, every)) for k, one in enumerate(workers)
    ]
    heapq.heapify(pushes)
    while pushes:
        now, k, found = heapq.heappop(pushes)
        _apply(values, found)
        if workers[k].left:
            found = workers[k].difference(values, every)
            heapq.heappush(pushes, (now + every / workers[k].speed, k, found))


def _hogwild(workers: list[Worker], values: Values, every: int) -> None:
    del every  # each step is in the shared memory at once
    for worker in workers:
        for name, parameter in worker.net.named_parameters():
            parameter.data = values[name]

    def run(worker: Worker) -> None:
        while worker.left:
            worker.step()

    with ThreadPoolExecutor(N_WORKERS) as threads:
        list(threads.map(run, workers))


@torch.no_grad()
def score(values: Values) -> tuple[float, float]:
    net = digits.net()
    net.load_state_dict(values)
    inputs, targets = images("test")
    outputs: torch.Tensor = net(inputs)
    accuracy = (outputs.argmax(1) == targets).float().mean()
    return float(functional.cross_entropy(outputs, targets)), float(accuracy)
