"""Translations of torch's layers with weights: linear, convolution, embedding."""

from collections.abc import Mapping
from typing import Final, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from distbelief.graph.building import Builder, uses
from distbelief.graph.layer import GraphError, Layer, TensorUse
from distbelief.graph.operation import Operand, Operation, Translated
from distbelief.graph.region import Shape
from distbelief.graph.translation import translates, translates_function
from distbelief.graph.wholes import whole_module


@translates(nn.Linear)
def linear(builder: Builder, module: nn.Linear, operation: Operation) -> Translated:
    """Add a fully connected layer."""
    return builder.add(
        operation.name,
        "linear",
        operation.inputs,
        operation.output,
        tensors=uses(module, operation.target),
    )


@translates_function(functional.linear)
def linear_function(builder: Builder, operation: Operation) -> Translated:
    """Add a fully connected layer with tensors of the model."""
    return builder.add(
        operation.name,
        "linear",
        operation.inputs[:1],
        operation.output,
        tensors=_weights(builder, operation),
    )


@translates(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(builder: Builder, module: _ConvNd, operation: Operation) -> Translated:
    """Add a convolution; one that pads with other than zeros is computed whole."""
    if module.padding_mode != "zeros":
        reason = f"padding_mode {module.padding_mode!r} has no split rule"
        return whole_module(builder, module, operation, reason=reason)
    return _convolution(
        builder,
        operation,
        uses(module, operation.target),
        stride=tuple(module.stride),
        padding=module.padding,
        dilation=tuple(module.dilation),
        groups=module.groups,
    )


@translates_function(functional.conv1d, functional.conv2d, functional.conv3d)
def convolution_function(builder: Builder, operation: Operation) -> Translated:
    """Add a convolution with tensors of the model."""
    argument = operation.argument
    tensors = _weights(builder, operation)
    n_dims = len(operation.output) - 1

    def several(position: int, word: str, default: int) -> Shape:
        sizes = argument(position, word, default)
        if isinstance(sizes, int):
            return (sizes,) * n_dims
        return tuple(cast("Shape", sizes))

    padding = argument(4, "padding", 0)
    return _convolution(
        builder,
        operation,
        tensors,
        stride=several(3, "stride", 1),
        padding=padding if isinstance(padding, str) else several(4, "padding", 0),
        dilation=several(5, "dilation", 1),
        groups=cast("int", argument(6, "groups", 1)),
    )


def _convolution(
    builder: Builder,
    operation: Operation,
    tensors: Mapping[str, TensorUse],
    *,
    stride: Shape,
    padding: str | Shape,
    dilation: Shape,
    groups: int,
) -> str:
    sizes = tensors["weight"].shape[2:]
    around, extra = (0,) * len(sizes), (0,) * len(sizes)
    if padding == "same":
        totals = [(n - 1) * d for n, d in zip(sizes, dilation, strict=True)]
        around = tuple(total // 2 for total in totals)
        extra = tuple(total % 2 for total in totals)
    elif not isinstance(padding, str):
        around = tuple(int(size) for size in padding)
    return builder.add(
        operation.name,
        "convolution",
        operation.inputs[:1],
        operation.output,
        options={
            "stride": stride,
            "padding": around,
            "extra": extra,
            "dilation": dilation,
            "groups": groups,
        },
        tensors=tensors,
    )


@translates(nn.Embedding)
def embedding(builder: Builder, module: nn.Embedding, operation: Operation) -> Translated:
    """Add rows of a table; of words that the forward counts itself, a part of it."""
    if module.scale_grad_by_freq:
        reason = "an embedding with scale_grad_by_freq has no split rule"
        return whole_module(builder, module, operation, reason=reason)
    use = uses(module, operation.target)["weight"]
    return _embedded(builder, operation, use, 0, padding=module.padding_idx)


@translates_function(functional.embedding)
def embedding_function(builder: Builder, operation: Operation) -> Translated:
    """Add rows of a table that is a tensor of the model."""
    operation.only("input", "weight", "padding_idx", "norm_type")
    use = owned(builder, operation, operation.operand(1, "weight"))
    padding = cast("int | None", operation.argument(2, "padding_idx"))
    return _embedded(builder, operation, use, 0, padding=padding)


def _embedded(
    builder: Builder, operation: Operation, use: TensorUse, position: int, *, padding: int | None
) -> str:
    words = operation.argument(position, "input")
    if isinstance(words, torch.Tensor):
        return _rows(builder, operation, use, words)
    source = operation.operand(position, "input")
    return builder.add(
        operation.name,
        "embedding",
        [source.name],
        operation.output,
        options={"padding": padding},
        tensors={"weight": use},
    )


def _rows(builder: Builder, operation: Operation, use: TensorUse, words: torch.Tensor) -> str:
    """Add rows of a table that do not depend on the sample: arange(first, last)."""
    listed: list[int] = words.flatten().tolist()
    first = listed[0] if listed else 0
    if listed != list(range(first, first + len(listed))) or words.shape[:-1].numel() > 1:
        raise GraphError(
            f"{operation.name}: words that the forward makes must be consecutive, "
            "as of torch.arange; give others as an input"
        )
    table = builder.add(
        f"{operation.name}.table", "parameter", [], use.shape, tensors={"value": use}
    )
    shape = (*words.shape, use.shape[1])
    part = builder.add(
        f"{operation.name}.rows" if words.dim() > 1 else operation.name,
        "slice",
        [table],
        shape[-2:],
        options={"starts": (first, 0), "steps": (1, 1)},
    )
    if words.dim() == 1:
        return part
    return builder.add(operation.name, "reshape", [part], shape)


_WORDS: Final = ("weight", "bias")


def _weights(builder: Builder, operation: Operation) -> dict[str, TensorUse]:
    """Return weight and bias, of a function that takes them after its input."""
    if not isinstance(operation.argument(0, "input"), Operand):
        operation.operand(0, "input")
    return {
        word: owned(builder, operation, operation.operand(position, word))
        for position, word in enumerate(_WORDS, start=1)
        if operation.argument(position, word) is not None
    }


def owned(builder: Builder, operation: Operation, operand: Operand) -> TensorUse:
    """Return the model's tensor that an operand is."""
    layer: Layer = builder[operand.name]
    use = layer.tensors.get("value")
    if layer.kind != "parameter" or use is None or use.shape != operand.shape:
        raise GraphError(
            f"{operation.name} with a weight that is computed ({operand.name!r}) has "
            "no split rule: put it into a module of its own"
        )
    return use
