"""Scaled dot-product attention, split by heads and by queries."""

import math
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.ops.call import aligned
from distbelief.graph.ops.dropout import mask as dropout_mask
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


def scores_shape(layer: Layer) -> Shape:
    """Return the shape of the attention weights, to which dropout applies."""
    return (*layer.shape[:-1], layer.input_shapes[1][-2])
