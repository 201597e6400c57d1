"""Where the values of a step lie: written once, gone when read for the last time.

Some slots are there once for all micro-batches, of others each has its own. A slot that
several operations add to is copied once, where its first value may be somebody else's
memory, and then added to in place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal, NamedTuple, final

import torch

from distbelief.graph.graph import GraphError
from distbelief.graph.region import Region, Shape


# Tensors put together from pieces that lie in slots: cut out, added, or the largest.
#
#     wanted   [0:10, 4:8]         piece in slot 3   [0:6, 0:8]     cut [0:6, 4:8]
#                                  piece in slot 5   [6:10, 4:8]    all of it
#
# What goes where is worked out once for each program (`gather`), and done at every step
# (`gathered`). One piece that holds all that is wanted is looked at, not copied. Pieces
# are added in the order of the program, never of arrival: same answers, same bits.

How = Literal["cut", "sum", "max"]
Slices = tuple["slice[int, int, None] | slice[None] | EllipsisType", ...]

Known = Sequence[tuple[int, Region]]
"""Slots, and the region of something that each holds."""


class Piece(NamedTuple):
    """What one slot gives.

    Attributes:
        slot: Which.
        source: What of it; None for all.
        target: To where in what is put together; None for all of that.
    """

    slot: int
    source: Slices | None
    target: Slices | None


@final
@dataclass(frozen=True, slots=True)
class Gather:
    """How something is put together.

    Attributes:
        shape: Of the result, without samples.
        samples: Whether they are its first dimension.
        how: "cut": pieces tile it. "sum", "max": they may overlap, or leave gaps.
        pieces: In the order in which they are added.
    """

    shape: Shape
    samples: bool
    how: How
    pieces: tuple[Piece, ...]


def gather(wanted: Region, known: Known, *, how: How, samples: bool, what: str) -> Gather:
    """Return how `wanted` is put together from what is known.

    Args:
        wanted: A region.
        known: Of the same thing; for "cut" disjoint.
        how: See `StartEpoch`.
        samples: Whether tensors have a dimension of samples first.
        what: What it is, for messages.

    Raises:
        GraphError: a part of it is nowhere: the program has a gap.
    """
    pieces: list[Piece] = []
    n_found = 0
    for slot, region in known:
        common = region & wanted
        if not common.n_elements:
            continue
        n_found += common.n_elements
        pieces.append(
            Piece(
                slot,
                _slices(common.within(region), region.shape, samples=samples),
                _slices(common.within(wanted), wanted.shape, samples=samples),
            )
        )
    if how != "sum" and n_found < wanted.n_elements:
        raise GraphError(f"{what} {wanted} is not there: the program has a gap")
    if how == "cut" and n_found > wanted.n_elements:
        raise GraphError(f"{what} {wanted} is there twice")
    # A sum that begins with a piece that covers it needs no zeros; which one that is
    # does not depend on what happens in a step.
    pieces.sort(key=lambda piece: piece.target is not None)
    return Gather(wanted.shape, samples, how, tuple(pieces))


def gathered(
    gather: Gather, pieces: Sequence[torch.Tensor | None], *, like: torch.Tensor
) -> torch.Tensor | None:
    """Return it put together; None for zeros.

    Args:
        gather: How.
        pieces: What lies in its slots, in order; None for zeros.
        like: Zeros of one sample, or none, of what an empty result looks like.
    """
    if len(pieces) == 1 and gather.pieces[0].target is None:
        return _source(gather.pieces[0], pieces[0])
    found = [
        (piece, _source(piece, value)) for piece, value in zip(gather.pieces, pieces, strict=True)
    ]
    there = [(piece, value) for piece, value in found if value is not None]
    if not there:
        is_empty = gather.how == "cut" and not gather.pieces
        return like.new_zeros(_shape(gather, like)) if is_empty else None
    first = there[0][1]
    if gather.how == "cut" and len(there) == len(found):
        whole = first.new_empty(_shape(gather, first))
        for piece, value in there:
            whole[_at(piece)] = value
        return whole
    return _added(gather, there)


def _added(gather: Gather, there: list[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """Return the sum, or the largest, of pieces that need not cover it."""
    (piece, first), *rest = there
    largest = gather.how == "max"
    if piece.target is None and rest and rest[0][0].target is None and not largest:
        whole = first + rest[0][1]  # the usual case: one pass, and no copy before it
        rest = rest[1:]
    elif piece.target is None:
        if not rest:
            return first
        whole = first.clone()
    else:
        whole = first.new_full(_shape(gather, first), -math.inf if largest else 0.0)
        rest = there
    for piece, value in rest:
        at = whole[_at(piece)]
        if largest:
            torch.maximum(at, value, out=at)
        else:
            at += value
    return whole


def _shape(gather: Gather, like: torch.Tensor) -> tuple[int, ...]:
    return (like.shape[0], *gather.shape) if gather.samples else gather.shape


def _at(piece: Piece) -> Slices:
    return (...,) if piece.target is None else piece.target


def _source(piece: Piece, value: torch.Tensor | None) -> torch.Tensor | None:
    return value if value is None or piece.source is None else value[piece.source]


def _slices(part: Region, shape: Shape, *, samples: bool) -> Slices | None:
    """Return what cuts `part` out of a tensor of this shape; None if it is all."""
    if part.shape == shape:
        return None
    return (slice(None), *part.slices) if samples else part.slices


@final
class Activations:
    """The values of the step under way.

    Args:
        once: Per slot, whether it is there once for all micro-batches.
        n_readers: Per place, how often it is read.
        sizes: Samples of each micro-batch.
        like: A zero of the step's type, where it is computed.
    """

    def __init__(
        self,
        once: Sequence[bool],
        n_readers: Sequence[int],
        *,
        sizes: Sequence[int],
        like: torch.Tensor,
    ) -> None:
        self._once = once
        self._n_readers = list(n_readers)
        self._sizes = sizes
        self._like = like
        self._values: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()  # of these nobody else has the memory

    def at(self, slot: int, copy: int) -> torch.Tensor:
        """Return what lies there, and leave it there."""
        return self._values[copy * len(self._once) + slot]

    def read(self, reads: Sequence[Gather], copy: int) -> list[torch.Tensor | None]:
        """Return what is put together; forget what nobody reads after this."""
        result = []
        for read in reads:
            places = [self._place(piece.slot, copy) for piece in read.pieces]
            pieces = [self._values.get(place) for place in places]
            like = self._like
            if read.samples and not pieces:
                like = like.expand(self._sizes[copy], 1)
            result.append(gathered(read, pieces, like=like))
        for read in reads:
            for piece in read.pieces:
                place = self._place(piece.slot, copy)
                self._n_readers[place] -= 1
                if not self._n_readers[place]:
                    self._values.pop(place, None)
        return result

    def write(self, slot: int, copy: int, value: torch.Tensor, *, adds: bool = False) -> None:
        """Lay a value there, or add it to what there is; unless nobody reads it."""
        place = self._place(slot, copy)
        if not self._n_readers[place]:
            return
        if not adds or place not in self._values:
            self._values[place] = value
        elif place in self._fresh:
            self._values[place] += value
        else:
            # The first may be somebody else's too: out of place once, then in place.
            self._values[place] = self._values[place] + value
            self._fresh.add(place)

    def _place(self, slot: int, copy: int) -> int:
        return slot if self._once[slot] else copy * len(self._once) + slot
