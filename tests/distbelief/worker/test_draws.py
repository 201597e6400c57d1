"""What data sets and models draw from the generators of the process.

With random augmentation and dropout, the same seed gave other weights (0.031 apart after some
steps): samples were read in one thread, and steps taken in another, from the same generators.
"""

import random  # noqa: TID251 -- as users do
from collections.abc import Callable
from threading import Thread
from typing import Final

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.task import dry_run
from distbelief.task.data import read_batch
from distbelief.worker.batches import BatchIndices, BatchReader, Draws
from distbelief.worker.local_executor import FlatModel, LocalExecutor


N: Final = 12
SOURCES: Final[dict[str, Callable[[], float]]] = {
    "torch": lambda: float(torch.randn(())),
    "numpy": lambda: float(np.random.standard_normal()),  # noqa: NPY002 -- as users do
    "random": random.random,
}


class Noisy:
    """Samples that are augmented at random, some of them or all."""

    def __init__(self, draw: Callable[[], float], *, first: int = 0) -> None:
        self.draw = draw
        self.first = first

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.draw() if index >= self.first else 0.0
        return torch.full((3,), index + noise), torch.tensor(float(index))


class AtOnce(Noisy):
    def __getitems__(self, indices: list[int]) -> list[object]:
        return [self[index] for index in indices]


def batch_of(*indices: int, epoch: int = 0, position: int = 0) -> BatchIndices:
    return BatchIndices(position=position, indices=np.array(indices), epoch=epoch)


def rows(reader: BatchReader, *indices: int, epoch: int = 0) -> list[float]:
    (inputs, _) = reader.read(batch_of(*indices, epoch=epoch)).tensors().values()
    return [float(row[0]) for row in inputs]


@pytest.mark.parametrize("source", SOURCES)
def test_a_sample_draws_the_same_whoever_reads_it_beside_what(source: str) -> None:
    dataset = Noisy(SOURCES[source])
    first, other = BatchReader(dataset, seed=5), BatchReader(dataset, seed=5)
    one = rows(first, 0, 1, 2, 3) + rows(first, 4, 5, 6)
    two = rows(other, 6, 2) + rows(other, 0, 1, 3) + rows(other, 4, 5)
    assert one == [two[k] for k in (2, 3, 1, 4, 5, 6, 0)]
    assert len({value - index for index, value in enumerate(one)}) == 7
    assert rows(first, 2, epoch=1) != [one[2]]  # each epoch augments anew
    assert rows(BatchReader(dataset, seed=6), 2) != [one[2]]


def test_samples_that_are_read_at_once_have_the_stream_of_the_first() -> None:
    dataset = AtOnce(SOURCES["torch"])
    reader = BatchReader(dataset)
    rows(reader, 8, 9)
    one = rows(reader, 0, 1, 2)
    assert rows(reader, 0, 1, 2) == rows(BatchReader(dataset), 0, 1, 2) == one
    assert rows(reader, 1, 2) != one[1:]


@pytest.mark.parametrize("source", SOURCES)
def test_samples_of_which_only_some_draw_are_found_out(source: str) -> None:
    """They are looked at in the first batch, the second, the fourth, ..."""
    reader = BatchReader(Noisy(SOURCES[source], first=6))
    assert rows(reader, 0, 1) == [0.0, 1.0]
    late = rows(reader, 2, 7)
    assert rows(BatchReader(Noisy(SOURCES[source])), 7, 2)[0] == late[1]


@pytest.mark.parametrize("source", SOURCES)
def test_a_sample_that_draws_for_the_first_time_at_any_time_is_found_out(source: str) -> None:
    """A resumed run and one with readers had other weights, where few samples drew numbers."""
    dataset = Noisy(SOURCES[source], first=N - 1)
    found: list[float] = []
    for n_before in range(8):
        reader = BatchReader(dataset, seed=3)
        for _ in range(n_before):
            rows(reader, 0, 1)
        found += rows(reader, N - 1)
    assert len({*found}) == 1


