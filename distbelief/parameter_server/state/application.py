"""How a push of some ranges is applied to a shard's vectors.

    values   |..aaaa....bb..bb..bb....|      a: long, updated where it lies
    state    |..aaaa....bb..bb..bb....|      b: copied out, updated, copied back,
    pushed   |aaaabbbbbb|                       in pieces that stay in the cache

Update rules work element by element, and torch's kernels treat the last few elements of
an array otherwise. So every piece that a rule sees has a multiple of `ALIGNMENT`
elements, as a whole vector has, filled up with zeros: a client that pushes parts gets
the bits that one gets which pushes everything.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from distbelief.parameter_server.layout.ranges import Copier, Ranges
from distbelief.vectors import ALIGNMENT, Element, Vector


Update = Callable[[Sequence[Vector], Vector], None]
"""update(vectors, pushed) changes the vectors, each (n,), in place."""

_IN_PLACE_MIN = 1 << 14
"""Elements of a range from which on it is updated where it lies."""

_PIECE = 1 << 16
"""Elements copied out at a time, of each vector."""


@final
@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements updated together.

    Attributes:
        n_elements: How many.
        target: Where they are in the shard's vectors: the first of them, if they lie
            side by side.
        source: Where they are in what was pushed, likewise.
    """

    n_elements: int
    target: int | Copier
    source: int | Copier


@final
class Application:
    """One way to apply pushes, made once for many.

    Args:
        target: Of the shard's vectors, what is to be updated.
        source: Where it lies in what is pushed, in the same order.

    Attributes:
        target: Likewise.
        n_elements: Of the target.
    """

    def __init__(self, target: Ranges, source: Ranges) -> None:
        self.target = target
        self.n_elements = target.n_elements
        self._pieces = tuple(_pieces(target, source))
        copied = [p.n_elements for p in self._pieces if isinstance(p.target, Copier)]
        self._n_copied = max(copied, default=0)

    def apply(self, update: Update, vectors: Sequence[Vector], pushed: Vector) -> None:
        """Update these ranges of the vectors by what was pushed."""
        room = np.zeros((len(vectors) + 1, _padded(self._n_copied)), pushed.dtype)
        for piece in self._pieces:
            n, target, source = piece.n_elements, piece.target, piece.source
            if isinstance(target, int) and isinstance(source, int):
                parts = [vector[target : target + n] for vector in vectors]
                update(parts, pushed[source : source + n])
            else:
                copies = room[:, : _padded(n)]
                copies[:, n:] = 0.0
                _apply_to_copies(piece, update, vectors, pushed, copies=copies)


def _apply_to_copies(
    piece: _Piece,
    update: Update,
    vectors: Sequence[Vector],
    pushed: Vector,
    *,
    copies: npt.NDArray[Element],
) -> None:
    n, target = piece.n_elements, piece.target
    assert isinstance(target, Copier)
    *targets, gradient = copies
    if isinstance(piece.source, int):
        gradient[:n] = pushed[piece.source : piece.source + n]
    else:
        piece.source.gather(torch.from_numpy(pushed), torch.from_numpy(gradient[:n]))
    pairs = [
        (torch.from_numpy(whole), torch.from_numpy(part[:n]))
        for whole, part in zip(vectors, targets, strict=True)
    ]
    for whole, part in pairs:
        target.gather(whole, part)
    update(targets, gradient)
    for whole, part in pairs:
        target.scatter(part, whole)


def _pieces(target: Ranges, source: Ranges) -> Iterator[_Piece]:
    """Yield the pieces, by rising index."""
    lengths = target.stops - target.starts
    in_place = lengths >= _IN_PLACE_MIN
    if len(lengths) == 1 and target.n_elements % ALIGNMENT == 0:
        in_place[:] = True  # everything, of a small shard
    done = 0  # elements of the target
    for index in np.flatnonzero(in_place):
        begin = int(target.offsets[index])
        yield from _copied(target, source, done, begin)
        n = int(lengths[index]) // ALIGNMENT * ALIGNMENT
        place = int(source.part(begin, begin + 1).starts[0])
        yield _Piece(n, int(target.starts[index]), place)
        done = begin + n
    yield from _copied(target, source, done, target.n_elements)


def _copied(target: Ranges, source: Ranges, start: int, stop: int) -> Iterator[_Piece]:
    for first in range(start, stop, _PIECE):
        last = min(first + _PIECE, stop)
        there, here = target.part(first, last), source.part(first, last)
        # What is pushed lies side by side, unless its elements differ in their clocks.
        place = int(here.starts[0]) if len(here.starts) == 1 else Copier(here)
        yield _Piece(last - first, Copier(there), place)


def _padded(n_elements: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-n_elements // ALIGNMENT) * ALIGNMENT
