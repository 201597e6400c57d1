"""Mixtures of experts: each rank computes its experts for the tokens that chose them.

The sum over experts is a partial sum, as a Linear layer's over its inputs: tokens go to all ranks,
each computes the experts whose weights it has, and the results are added.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch.func import functional_call
from typing_extensions import override

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Call, Cut, Operator, Sums, Work
from distbelief.graph.ops.call import step_numbers
from distbelief.graph.region import Region


@final
class Routing(Operator):
    """The weight of each expert for each token; 0 for those that are not chosen."""

    # inputs    numbers of the chosen experts and their weights, each (*tokens, chosen)
    # output    (*tokens, experts), by experts in their order
    name: ClassVar[str] = "routing"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        chosen = (0, layer.input_shapes[0][-1])
        return (output.replaced(-1, chosen),) * 2

    @override
    def compute(self, call: Call) -> torch.Tensor:
        chosen, weights = call.inputs
        experts = torch.arange(*call.region.intervals[-1], device=chosen.device)
        return ((chosen.unsqueeze(-1) == experts) * weights.unsqueeze(-1)).sum(-2)


@final
class Experts(Sums):
    """The weighted sum of the experts that each token chose; a part is some of the experts."""

    # inputs    weights of all experts (*tokens, experts); x (*tokens, size); numbers of those that
    #           each token chose, (*tokens, chosen)
    # tensors   of its module, each (experts, ...)
    # options   module: its path in the model, a key of `Step.modules`
    name: ClassVar[str] = "experts"

    @override
    def reduced(self, layer: Layer, output: Region) -> Region:
        return output.replaced(-1, (0, layer.input_shapes[0][-1]))

    @override
    def cuts_of_output(self, layer: Layer) -> tuple[Cut, ...]:
        return super().cuts_of_output(layer)[:-1]  # a row of a token is computed at once

    @override
    def reads(self, layer: Layer, part: Region) -> tuple[Region, ...]:
        return (part, *(part.replaced(-1, (0, shape[-1])) for shape in layer.input_shapes[1:]))

    @override
    def uses(self, layer: Layer, part: Region) -> Mapping[str, Region]:
        return {
            word: Region.of(*use.shape).replaced(0, part.intervals[-1])
            for word, use in layer.tensors.items()
        }

    @override
    def writes(self, layer: Layer, part: Region) -> Region:
        return part.replaced(-1, (0, layer.shape[-1]))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        routing, x, chosen = (value.flatten(0, -2) for value in call.inputs)
        first, last = call.region.intervals[-1]
        tokens, places = ((chosen >= first) & (chosen < last)).nonzero(as_tuple=True)
        factor = 1.0
        if not len(tokens):  # a product with 0, for the sake of gradients
            tokens = places = tokens.new_zeros(1)
            factor = 0.0
        own = (chosen[tokens, places] - first).clamp(0, last - first - 1).unsqueeze(-1)
        weights = routing[tokens].gather(1, own) * factor
        module = call.module
        n_experts = module.num_experts
        try:
            module.num_experts = last - first  # type: ignore[assignment] # not a tensor
            with step_numbers(call):
                rows = functional_call(module, dict(call.tensors), (x[tokens], own, weights))
        finally:
            module.num_experts = n_experts
        found = x.new_zeros(x.shape[0], layer.shape[-1]).index_add(0, tokens, rows)
        return found.view(*call.inputs[1].shape[:-1], layer.shape[-1])

    @override
    def work(self, layer: Layer, part: Region) -> Work:
        n_experts, n_chosen = layer.input_shapes[0][-1], layer.input_shapes[2][-1]
        n_weights = sum(math.prod(use.shape) for use in layer.tensors.values()) / n_experts
        n_tokens = math.prod(part.shape[:-1])
        forward = 2.0 * n_weights * n_chosen * n_tokens
        read = sum(region.n_elements for region in self.reads(layer, part))
        n_written = self.writes(layer, part).n_elements
        return Work(forward=forward, backward=2 * forward, n_elements=read + n_written)
