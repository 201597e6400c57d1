"""Initial values from a safetensors file, read by ranges: no process needs it whole."""

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from distbelief.errors import StorageError
from distbelief.parameter_server.layout.layout import Layout
from distbelief.vectors import Vector


Read = Callable[[str, int, int], Vector]
"""read(name, start, stop) -> elements [start, stop) of that tensor, row-major."""


def reader(path: str, layout: Layout) -> Read:
    """Return a function that reads ranges of the layout's tensors from this file.

    Args:
        path: A .safetensors file with whole tensors by name.
        layout: Names and shapes that it must have; its dtype is what is returned.

    Raises:
        StorageError: the file cannot be read, lacks a tensor, or has another shape.
    """
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    dtype = torch.float64 if layout.dtype.itemsize == 8 else torch.float32
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read initial values from {path}: {error}") from None
    for name in shapes:
        if name not in found:
            few = ", ".join(sorted(found)[:5])
            raise StorageError(
                f"{path} has no tensor {name!r} (it has {few}"
                f"{', ...' if len(found) > 5 else ''}): use a file of this model"
            )

    def read(name: str, start: int, stop: int) -> Vector:
        with safe_open(path, framework="pt") as file:
            tensor = file.get_slice(name)
            shape = tuple(tensor.get_shape())
            if shape != shapes[name]:
                raise StorageError(
                    f"{path}: tensor {name!r} has shape {shape}, the model's has "
                    f"{shapes[name]}: use a file of this model"
                )
            if not shape:
                part = file.get_tensor(name).reshape(1)
                first = 0
            else:
                row = max(prod(shape[1:]), 1)
                first = start // row * row
                part = tensor[start // row : -(-stop // row)]
            flat: torch.Tensor = part.reshape(-1)[start - first : stop - first]
            return np.asarray(flat.to(dtype).numpy())

    return read
