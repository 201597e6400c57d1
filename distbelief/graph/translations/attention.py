"""Translations of attention, as a function and as a module."""

import math
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.building import Builder, uses
from distbelief.graph.kinds.attention import attention_layer
from distbelief.graph.kinds.multi_head import multi_head_attention_layers
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import GraphError, Layer
from distbelief.graph.operation import Operand, Operation, Translated
from distbelief.graph.translation import translates, translates_function
from distbelief.graph.translations.broadcasting import with_batch


@translates_function(functional.scaled_dot_product_attention)
def attention(builder: Builder, operation: Operation) -> Translated:
    """Add attention of heads that are apart already."""
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


@translates(nn.MultiheadAttention)
def multi_head_attention(
    builder: Builder, module: nn.MultiheadAttention, operation: Operation
) -> Translated:
    """Add projections and attention; its weights, the second result, are not kept."""
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
        GraphError: the batch is not its first dimension, or it adds keys of its own.
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
    """Return whether a mask hides what comes later, or the layer that is added.

    Args:
        builder: Has the layers so far.
        operation: What is given the mask.
        mask: Made by the forward, or the model's.
        true_hides: Whether True in a boolean mask hides, as in torch's modules, or
            shows, as in its function.

    Raises:
        GraphError: it is neither.
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
    """Return what is added to the scores so that keys which only pad are not seen.

    Args:
        builder: Has the layers so far.
        operation: What is given the mask.
        mask: What is added anyway.
        padding: Per sample and key: a mask, True for what is hidden, or numbers to add;
            None for no padding.

    Raises:
        GraphError: it is not computed from an input.
    """
    if padding is None:
        return mask
    if not isinstance(padding, Operand) or not padding.batched:
        raise GraphError(
            f"{operation.name}: only a padding mask that is computed from the model's "
            "input has a split rule: compare it with the word that pads, say"
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
    """Return whether a mask made by a forward hides all later keys and nothing else."""
    if mask.is_meta or mask.dim() < 2 or mask.shape[:-2].numel() != 1:
        return False
    rows = mask.reshape(mask.shape[-2:])
    later = torch.ones(rows.shape, dtype=torch.bool).triu(1)
    if rows.dtype == torch.bool:
        return torch.equal(rows, later if true_hides else ~later)
    hidden = torch.zeros(rows.shape, dtype=rows.dtype).masked_fill(later, -math.inf)
    return torch.equal(rows, hidden)


def _n_dims(operation: Operation) -> int:
    """Return of how many dimensions, the batch counted, scores are: heads are one."""
    return len(operation.operands[0].shape) + 1
