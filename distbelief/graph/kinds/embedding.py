"""Embeddings: the row of a table for each word.

    kind      "embedding"
    inputs    words, whole numbers: (*positions); () for one per sample
    tensors   weight (words, size)
    options   padding: the word whose row gets no gradient, or None

Output (*positions, size), cut by positions and by columns of the table.
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
class Embedding(LayerKind):
    """output[p] = weight[words[p]]."""

    name: ClassVar[str] = "embedding"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (Region(output.intervals[:-1]),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        n_words, _ = layer.tensors["weight"].shape
        return {"weight": Region(((0, n_words), output.intervals[-1]))}

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements)
        return Work(backward=n, n_elements=2 * n)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        padding = layer.options["padding"]
        assert padding is None or isinstance(padding, int), (layer.name, padding)
        return functional.embedding(inputs[0], tensors["weight"], padding)
