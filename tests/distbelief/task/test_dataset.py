from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.task.data import (
    Batch,
    Dataset,
    Fields,
    are_alike,
    marks_of,
    n_samples_of,
    read_batch,
    rebuilt,
    shown_path,
    tensors_of,
)


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


class OneByOne(Lists):
    """Reads no batch at once, as torch lets a subclass say."""

    __getitems__ = None  # type: ignore[assignment]


class Wrapped(Samples):
    """Has what the data set within has, and its own samples."""

    def __init__(self, within: Lists) -> None:
        super().__init__(pairs(3))
        self.within = within

    def __getattr__(self, name: str) -> object:
        return getattr(self.within, name)


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


def test_a_data_set_may_say_that_it_reads_no_batch_at_once() -> None:
    """Regression: its None was called, where torch's loader reads one sample after the other."""
    read = read_batch(OneByOne(pairs(3)), [2, 0])
    assert n_samples_of(read.inputs) == 2


def test_a_wrapper_reads_its_own_samples() -> None:
    """Regression: a batch came from the data set within, without the wrapper's transform."""
    within = Lists([(torch.full((2,), 9.0), 9)] * 3)
    assert not (read_batch(Wrapped(within), [0, 1]).tensors()["inputs",] == 9.0).any()


class InOrder(Lists):
    def read_in_order(self, wanted: list[int], _before: object) -> object:
        return [(torch.full((2,), 9.0), 9) for _ in wanted]


def test_a_wrapper_of_pieces_reads_its_own_samples() -> None:
    """The same of the other way to read a batch, which pieces and streams have."""
    read = read_batch(Wrapped(InOrder(pairs(3))), [0, 1])
    assert not (read.tensors()["inputs",] == 9.0).any()


@pytest.mark.parametrize(
    ("dataset", "indices", "claims"),
    [
        (Samples(pairs(2)), [0, 5], ["[data.test] reading samples 0, 5 failed: IndexError"]),
        (Samples([]), range(100), ["reading samples 0 to 99 failed"]),
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
        (Samples([(object(), 0)]), [0], ["inputs of sample 0 is of type object: it must be a"]),
        (
            Samples([({"x": 1, "name": "word"}, 0)]),
            [0],
            ["inputs.name of sample 0 is of type str", "leave out what neither forward"],
        ),
        (Samples([{"a": 1, "mask": None}]), [0], ["batch.mask of sample 0 is of type NoneType"]),
        (Samples([([torch.ones(2)], 0)]), [0], ["inputs of sample 0 is a list of 1"]),
        (
            Arrays(np.zeros((3, 2)), np.zeros(2)),
            [0, 1],
            ["inputs of shape (3, 2): the first size must be 2"],
        ),
        (Returning((1, 2, 3)), [0], ["a tuple of 3: a batch is a tuple (inputs, targets)"]),
        (
            Samples([{"a": 1, "b": 2}, {"a": 1}]),
            [0, 1],
            ["samples 0 and 1 have entries batch.a, batch.b and batch.a"],
        ),
        (Samples([{"a": 1}, (1, 2)]), [0, 1], ["sample 1 is a tuple of 2", "a dictionary"]),
        (
            Samples([{"a": torch.zeros(3)}, {"a": torch.zeros(4)}]),
            [0, 1],
            ["batch.a of samples 0 and 1 have shapes (3,) and (4,)"],
        ),
        (Returning([]), [0, 1], ["__getitems__ of 2 samples returned a list of 0"]),
    ],
    ids=["it fails", "many samples", "no pair", "a triple", "two shapes", "no tensor", "text",
         "nothing", "tensors in a list", "another size", "three parts", "other entries",
         "two forms", "two shapes of an entry", "another length"],
)  # fmt: skip
def test_a_data_set_that_gives_no_batch_is_refused_with_the_reason(
    dataset: Dataset, indices: Sequence[int], claims: list[str]
) -> None:
    with pytest.raises(JobError) as caught:
        read_batch(dataset, indices, table="data.test")
    assert str(caught.value).startswith("[data.test] ")
    assert all(claim in str(caught.value) for claim in claims)


@pytest.mark.parametrize("size", [1, 3])
def test_a_list_of_numbers_is_a_tensor(size: int) -> None:
    """Regression: of one sample it became a batch of its numbers."""
    samples = Samples([{"ids": [i, 5], "labels": i} for i in range(3)])
    batch = read_batch(samples, range(size))
    found = {shown_path(path): tensor.tolist() for path, tensor in batch.tensors().items()}
    expected = {"batch.ids": [[i, 5] for i in range(size)], "batch.labels": list(range(size))}
    assert found == expected


class Point(NamedTuple):
    x: torch.Tensor
    y: float


def rows(index: int) -> dict[str, object]:
    return {"mask": torch.tensor([True, index > 1]), "ids": torch.tensor([index, 7])}


