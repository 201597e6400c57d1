"""Computes a layer graph region by region in one process, as a reference.

Every layer is computed in the given parts, each from exactly what its operator says that it reads
and uses. If operators are right, outputs and gradients equal the model's, however layers are
split (DB-3).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import final

import torch

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import Call, Step, operator_of
from distbelief.graph.region import Region


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
    """Return the output of every layer, (batch, *shape), computed in these parts one by one."""
    step = step or Step()
    values: dict[str, torch.Tensor] = {}
    for layer in graph.layers:
        if layer.kind == INPUT:
            if layer.name not in inputs:
                raise GraphError(f"input {layer.name!r} is missing")
            values[layer.name] = inputs[layer.name]
            continue
        wanted = (parts or {}).get(layer.name, (layer.region,))
        values[layer.name] = _computed(layer, wanted, values, tensors, step)
    return values


def tile(whole: Region, parts: Iterable[Region]) -> bool:
    """Return whether the parts contain every index of `whole` exactly once."""
    parts = [part for part in parts if part.n_elements]
    if sum(part.n_elements for part in parts) != whole.n_elements:
        return False
    if not all(part in whole for part in parts):
        return False
    # Equal counts and no overlap leave no gap.
    return not any((a & b).n_elements for i, a in enumerate(parts) for b in parts[i + 1 :])


def _computed(
    layer: Layer,
    parts: Parts,
    values: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    step: Step,
) -> torch.Tensor:
    kind, partial = operator_of(layer), None
    split, what = layer.region, repr(layer.name)
    if isinstance(parts, Partials):
        parts, partial = parts.parts, kind.partial
        split, what = Region.of(*layer.input_shapes[0]), f"the first input of {layer.name!r}"
        if tile(split, parts) and partial is None:
            raise GraphError(f"layers of kind {layer.kind!r} have no partial outputs")
    if not tile(split, parts):
        raise GraphError(f"parts {', '.join(map(str, parts))} do not tile {what}, {split}")
    sums = partial is None or partial.combine(layer) == "sum"
    computed = []
    for part in parts:
        if not part.n_elements:
            continue
        reads = (partial or kind).reads(layer, part)
        inputs = [
            values[name][(slice(None), *region.slices)]
            for name, region in zip(layer.inputs, reads, strict=True)
        ]
        uses = {
            word: tensors[layer.tensors[word].name][region.slices]
            for word, region in (partial or kind).uses(layer, part).items()
        }
        value = (partial or kind).compute(Call(layer, part, inputs, uses, step))
        written = part if partial is None else partial.writes(layer, part)
        _check(layer, value, written)
        computed.append(_placed(layer, value, written, fill=0.0 if sums else -math.inf))
    # Out of place, for autograd.
    return reduce(torch.add, computed) if sums else torch.stack(computed).amax(0)


def _placed(layer: Layer, value: torch.Tensor, part: Region, *, fill: float) -> torch.Tensor:
    """Return `value` as the part of a whole output that is `fill` elsewhere."""
    if part == layer.region:
        return value
    whole = value.new_full((value.shape[0], *layer.shape), fill)
    whole[(slice(None), *part.slices)] = value
    return whole


def _check(layer: Layer, value: torch.Tensor, part: Region) -> None:
    if tuple(value.shape[1:]) != part.shape:
        raise GraphError(
            f"kind {layer.kind!r} computes {part} of {layer.name!r} with shape "
            f"{list(value.shape[1:])}, not {list(part.shape)}"
        )
