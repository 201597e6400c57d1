"""What every entrant has to do: the same data, initial weights, batches and stop.

Only torch and the standard library are used, because entrants may run in another
Python than ours. Everything is files: `course.json`, the data, and a board on which
workers write what they do and read when to stop. Files that are written during a run
are mapped, so that a note costs microseconds, whatever the system under test.

    worker k:  ready .. all ready -> gradients .. budget used -> done .. released

Worker 0 records its parameters, as it has fetched them, every `record_every` gradients
of its own. Whoever holds the contest evaluates them afterwards, so held-out loss costs
every entrant the same: one copy of the parameters.
"""

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from torch import nn
from torch.nn import functional


WAIT_SECONDS_MAX = 180.0
_POLL_SECONDS = 1e-3

# Columns of a worker's row on the board; the last row is the referee's.
READY, BEGUN, N_GRADIENTS, DONE, N_RECORDS = range(5)
RELEASED = 0
N_COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class Course:
    data_folder: str
    run_folder: str
    sizes: tuple[int, ...]  # inputs, hidden units of each layer, classes
    n_train: int
    n_held_out: int
    n_workers: int = 2
    n_gradients: int  # of all workers together
    batch_size: int = 64
    learning_rate: float
    rule: str = "sgd"
    every: int = 1  # steps between fetches, and between pushes, of ours
    record_every: int = 25  # gradients of worker 0
    pause_seconds: float = 0.0  # of the last worker, after each of its gradients

    @classmethod
    def read(cls, path: str | Path) -> Self:
        fields = json.loads(Path(path).read_text())
        return cls(**{**fields, "sizes": tuple(fields["sizes"])})

    def write(self) -> Path:
        folder = Path(self.run_folder)
        folder.mkdir(parents=True, exist_ok=True)
        for mapped in (self.board, self.times, self.recorded):
            mapped()  # makes the file
        path = folder / "course.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def n_records_max(self) -> int:
        return self.n_gradients // self.record_every + 2

    @property
    def n_parameters(self) -> int:
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        return sum((inputs + 1) * outputs for inputs, outputs in pairs)

    def board(self) -> torch.Tensor:
        return _map(self.run_folder, "board", (self.n_workers + 1, N_COLUMNS), torch.float64)

    def times(self) -> torch.Tensor:
        """Return when parameters were recorded, (n_records_max,)."""
        return _map(self.run_folder, "times", (self.n_records_max,), torch.float64)

    def recorded(self) -> torch.Tensor:
        """Return the parameters recorded, (n_records_max, n_parameters)."""
        return _map(self.run_folder, "recorded", (self.n_records_max, self.n_parameters))

    def net(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs, outputs in zip(self.sizes, self.sizes[1:], strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        net = nn.Sequential(*layers[:-1])
        load(net, _map(self.data_folder, "initial", (self.n_parameters,), shared=False))
        return net

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, n_inputs) inputs and (n,) classes; the last are held out."""
        n = self.n_train + self.n_held_out
        inputs = _map(self.data_folder, "inputs", (n, self.sizes[0]), shared=False)
        return inputs, _map(self.data_folder, "targets", (n,), torch.int64, shared=False)

    def held_out_loss(self, net: nn.Module) -> float:
        inputs, targets = self.data()
        with torch.no_grad():
            outputs = net(inputs[self.n_train :])
            return functional.cross_entropy(outputs, targets[self.n_train :]).item()

    def generate(self, *, seed: int = 0, n_latent: int = 32) -> None:
        """Write data that a random net classifies, and initial weights.

        Inputs lie near a curved surface of `n_latent` dimensions, as natural data do;
        the teacher sees the place on it.
        """
        random = torch.Generator().manual_seed(seed)
        n, n_inputs, n_classes = (self.n_train + self.n_held_out, self.sizes[0], self.sizes[-1])

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=random) * scale

        place = normal(n, n_latent)
        inputs = torch.tanh(place @ normal(n_latent, n_inputs, scale=n_latent**-0.5))
        inputs += normal(n, n_inputs, scale=0.1)
        hidden = torch.tanh(
            place @ normal(n_latent, 64, scale=1.5 * n_latent**-0.5) + normal(64, scale=0.2)
        )
        scores = hidden @ normal(64, n_classes)
        targets = ((scores - scores.mean(0)) / scores.std(0)).argmax(1)
        initial = []
        for n_in, n_out in zip(self.sizes, self.sizes[1:], strict=False):
            bound = 1 / math.sqrt(n_in)  # as torch initialises a linear layer
            for shape in ((n_out, n_in), (n_out,)):
                uniform = torch.rand(*shape, generator=random)
                initial.append(((2 * uniform - 1) * bound).reshape(-1))
        Path(self.data_folder).mkdir(parents=True, exist_ok=True)
        made = {"inputs": inputs, "targets": targets, "initial": torch.cat(initial)}
        for name, values in made.items():
            # A file that is shared grows to what is mapped of it.
            _map(self.data_folder, name, tuple(values.shape), values.dtype).copy_(values)


def _map(
    folder: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    shared: bool = True,
) -> torch.Tensor:
    path, size = str(Path(folder, name)), math.prod(shape)
    return torch.from_file(path, shared=shared, size=size, dtype=dtype).view(shape)


def load(net: nn.Module, flat: torch.Tensor) -> None:
    """Set the parameters of `net` to (n_parameters,) values."""
    sizes = [parameter.numel() for parameter in net.parameters()]
    with torch.no_grad():
        for parameter, values in zip(net.parameters(), flat.split(sizes), strict=True):
            parameter.copy_(values.view_as(parameter))


class Entrant:
    """One worker on the course: its net, its batches, its notes."""

    def __init__(self, course: Course, worker: int, *, in_step: bool = False) -> None:
        """Prepare; `batches` begins. `in_step`: the system lets no worker go ahead."""
        torch.set_num_threads(1)
        self.course = course
        self.net = course.net()  # with the initial weights
        self._worker = worker
        self._in_step = in_step
        self._board = course.board()
        self._times, self._recorded = course.times(), course.recorded()
        self._n_records = 0
        self._pauses = course.pause_seconds > 0 and worker == course.n_workers - 1

    def gradient(
        self, inputs: torch.Tensor, targets: torch.Tensor, net: nn.Module | None = None
    ) -> None:
        net = self.net if net is None else net
        net.zero_grad()
        functional.cross_entropy(net(inputs), targets).backward()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Wait for the others; yield batches until the budget of gradients is used.

        What the caller does with a batch ends with the next parameters in its net.
        """
        course, mine = self.course, self._board[self._worker]
        inputs, targets = course.data()
        self.gradient(inputs[: course.batch_size], targets[: course.batch_size])
        self.net.zero_grad()  # what torch does once, at the first use, is done
        mine[READY] = 1.0
        self._wait(lambda: bool((self._board[:-1, READY] == 1.0).all()))
        mine[BEGUN] = time.monotonic()
        self._record()
        for n, index in enumerate(self._indices(), start=1):
            yield inputs[index], targets[index]
            mine[N_GRADIENTS] = n
            if n % course.record_every == 0:
                self._record()
            if self._pauses:
                time.sleep(course.pause_seconds)
            if self._ends(n):
                break
        mine[DONE] = time.monotonic()

    def train(self, step: Callable[[], object], net: nn.Module | None = None) -> None:
        """Take a step after the gradient of each batch, then wait until all may leave."""
        for inputs, targets in self.batches():
            self.gradient(inputs, targets, net)
            step()
        self._wait(lambda: bool(self._board[-1, RELEASED]))

    def _indices(self) -> Iterator[torch.Tensor]:
        course = self.course
        random = torch.Generator().manual_seed(1 + self._worker)
        n = course.n_train // course.n_workers
        while True:
            order = torch.randperm(n, generator=random) + n * self._worker
            yield from order[: n - n % course.batch_size].split(course.batch_size)

    def _ends(self, n: int) -> bool:
        course = self.course
        if self._in_step:
            return n >= course.n_gradients // course.n_workers
        return self._board[:-1, N_GRADIENTS].sum().item() >= course.n_gradients

    def _record(self) -> None:
        if self._worker == 0 and self._n_records < self.course.n_records_max:
            flat = [parameter.detach().view(-1) for parameter in self.net.parameters()]
            torch.cat(flat, out=self._recorded[self._n_records])
            self._times[self._n_records] = time.monotonic()
            self._n_records += 1
            self._board[0, N_RECORDS] = self._n_records

    @staticmethod
    def _wait(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened for {WAIT_SECONDS_MAX:g} s")
            time.sleep(_POLL_SECONDS)


def run_together(
    target: Callable[..., None], arguments: Sequence[tuple[object, ...]], *, forever: int = 0
) -> None:
    """Run `target(*a)` for each a in a process of its own, until all have ended."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=each) for each in arguments]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes[forever:]):
            for index, process in enumerate(processes):
                process.join(0.05)
                if process.exitcode:
                    raise ChildProcessError(f"process {index} ended with status {process.exitcode}")
    finally:
        for process in processes:
            process.kill()
            process.join()
