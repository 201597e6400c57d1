"""The trained model as one file: whole tensors under their names and shapes.

The shards hold ranges of flat tensors; here they become what `load_state_dict` of the
plain module takes, or any other program that reads safetensors.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from distbelief import files
from distbelief.parameter_server.layout import Layout
from distbelief.runtime.local_model import LocalModel
from distbelief.vectors import Vector


def write_model(
    path: Path,
    layout: Layout,
    shard_values: Sequence[Vector],
    *,
    like: nn.Module | None = None,
    facts: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Write the model that the shards hold to `path`; return its tensors by name.

    Args:
        path: A .safetensors file, replaced whole or not at all.
        layout: How the shards hold it.
        shard_values: Of each shard, (layout.shard_size(k),).
        like: A module of this kind. It tells which tensors are integers (BatchNorm's
            num_batches_tracked) and gives the second names of shared tensors, without
            which its `load_state_dict` would miss them. None: all of the layout's
            dtype, under their first names.
        facts: Metadata of the file.

    Raises:
        StorageError: the file cannot be written.
        ValueError: the values are not of this layout.
    """
    tensors = assemble(layout, shard_values, like=like)
    files.write_by(path, lambda temporary: _save(temporary, tensors, facts or {}))
    return tensors


def assemble(
    layout: Layout, shard_values: Sequence[Vector], *, like: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole tensors that the shards hold, for `load_state_dict`.

    Args:
        layout: How the shards hold them.
        shard_values: Of each shard, (layout.shard_size(k),).
        like: See `write_model`.
    """
    if len(shard_values) != layout.n_shards:
        raise ValueError(
            f"values of {len(shard_values)} shards for a layout of {layout.n_shards}"
        )
    model = None if like is None else LocalModel(like)
    own = {} if model is None else model.named_tensors()
    usual = torch.float64 if layout.dtype.itemsize == 8 else torch.float32
    flat = [
        torch.zeros(
            spec.n_elements, dtype=own[spec.name].dtype if spec.name in own else usual
        )
        for spec in layout.tensors
    ]
    for k, values in enumerate(shard_values):
        layout.scatter(k, values, flat)
    tensors = {
        spec.name: tensor.reshape(spec.shape)
        for spec, tensor in zip(layout.tensors, flat, strict=True)
    }
    aliases = {} if model is None else model.aliases()
    # A file holds every name by itself, so what is shared is written twice.
    return tensors | {alias: tensors[name].clone() for alias, name in aliases.items()}


def _save(
    path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]
) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"} | dict(facts))
    except SafetensorError as error:
        raise files.of_safetensors(error) from error
