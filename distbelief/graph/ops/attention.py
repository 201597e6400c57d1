"""Multi-head attention as layers: projections, heads apart, attention, and back.

    x (positions, features) -> linear (positions, heads * size)
        -> reshape (positions, heads, size) -> permute (heads, positions, size)

and so for queries, keys and values. Split by heads, everything up to the last
projection is one machine's own: its rows of the weights, its heads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer, TensorUse
from distbelief.graph.operator import Cut, Operator, Step, Work
from distbelief.graph.ops.dropout import mask as dropout_mask
from distbelief.graph.ops.pointwise import broadcast, lined_up
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.region import Region, Shape


# Scaled dot-product attention, split by heads and by queries.
#
#     kind      "attention"
#     inputs    query (*heads, queries, size), key (*heads, keys, size),
#               value (*heads, keys, size of values); a fourth, optional: a mask that is
#               added to the scores, and broadcasts against (*heads, queries, keys)
#     options   causal: whether query i sees keys 0 to i only
#               scale: factor of the scores, or None for 1 / sqrt(size)
#               dropout: probability that a weight is dropped, in a training step
#
# Cut by heads or queries, not by size. A causal part needs no keys after its last query.
# With the projections before and after it: `multi_head_attention_layers` in `multi_head`.


@final
class Attention(Operator):
    """softmax(query key^T * scale + mask) value."""

    name: ClassVar[str] = "attention"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return tuple(Cut(dim) for dim in range(len(layer.shape) - 1))

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        *heads, queries, _ = output.intervals
        n_keys, size = layer.input_shapes[1][-2:]
        if layer.options["causal"]:
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
        return (*reads, broadcast(scores, layer.input_shapes[3]))

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
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        query, key, value, *masks = inputs
        mask = None
        if masks:  # made of whole numbers, it may be of another type
            mask = lined_up(masks[0], query.dim() - 1).to(query.dtype)
        if layer.options["causal"]:
            first, last = output.intervals[-2]
            queries = torch.arange(first, last, device=query.device)
            keys = torch.arange(key.shape[-2], device=query.device)
            unseen = query.new_zeros(last - first, key.shape[-2])
            unseen = unseen.masked_fill(keys > queries.unsqueeze(1), -math.inf)
            mask = unseen if mask is None else mask + unseen
        scale = None if layer.options["scale"] is None else layer.number("scale")
        if step.training and layer.number("dropout"):
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            scores = (query * scale) @ key.transpose(-1, -2)
            scores = scores if mask is None else scores + mask
            weights = scores.softmax(-1)
            return (weights * _fates(layer, output, weights, step)) @ value
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
    """Return the layer that attends; query, key, value and perhaps a mask."""
    query, _, value, *_ = sources
    return Layer(
        name=name,
        kind=Attention.name,
        inputs=tuple(source.name for source in sources),
        input_shapes=tuple(source.shape for source in sources),
        shape=(*query.shape[:-1], value.shape[-1]),
        options={"causal": causal, "scale": scale, "dropout": dropout},
    )


def scores_shape(layer: Layer) -> Shape:
    """Return the shape of the weights, of which some are dropped."""
    return (*layer.shape[:-1], layer.input_shapes[1][-2])


def _fates(layer: Layer, output: Region, weights: torch.Tensor, step: Step) -> torch.Tensor:
    """Return which weights are kept, as factors; of keys as far as they are read."""
    part = Region((*output.intervals[:-1], (0, weights.shape[-1])))
    return dropout_mask(
        layer.name,
        scores_shape(layer),
        part,
        probability=layer.number("dropout"),
        like=weights,
        step=step,
    )


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
        name: Of the last one.
        sources: Query, key and value: (positions, features).
        n_heads: Divides the features.
        tensors: By torch's words: in_proj_weight, or q_proj_weight, k_proj_weight and
            v_proj_weight; in_proj_bias; out_proj.weight; out_proj.bias.
        causal: Whether position i sees positions 0 to i only.
        mask: What is added to the scores, if anything.
        dropout: Of the attention's weights.

    Raises:
        GraphError: it has biases added to keys and values (add_bias_kv).
    """
    if "bias_k" in tensors:
        raise GraphError(f"{name!r}: attention with add_bias_kv has no split rule")
    n_features = tensors["out_proj.weight"].shape[1]
    layers: list[Layer] = []
    heads = []
    for place, (letter, source) in enumerate(zip("qkv", sources, strict=True)):
        n_positions = source.shape[0]
        first = place * n_features
        own = "in_proj_weight" not in tensors
        uses = {"weight": tensors[f"{letter}_proj_weight" if own else "in_proj_weight"]}
        options = {"first_row": 0 if own else first}
        if "in_proj_bias" in tensors:
            uses["bias"] = tensors["in_proj_bias"]
            options["first_row_of_bias"] = first
        projected = Layer(
            name=f"{name}.{letter}",
            kind="linear",
            inputs=(source.name,),
            input_shapes=(source.shape,),
            shape=(n_positions, n_features),
            options=options,
            tensors=uses,
        )
        apart = reshape_layer(
            f"{name}.{letter}.heads", projected, shape=(n_positions, n_heads, n_features // n_heads)
        )
        heads.append(_swapped(f"{name}.{letter}.first", apart))
        layers += [projected, apart, heads[-1]]
    masks = [] if mask is None else [mask]
    attention = attention_layer(
        f"{name}.attention", [*heads, *masks], causal=causal, dropout=dropout
    )
    together = _swapped(f"{name}.positions", attention)
    joined = reshape_layer(f"{name}.joined", together, shape=(together.shape[0], n_features))
    words = {"weight": "out_proj.weight", "bias": "out_proj.bias"}
    out = Layer(
        name=name,
        kind="linear",
        inputs=(joined.name,),
        input_shapes=(joined.shape,),
        shape=(joined.shape[0], tensors["out_proj.weight"].shape[0]),
        tensors={word: tensors[long] for word, long in words.items() if long in tensors},
    )
    return [*layers, attention, together, joined, out]


def _swapped(name: str, source: Layer) -> Layer:
    """Return the layer that swaps the first two of three dimensions."""
    first, second, third = source.shape
    return Layer(
        name=name,
        kind="permute",
        inputs=(source.name,),
        input_shapes=(source.shape,),
        shape=(second, first, third),
        options={"dims": (1, 0, 2)},
    )
