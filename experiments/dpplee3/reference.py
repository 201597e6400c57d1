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
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of the server's values on the held-out digits."""

    loss: float
    accuracy: float


def batches(worker: int, n_epochs: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield the samples of each step; the last batch of an epoch may be short."""
    n = len(digits.images("train"))
    first, last = n * worker // N_WORKERS, n * (worker + 1) // N_WORKERS
    for _ in range(n_epochs):
        order = first + torch.randperm(last - first, generator=generator)
        yield from order.split(BATCH)


def steps_of_epoch(worker: int) -> int:
    return len([*batches(worker, 1, torch.Generator())])


class Worker:
    """A worker with a part of the data, and an optimizer that it keeps."""

    def __init__(
        self, index: int, n_epochs: int, *, seed: int, rate: float, momentum: float
    ) -> None:
        self.net = digits.net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=rate, momentum=momentum)
        generator = torch.Generator().manual_seed(1000 * seed + index)
        self.batches = [*batches(index, n_epochs, generator)]
        self.inputs, self.targets = digits.images("train").tensors
        self.n_done = 0

    @property
    def is_done(self) -> bool:
        return self.n_done == len(self.batches)

    def step(self) -> None:
        rows = self.batches[self.n_done]
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.net(self.inputs[rows]), self.targets[rows])
        loss.backward()
        self.optimizer.step()
        self.n_done += 1

    def difference(self, values: Values, n_steps: int) -> Values:
        """Take so many steps from these values, or those that are left, and return w - x."""
        self.net.load_state_dict(values)
        for _ in range(min(n_steps, len(self.batches) - self.n_done)):
            self.step()
        return {name: values[name] - x for name, x in self.net.state_dict().items()}


def train(mode: str, every: int | None, *, n_epochs: int, seed: int) -> Score:
    """Train; `every`: steps between exchanges, or None for one at the end of each n_epochs."""
    torch.manual_seed(seed)
    values = {name: value.clone() for name, value in digits.net().state_dict().items()}
    momentum, rate = (0.0, HOGWILD_RATE) if mode == "hogwild" else (MOMENTUM, RATE)
    workers = [
        Worker(index, n_epochs, seed=seed, rate=rate, momentum=momentum)
        for index in range(N_WORKERS)
    ]
    each = [every or steps_of_epoch(index) for index in range(N_WORKERS)]
    if mode == "synchronous":
        _synchronous(workers, values, each)
    elif mode == "asynchronous":
        _asynchronous(workers, values, each)
    else:
        _hogwild(workers, values)
    return score(values)


def _apply(values: Values, difference: Values) -> None:
    for name, moved in difference.items():
        values[name] -= SERVER_RATE * moved


def _synchronous(workers: Sequence[Worker], values: Values, each: Sequence[int]) -> None:
    while not all(worker.is_done for worker in workers):
        begun = {name: value.clone() for name, value in values.items()}
        found = [one.difference(begun, n) for one, n in zip(workers, each, strict=True)]
        for difference in found:
            _apply(values, difference)


def _asynchronous(workers: Sequence[Worker], values: Values, each: Sequence[int]) -> None:
    pushes: list[tuple[float, int, Values]] = []

    def begin(index: int, now: float) -> None:
        if not workers[index].is_done:
            fetched = {name: value.clone() for name, value in values.items()}
            found = workers[index].difference(fetched, each[index])
            heapq.heappush(pushes, (now + each[index] / SPEEDS[index], index, found))

    for index in range(N_WORKERS):
        begin(index, 0.0)
    while pushes:
        now, index, found = heapq.heappop(pushes)
        _apply(values, found)
        begin(index, now)


def _hogwild(workers: Sequence[Worker], values: Values) -> None:
    for worker in workers:
        for name, parameter in worker.net.named_parameters():
            parameter.data = values[name]  # the same memory

    def run(worker: Worker) -> None:
        while not worker.is_done:
            worker.step()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@torch.no_grad()
def score(values: Values) -> Score:
    net = digits.net()
    net.load_state_dict(values)
    inputs, targets = digits.images("test").tensors
    outputs: torch.Tensor = net.eval()(inputs)
    return Score(
        loss=float(functional.cross_entropy(outputs, targets)),
        accuracy=float((outputs.argmax(1) == targets).float().mean()),
    )
