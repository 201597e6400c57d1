"""What `distbelief.plan` is given, checked before anything takes long."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from distbelief.graph.capture import InputSpec
from distbelief.graph.layer import GraphError
from distbelief.program.cluster import Cluster


def check_model(model: object) -> None:
    """Check that it is a module.

    Raises:
        GraphError: it is not.
    """
    if not isinstance(model, nn.Module):
        raise GraphError(
            f"the model is {_shown(model)}: give a torch.nn.Module, which may be on the meta device"
        )


def examples_of(example: object) -> list[torch.Tensor]:
    """Return an example of each input, all of the same batch.

    Raises:
        GraphError: it is none.
    """
    found = [example] if isinstance(example, torch.Tensor) else example
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise GraphError(
            f"the example is {_shown(example)}: give a tensor (batch, *shape), or one per input"
        )
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise GraphError(
                f"the example of an input is {_shown(tensor)}: give a tensor "
                "(batch, *shape), as torch.as_tensor makes it"
            )
        if tensor.is_complex() or tensor.is_quantized:
            raise GraphError(
                f"the example of an input is of {tensor.dtype}: give floating point "
                "or whole numbers"
            )
    shapes = [list(tensor.shape) for tensor in found]
    if len({tuple(shape[:1]) for shape in shapes}) != 1 or not shapes[0]:
        raise GraphError(
            "the example is no batch: give a tensor (batch, *shape), or one per input, "
            f"not {shapes}"
        )
    if any(0 in shape for shape in shapes):
        raise GraphError(
            f"the example has an extent of 0: {shapes}; give a batch of 1 or more, "
            "none of whose dimensions is empty"
        )
    return list(found)


def spec_of(example: torch.Tensor) -> InputSpec:
    """Return the input that a batch is an example of."""
    n_values = None
    if not example.is_floating_point():
        n_values = int(example.max()) + 1 if not example.is_meta else 1
    return InputSpec(shape=tuple(example.shape[1:]), n_values=n_values)


def counts_of(machines: object) -> list[int]:
    """Return the numbers of machines.

    Raises:
        GraphError: they are none.
    """
    found = (machines,) if isinstance(machines, int) else machines
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        found = (None,)
    # True is an int too, and no number of machines.
    counts = [n for n in found if type(n) is int]
    if len(counts) < len(found):
        raise GraphError(
            f"machines is {_shown(machines)}: give a number, such as 8, or several, "
            "such as (1, 2, 4, 8)"
        )
    return counts


def check_words(
    *, loss: object, cluster: object, pins: object, flags: Mapping[str, object]
) -> None:
    """Check the types of what else a plan depends on.

    Raises:
        GraphError: one is of another.
    """
    if not isinstance(loss, str):
        raise GraphError(
            f"loss is {_shown(loss)}: give its name, such as 'cross_entropy', or '' for none"
        )
    if not isinstance(cluster, str | Path | Cluster):
        raise GraphError(
            f"cluster is {_shown(cluster)}: give the name of one, such as 'rack-10g', "
            "the path of a file, or a Cluster"
        )
    if not isinstance(pins, Mapping) or not all(
        isinstance(word, str) for pair in pins.items() for word in pair
    ):
        raise GraphError(
            f"pins is {_shown(pins)}: give a split per layer, such as {{'conv1': 'grid:3x3'}}"
        )
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise GraphError(f"{name} is {_shown(flag)}: give True or False")


def _shown(value: object) -> str:
    """Return a value and its type, cut short."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{text} ({type(value).__name__})"
