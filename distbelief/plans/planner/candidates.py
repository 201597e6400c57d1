"""Candidates: the placements of one layer that the planner considers, and their labels.

    whole       all of it on one machine; whole@3 on machine 3
    units 4     neurons, channels or heads, cut in 4; also rows, columns, depth
    grid 2x3    rows and columns; of three numbers the first is for units
    inputs 4    partial sums over 4 parts of the first input, combined by the same 4

Region i is on machine i of the given order, so layers that are cut alike exchange little. Extents
are in proportion to the machines' speeds. Equal machines are interchangeable: whole layers go to
the first one, unless memory is limited.

Pins are placements that the user requires: "whole@3", "rows:4", "grid:2x3", "inputs:4".
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import Cut, operator_of, sums_of
from distbelief.graph.region import Region, Shape
from distbelief.plans.cluster import UNLIMITED, Cluster, weights
from distbelief.plans.placement import Placement, grid


N_CANDIDATES_MAX: Final = 60
_N_WHOLE_MAX: Final = 8
# Elements per machine; with fewer, one machine combines all partial sums.
_N_COMBINED_MIN: Final = 8
_CHANNELS_FIRST: Final = frozenset({"convolution", "transposed_convolution", "pool"})
_NAMES: Final = {
    1: ("units",),
    2: ("rows", "units"),  # of a sequence
    3: ("units", "rows", "columns"),
    4: ("units", "depth", "rows", "columns"),
}


class Candidate(NamedTuple):
    placement: Placement
    label: str


def candidates(
    layer: Layer, cluster: Cluster, *, machines: Sequence[int] | None = None
) -> list[Candidate]:
    """Return the candidates of a layer, whole ones first: at most `N_CANDIDATES_MAX`.

    `machines` are all of them, in the order in which they are used.
    """
    machines = machines or range(len(cluster))
    wholes = [whole(layer, machine) for machine in _whole_machines(cluster, machines)]
    families = [[each for each in family if each] for family in _families(layer, cluster, machines)]
    return [*wholes, *_thinned(families, N_CANDIDATES_MAX - len(wholes))]


def whole(layer: Layer, machine: int) -> Candidate:
    label = f"whole@{machine}" if machine else "whole"
    return Candidate(Placement.whole(len(layer.shape), machine), label)


def split(
    layer: Layer, cluster: Cluster, parts: Sequence[int], *, machines: Sequence[int] | None = None
) -> Candidate | None:
    """Return a layer with its output cut into these numbers of parts; None if impossible."""
    machines = machines or range(len(cluster))
    placement = _cut(layer.shape, cuts_of(layer), cluster, parts, machines)
    if placement is None:
        return None
    names = dimension_names(layer)
    in_two = [dim for dim, n_parts in enumerate(parts) if n_parts > 1]
    if not in_two:
        return whole(layer, machines[0])
    if len(in_two) == 1:
        return Candidate(placement, f"{names[in_two[0]]} {parts[in_two[0]]}")
    shown = parts[-2:] if min(in_two) >= len(parts) - 2 else parts
    return Candidate(placement, f"grid {'x'.join(map(str, shown))}")


def partial_sums(
    layer: Layer, cluster: Cluster, n_parts: int, *, dim: int, machines: Sequence[int] | None = None
) -> Candidate | None:
    """Return a layer as partial sums over parts of dimension `dim` of its first input.

    The machines that compute them combine them, each a part of the output if it is large enough.
    None if there are no such sums, or too few machines.
    """
    if dim not in summed_dims(layer):
        return None
    machines = machines or range(len(cluster))
    shape = layer.input_shapes[0]
    parts = [n_parts if other == dim else 1 for other in range(len(shape))]
    placement = _cut(shape, sums_of(layer).cuts(layer), cluster, parts, machines)
    if placement is None:
        return None
    combine: Placement | None = None
    if layer.region.n_elements >= _N_COMBINED_MIN * n_parts:
        longest = max(range(len(layer.shape)), key=lambda other: layer.shape[other])
        parts = [n_parts if o == longest else 1 for o in range(len(layer.shape))]
        combine = _cut(layer.shape, (Cut(longest),), cluster, parts, machines)
    combine = combine or Placement.whole(len(layer.shape), machines[0])
    place = "" if dim == summed_dims(layer)[0] else f" of dimension {dim}"
    combined = msgspec.structs.replace(placement, combine=combine)
    return Candidate(combined, f"inputs {n_parts}{place}")


def summed_dims(layer: Layer) -> tuple[int, ...]:
    """Return the dimensions of the first input over which a layer sums, the last first."""
    partial = None if layer.whole else operator_of(layer).partial
    if partial is None:
        return ()
    whole_input = Region.of(*layer.input_shapes[0])
    found = []
    for cut in partial.cuts(layer):
        parts = whole_input.cut(cut.dim, [1.0, 1.0], unit=cut.unit)
        if not all(part.n_elements for part in parts):
            continue
        # Parts along a dimension that is not summed write different parts of the output.
        if len({partial.writes(layer, part) for part in parts}) == 1:
            found.append(cut.dim)
    return tuple(sorted(found, reverse=True))


def cuts_of(layer: Layer) -> tuple[Cut, ...]:
    """Return the dimensions along which the output may be split; none if the layer is opaque."""
    return () if layer.whole else operator_of(layer).cuts(layer)


def dimension_names(layer: Layer) -> tuple[str, ...]:
    """Return the names of the output's dimensions in labels and pins."""
    n_dims = len(layer.shape)
    if n_dims == 2 and layer.kind in _CHANNELS_FIRST:
        return ("units", "rows")
    return _NAMES.get(n_dims) or tuple(f"dimension{dim}" for dim in range(n_dims))


