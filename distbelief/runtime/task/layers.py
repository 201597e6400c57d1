"""Which layer of the user's model did not take its inputs, and why.

torch says "mat1 and mat2 shapes cannot be multiplied"; a user wants to know which
layer, which two widths, and whether the data or the model is to be changed.
"""

from contextlib import ExitStack
from typing import Final, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


GIVEN_BY_LAYERS: Final = "the layers before it give"

_WIDTHS: Final[tuple[tuple[type[nn.Module], str, int], ...]] = (
    (nn.Linear, "in_features", -1),
    (nn.Conv1d, "in_channels", -2),
    (nn.Conv2d, "in_channels", -3),
    (nn.Conv3d, "in_channels", -4),
    (nn.BatchNorm1d, "num_features", 1),
    (nn.BatchNorm2d, "num_features", 1),
    (nn.BatchNorm3d, "num_features", 1),
    (nn.RNNBase, "input_size", -1),
)
"""Layers, what they call the width of their inputs, and the axis that has it."""


@final
class Watch:
    """Remembers which innermost layer was entered last, with what, and if it returned.

    Use as a context manager around a forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack = ExitStack()
        self._name = ""
        self._layer: nn.Module | None = None
        self._received: torch.Tensor | None = None
        self._returned = False

    def __enter__(self) -> "Watch":
        for name, layer in self._module.named_modules():
            if next(layer.children(), None) is None:
                for handle in self._hook(name, layer):
                    self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _hook(self, name: str, layer: nn.Module) -> tuple[RemovableHandle, ...]:
        def enter(layer: nn.Module, inputs: tuple[object, ...]) -> None:
            first = inputs[0] if inputs else None
            self._name, self._layer, self._returned = name, layer, False
            self._received = first if isinstance(first, torch.Tensor) else None

        def leave(layer: nn.Module, inputs: object, outputs: object) -> None:
            del layer, inputs, outputs
            self._returned = True

        return layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)

    def explain(self, error: Exception, inputs: torch.Tensor, *, data: str) -> str:
        """Return where `error` came from and why, as the end of a sentence.

        Args:
            error: What the forward pass raised.
            inputs: Of the model.
            data: Table of the job file that they came from, "data.train".
        """
        reason = f"{type(error).__name__}: {error}"
        layer = self._layer
        if layer is None:
            return f"the model: {reason}"
        kind = type(layer).__name__
        where = f"layer {self._name!r} ({kind})" if self._name else f"the {kind}"
        if self._returned:
            return f"after {where}: {reason}"
        received = self._received
        if received is not None:
            giver = f"[{data}] gives" if received is inputs else GIVEN_BY_LAYERS
            reason = _why(layer, received, giver=giver) or reason
        return f"{where}: {reason}"


def dtype_name(tensor: torch.Tensor) -> str:
    """Return "float32", "int64", ..."""
    return str(tensor.dtype).removeprefix("torch.")


def _why(layer: nn.Module, received: torch.Tensor, *, giver: str) -> str | None:
    if isinstance(layer, nn.Embedding):
        return _why_embedding(layer, received, giver=giver)
    weight = next(layer.parameters(), None)
    if weight is not None and weight.dtype != received.dtype:
        return (
            f"its parameters are {dtype_name(weight)}, but {giver} "
            f"{dtype_name(received)}: let the data set return {dtype_name(weight)}"
        )
    return _why_width(layer, received, giver=giver)


def _why_embedding(layer: nn.Embedding, received: torch.Tensor, *, giver: str) -> str | None:
    if received.is_floating_point():
        return f"it takes whole numbers (int64), but {giver} {dtype_name(received)}"
    if received.numel() == 0:
        return None
    low, high = int(received.min()), int(received.max())
    if low >= 0 and high < layer.num_embeddings:
        return None
    return f"it takes numbers from 0 to {layer.num_embeddings - 1}, but {giver} {low} to {high}"


def _why_width(layer: nn.Module, received: torch.Tensor, *, giver: str) -> str | None:
    needed = _width(layer)
    shape = tuple(received.shape)
    if needed is None or not shape:
        return None
    size, axis = needed
    width = shape[axis] if -len(shape) <= axis < len(shape) else shape[-1]
    if width == size:
        return None
    mend = "make them agree" if giver == GIVEN_BY_LAYERS else "change the data set or the model"
    return f"it takes inputs of width {size}, but {giver} width {width} (shape {shape}): {mend}"


def _width(layer: nn.Module) -> tuple[int, int] | None:
    """Return the size that a layer needs of its input, and along which axis."""
    for kind, attribute, axis in _WIDTHS:
        if isinstance(layer, kind):
            return int(getattr(layer, attribute)), axis
    if isinstance(layer, nn.LayerNorm) and layer.normalized_shape:
        return layer.normalized_shape[-1], -1
    return None
