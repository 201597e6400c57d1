"""Local response normalisation: each map against its neighbours, place by place.

    kind      "local_response"
    inputs    (maps, *space)
    options   size: maps of the window; alpha, beta, k: as in torch.nn.LocalResponseNorm

    y = x / (k + alpha * mean of x^2 over the window of maps)^beta

A part needs a halo of maps, and nothing else of space than its own.
Source: Krizhevsky, Sutskever and Hinton 2012, section 3.3; torch's alpha is for the
mean over the window where theirs is for the sum.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


@final
class LocalResponse(LayerKind):
    """What `torch.nn.LocalResponseNorm` computes."""

    name: ClassVar[str] = "local_response"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        before, after = _reach(layer)
        start, stop = output.intervals[0]
        if start == stop:
            return (output,)
        span = (max(0, start - before), min(layer.shape[0], stop + after))
        return (output.replaced(0, span),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements)
        operations = n * (layer.integer("size") + 10)
        return Work(forward=operations, backward=2 * operations, n_elements=4 * n)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        x = inputs[0]
        before, after = _reach(layer)
        start, stop = output.intervals[0]
        first = max(0, start - before)
        pads = (before - (start - first), max(0, stop + after - layer.shape[0]))
        squares = x.square().flatten(2) if x.dim() > 2 else x.square().unsqueeze(2)
        columns = functional.pad(squares, (0, 0, *pads)).unfold(1, layer.integer("size"), 1)
        means = columns.mean(3).view(x.shape[0], stop - start, *x.shape[2:])
        scale = layer.number("k") + layer.number("alpha") * means
        return x[:, start - first : stop - first] / scale ** layer.number("beta")


def _reach(layer: Layer) -> tuple[int, int]:
    """Return how many maps the window holds before its own, and after it."""
    size = layer.integer("size")
    return (size // 2, (size - 1) // 2)
