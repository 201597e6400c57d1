"""Whether a trained model is still one of the source that is to compute with it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from distbelief import files
from distbelief.errors import JobError, StorageError
from distbelief.graph.region import Shape


def check_trained(module: nn.Module, weights: Path, *, factory: str) -> None:
    """Compare names and shapes, before anything is read.

    Args:
        module: What the source makes today; may be without memory.
        weights: model.safetensors.
        factory: Of the module, for messages.

    Raises:
        JobError: the source has changed since.
        StorageError: the file cannot be read, or is damaged.
    """
    made = {
        name: tuple(value.shape)
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)  # other modules' own state is none
    }
    trained = shapes_in(weights)
    for name in sorted(made.keys() | trained.keys()):
        if made.get(name) != trained.get(name):
            raise JobError(
                f"{weights} is of another model than {factory} makes today: {name!r} "
                f"is {_shown(trained.get(name))} there, and {_shown(made.get(name))} "
                "here: use the source that it was trained with"
            )


def shapes_in(weights: Path) -> Mapping[str, Shape]:
    """Return the shape of every tensor in a file.

    Raises:
        StorageError: it cannot be read, or is damaged.
    """
    try:
        with safe_open(weights, framework="pt") as file:
            return {
                name: tuple(file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118 -- no mapping
            }
    except OSError as error:
        raise files.explained(error, weights, doing="read") from error
    except SafetensorError as error:
        raise StorageError(f"{weights} is damaged: {error}") from error


def _shown(shape: Shape | None) -> str:
    return "absent" if shape is None else f"{list(shape)}"
