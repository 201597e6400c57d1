"""Lowering rules for attention and torch's encoder layers."""

import math
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.graph import Builder, GraphError, Layer, below, uses
from distbelief.graph.lowering.registry import lower_child, lowers, lowers_function
from distbelief.graph.lowering.views import with_batch
from distbelief.graph.operation import Lowered, Operand, Operation
from distbelief.graph.ops.attention import attention_layer, multi_head_attention_layers
from distbelief.graph.ops.views import reshape_layer


@lowers_function(functional.scaled_dot_product_attention)
def attention(builder: Builder, operation: Operation) -> Lowered:
    operation.only(*("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"))
    words = ("query", "key", "value")
    sources = [
        builder[operation.operand(position, word).name] for position, word in enumerate(words)
    ]
    given = operation.argument(3, "attn_mask")
    causal, mask = masked(builder, operation, given, true_hides=False)
    dropout = operation.argument(4, "dropout_p", 0.0)
    assert isinstance(dropout, int | float), operation
    return builder.add_layer(
        attention_layer(
            builder.free_name(operation.name),
            [*sources, *([] if mask is None else [mask])],
            causal=causal or bool(operation.argument(5, "is_causal", default=False)),
            scale=cast("float | None", operation.keywords.get("scale")),
            dropout=float(dropout),
        )
    )


@lowers(nn.MultiheadAttention)
def multi_head_attention(
    builder: Builder, module: nn.MultiheadAttention, operation: Operation
) -> Lowered:
    # The attention weights, the second result, are not kept.
    words = ("query", "key", "value")
    sources = [
        builder[operation.operand(position, word).name] for position, word in enumerate(words)
    ]
    causal, mask = masked(builder, operation, operation.argument(5, "attn_mask"))
    hint = bool(operation.argument(7, "is_causal", default=False))
    padding = operation.argument(3, "key_padding_mask")
    mask = with_padding(builder, operation, None if hint else mask, padding)
    name = attend(
        builder,
        module,
        operation,
        (sources[0], sources[1], sources[2]),
        causal=causal or hint,
        mask=mask,
    )
    return (name,)


def attend(
    builder: Builder,
    module: nn.MultiheadAttention,
    operation: Operation,
    sources: tuple[Layer, Layer, Layer],
    *,
    causal: bool,
    mask: Layer | None,
) -> str:
    """Add the layers of a multi-head attention.

    Raises:
        GraphError: The batch is not its first dimension, or it adds keys of its own.
    """
    if not module.batch_first:
        raise GraphError(
            f"{operation.name} takes the batch as its second dimension: give it batch_first=True"
        )
    if module.add_zero_attn or module.bias_k is not None:
        raise GraphError(
            f"{operation.name}: attention with add_zero_attn or add_bias_kv has no "
            "split rule: leave them out"
        )
    layers = multi_head_attention_layers(
        builder.free_name(operation.name),
        sources,
        n_heads=module.num_heads,
        tensors=uses(module, operation.target),
        causal=causal,
        mask=mask,
        dropout=module.dropout if operation.trains else 0.0,
    )
    return builder.extend(layers)


def masked(
    builder: Builder, operation: Operation, mask: object, *, true_hides: bool = True
) -> tuple[bool, Layer | None]:
    """Return whether a mask is causal, or the layer that is added to the scores.

    Args:
        builder: Builder with the layers so far.
        operation: The operation that gets the mask.
        mask: A mask made by the forward, or a tensor of the model.
        true_hides: Whether True in a boolean mask hides (torch's modules) or shows (its function).

    Raises:
        GraphError: The mask is neither.
    """
    if mask is None:
        return False, None
    if isinstance(mask, torch.Tensor) and _is_causal(mask, true_hides=true_hides):
        return True, None
    if isinstance(mask, Operand) and not mask.is_integer:
        return False, with_batch(builder, mask, _n_dims(operation))
    raise GraphError(
        f"{operation.name}: only a causal mask (is_causal=True), or a buffer that is "
        "added to the scores (float, -inf for what is hidden), has a split rule"
    )


def with_padding(
    builder: Builder, operation: Operation, mask: Layer | None, padding: object
) -> Layer | None:
    """Return what is added to the scores so that padding keys are hidden.

    Args:
        builder: Builder with the layers so far.
        operation: The operation that gets the mask.
        mask: Added to the scores in any case.
        padding: Per sample and key: a mask, True for hidden keys, or numbers to add; None for none.

    Raises:
        GraphError: The padding is not computed from an input.
    """
    if padding is None:
        return mask
    if not isinstance(padding, Operand) or not padding.batched:
        raise GraphError(
            f"{operation.name}: only a padding mask that is computed from the model's "
            "input has a split rule: compare the input with the padding word"
        )
    added = builder[padding.name]
    if padding.is_integer:
        added = builder[
            builder.add(
                f"{operation.name}.padding",
                "where",
                [added.name],
                added.shape,
                options={"yes": -math.inf, "no": 0.0},
            )
        ]
    name = builder.free_name(f"{operation.name}.keys")
    added = reshape_layer(name, added, shape=(1, 1, *added.shape))  # heads, queries
    builder.add_layer(added)
    if mask is None:
        return added
    name = builder.add(
        f"{operation.name}.mask",
        "pointwise",
        [mask.name, added.name],
        tuple(torch.broadcast_shapes(mask.shape, added.shape)),
        options={"function": "add"},
    )
    return builder[name]


