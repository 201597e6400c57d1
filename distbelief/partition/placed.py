"""A layer in all candidates at once: who computes, has, reads and uses what."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar, final

from distbelief.graph.kind import kind_of
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region
from distbelief.partition.transfer import Boxes, Cells
from distbelief.program.boxes import disjoint
from distbelief.program.placement import Placement


_T = TypeVar("_T")


@final
class Placed:
    """A layer in the candidates of its group.

    Equal layers with equal placements share one of these, and all that follows from it.

    Args:
        layer: Which.
        placements: Of each candidate.
    """

    def __init__(self, layer: Layer, placements: Sequence[Placement]) -> None:
        self.layer = layer
        self.placements = tuple(placements)

    @cached_property
    def computed(self) -> list[list[tuple[int, Region]]]:
        """Per candidate the cells, of the output or, if partial, the first input."""
        layer = self.layer
        return [
            list(p.cells(layer.input_shapes[0] if p.combine else layer.shape))
            for p in self.placements
        ]

    @cached_property
    def owned(self) -> Boxes:
        """Who has what of the output."""
        cells = [placement.owners(self.layer) for placement in self.placements]
        return Boxes.of(cells, n_dims=len(self.layer.shape))

    @cached_property
    def reads(self) -> list[list[tuple[int, tuple[Region, ...]]]]:
        """Per candidate what each machine needs of each input."""
        kind = kind_of(self.layer)
        partial = kind.partial.reads if kind.partial else None
        return self._told(kind.reads, partial)

    @cached_property
    def uses(self) -> list[list[tuple[int, Mapping[str, Region]]]]:
        """Per candidate what each machine uses of the tensors."""
        kind = kind_of(self.layer)
        partial = kind.partial.uses if kind.partial else None
        return self._told(kind.uses, partial)

    @cached_property
    def writes(self) -> list[Cells]:
        """Per candidate what each machine adds to the output, if it is partial."""
        partial = kind_of(self.layer).partial
        return [
            [(m, partial.writes(self.layer, cell)) for m, cell in cells]
            if placement.combine and partial
            else []
            for placement, cells in zip(self.placements, self.computed, strict=True)
        ]

    @cached_property
    def combined(self) -> list[Cells]:
        """Per candidate who adds up which part of the output; nobody if not partial."""
        return [p.owners(self.layer) if p.combine else [] for p in self.placements]

    def _told(
        self,
        of_output: Callable[[Layer, Region], _T],
        of_part: Callable[[Layer, Region], _T] | None,
    ) -> list[list[tuple[int, _T]]]:
        found = []
        for placement, cells in zip(self.placements, self.computed, strict=True):
            tell = of_part if placement.combine and of_part else of_output
            found.append([(machine, tell(self.layer, cell)) for machine, cell in cells])
        return found


def needed(readers: Sequence[tuple[Placed, Sequence[int]]], *, n_dims: int) -> Boxes:
    """Return which part of a layer each machine needs, all that it reads it for.

    Args:
        readers: Of one group; each with the indices of the inputs that are this layer.
        n_dims: Of the layer that is read.
    """
    found: list[Cells] = []
    for candidate in range(len(readers[0][0].placements)):
        needs: dict[int, set[Region]] = {}
        for reader, indices in readers:
            for machine, reads in reader.reads[candidate]:
                needs.setdefault(machine, set()).update(reads[i] for i in indices)
        found.append(
            [
                (machine, region)
                for machine, regions in needs.items()
                for region in (disjoint(regions) if len(regions) > 1 else regions)
            ]
        )
    return Boxes.of(found, n_dims=n_dims)
