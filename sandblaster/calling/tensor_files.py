"""Data that the user holds as tensors, as a file that all replicas map.

Mapped, not read: on one host they share one copy of it.
"""

import zlib
from pathlib import Path
from typing import final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from distbelief.errors import JobError


@final
class TensorPairs:
    """A data set of the pairs (inputs[i], targets[i])."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs = inputs
        self._targets = targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index], self._targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole batch."""
        n, first = len(indices), indices[0]
        if indices[-1] == first + n - 1 and indices == list(range(first, first + n)):
            return self._inputs[first : first + n], self._targets[first : first + n]
        return self._inputs[indices], self._targets[indices]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All inputs, all targets."""
        return self._inputs, self._targets

    @property
    def fingerprint(self) -> str:
        """Of all values: a run is resumed on the same data only."""
        parts = (self._inputs, self._targets)
        value = 0
        for part in parts:
            value = zlib.crc32(part.view(torch.uint8).numpy().data, value)
        shapes = "; ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        return f"crc32 {value:08x} of {shapes}"


def pairs(path: str) -> TensorPairs:
    """Return the data set in this file: the factory of job files."""
    tensors = load_file(path)
    return TensorPairs(tensors["inputs"], tensors["targets"])


def tensors_in(path: Path) -> dict[str, torch.Tensor] | None:
    """Return what is in a file, or None if it is not there, or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return None


def as_pair(data: object) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return inputs and targets, if that is what the data are; else None.

    They are as a file has them: contiguous, without gradients, in ordinary memory.

    Raises:
        JobError: they are, but cannot be used.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not isinstance(data, tuple | list) or len(data) != 2:
        return None
    inputs, targets = (_tensor(part) for part in data)
    if inputs is None or targets is None:
        return None
    if inputs.ndim < 1 or targets.ndim < 1 or len(inputs) != len(targets):
        raise JobError(
            f"minimize: data are inputs of shape {tuple(inputs.shape)} and targets of "
            f"shape {tuple(targets.shape)}: there must be as many of both"
        )
    return inputs, targets


def write_pairs(path: Path, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write inputs and targets, as `as_pair` returns them, to `path`."""
    inputs, targets = pair
    if inputs.data_ptr() == targets.data_ptr():
        targets = targets.clone()  # the file must not hold one memory twice
    save_file({"inputs": inputs, "targets": targets}, path)


def _tensor(part: object) -> torch.Tensor | None:
    if isinstance(part, np.ndarray):
        try:
            return torch.from_numpy(np.ascontiguousarray(part))
        except TypeError:
            raise JobError(
                f"minimize: data is an array of {part.dtype}, of which torch has no "
                "tensors: make numbers of it"
            ) from None
    if not isinstance(part, torch.Tensor):
        return None
    return part.detach().cpu().contiguous()