def sizes(n_machines: int) -> list[int]:
    """Return the numbers of parts to try: 2, 3, 4, 6, 8, 12, ..., all."""
    if n_machines <= 12:
        return list(range(2, n_machines + 1))
    powers = {2**i for i in range(1, 20)} | {3 * 2**i for i in range(20)}
    divisors = {k for k in range(2, n_machines + 1) if n_machines % k == 0}
    return sorted(k for k in powers | divisors if k <= n_machines)


def _whole_machines(cluster: Cluster, machines: Sequence[int]) -> list[int]:
    # Some machines of each sort; equal machines are interchangeable.
    if any(machine.memory < UNLIMITED for machine in cluster.machines):
        return list(machines[:_N_WHOLE_MAX])
    first_of_sort: dict[object, int] = {}
    for index in machines:
        first_of_sort.setdefault(cluster.machines[index], index)
    chosen = set(first_of_sort.values())
    if not cluster.is_uniform:
        chosen.update(machines[:2])
    return [index for index in machines if index in chosen][:_N_WHOLE_MAX]


def _families(
    layer: Layer, cluster: Cluster, machines: Sequence[int]
) -> Iterator[list[Candidate | None]]:
    # Candidates of each sort, by number of parts; None if impossible.
    n_dims = len(layer.shape)
    cuttable = [cut.dim for cut in cuts_of(layer)]
    counts = sizes(len(cluster))
    tried: list[list[tuple[int, ...]]] = []
    for dim in cuttable:
        if dim == n_dims - 1 and n_dims > 2 and layer.shape[-1] <= layer.shape[-2]:
            continue  # columns would be no better than rows
        tried.append([_parts(n_dims, {dim: k}) for k in counts])
    if n_dims >= 2 and {n_dims - 2, n_dims - 1} <= set(cuttable):
        tried.append(_grids(layer.shape, n_dims - 2, n_dims - 1, counts, n_each=2))
    if n_dims >= 3 and {0, n_dims - 2} <= set(cuttable):
        tried.append(_grids(layer.shape, 0, n_dims - 2, counts, n_each=1))
    for family in tried:
        yield [split(layer, cluster, parts, machines=machines) for parts in family]
    for dim in summed_dims(layer):
        yield [partial_sums(layer, cluster, k, dim=dim, machines=machines) for k in counts]


def _parts(n_dims: int, parts: dict[int, int]) -> tuple[int, ...]:
    return tuple(parts.get(dim, 1) for dim in range(n_dims))


