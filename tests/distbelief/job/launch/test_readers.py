"""Processes that read samples: the bits, order and errors of a role that reads by itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Final, NamedTuple

import numpy as np
import pytest
import torch

from distbelief.core.errors import DistBeliefError, JobError
from distbelief.job.launch.readers import N_AHEAD_EACH, ReaderProcesses
from distbelief.task.data import Batch, Dataset
from distbelief.worker.batches import BatchIndices, BatchReader
from tests.distbelief.worker.test_draws import SOURCES, AtOnce, Noisy
from tests.processes.commands import alive, poll


pytestmark = pytest.mark.processes

N: Final = 12


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


class Samples:
    """Samples of any form."""

    def __init__(self, sample: Callable[[int], object]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> object:
        return self.sample(index)


class Batches(Samples):
    """Whole batches of any form."""

    def __getitems__(self, indices: list[int]) -> object:
        return self.sample(len(indices))


@contextmanager
def readers_of(
    dataset: Dataset, *, n: int = 2, seed: int = 5
) -> Iterator[tuple[BatchReader, ReaderProcesses]]:
    with ReaderProcesses("data.train") as readers:
        readers.fork(n, lambda: dataset)
        yield BatchReader(dataset, seed=seed, readers=readers), readers


def batch_of(*indices: int, epoch: int = 0) -> BatchIndices:
    return BatchIndices(position=0, indices=np.array(indices, np.int64), epoch=epoch)


def check_equal(found: Batch, expected: Batch) -> None:
    assert found.is_dictionary == expected.is_dictionary
    ours, others = found.tensors(), expected.tensors()
    assert list(ours) == list(others)
    for path, tensor in others.items():
        assert ours[path].dtype == tensor.dtype
        assert ours[path].shape == tensor.shape
        assert ours[path].stride() == tensor.stride()
        torch.testing.assert_close(ours[path], tensor, rtol=0.0, atol=0.0, equal_nan=True)


WANTED: Final = [
    batch_of(*np.random.default_rng(k).integers(N, size=4).tolist(), epoch=k // 3)
    for k in range(12)
]


@pytest.mark.each_value
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", [Noisy, AtOnce])
@pytest.mark.parametrize("n_readers", [1, 3])
def test_readers_draw_what_the_role_would_draw(
    source: str, kind: type[Noisy], n_readers: int
) -> None:
    dataset = kind(SOURCES[source])
    alone = BatchReader(dataset, seed=5)
    expected = [alone.read(one) for one in WANTED]
    with readers_of(dataset, n=n_readers) as (reader, _):
        for k, one in enumerate(WANTED):
            check_equal(reader.read(one, WANTED[k + 1 : k + 1 + reader.n_ahead]), expected[k])


def test_what_is_read_ahead_may_never_be_asked_for() -> None:
    """A generation ends: other samples come next, among them some that are being read."""
    dataset = Noisy(SOURCES["torch"])
    alone = BatchReader(dataset, seed=5)
    with readers_of(dataset) as (reader, _):
        for first, others in (
            (0, (1, 2, 3, 4)),
            (9, (3, 10)),
            (3, ()),
            (2, (9,)),
            (9, ()),
            (9, ()),
        ):
            found = reader.read(WANTED[first], [WANTED[k] for k in others])
            check_equal(found, alone.read(WANTED[first]))


def test_samples_of_any_form_are_handed_over() -> None:
    forms: list[Callable[[int], object]] = [
        lambda i: (torch.full((2, 3), i), float(i)),
        lambda i: ((torch.ones(2, dtype=torch.bfloat16), np.arange(3) + i), i),
        lambda i: ({"ids": torch.arange(4) + i, "deep": {"mask": torch.tensor([i > 3])}}, 1),
        lambda i: {"x": Pair(torch.zeros(0), [1, 2, i]), "y": torch.tensor(complex(i, 1))},
        lambda i: (tuple(torch.full((1,), k + i) for k in range(12)), torch.tensor(float("nan"))),
    ]
    for form in forms:
        dataset = Samples(form)
        with readers_of(dataset, n=1) as (reader, _):
            check_equal(
                reader.read(batch_of(3, 1, 4)), BatchReader(dataset).read(batch_of(3, 1, 4))
            )


def same(batch: object, _n: int) -> object:
    return batch


def test_tensors_keep_their_strides() -> None:
    """Kernels add in another order otherwise, and bits differ."""
    images = torch.randn(12, 3, 8, 8)
    forms: list[Callable[[int], object]] = [
        lambda n: (images[:n].to(memory_format=torch.channels_last), images[:n, 0, :, 0].t()[:n]),
        lambda n: (images[0, 0, 0, 0].expand(n, 5), torch.randn(6, n).t()[:, 1::2]),
        lambda n: (images[:n, 1:, 2:5, ::3], torch.view_as_complex(images[:n, 0, :, :2]).conj()),
    ]
    for form in forms:
        whole = form(4)
        with readers_of(Batches(partial(same, whole)), n=1) as (reader, _):
            found = reader.read(batch_of(0, 1, 2, 3))
        assert isinstance(whole, tuple)
        check_equal(found, Batch(*whole))


def test_a_batch_lives_on_after_its_readers() -> None:
    with readers_of(Samples(lambda i: (torch.full((1000,), i), i)), n=1) as (reader, _):
        first = reader.read(batch_of(1, 2), [batch_of(3, 4)])
        second = reader.read(batch_of(3, 4))
    inputs = first.tensors()["inputs",]
    inputs += 1  # it is its own memory
    assert inputs.sum(1).tolist() == [2000, 3000]
    assert second.tensors()["targets",].tolist() == [3, 4]


def failing(index: int) -> object:
    if index == 7:
        raise OSError("no such image")
    return torch.ones(2 if index == 8 else 1), index


@pytest.mark.parametrize("bad", [7, 8])
def test_an_error_is_that_of_the_role_and_comes_in_its_turn(bad: int) -> None:
    dataset = Samples(failing)
    with pytest.raises(JobError) as expected:
        BatchReader(dataset).read(batch_of(1, bad, 2))
    with readers_of(dataset) as (reader, _):
        for _ in range(3):
            reader.read(batch_of(1, 2), [batch_of(1, bad, 2), batch_of(3)])
        with pytest.raises(JobError) as caught:
            reader.read(batch_of(1, bad, 2), [batch_of(3)])
        reader.read(batch_of(3))
    assert str(caught.value) == str(expected.value)
    assert str(bad) in str(caught.value)


@pytest.mark.parametrize("kind", ["sparse", "parameter"])
def test_what_processes_cannot_hand_over_is_refused_with_the_way_out(kind: str) -> None:
    tensor = {"sparse": torch.eye(3).to_sparse(), "parameter": torch.nn.Parameter(torch.ones(3))}
    with (
        readers_of(Batches(lambda n: (tensor[kind], torch.ones(n))), n=1) as (reader, _),
        pytest.raises(JobError, match=r"inputs is .*: return a dense .* leave num_workers out of"),
    ):
        reader.read(batch_of(0, 1, 2))


def read_all(reader: BatchReader) -> None:
    for k in range(N):
        reader.read(batch_of(k), [batch_of((k + 1) % N), batch_of((k + 2) % N)])


def test_a_reader_that_is_killed_is_named_with_the_way_out() -> None:
    with readers_of(Samples(lambda i: (torch.ones(1), i))) as (reader, readers):
        ahead = [batch_of(k) for k in range(1, 5)]
        reader.read(batch_of(0), ahead)
        victim = readers.pids[0]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(DistBeliefError, match=rf"process {victim}, .* SIGKILL \(out of memory"):
            read_all(reader)
        pids = readers.pids
    assert not alive([victim, *pids])


def test_a_reader_that_cannot_go_on_tells_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    def leave(_index: int) -> object:
        raise SystemExit(3)

    with (
        readers_of(Samples(leave), n=1) as (reader, _),
        pytest.raises(
            DistBeliefError, match=r"status 3 \(see the log .* use a smaller num_workers"
        ),
    ):
        reader.read(batch_of(0))
    assert capfd.readouterr().err == ""


PROGRAM: Final = """
import os, time
from distbelief.job.launch.readers import ReaderProcesses

readers = ReaderProcesses("data.train")
readers.fork(2, lambda: [(1, 2)])
readers.fork(1, lambda: time.sleep(1000.0))  # it builds its data
print(*readers.pids, flush=True)
time.sleep(1000.0)
"""


def test_readers_end_with_a_role_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as role:
        assert role.stdout is not None
        pids = [int(pid) for pid in role.stdout.readline().split()]
        assert sorted(alive(pids)) == sorted(pids)
        role.kill()
    poll(lambda: not alive(pids))


def counting() -> Samples:
    """Return samples with the process that has read them, and their number among its own."""
    n_read = count(1)
    return Samples(lambda _index: (torch.tensor(float(os.getpid())), next(n_read)))


def test_no_more_is_read_ahead_than_two_batches_for_each_reader() -> None:
    with readers_of(counting()) as (reader, readers):
        assert reader.n_ahead == 2 * N_AHEAD_EACH == 4
        ahead = [batch_of(k) for k in range(1, 5)]
        found = [reader.read(batch_of(0), ahead), *(reader.read(one) for one in ahead)]
        who = [int(batch.tensors()["inputs",]) for batch in found]
        assert {*who} == {*readers.pids}
        assert max(int(batch.tensors()["targets",]) for batch in found) <= 3
