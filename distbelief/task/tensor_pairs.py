"""Inputs and targets that are tensors or arrays already, as a data set."""

import zlib
from typing import cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from distbelief.core.errors import JobError


Pair = tuple[Tensor, Tensor]


@final
class TensorPairs:
    """A data set of the pairs (inputs[i], targets[i])."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.tensors = inputs, targets

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Pair:
        inputs, targets = self.tensors
        return inputs[index], targets[index]

    def __getitems__(self, indices: list[int]) -> Pair:
        inputs, targets = self.tensors
        n, first = len(indices), indices[0]
        if indices[-1] == first + n - 1 and indices == list(range(first, first + n)):
            # Copies: a model or loss that changes its arguments must not change the data.
            return inputs[first : first + n].clone(), targets[first : first + n].clone()
        chosen = torch.tensor(indices)
        return inputs[chosen], targets[chosen]

    @property
    def fingerprint(self) -> str:
        """Checksum of all values: a run resumes on the same data only."""
        value = 0
        for part in self.tensors:
            if part.numel():  # torch makes no such view of an empty array of numpy's
                value = zlib.crc32(part.view(torch.uint8).numpy().data, value)
        shapes = "; ".join(f"{part.dtype} {tuple(part.shape)}" for part in self.tensors)
        return f"crc32 {value:08x} of {shapes}"


def as_pair(data: object, *, user: str) -> Pair | None:
    """Return inputs and targets, contiguous, in CPU memory and without gradients; else None.

    None too of a TensorDataset that reads its samples in a way of its own.
    """
    if isinstance(data, TensorDataset):
        if not _reads_as_torch(type(data)):
            return None
        data = data.tensors
    parts = list(data) if isinstance(data, tuple | list) else [data]
    tensors = [_tensor(part, user=user) for part in parts]
    if all(tensor is None for tensor in tensors):
        return None
    if len(tensors) != 2 or any(tensor is None for tensor in tensors):
        found = ", ".join(type(part).__name__ for part in parts[:4])
        raise JobError(
            f"{user}: data are of {found}: give inputs and targets, as two tensors or arrays "
            "(x, y), or a function of a module that makes a data set"
        )
    inputs, targets = cast("list[Tensor]", tensors)
    if inputs.ndim < 1 or targets.ndim < 1 or len(inputs) != len(targets):
        raise JobError(
            f"{user}: data are inputs of shape {tuple(inputs.shape)} and targets of "
            f"shape {tuple(targets.shape)}: give as many inputs as targets"
        )
    return inputs, targets


def _reads_as_torch(kind: type[TensorDataset]) -> bool:
    """Return whether samples are rows of its tensors: a subclass may transform them."""
    names = "__getitem__", "__getitems__", "__len__"
    return all(getattr(kind, one, None) is getattr(TensorDataset, one, None) for one in names)


def _tensor(part: object, *, user: str) -> Tensor | None:
    if isinstance(part, np.ndarray):
        native = part.dtype.newbyteorder("=")
        try:
            return torch.from_numpy(np.ascontiguousarray(part, dtype=native))
        except TypeError:
            raise JobError(
                f"{user}: data is an array of {part.dtype}, which torch does not have: "
                "convert it to numbers"
            ) from None
    if not isinstance(part, Tensor):
        return None
    if part.is_meta or part.is_quantized or part.layout != torch.strided:
        kind = "a tensor on the meta device" if part.is_meta else f"{part.layout} of {part.dtype}"
        raise JobError(f"{user}: data is {kind}: give a dense tensor, as of to_dense()")
    return part.detach().cpu().contiguous()
