"""Reading a batch: the three forms a data set may have, and what each gets wrong."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from distbelief.data.dataset import Dataset, read_batch
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
    inputs, targets = read_batch(form(pairs(5)), [3, 0, 4])
    assert inputs.shape == (3, 3)
    assert inputs[:, 0].tolist() == [3.0, 0.0, 4.0]
    assert targets.tolist() == [3, 0, 4]
    assert targets.dtype == torch.int64


def test_a_tuple_is_a_whole_batch() -> None:
    inputs, targets = np.ones((2, 3), np.float32), np.array([1, 2])
    got = read_batch(Arrays(inputs, targets), [7, 8])
    assert got[0].dtype == torch.float32
    assert got[0].shape == (2, 3)
    assert got[1].tolist() == [1, 2]


def test_indices_may_be_numpy_integers() -> None:
    _, targets = read_batch(Samples(pairs(5)), np.array([4, 1]).tolist())
    assert targets.tolist() == [4, 1]


def refused(dataset: Dataset, indices: Sequence[int]) -> str:
    with pytest.raises(JobError) as caught:
        read_batch(dataset, indices, table="data.test")
    return str(caught.value)


def test_a_data_set_that_fails_is_named_with_the_samples() -> None:
    text = refused(Samples(pairs(2)), [0, 5])
    assert text.startswith("[data.test] reading samples 0, 5 failed: IndexError")


def test_of_many_samples_a_few_are_named() -> None:
    text = refused(Samples([]), range(100))
    assert "0, 1, 2, 3, 4, ... (100 in all)" in text


def test_a_sample_that_is_no_pair_is_named() -> None:
    text = refused(Samples([(torch.zeros(1), 0), torch.zeros(3)]), [0, 1])
    assert text == ("[data.test] sample 1 is of type Tensor: it must be a pair (input, target)")


def test_a_triple_is_no_pair() -> None:
    assert "sample 0 is a tuple of 3" in refused(Samples([(1, 2, 3)]), [0])


def test_samples_of_two_shapes_are_named_with_both() -> None:
    text = refused(Samples([(torch.zeros(3), 0), (torch.zeros(4), 0)]), [0, 1])
    assert "inputs of samples 0 and 1 have shapes (3,) and (4,)" in text
    assert "pad or crop" in text


def test_samples_that_do_not_join_say_why() -> None:
    assert "cannot join samples" in refused(Samples([(object(), 0)]), [0])


def test_text_is_no_tensor() -> None:
    assert "inputs are a tuple of 1" in refused(Samples([("word", 0)]), [0])


def test_a_batch_of_another_size_is_named_with_its_shape() -> None:
    text = refused(Arrays(np.zeros((3, 2)), np.zeros(2)), [0, 1])
    assert "inputs of shape (3, 2): the first size must be 2" in text


def test_a_batch_of_three_parts_is_refused() -> None:

    class Triples(Samples):
        def __getitems__(self, indices: list[int]) -> object:
            return (1, 2, 3)

    assert "a tuple of 3: a batch is a tuple (inputs, targets)" in refused(Triples([]), [0])


def test_a_list_of_another_length_is_refused() -> None:
    class Short(Samples):
        def __getitems__(self, indices: list[int]) -> object:
            return []

    assert "__getitems__ of 2 samples returned a list of 0" in refused(Short([]), [0, 1])