def _grids(
    shape: Shape, one: int, other: int, counts: Sequence[int], *, n_each: int
) -> list[tuple[int, ...]]:
    # For each number of cells, the grids nearest to squares: they have the shortest halos. For
    # channels and rows no shape is better than another.
    found = []
    for count in counts:
        pairs = [(a, count // a) for a in range(2, count // 2 + 1) if count % a == 0]
        pairs = [(a, b) for a, b in pairs if a <= shape[one] and b <= shape[other]]
        pairs.sort(key=lambda ab: abs(math.log(shape[one] * ab[1] / shape[other] / ab[0])))
        # The best one last: thinning keeps the last.
        best = reversed(pairs[:n_each])
        found += [_parts(len(shape), {one: a, other: b}) for a, b in best]
    return found


def _cut(
    shape: Shape,
    cuts: Sequence[Cut],
    cluster: Cluster,
    parts: Sequence[int],
    machines: Sequence[int],
) -> Placement | None:
    # One cell for each of the first machines, as large as the machine is fast.
    units = dict(cuts)
    n_cells = math.prod(parts)
    if n_cells > len(cluster):
        return None
    for dim, (extent, n_parts) in enumerate(zip(shape, parts, strict=True)):
        if n_parts > 1 and (dim not in units or n_parts * units[dim] > extent):
            return None
    used = [cluster.machines[index] for index in machines[:n_cells]]
    speeds = np.array(weights(used)).reshape(tuple(parts))
    dims = range(len(shape))
    shares = [speeds.sum(tuple(o for o in dims if o != dim)).tolist() for dim in dims]
    return grid(shape, shares, machines[:n_cells], units=[units.get(dim, 1) for dim in dims])


def _thinned(families: list[list[Candidate]], limit: int) -> list[Candidate]:
    # Drop every second candidate of the largest family until `limit` is met.
    while sum(map(len, families)) > limit:
        largest = max(range(len(families)), key=lambda i: len(families[i]))
        family = families[largest]
        # The last one uses the most machines: keep it.
        families[largest] = family[(len(family) + 1) % 2 :: 2]
    distinct = {c.placement: c for family in families for c in family}
    return list(distinct.values())


# --- pins ---

_WHOLE: Final = re.compile(r"whole(?:@(\d+))?")
_SPLIT: Final = re.compile(r"(\w+)[: ](\d+(?:x\d+)*)")


def check_pins(graph: LayerGraph, pins: Mapping[str, str], cluster: Cluster | None = None) -> None:
    """Check that pins name layers that are computed.

    With a cluster, each pin must also be possible there. GraphError if a pin names no such layer,
    or is impossible.
    """
    for name in pins:
        if name not in graph.by_name:
            raise GraphError(f"{name!r} is pinned, but there is no such layer{near(graph, name)}")
        if graph[name].kind == INPUT:
            raise GraphError(
                f"{name!r} is pinned, but it is an input: pin the layers that read it instead"
            )
        if cluster is not None:
            pinned(graph[name], cluster, pins[name])


def near(graph: LayerGraph, name: str) -> str:
    """Return a hint for an unknown layer: similar names, or some that exist."""
    found = difflib.get_close_matches(name, list(graph.by_name), n=3)
    if found:
        return f": do you mean {' or '.join(map(repr, found))}?"
    some = [layer.name for layer in graph.computed[:8]]
    return f" (there are {', '.join(some)}, ...)"


def pinned(
    layer: Layer, cluster: Cluster, pin: str, *, machines: Sequence[int] | None = None
) -> Candidate:
    """Return the candidate that a pin means, tried or not; GraphError lists what is possible."""
    found: Candidate | None = None
    if match := _WHOLE.fullmatch(pin):
        machine = int(match[1] or 0)
        found = whole(layer, machine) if machine < len(cluster) else None
    elif match := _SPLIT.fullmatch(pin):
        name, numbers = match[1], [int(number) for number in match[2].split("x")]
        names, dims = dimension_names(layer), summed_dims(layer)
        parts: list[int] = []
        if name == "grid" and 1 < len(numbers) <= len(names):
            # A grid with fewer numbers than dimensions means the last dimensions.
            parts = [1] * (len(names) - len(numbers)) + numbers
        elif name in names and len(numbers) == 1:
            parts = [numbers[0] if name == other else 1 for other in names]
        if min(numbers) >= 1 and parts:
            found = split(layer, cluster, parts, machines=machines)
        elif min(numbers) >= 1 and name == "inputs" and len(numbers) == 1 and dims:
            found = partial_sums(layer, cluster, numbers[0], dim=dims[0], machines=machines)
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
    for cut in cuts_of(layer):
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
