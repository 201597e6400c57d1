"""Pins: placements that the user requires, like "whole@3", "rows:4", "grid:2x3", "inputs:4".

A pin need not be among the candidates: any number of parts is possible that the layer and the
number of machines allow.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Final

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import operator_of
from distbelief.partition.candidates import (
    Candidate,
    dimension_names,
    partial_sums,
    split,
    summed_dims,
    whole,
)
from distbelief.program.cluster import Cluster


_WHOLE: Final = re.compile(r"whole(?:@(\d+))?")
_SPLIT: Final = re.compile(r"(\w+)[: ](\d+(?:x\d+)*)")


def check_pins(graph: LayerGraph, pins: Mapping[str, str], cluster: Cluster | None = None) -> None:
    """Check that pins name layers that are computed.

    Args:
        graph: The layer graph.
        pins: Per layer, its split.
        cluster: If given, each pin must be possible on these machines.

    Raises:
        GraphError: a pin names no such layer, or is impossible.
    """
    for name in pins:
        if name not in graph.by_name:
            near = difflib.get_close_matches(name, list(graph.by_name), n=3)
            few = [x.name for x in graph.layers if x.kind != INPUT][:8]
            hint = (
                f": do you mean {' or '.join(map(repr, near))}?"
                if near
                else f" (there are {', '.join(few)}, ...)"
            )
            raise GraphError(f"{name!r} is pinned, but there is no such layer{hint}")
        if graph[name].kind == INPUT:
            raise GraphError(
                f"{name!r} is pinned, but it is an input: pin the layers that read it instead"
            )
        if cluster is not None:
            pinned(graph[name], cluster, pins[name])


def pinned(
    layer: Layer, cluster: Cluster, pin: str, *, machines: Sequence[int] | None = None
) -> Candidate:
    """Return the candidate that a pin means.

    Args:
        layer: The pinned layer.
        cluster: All machines.
        pin: Its split.
        machines: In the order in which they are used.

    Raises:
        GraphError: the layer cannot be placed so; lists what is possible.
    """
    found = _whole(layer, cluster, pin) or _split(layer, cluster, pin, machines=machines)
    if found is None:
        raise GraphError(
            f"{layer.name!r} cannot be pinned to {pin!r} on {len(cluster)} machines: "
            f"use {', '.join(possible(layer, cluster))}"
            + (f" ({layer.whole})" if layer.whole else "")
        )
    return found


def possible(layer: Layer, cluster: Cluster) -> list[str]:
    """Return the pins that a layer allows, for people."""
    n_machines = len(cluster)
    found = ["whole"]
    if n_machines > 1:
        found.append(f"whole@0 to whole@{n_machines - 1}")
    names, most = dimension_names(layer), {}
    for cut in () if layer.whole else operator_of(layer).cuts(layer):
        most[cut.dim] = min(n_machines, layer.shape[cut.dim] // cut.unit)
        if most[cut.dim] >= 2:
            found.append(f"{names[cut.dim]}:2 to {names[cut.dim]}:{most[cut.dim]}")
    n_dims = len(layer.shape)
    if n_dims >= 2 and min(most.get(dim, 1) for dim in (n_dims - 2, n_dims - 1)) > 1:
        found.append(
            f"grid:AxB with {names[-2]} A <= {most[n_dims - 2]}, {names[-1]} B <= "
            f"{most[n_dims - 1]}, A * B <= {n_machines}"
        )
    for dim in summed_dims(layer)[:1]:
        n_parts = min(n_machines, layer.input_shapes[0][dim])
        if n_parts >= 2:
            found.append(f"inputs:2 to inputs:{n_parts}")
    return found


def _whole(layer: Layer, cluster: Cluster, pin: str) -> Candidate | None:
    match = _WHOLE.fullmatch(pin)
    if match is None:
        return None
    machine = int(match[1] or 0)
    return whole(layer, machine) if machine < len(cluster) else None


def _split(
    layer: Layer, cluster: Cluster, pin: str, *, machines: Sequence[int] | None
) -> Candidate | None:
    match = _SPLIT.fullmatch(pin)
    if match is None:
        return None
    name, numbers = match[1], [int(number) for number in match[2].split("x")]
    if min(numbers) < 1:
        return None
    if name == "inputs" and len(numbers) == 1:
        dims = summed_dims(layer)
        if not dims:
            return None
        return partial_sums(layer, cluster, numbers[0], dim=dims[0], machines=machines)
    parts = _parts(layer, name, numbers)
    return split(layer, cluster, parts, machines=machines) if parts else None


def _parts(layer: Layer, name: str, numbers: list[int]) -> list[int]:
    # A grid with fewer numbers than dimensions means the last dimensions. Empty if impossible.
    names = dimension_names(layer)
    if name == "grid" and 1 < len(numbers) <= len(names):
        return [1] * (len(names) - len(numbers)) + numbers
    if name in names and len(numbers) == 1:
        return [numbers[0] if name == other else 1 for other in names]
    return []
