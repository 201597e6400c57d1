from collections.abc import Sequence

import numpy as np
import pytest
import torch

from distbelief.data import Dataset, read_batch
from distbelief.errors import JobError


class Samples:
    """As torch has it: one sample at a time."""

    def __init__(self, samples: Sequence[object]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> object:
        return self._samples[index]


class Lists(Samples):
    """A list of samples for each batch."""

    def __getitems__(self, indices: list[int]) -> object:
        return [self._samples[index] for index in indices]


class Arrays:
    """A finished batch at once."""

    def __init__(self, inputs: object, targets: object) -> None:
        self.batch = inputs, targets

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> object:
        raise AssertionError("the batch is asked for at once")

    def __getitems__(self, indices: list[int]) -> object:
        return self.batch


def pairs(n: int) -> list[tuple[torch.Tensor, int]]:
    return [(torch.full((3,), float(i)), i) for i in range(n)]


@pytest.mark.parametrize("form", [Samples, Lists])
def test_samples_are_joined_in_the_order_asked_for(form: type[Samples]) -> None:
    inputs, targets = read_batch(form(pairs(5)), [3, 0, 4]).tensors().values()
    assert inputs.shape == (3, 3)
    assert inputs[:, 0].tolist() == [3.0, 0.0, 4.0]
    assert targets.tolist() == [3, 0, 4]
    assert targets.dtype == torch.int64


def test_a_tuple_is_a_whole_batch() -> None:
    inputs, targets = np.ones((2, 3), np.float32), np.array([1, 2])
    got = list(read_batch(Arrays(inputs, targets), [7, 8]).tensors().values())
    assert got[0].dtype == torch.float32
    assert got[0].shape == (2, 3)
    assert got[1].tolist() == [1, 2]


def test_indices_may_be_numpy_integers() -> None:
    _, targets = read_batch(Samples(pairs(5)), np.array([4, 1]).tolist()).tensors().values()
    assert targets.tolist() == [4, 1]


class Returning(Samples):
    """Its batches are this."""

    def __init__(self, batch: object) -> None:
        super().__init__([])
        self._batch = batch

    def __getitems__(self, indices: list[int]) -> object:
        return self._batch


@pytest.mark.parametrize(
    ("dataset", "indices", "claims"),
    [
        (Samples(pairs(2)), [0, 5], ["[data.test] reading samples 0, 5 failed: IndexError"]),
        (Samples([]), range(100), ["0, 1, 2, 3, 4, ... (100 in all)"]),
        (
            Samples([(torch.zeros(1), 0), torch.zeros(3)]),
            [0, 1],
            ["[data.test] sample 1 is of type Tensor: it must be a pair (input, target)"],
        ),
        (Samples([(1, 2, 3)]), [0], ["sample 0 is a tuple of 3"]),
        (
            Samples([(torch.zeros(3), 0), (torch.zeros(4), 0)]),
            [0, 1],
            ["inputs of samples 0 and 1 have shapes (3,) and (4,)", "pad or crop"],
        ),
        (Samples([(object(), 0)]), [0], ["cannot join samples"]),
        (Samples([("word", 0)]), [0], ["inputs.0 are of type str"]),
        (
            Arrays(np.zeros((3, 2)), np.zeros(2)),
            [0, 1],
            ["inputs of shape (3, 2): the first size must be 2"],
        ),
        (Returning((1, 2, 3)), [0], ["a tuple of 3: a batch is a tuple (inputs, targets)"]),
        (Returning([]), [0, 1], ["__getitems__ of 2 samples returned a list of 0"]),
    ],
    ids=["it fails", "many samples", "no pair", "a triple", "two shapes", "no join", "text",
         "another size", "three parts", "another length"],
)  # fmt: skip
def test_a_data_set_that_gives_no_batch_is_refused_with_the_reason(
    dataset: Dataset, indices: Sequence[int], claims: list[str]
) -> None:
    with pytest.raises(JobError) as caught:
        read_batch(dataset, indices, table="data.test")
    assert str(caught.value).startswith("[data.test] ")
    assert all(claim in str(caught.value) for claim in claims)