@pytest.mark.parametrize("source", ["numpy", "random"])
def test_a_second_generator_that_is_drawn_from_later_is_found_out(source: str) -> None:
    """Only torch's is seeded for each sample, until others are seen to be drawn from."""

    def draw() -> float:
        noise = SOURCES["torch"]()
        return noise + SOURCES[source]() if noise > 0.8 else noise

    one, other = (BatchReader(Noisy(draw), seed=3) for _ in range(2))
    found = [row for k in range(0, N, 3) for row in rows(one, *range(k, k + 3), epoch=1)]
    order = [*reversed(range(N))]
    again = [row for k in range(0, N, 4) for row in rows(other, *order[k : k + 4], epoch=1)]
    assert found == again[::-1]


def test_data_that_draw_nothing_leave_the_generators_alone() -> None:
    reader = BatchReader(Noisy(lambda: 0.0))
    for _ in range(2):
        rows(reader, 0, 1)
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    rows(reader, 0, 1)
    assert torch.rand(()) == expected


class Interrupted(nn.Module):
    """Lets another thread do something in the middle of its forward."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.draw = SOURCES[source]
        self.meanwhile: Callable[[], object] | None = None
        self.thread = Thread()

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meanwhile is not None:
            self.thread = Thread(target=self.meanwhile)
            self.thread.start()
            self.thread.join(0.05)  # it waits for the end of the step, or has drawn by then
        y: torch.Tensor = self.layer(x) * self.draw()
        return y.flatten()


def executor_of(module: nn.Module, draw: Callable[[], float]) -> LocalExecutor:
    return LocalExecutor(
        FlatModel(module),
        Noisy(draw),
        loss=nn.functional.mse_loss,
        names=dry_run.Names(model="net", loss="mse", data="data.train"),
        seed=(3, 1),
    )


@pytest.mark.parametrize("source", SOURCES)
def test_no_read_draws_in_the_middle_of_a_step(source: str) -> None:
    def play(*, beside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Interrupted(source)
        executor = executor_of(module, SOURCES[source])
        found: dict[int, torch.Tensor] = {}
        executor.run(executor.batches.read(1, 0, batch_of(0, 1)), found.__setitem__)
        here, after = (
            executor.batches.read(1, 1, batch_of(2, 3, position=2)),
            batch_of(4, 5, position=4),
        )
        read: list[torch.Tensor] = []

        def read_on() -> None:
            batch = executor.batches.read(1, 2, after).batch
            assert batch is not None
            read.extend(batch.tensors().values())

        if beside:
            module.meanwhile = read_on
        executor.run(here, found.__setitem__)
        if beside:
            module.thread.join()
        else:
            read_on()
        return [*found.values(), *read]

    for one, two in zip(play(beside=False), play(beside=True), strict=True):
        assert torch.equal(one, two)


def test_a_read_that_draws_goes_on_beside_a_step_that_does_not() -> None:
    """Augmented images and a net without dropout: one thread reads while the other computes."""
    model, data = Draws(), Draws()
    sources: dict[Draws, Callable[[], float]] = {model: lambda: 0.0, data: SOURCES["torch"]}
    for draws, source in sources.items():
        for _ in range(4):
            draws.run(source, seed=lambda: 1)
    assert (model.are_seen, data.are_seen) == (False, True)
    read: list[bool] = []

    def read_on() -> None:
        data.run(lambda: read.append(True), seed=lambda: 2)

    def compute() -> None:
        thread = Thread(target=read_on)
        thread.start()
        thread.join(60.0)
        assert read

    model.run(compute, seed=lambda: 3)  # the fifth time: it is not looked at


def test_a_plain_read_is_that_of_the_data_set() -> None:
    dataset = Noisy(lambda: 0.0)
    found = BatchReader(dataset).read(batch_of(3, 1)).tensors().values()
    expected = read_batch(dataset, [3, 1]).tensors().values()
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
