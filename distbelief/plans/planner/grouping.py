"""Groups of layers that are placed together: followers use the cells of a root, without messages.

    conv1 --> batch norm: mean, variance, normalise --> relu --> conv2
      ^          |                   |                   |
      '-- root   '----- follow ------'-------------------'

    elementwise   relu, dropout, normalise, add: a region reads that same region
    reduced       sums over what each machine owns: statistics, the sum of a softmax, a loss;
                  partial sums if cells are cut along what is summed

The planner then places roots only. In theory another input may be the better leader, in practice
hardly ever.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, final

from distbelief.graph.graph import Layer, LayerGraph
from distbelief.graph.operator import joined, operator_of, sums_of
from distbelief.graph.region import Interval, Region, Shape
from distbelief.plans.compiler import LruCache
from distbelief.plans.placement import Cuts, Placement


@final
@dataclass(frozen=True, slots=True)
class Follower:
    """A layer that follows one of its inputs."""

    layer: Layer
    leader: Layer  # the input
    reduces: bool  # sums over the input; else elementwise

    def placement(self, leader: Placement) -> Placement:
        """Return the placement of the layer, given that of its leader."""
        layout = leader if leader.combine is None else leader.combine
        if self.reduces:
            return _reduced(self.layer, self.leader.shape, layout)
        pairs = zip(self.leader.shape, layout.cuts, strict=True)
        kept = (cuts for extent, cuts in pairs if extent != 1)
        return Placement(
            cuts=tuple(() if n == 1 else next(kept) for n in self.layer.shape),
            machines=layout.machines,
        )


@final
@dataclass(frozen=True, slots=True)
class Group:
    """A root and its followers, in topological order."""

    root: Layer
    followers: tuple[Follower, ...]

    @property
    def members(self) -> tuple[Layer, ...]:
        return (self.root, *(follower.layer for follower in self.followers))

    def placements(self, placement: Placement) -> dict[str, Placement]:
        """Return the placement of each member, given that of the root."""
        placed = {self.root.name: placement}
        for follower in self.followers:
            placed[follower.layer.name] = follower.placement(placed[follower.leader.name])
        return placed


def groups(graph: LayerGraph, *, pinned: Collection[str] = ()) -> tuple[Group, ...]:
    """Return all layers except inputs, each in one group; pinned layers are roots."""
    statistics = joined(graph)
    found: list[tuple[Layer, list[Follower]]] = []
    index_of: dict[str, int] = {}
    for layer in graph.computed:
        options = []
        if layer.name not in pinned:
            for index, name in enumerate(layer.inputs):
                how = _follows(layer, index, statistics=statistics)
                if how is not None and name in index_of:
                    options.append(Follower(layer, graph[name], reduces=how == "reduced"))
        if options:
            # The latest leader: the add of a residual block follows the block, not the shortcut.
            follower = max(options, key=lambda follower: index_of[follower.leader.name])
            index_of[layer.name] = index_of[follower.leader.name]
            found[index_of[layer.name]][1].append(follower)
        else:
            index_of[layer.name] = len(found)
            found.append((layer, []))
    return tuple(Group(root, tuple(followers)) for root, followers in found)


def _follows(
    layer: Layer, index: int, *, statistics: Collection[str]
) -> Literal["alike", "reduced"] | None:
    # How a layer may follow one of its inputs; None if it may not.
    if layer.whole:
        return None
    if reads_its_own(layer, index):
        # Statistics have one value per batch: a layer that also reads samples follows the samples.
        same = (layer.inputs[index] in statistics) == (layer.name in statistics)
        return "alike" if same else None
    reduces = operator_of(layer).partial is not None and not layer.tensors
    n_read = math.prod(layer.input_shapes[index])
    smaller = index == 0 and math.prod(layer.shape) <= n_read
    return "reduced" if reduces and smaller else None


_ALIKE: Final = LruCache[bool](10_000)  # by signature and index


def reads_its_own(layer: Layer, index: int) -> bool:
    """Return whether every region reads that same region of an input, extents of 1 aside."""
    return _ALIKE.get((layer.signature, index), lambda: _reads_its_own(layer, index))


def _reads_its_own(layer: Layer, index: int) -> bool:
    shape = layer.input_shapes[index]
    if _squeezed(layer.shape) != _squeezed(shape):
        return False
    kind = operator_of(layer)
    units = {cut.dim: cut.unit for cut in kind.cuts(layer)}
    if any(units.get(dim) != 1 for dim, n in enumerate(layer.shape) if n > 1):
        return False
    return all(
        kind.reads(layer, probe)[index] == _moved(probe, of=layer.shape, to=shape)
        for probe in _probes(layer.region)
    )


def _probes(region: Region) -> Iterator[Region]:
    # Regions that reveal a halo, a permutation or a broadcast.
    yield region
    for dim, (_, extent) in enumerate(region):
        if extent > 1:
            half = extent // 2
            yield region.replaced(dim, (0, half))
            yield region.replaced(dim, (half, extent))


def _squeezed(shape: Shape) -> Shape:
    return tuple(extent for extent in shape if extent != 1)


def _moved(region: Region, *, of: Shape, to: Shape) -> Region:
    # The same region in a shape with other dimensions of extent 1.
    pairs = zip(region, of, strict=True)
    kept: Iterator[Interval] = (interval for interval, extent in pairs if extent != 1)
    return Region(tuple((0, 1) if extent == 1 else next(kept) for extent in to))


def _reduced(layer: Layer, shape: Shape, layout: Placement) -> Placement:
    # The sum is computed where its summands are, if possible; the first machine that contributes to
    # a part of the sum combines it.
    partial = sums_of(layer)
    whole = Placement.whole(len(layer.shape), layout.machines[0])
    cells = list(layout.cells(shape))
    if len(cells) == 1:
        return Placement.whole(len(layer.shape), cells[0][0])
    if not _allows({cut.dim: cut.unit for cut in partial.cuts(layer)}, layout.cuts):
        return whole
    first: dict[Region, int] = {}
    for machine, cell in cells:
        first.setdefault(partial.writes(layer, cell), machine)
    combine = _grid_of(first, len(layer.shape))
    units = {cut.dim: cut.unit for cut in operator_of(layer).cuts(layer)}
    if len(first) == len(cells) and _allows(units, combine.cuts):
        return combine  # nothing to combine: each cell writes a part of its own
    return Placement(cuts=layout.cuts, machines=layout.machines, combine=combine)


def _allows(units: dict[int, int], cuts: Cuts) -> bool:
    return all(
        dim in units and all(place % units[dim] == 0 for place in places)
        for dim, places in enumerate(cuts)
        if places
    )


def _grid_of(cells: dict[Region, int], n_dims: int) -> Placement:
    # The cells are known to form a grid.
    starts = [sorted({region.intervals[dim][0] for region in cells}) for dim in range(n_dims)]
    machine_at = {tuple(start for start, _ in region): machine for region, machine in cells.items()}
    return Placement(
        cuts=tuple(tuple(places[1:]) for places in starts),
        machines=tuple(machine_at[place] for place in product(*starts)),
    )
