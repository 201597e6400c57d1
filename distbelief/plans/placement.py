"""The placement of one layer: a grid of cuts, and a machine for each cell.

    output [16, 32, 32]      cuts ((), (16,), (10, 21))      machines 0 1 2 3 4 5

        columns   0    10   21   32
        rows  0   |  0  |  1  |  2  |
             16   |  3  |  4  |  5  |
             32

Cells tile the layer by construction. A layer whose output is a sum over its first input may be
placed as *partial*: then the cells are of that input, and `combine` places the sum.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import Self, final

import msgspec
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import operator_of
from distbelief.graph.region import Interval, Region, Shape


Cuts = tuple[tuple[int, ...], ...]


@final
class Placement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True):
    """A grid of cells and the machine of each cell."""

    cuts: Cuts  # per dimension, ascending; 0 and the extent are left out
    machines: tuple[int, ...]  # of each cell, the last dimension running fastest
    combine: "Placement | None" = None  # placement of the sum; None if the cells are of the output

    @classmethod
    def whole(cls, n_dims: int, machine: int) -> Self:
        return cls(cuts=((),) * n_dims, machines=(machine,))

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(len(cuts) + 1 for cuts in self.cuts)

    def cells(self, shape: Shape) -> Iterator[tuple[int, Region]]:
        """Yield machine and region of every cell that is not empty.

        `shape` is what is cut: the output, or the first input if `combine`.
        """
        rows: list[list[Interval]] = [
            list(pairwise((0, *cuts, extent)))
            for cuts, extent in zip(self.cuts, shape, strict=True)
        ]
        for machine, intervals in zip(self.machines, product(*rows), strict=True):
            region = Region(intervals)
            if region.n_elements:
                yield machine, region

    @property
    def computing(self) -> frozenset[int]:
        others = self.combine.computing if self.combine else frozenset[int]()
        return others.union(self.machines)

    def owners(self, layer: Layer) -> list[tuple[int, Region]]:
        """Return the machines that have the output once it is computed, with their regions."""
        whose = self if self.combine is None else self.combine
        return list(whose.cells(layer.shape))

    def check_cells(self, name: str, *, n_machines: int) -> None:
        """Raise GraphError if cells, machines and cuts of layer `name` contradict each other."""
        n_cells = math.prod(self.grid)
        if len(self.machines) != n_cells:
            raise GraphError(
                f"{name!r} is cut into {n_cells} cells, but {len(self.machines)} machines are "
                "named: name one per cell"
            )
        for machine in self.machines:
            if not 0 <= machine < n_machines:
                raise GraphError(
                    f"{name!r} is placed on machine {machine}: use 0 to {n_machines - 1}"
                )
        for cuts in self.cuts:
            if list(cuts) != sorted(cuts) or (cuts and cuts[0] < 0):
                raise GraphError(f"{name!r} is cut at {list(cuts)}: cuts must ascend, from 0")
        if self.combine is not None:
            if self.combine.combine is not None:
                raise GraphError(f"{name!r} combines partial sums twice: combine them once")
            self.combine.check_cells(name, n_machines=n_machines)

    def check(self, layer: Layer, *, n_machines: int) -> None:
        """Check that this layer can be computed with this placement; GraphError says why not."""
        self.check_cells(layer.name, n_machines=n_machines)
        kind, shape = operator_of(layer), layer.shape
        allowed: dict[int, int] = dict(kind.cuts(layer))
        if self.combine is not None:
            if kind.partial is None:
                raise GraphError(
                    f"{layer.name!r} is placed as partial sums, but layers of kind "
                    f"{layer.kind!r} have none: plan again"
                )
            _check_extents(self.combine, layer.name, shape)
            shape, allowed = layer.input_shapes[0], dict(kind.partial.cuts(layer))
        _check_extents(self, layer.name, shape)
        for dim, places in enumerate(self.cuts):
            if places and dim not in allowed:
                raise GraphError(
                    f"{layer.name!r} cannot be cut along dimension {dim}, only along "
                    f"{sorted(allowed) or 'none'}"
                )
            if any(place % allowed.get(dim, 1) for place in places):
                raise GraphError(
                    f"{layer.name!r} is cut at {list(places)} along dimension {dim}: use "
                    f"multiples of {allowed[dim]}"
                )

    @override
    def __str__(self) -> str:
        n = len(set(self.machines))
        on = f"machine {self.machines[0]}" if n == 1 else f"{n} machines"
        if math.prod(self.grid) == 1:
            return f"whole on {on}"
        grid = "x".join(map(str, self.grid))
        return f"{'inputs ' if self.combine else ''}{grid} on {on}"


def grid(
    shape: Shape,
    weights: Sequence[Sequence[float]],
    machines: Iterable[int],
    *,
    units: Sequence[int] | None = None,
) -> Placement:
    """Return a placement whose cells have extents in proportion to `weights`, one for each part.

    One number leaves a dimension whole. Cuts lie at multiples of `units`, by dimension; the last
    dimension of `machines` runs fastest.
    """
    units = units or (1,) * len(shape)
    # A cut is the end of every part but the last.
    cuts = tuple(
        tuple(part.intervals[0][1] for part in Region(((0, extent),)).cut(0, parts, unit=unit)[:-1])
        for extent, parts, unit in zip(shape, weights, units, strict=True)
    )
    return Placement(cuts=cuts, machines=tuple(machines))


def _check_extents(placement: Placement, name: str, shape: Shape) -> None:
    if len(placement.cuts) != len(shape):
        raise GraphError(
            f"{name!r} has {len(shape)} dimensions, but its placement has cuts for "
            f"{len(placement.cuts)}"
        )
    for cuts, extent in zip(placement.cuts, shape, strict=True):
        if cuts and cuts[-1] > extent:
            raise GraphError(
                f"{name!r} is cut at {list(cuts)}: cuts must ascend, from 0 to {extent}"
            )
