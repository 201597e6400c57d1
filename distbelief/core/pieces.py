"""Pieces of a data set, each of which lies on some hosts, and their order in an epoch.

    position   0 ............. n-1 | n ............. 2n-1       epoch 0, epoch 1
    piece      [ 2 )[ 0  )[ 1     )  [ 1     )[ 2 )[ 0  )       each in an order of its own

The rows of a piece follow each other. Names, rows and seed alone decide the order, so it is the
same for any number of replicas, and wherever the pieces are.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, Self, final

import msgspec
import numpy as np
from numpy.typing import NDArray


Span = tuple[int, int]


@final
class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """All pieces of a data set, sorted by name, the same in each process."""

    names: tuple[str, ...]
    rows: tuple[int, ...]  # of each
    is_placed: bool = False  # they lie on some hosts, and not on all
    can_fetch: bool = False  # a host may get those of others

    @classmethod
    def of(cls, rows: Mapping[str, int], *, is_placed: bool, can_fetch: bool) -> Self:
        names = tuple(sorted(rows))
        return cls(
            names=names,
            rows=tuple(rows[name] for name in names),
            is_placed=is_placed,
            can_fetch=can_fetch,
        )

    def difference(self, here: "Pieces") -> str:
        """Return what another host has otherwise: the first piece, or its methods."""
        of, to = (dict(zip(one.names, one.rows, strict=True)) for one in (self, here))
        for name in sorted(of.keys() | to.keys()):
            if of.get(name) != to.get(name):
                was, now = (f"{one.get(name, 'no')} rows" for one in (of, to))
                return f"piece {name!r}: {now} here, {was} where the job began"
        return "here() or fetch() on some hosts only"


class Placed(Protocol):
    """A data set in pieces, of which this process may read some only (`task.pieces`)."""

    pieces: Pieces
    here: tuple[int, ...]  # ranges [start, stop, start, stop, ...) of those that it can read

    def readable(self, n: int) -> NDArray[np.int64]:
        """Return so many samples at most that it can read."""
        ...


@final
class PieceOrder:
    """Where the pieces are in each epoch, by a seed."""

    def __init__(self, pieces: Pieces, *, seed: int) -> None:
        self.pieces = pieces
        self.rows = np.array(pieces.rows, np.int64)
        self._n_samples = int(self.rows.sum())
        self._seed = seed
        self._kept: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def at(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pieces of an epoch in their order, and where each ends in it."""
        found = self._kept.get(epoch)
        if found is None:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self.rows))
            found = order, np.cumsum(self.rows[order])
            # Ranges of two epochs are dealt, and readers are ahead of steps.
            self._kept = dict([*self._kept.items()][-3:]) | {epoch: found}
        return found

    def at_position(self, position: int) -> tuple[int, Span]:
        """Return which piece is at a position, and from where to where it is."""
        epoch, offset = divmod(position, self._n_samples)
        order, stops = self.at(epoch)
        k = int(np.searchsorted(stops, offset, side="right"))
        stop, piece = position - offset + int(stops[k]), int(order[k])
        return piece, (stop - int(self.rows[piece]), stop)

    def spans(self, epoch: int, pieces: Iterable[Span]) -> list[Span]:
        """Return the positions in an epoch of these ranges of pieces."""
        is_one = np.zeros(len(self.rows), np.bool_)
        for first, last in pieces:
            is_one[first:last] = True
        order, stops = self.at(epoch)
        stops = (stops + epoch * self._n_samples)[is_one[order]]
        rows = self.rows[order][is_one[order]]
        return list(zip((stops - rows).tolist(), stops.tolist(), strict=True))
