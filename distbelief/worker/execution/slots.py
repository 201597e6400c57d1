"""Slots for the values of a step, and gathers that assemble a tensor from several slots.

    wanted   [0:10, 4:8]         piece in slot 3   [0:6, 0:8]     cut [0:6, 4:8]
                                 piece in slot 5   [6:10, 4:8]    all of it

`gather` plans once per dataflow; `gathered` runs at every step. A single piece that covers
the wanted region is a view. Pieces are added in the order of operations, never in order of arrival.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal, NamedTuple, final

import torch

from distbelief.graph.graph import GraphError
from distbelief.graph.region import Region, Shape


How = Literal["cut", "sum", "max"]
Slices = tuple["slice[int, int, None] | slice[None] | EllipsisType", ...]

Known = Sequence[tuple[int, Region]]  # slots, and the region that each holds


class Piece(NamedTuple):
    slot: int
    source: Slices | None  # the part of the slot's value; None: all of it
    target: Slices | None  # the part of the result; None: all of it


@final
@dataclass(frozen=True, slots=True)
class Gather:
    """How a tensor is assembled."""

    shape: Shape  # of the result, without the sample dimension
    samples: bool  # whether samples are its first dimension
    how: How  # "cut": the pieces tile it. "sum", "max": they may overlap or leave gaps.
    pieces: tuple[Piece, ...]  # in the order in which they are added
    joined: bool = False  # whether one sample stands for the whole batch


def gather(
    wanted: Region, known: Known, *, how: How, samples: bool, joined: bool = False, what: str
) -> Gather:
    """Plan how `wanted` is assembled from known slots; GraphError if the dataflow has a gap."""
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
        raise GraphError(f"{what} {wanted} is not there: the dataflow has a gap")
    if how == "cut" and n_found > wanted.n_elements:
        raise GraphError(f"{what} {wanted} is there twice")
    # A sum that begins with a piece that covers it needs no zeros. The choice is fixed here,
    # so it does not depend on the order of events.
    pieces.sort(key=lambda piece: piece.target is not None)
    return Gather(wanted.shape, samples, how, tuple(pieces), joined)


def gathered(
    gather: Gather, pieces: Sequence[torch.Tensor | None], *, like: torch.Tensor
) -> torch.Tensor | None:
    """Return the assembled tensor; None for zeros.

    `pieces` are the values of its slots, in order, None for zeros; `like` is the pattern of an
    empty result: zeros with one sample or none.
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
    # None means the whole tensor, which needs no view.
    if part.shape == shape:
        return None
    return (slice(None), *part.slices) if samples else part.slices


@final
class Activations:
    """The values of the current step, freed after their last reader."""

    def __init__(
        self,
        once: Sequence[bool],  # per slot, whether it exists once for all micro-batches
        n_readers: Sequence[int],  # per slot and micro-batch
        *,
        sizes: Sequence[int],  # samples of each micro-batch
        like: torch.Tensor,  # a zero of the step's type and device
    ) -> None:
        self._once = once
        self._n_readers = list(n_readers)
        self._sizes = sizes
        self._like = like
        self._values: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()  # values whose memory is not shared

    def at(self, slot: int, micro_batch: int) -> torch.Tensor:
        return self._values[micro_batch * len(self._once) + slot]

    def read(self, reads: Sequence[Gather], micro_batch: int) -> list[torch.Tensor | None]:
        """Return the assembled tensors; free the values that have no reader left."""
        result = []
        for read in reads:
            keys = [self._key(piece.slot, micro_batch) for piece in read.pieces]
            pieces = [self._values.get(key) for key in keys]
            like = self._like
            if read.samples and not pieces:
                like = like.expand(1 if read.joined else self._sizes[micro_batch], 1)
            result.append(gathered(read, pieces, like=like))
        for read in reads:
            for piece in read.pieces:
                key = self._key(piece.slot, micro_batch)
                self._n_readers[key] -= 1
                if not self._n_readers[key]:
                    self._values.pop(key, None)
        return result

    def write(
        self, slot: int, micro_batch: int, value: torch.Tensor, *, adds: bool = False
    ) -> None:
        """Store a value, or add it to the slot; drop it if it has no reader."""
        key = self._key(slot, micro_batch)
        if not self._n_readers[key]:
            return
        if not adds or key not in self._values:
            self._values[key] = value
        elif key in self._fresh:
            self._values[key] += value
        else:
            # The first value may be shared: add out of place once, then in place.
            self._values[key] = self._values[key] + value
            self._fresh.add(key)

    def _key(self, slot: int, micro_batch: int) -> int:
        return slot if self._once[slot] else micro_batch * len(self._once) + slot
