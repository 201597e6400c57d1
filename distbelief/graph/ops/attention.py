"""Scaled dot-product attention and multi-head attention as layers.

    x (positions, features) -> linear (positions, heads * size)
        -> reshape (positions, heads, size) -> permute (heads, positions, size)

for queries, keys and values. Split by heads, everything up to the last projection stays on one
rank: its rows of the weights, its heads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer, TensorUse
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.ops.dropout import mask as dropout_mask
from distbelief.graph.ops.pointwise import aligned
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.region import Region, Shape


@final
class Attention(Operator):
    """softmax(query key^T * scale + mask) value, split by heads and by queries."""

    # inputs    query (*heads, queries, size), key (*heads, keys, size),
    #           value (*heads, keys, value size), and optionally a mask that is added to the
    #           scores and broadcasts against (*heads, queries, keys)
    # options   causal: whether query i sees keys 0 to i only
    #           scale: factor of the scores; None for 1 / sqrt(size)
    #           dropout: probability that a weight is dropped in training
    name: ClassVar[str] = "attention"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return super().cuts(layer)[:-1]

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        *heads, queries, _ = output.intervals
        n_keys, size = layer.input_shapes[1][-2:]
        if layer.options["causal"]:  # keys after the last query are not needed
            n_keys = min(n_keys, queries[1])
        keys = (0, n_keys)
        reads = (
            Region((*heads, queries, (0, size))),
            Region((*heads, keys, (0, size))),
            Region((*heads, keys, (0, layer.shape[-1]))),
        )
        if len(layer.inputs) == len(reads):
            return reads
        scores = Region((*heads, queries, keys))
        return (*reads, scores.broadcast(layer.input_shapes[3]))

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        query, key, value, *_ = self.reads(layer, output)
        n_keys, size = key.shape[-2:]
        n_scores = float(math.prod(query.shape[:-1]) * n_keys)
        products = 2 * n_scores * (size + layer.shape[-1])
        return Work(
            forward=products + 5 * n_scores,
            backward=2.5 * products,  # the scores are computed again
            n_elements=float(query.n_elements + key.n_elements + value.n_elements) + 2 * n_scores,
        )

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        query, key, value, *masks = call.inputs
        mask = None
        if masks:  # a mask made of integers may have another dtype
            mask = aligned(masks[0], query.dim() - 1).to(query.dtype)
        if layer.options["causal"]:
            first, last = call.region.intervals[-2]
            queries = torch.arange(first, last, device=query.device)
            keys = torch.arange(key.shape[-2], device=query.device)
            hidden = query.new_zeros(last - first, key.shape[-2])
            hidden = hidden.masked_fill(keys > queries.unsqueeze(1), -math.inf)
            mask = hidden if mask is None else mask + hidden
        scale = None if layer.options["scale"] is None else layer.number("scale")
        if call.step.training and layer.number("dropout"):
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            scores = (query * scale) @ key.transpose(-1, -2)
            scores = scores if mask is None else scores + mask
            weights = scores.softmax(-1)
            factors = dropout_mask(
                layer.name,
                scores_shape(layer),
                # Of the keys that are read only: a causal part needs fewer.
                Region((*call.region.intervals[:-1], (0, key.shape[-2]))),
                probability=layer.number("dropout"),
                like=weights,
                step=call.step,
            )
            return (weights * factors) @ value
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale
        )


def attention_layer(
    name: str,
    sources: Sequence[Layer],
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Layer:
    """Return an attention layer for query, key, value and an optional mask."""
    query, _, value, *_ = sources
    return Layer.of(
        name,
        Attention.name,
        sources,
        (*query.shape[:-1], value.shape[-1]),
        options={"causal": causal, "scale": scale, "dropout": dropout},
    )


def scores_shape(layer: Layer) -> Shape:
    """Return the shape of the attention weights, to which dropout applies."""
    return (*layer.shape[:-1], layer.input_shapes[1][-2])


def multi_head_attention_layers(
    name: str,
    sources: tuple[Layer, Layer, Layer],
    *,
    n_heads: int,
    tensors: Mapping[str, TensorUse],
    causal: bool = False,
    mask: Layer | None = None,
    dropout: float = 0.0,
) -> list[Layer]:
    """Return the layers of `torch.nn.MultiheadAttention`, batch first.

    Args:
        name: Name of the last layer.
        sources: Query, key and value: (positions, features).
        n_heads: Number of heads; divides the features.
        tensors: By torch's names: in_proj_weight, or q_proj_weight, k_proj_weight and
            v_proj_weight; in_proj_bias; out_proj.weight; out_proj.bias.
        causal: Whether position i sees positions 0 to i only.
        mask: Added to the scores, if given.
        dropout: Dropout probability of the attention weights.

    Raises:
        GraphError: It has biases added to keys and values (add_bias_kv).
    """
    if "bias_k" in tensors:
        raise GraphError(f"{name!r}: attention with add_bias_kv has no split rule")
    n_features = tensors["out_proj.weight"].shape[1]
    layers: list[Layer] = []
    heads = []
    own = "in_proj_weight" not in tensors
    for index, (letter, source) in enumerate(zip("qkv", sources, strict=True)):
        n_positions = source.shape[0]
        first = index * n_features
        uses = {"weight": tensors[f"{letter}_proj_weight" if own else "in_proj_weight"]}
        options = {"first_row": 0 if own else first}
        if "in_proj_bias" in tensors:
            uses["bias"] = tensors["in_proj_bias"]
            options["first_row_of_bias"] = first
        projected = Layer.of(
            f"{name}.{letter}",
            "linear",
            [source],
            (n_positions, n_features),
            options=options,
            tensors=uses,
        )
        split_heads = reshape_layer(
            f"{name}.{letter}.heads", projected, shape=(n_positions, n_heads, n_features // n_heads)
        )
        heads.append(_swapped(f"{name}.{letter}.first", split_heads))
        layers += [projected, split_heads, heads[-1]]
    masks = [] if mask is None else [mask]
    attention = attention_layer(
        f"{name}.attention", [*heads, *masks], causal=causal, dropout=dropout
    )
    by_position = _swapped(f"{name}.positions", attention)
    joined = reshape_layer(f"{name}.joined", by_position, shape=(by_position.shape[0], n_features))
    keys = {"weight": "out_proj.weight", "bias": "out_proj.bias"}
    out = Layer.of(
        name,
        "linear",
        [joined],
        (joined.shape[0], tensors["out_proj.weight"].shape[0]),
        tensors={key: tensors[long] for key, long in keys.items() if long in tensors},
    )
    return [*layers, attention, by_position, joined, out]


def _swapped(name: str, source: Layer) -> Layer:
    # Swaps the first two of three dimensions.
    first, second, third = source.shape
    return Layer.of(name, "permute", [source], (second, first, third), options={"dims": (1, 0, 2)})
