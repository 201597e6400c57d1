"""Computes a layer graph region by region in one process, as a reference.

Every layer is computed in the given parts, each from exactly what its operator says that it reads
and uses. If operators are right, outputs and gradients equal the model's, however layers are
split (DB-3).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import Call, Step, operator_of
from distbelief.graph.region import Region, tile


@final
@dataclass(frozen=True, slots=True)
class Partials:
    """A layer computed as partial outputs, from these parts of its first input."""

    parts: tuple[Region, ...]


Parts = Sequence[Region] | Partials


def evaluate(
    graph: LayerGraph,
    inputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    *,
    parts: Mapping[str, Parts] | None = None,
    step: Step | None = None,
) -> dict[str, torch.Tensor]:
    """Return the output of every layer: (batch, *shape).

    Args:
        graph: The graph.
        inputs: For each input layer: (batch, *shape).
        tensors: The model's tensors, by name.
        parts: Regions of each layer's output, computed one by one; other layers are not split.
        step: Seed and mode.

    Raises:
        GraphError: Parts do not tile their layer, or an input is missing.
    """
    step = step or Step()
    values: dict[str, torch.Tensor] = {}
    for layer in graph.layers:
        if layer.kind == INPUT:
            if layer.name not in inputs:
                raise GraphError(f"input {layer.name!r} is missing")
            values[layer.name] = inputs[layer.name]
            continue
        wanted = (parts or {}).get(layer.name, (layer.region,))
        if isinstance(wanted, Partials):
            values[layer.name] = _combined(layer, wanted.parts, values, tensors, step)
        else:
            values[layer.name] = _assembled(layer, wanted, values, tensors, step)
    return values


def _assembled(
    layer: Layer,
    parts: Sequence[Region],
    values: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    step: Step,
) -> torch.Tensor:
    if not tile(layer.region, parts):
        raise GraphError(
            f"parts {', '.join(map(str, parts))} do not tile {layer.name!r}, {layer.region}"
        )
    kind = operator_of(layer)
    whole: torch.Tensor | None = None
    for part in parts:
        if not part.n_elements:
            continue
        reads, uses = kind.reads(layer, part), kind.uses(layer, part)
        inputs, parts_of = _cut_inputs(layer, reads, values), _cut_tensors(layer, uses, tensors)
        value = kind.compute(Call(layer, part, inputs, parts_of, step))
        _check(layer, value, part)
        # Out of place, for autograd: each index is in one part.
        placed = _placed(layer, value, part, fill=0.0)
        whole = placed if whole is None else whole + placed
    assert whole is not None, layer.name
    return whole


def _combined(
    layer: Layer,
    parts: Sequence[Region],
    values: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    step: Step,
) -> torch.Tensor:
    if not tile(Region.of(*layer.input_shapes[0]), parts):
        raise GraphError(
            f"parts {', '.join(map(str, parts))} do not tile the first input of {layer.name!r}"
        )
    partial = operator_of(layer).partial
    if partial is None:
        raise GraphError(f"layers of kind {layer.kind!r} have no partial outputs")
    sums = partial.combine == "sum"
    contributions = []
    for part in parts:
        if not part.n_elements:
            continue
        inputs = _cut_inputs(layer, partial.reads(layer, part), values)
        parts_of = _cut_tensors(layer, partial.uses(layer, part), tensors)
        value = partial.compute(Call(layer, part, inputs, parts_of, step))
        written = partial.writes(layer, part)
        _check(layer, value, written)
        fill = 0.0 if sums else -math.inf
        contributions.append(_placed(layer, value, written, fill=fill))
    stacked = torch.stack(contributions)
    return stacked.sum(0) if sums else stacked.amax(0)


def _placed(layer: Layer, value: torch.Tensor, part: Region, *, fill: float) -> torch.Tensor:
    """Return `value` as the part of a whole output that is `fill` elsewhere."""
    if part == layer.region:
        return value
    whole = value.new_full((value.shape[0], *layer.shape), fill)
    whole[(slice(None), *part.slices)] = value
    return whole


def _cut_inputs(
    layer: Layer, reads: Sequence[Region], values: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    return [
        values[name][(slice(None), *region.slices)]
        for name, region in zip(layer.inputs, reads, strict=True)
    ]


def _cut_tensors(
    layer: Layer, uses: Mapping[str, Region], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {word: tensors[layer.tensors[word].name][region.slices] for word, region in uses.items()}


def _check(layer: Layer, value: torch.Tensor, part: Region) -> None:
    if tuple(value.shape[1:]) != part.shape:
        raise GraphError(
            f"kind {layer.kind!r} computes {part} of {layer.name!r} with shape "
            f"{list(value.shape[1:])}, not {list(part.shape)}"
        )