def _is_causal(mask: torch.Tensor, *, true_hides: bool) -> bool:
    # A mask made by the forward that hides all later keys and nothing else.
    if mask.is_meta or mask.dim() < 2 or mask.shape[:-2].numel() != 1:
        return False
    rows = mask.reshape(mask.shape[-2:])
    later = torch.ones(rows.shape, dtype=torch.bool).triu(1)
    if rows.dtype == torch.bool:
        return torch.equal(rows, later if true_hides else ~later)
    hidden = torch.zeros(rows.shape, dtype=rows.dtype).masked_fill(later, -math.inf)
    return torch.equal(rows, hidden)


def _n_dims(operation: Operation) -> int:
    # Dimensions of the scores with the batch; heads are one of them.
    return len(operation.operands[0].shape) + 1


@lowers(nn.TransformerEncoder, like_input=True)
def encoder(builder: Builder, module: nn.TransformerEncoder, operation: Operation) -> Lowered:
    source = builder[operation.operand(0, "src").name]
    causal, mask = _mask(builder, operation, "mask", (2, 3))
    for index, layer in enumerate(module.layers):
        path = below(operation.target, f"layers.{index}")
        assert isinstance(layer, nn.TransformerEncoderLayer), path
        source = _layer(builder, layer, path, source, of=operation, causal=causal, mask=mask)
    if module.norm is not None:
        path = below(operation.target, "norm")
        source = lower_child(builder, module.norm, path, [source], of=operation)
    return source.name


@lowers(nn.TransformerEncoderLayer, like_input=True)
def encoder_layer(
    builder: Builder, module: nn.TransformerEncoderLayer, operation: Operation
) -> Lowered:
    source = builder[operation.operand(0, "src").name]
    causal, mask = _mask(builder, operation, "src_mask", (2, 3))
    return _layer(
        builder, module, operation.target, source, of=operation, causal=causal, mask=mask
    ).name


def _mask(
    builder: Builder, operation: Operation, word: str, places: tuple[int, int]
) -> tuple[bool, Layer | None]:
    padding, hint = places
    causal, mask = masked(builder, operation, operation.argument(1, word))
    if operation.argument(hint, "is_causal", default=False):
        causal, mask = True, None
    given = operation.argument(padding, "src_key_padding_mask")
    return causal, with_padding(builder, operation, mask, given)


def _layer(
    builder: Builder,
    module: nn.TransformerEncoderLayer,
    path: str,
    x: Layer,
    *,
    of: Operation,
    causal: bool,
    mask: Layer | None,
) -> Layer:
    def child(word: str, source: Layer) -> Layer:
        part = getattr(module, word)
        assert isinstance(part, nn.Module), word
        return lower_child(builder, part, below(path, word), [source], of=of)

    def attention(source: Layer) -> Layer:
        own = Operation(
            name=below(path, "self_attn"),
            target=below(path, "self_attn"),
            arguments=(Operand(name=source.name, shape=source.shape),),
            keywords={},
            result=of.result,
            batch=of.batch,
            trains=of.trains and module.self_attn.training,
        )
        sources = (source, source, source)
        name = attend(builder, module.self_attn, own, sources, causal=causal, mask=mask)
        return child("dropout1", builder[name])

    def feed_forward(source: Layer) -> Layer:
        inner = _activated(builder, module, path, child("linear1", source), of=of)
        return child("dropout2", child("linear2", child("dropout", inner)))

    def added(word: str, left: Layer, right: Layer) -> Layer:
        name = builder.add(
            below(path, word),
            "pointwise",
            [left.name, right.name],
            left.shape,
            options={"function": "add"},
        )
        return builder[name]

    if module.norm_first:
        x = added("add1", x, attention(child("norm1", x)))
        return added("add2", x, feed_forward(child("norm2", x)))
    x = child("norm1", added("add1", x, attention(x)))
    return child("norm2", added("add2", x, feed_forward(x)))


def _activated(
    builder: Builder, module: nn.TransformerEncoderLayer, path: str, source: Layer, *, of: Operation
) -> Layer:
    activation: object = module.activation
    if isinstance(activation, nn.Module):
        return lower_child(builder, activation, below(path, "activation"), [source], of=of)
    names: dict[object, str] = {functional.relu: "relu", functional.gelu: "gelu"}
    if activation not in names:
        raise GraphError(
            f"{path}: activation {activation!r} has no split rule: give it as a module"
        )
    name = builder.add(
        below(path, "activation"),
        "pointwise",
        [source.name],
        source.shape,
        options={"function": names[activation]},
    )
    return builder[name]
