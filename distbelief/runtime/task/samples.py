"""What one sample of a data set is like: all that a layer graph needs to know of it."""

from typing import final

import msgspec
import torch
from typing_extensions import override

from distbelief.data.dataset import Dataset, read_batch
from distbelief.graph.region import Shape


@final
class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and kinds of an input and its target.

    Attributes:
        input_shape: Without the batch.
        input_is_integer: Words, for example.
        target_shape: Likewise.
        target_is_integer: Labels, for example.
    """

    input_shape: Shape
    input_is_integer: bool
    target_shape: Shape
    target_is_integer: bool

    @override
    def __str__(self) -> str:
        """Return "input [3, 32, 32], target []"."""
        kind = " of whole numbers"
        return (
            f"input {list(self.input_shape)}{kind if self.input_is_integer else ''}, "
            f"target {list(self.target_shape)}{kind if self.target_is_integer else ''}"
        )


def sample_of(dataset: Dataset, *, table: str = "data.train") -> Sample:
    """Return what the first sample of a data set is like.

    Raises:
        JobError: it cannot be read.
    """
    inputs, targets = read_batch(dataset, [0], table=table)
    return Sample(
        input_shape=tuple(inputs.shape[1:]),
        input_is_integer=not _is_number(inputs),
        target_shape=tuple(targets.shape[1:]),
        target_is_integer=not _is_number(targets),
    )


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()
