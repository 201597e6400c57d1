"""Map-style data sets, read a batch at a time.

A data set has a length and returns a pair (input, target) for `dataset[index]`, as in torch. With
torch's `__getitems__`, it is asked for a whole batch at once. It may return a list of samples, or
the finished batch as a tuple (inputs, targets), which avoids splitting an array into samples and
joining them again.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch.utils.data import default_collate

from distbelief.errors import JobError


Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs (n_samples, ...) and targets (n_samples, ...)."""


@runtime_checkable
class Dataset(Protocol):
    """A map-style data set of pairs (input, target)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@runtime_checkable
class _BatchedDataset(Protocol):
    def __getitems__(self, indices: list[int], /) -> object: ...


def read_batch(dataset: Dataset, indices: Sequence[int], *, table: str = "data.train") -> Batch:
    """Return the samples of these indices, joined in this order; `table` is for messages.

    Raises:
        JobError: The data set fails, or its samples are not pairs or do not join.
    """
    wanted = [int(index) for index in indices]
    try:
        if isinstance(dataset, _BatchedDataset):
            read = dataset.__getitems__(wanted)
        else:
            read = [dataset[index] for index in wanted]
    except Exception as error:  # the user's code may raise anything
        raise JobError(
            f"[{table}] reading samples {_shown(wanted)} failed: {type(error).__name__}: {error}"
        ) from error
    if isinstance(read, tuple):
        return _whole_batch(read, wanted, table=table)
    if not isinstance(read, list) or len(read) != len(wanted):
        raise JobError(
            f"[{table}] __getitems__ of {len(wanted)} samples returned {_kind(read)}: "
            "it must return a list of as many samples, or a tuple (inputs, targets)"
        )
    return _joined(read, wanted, table=table)


def _whole_batch(read: tuple[object, ...], wanted: Sequence[int], *, table: str) -> Batch:
    if len(read) != 2:
        raise JobError(
            f"[{table}] __getitems__ returned {_kind(read)}: a batch is a tuple (inputs, targets)"
        )
    batch = _tensor(read[0], "inputs", table), _tensor(read[1], "targets", table)
    for name, tensor in zip(("inputs", "targets"), batch, strict=True):
        if tensor.ndim == 0 or len(tensor) != len(wanted):
            raise JobError(
                f"[{table}] __getitems__ of {len(wanted)} samples returned {name} of "
                f"shape {tuple(tensor.shape)}: the first size must be {len(wanted)}"
            )
    return batch


def _joined(samples: list[object], wanted: Sequence[int], *, table: str) -> Batch:
    for index, sample in zip(wanted, samples, strict=True):
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise JobError(
                f"[{table}] sample {index} is {_kind(sample)}: it must be a pair (input, target)"
            )
    try:
        inputs, targets = default_collate(samples)
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobError(
            f"[{table}] {_misfit(samples, wanted) or f'cannot join samples: {error}'}"
        ) from error
    return _tensor(inputs, "inputs", table), _tensor(targets, "targets", table)


# Names the first two samples with different shapes, which torch's own error does not.
def _misfit(samples: list[object], wanted: Sequence[int]) -> str | None:
    shapes: dict[int, tuple[int, object]] = {}
    for index, sample in zip(wanted, samples, strict=True):
        assert isinstance(sample, tuple | list)
        for place, part in enumerate(sample):
            shape = tuple(getattr(part, "shape", ()))
            first, expected = shapes.setdefault(place, (index, shape))
            if shape != expected:
                return (
                    f"the {('inputs', 'targets')[place]} of samples {first} and {index}"
                    f" have shapes {expected} and {shape}: all samples must have one "
                    "shape (pad or crop them in the data set)"
                )
    return None


def _tensor(value: object, name: str, table: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobError(
            f"[{table}] {name} are {_kind(value)}, which torch cannot turn into a tensor: {error}"
        ) from error


def _kind(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"


def _shown(indices: Sequence[int]) -> str:
    few = ", ".join(map(str, indices[:5]))
    return few if len(indices) <= 5 else f"{few}, ... ({len(indices)} in all)"
