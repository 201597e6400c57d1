"""The tensors of a model as the shards see them: names, shapes, kinds."""

import math
from collections.abc import Sequence
from typing import Literal, final

import msgspec
import numpy as np
import torch

from distbelief.vectors import Vector


Kind = Literal["parameter", "buffer"]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a model: its name, its shape, and what it is to the shards.

    A "parameter" is updated by gradients; a "buffer" (BatchNorm's statistics, a frozen
    parameter) is averaged over the clients.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = "parameter"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor has no name; every tensor needs its own")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has shape {self.shape}; sizes are 0 or more")
        if self.kind not in {"parameter", "buffer"}:
            raise ValueError(
                f"tensor {self.name!r} has kind {self.kind!r}; use 'parameter' or 'buffer'"
            )

    @property
    def n_elements(self) -> int:
        """Product of the sizes: 1 for a scalar."""
        return math.prod(self.shape)


def check_tensors(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None]) -> None:
    """Check that these are the flat tensors of `specs`.

    Raises:
        ValueError: one is missing, or has another shape.
    """
    if len(tensors) != len(specs):
        raise ValueError(
            f"{len(tensors)} tensors given, the layout has {len(specs)}: "
            "give all of them, in its order (whole tensors are sorted by name)"
        )
    for spec, tensor in zip(specs, tensors, strict=True):
        check_tensor(spec, tensor)


def check_tensor(spec: TensorSpec, tensor: torch.Tensor | None) -> None:
    """Check that this is the flat tensor of `spec`; None is always right.

    Raises:
        ValueError: it has another shape.
    """
    if tensor is None:
        return
    if tensor.shape != (spec.n_elements,):
        raise ValueError(
            f"tensor {spec.name!r} has shape {tuple(tensor.shape)}; its "
            f"{spec.n_elements} elements are needed in one dimension: flatten "
            "it, and give the tensors in the layout's order (whole ones: by name)"
        )
    if tensor.is_complex():
        raise ValueError(
            f"tensor {spec.name!r} is {tensor.dtype}, and shards hold real "
            "numbers; make it a real one with torch.view_as_real"
        )


def as_tensor(vector: Vector) -> torch.Tensor:
    """Return the same memory as a tensor.

    Of a read-only array too, at which torch would warn: it knows no read-only tensors.
    """
    if vector.flags.writeable:
        return torch.from_numpy(vector)
    return torch.from_numpy(np.asarray(_Writeable(vector)))


@final
class _Writeable:
    """Presents an array's memory as if it could be written."""

    def __init__(self, vector: Vector) -> None:
        address, _ = vector.__array_interface__["data"]
        self._vector = vector  # keeps the memory alive
        self.__array_interface__ = vector.__array_interface__ | {"data": (address, False)}