FORMS: dict[str, Callable[[int], object]] = {
    "entries": rows,
    "keywords": lambda i: (rows(i), float(i)),
    "positions": lambda i: ((torch.tensor([i]), i), {"boxes": (torch.zeros(2), 2 * i)}),
    "fields": lambda i: [Point(torch.tensor([i]), 1.0), i],
}
PATHS = {
    "entries": ["batch.ids", "batch.mask"],
    "keywords": ["inputs.ids", "inputs.mask", "targets"],
    "positions": ["inputs.0", "inputs.1", "targets.boxes.0", "targets.boxes.1"],
    "fields": ["inputs.x", "inputs.y", "targets"],
}


@pytest.mark.parametrize("form", FORMS)
def test_items_of_any_form_are_joined_entry_by_entry(form: str) -> None:
    batch = read_batch(Samples([FORMS[form](i) for i in range(4)]), [3, 1])
    tensors = batch.tensors()
    assert [shown_path(path) for path in tensors] == PATHS[form]
    assert all(len(tensor) == 2 for tensor in tensors.values())
    assert batch.is_dictionary == (form == "entries")
    found = {shown_path(path): tensor.tolist() for path, tensor in tensors.items()}
    expected: dict[str, object] = {
        "entries": [[3, 7], [1, 7]],
        "keywords": [[3, 7], [1, 7]],
        "positions": [[3], [1]],
        "fields": [[3], [1]],
    }
    assert found[PATHS[form][0]] == expected[form]
    again = Batch.of(tensors)
    assert again.tensors().keys() == tensors.keys()
    assert again.is_dictionary == batch.is_dictionary


def test_a_dictionary_may_be_a_whole_batch() -> None:
    batch = read_batch(Returning({"b": np.ones((2, 3)), "a": [4, 5]}), [0, 1])
    assert list(batch.tensors()) == [("batch", "a"), ("batch", "b")]
    with pytest.raises(JobError, match=r"batch\.a of shape \(2,\): the first size must be 3"):
        read_batch(Returning({"a": [4, 5]}), [0, 1, 2])


class Takes(nn.Module):
    @override
    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor | None = None) -> object:
        return {"ids": ids, "mask": mask}


class TakesAny(nn.Module):
    @override
    def forward(self, **entries: torch.Tensor) -> object:
        return entries


def test_of_a_dictionary_forward_gets_what_it_names() -> None:
    entries = {"ids": torch.zeros(2), "mask": torch.ones(2), "labels": torch.ones(2)}
    item = Batch(entries, entries)
    assert item.run(Takes()) == {"ids": entries["ids"], "mask": entries["mask"]}
    assert item.run(TakesAny()) == entries
    with pytest.raises(TypeError, match="labels"):  # arguments that are named are all meant
        Batch(entries, torch.zeros(2)).run(Takes())


def test_values_are_taken_apart_and_put_together() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    value = {"logits": one, "more": [None, (two, "text")], "cache": None}
    found = tensors_of(value)
    assert list(found) == [("logits",), ("more", 1, 0)]
    again = rebuilt(found)
    assert isinstance(again, Fields)
    assert again.logits is again["logits"] is again[0] is one
    assert rebuilt({(): one}) is one
    assert rebuilt({("a", 2): two}) == Fields(a=(None, None, two))
    with pytest.raises(AttributeError, match="there is no 'cache', only logits, more"):
        again.cache  # noqa: B018


def test_data_of_other_content_are_told_apart() -> None:
    """Data were known by their number: a host with others of as many samples took part."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(50, 2, 3, generator=generator)
    labels = torch.arange(50) % 6
    marks = marks_of(TensorDataset(inputs, labels))
    assert marks is not None
    assert are_alike(marks, marks_of(TensorDataset(inputs.clone(), labels)))
    # The same features of another processor, or with NaN, are the same data.
    assert are_alike(marks, marks_of(TensorDataset(inputs * (1 + 1e-6) + 1e-9, labels)))
    broken = inputs.clone()
    broken[0, 0] = torch.nan
    assert are_alike(*[marks_of(TensorDataset(broken, labels))] * 2)
    for others in (
        TensorDataset(inputs.flip(0), labels),
        TensorDataset(inputs.flip(2), labels),
        TensorDataset(inputs, labels.flip(0)),
        TensorDataset(inputs.double() * 1.01, labels),
        TensorDataset(broken, labels),
        TensorDataset(torch.randn(50, 2, 3, generator=generator), labels),
    ):
        assert not are_alike(marks, marks_of(others))
    assert are_alike(marks_of(Samples([(torch.zeros(3), 2)])), (0.0, 0.0, 2.0, 2.0))


def test_samples_drawn_at_random_fit_all() -> None:
    generator = torch.Generator().manual_seed(3)

    class Drawn(Samples):
        @override
        def __getitem__(self, index: int) -> object:
            return torch.rand(3, generator=generator), index

    assert marks_of(Drawn(range(9))) is None
    assert are_alike(None, (1.0, 2.0))
