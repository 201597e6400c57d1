"""How many pushes each element of a shard has received.

    pushes of everything          3
    pushes of [0, 64)             2      an element of [0, 64) has received 5
    pushes of [64, 128)           1

On the wire and in snapshots: per part its count, its number of stripes and the stripes; the
whole vector comes first, with no stripes.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.ranges import (
    N_STRIPES_MAX as N_STRIPES_OF_ONE,
    IndexRanges,
    Indices,
)
from distbelief.parameter_server.slices import ShardSlice


N_STRIPES_MAX = 1 << 14
"""Limit of all parts together: with their counts they fit into one array frame."""

_N_PUSHES_MAX = 1 << 53

_WORDS = 4  # of a stripe


@final
@dataclass(slots=True, eq=False)
class _SliceCount:
    stripes: Indices
    ranges: IndexRanges
    n_pushes: int = 0


@final
class StepCounts:
    """The clock of the update rule, for each element.

    The shard's clock counts all pushes, but the ranks of a
    partitioned replica push parts: the shard's clock rises with each while every element receives
    one. Adam's bias correction and schedules therefore count per element, so that a replica
    trains bit-identically on one machine or several.
    """

    def __init__(self, n_whole: int = 0) -> None:
        self.n_whole = n_whole  # pushes of the whole vector
        self._parts: dict[bytes, _SliceCount] = {}

    @classmethod
    def read(cls, words: Vector, *, size: int) -> "StepCounts":
        """Return counts that another incarnation or copy wrote, or raise RemoteProtocolError."""
        if words.dtype != np.int64 or len(words) < 2 or words[1] != 0:
            raise RemoteProtocolError(f"{len(words)} numbers of {words.dtype} are not push counts")
        steps, at = cls(_count(int(words[0]))), 2
        while at < len(words):
            n_pushes = _count(int(words[at]))
            n_words = int(words[at + 1]) * _WORDS if at + 1 < len(words) else 0
            stripes = words[at + 2 : at + 2 + max(n_words, 0)]
            if n_words <= 0 or len(stripes) < n_words:
                raise RemoteProtocolError("push counts end in the middle of a part")
            held = IndexRanges.from_wire(stripes, size=size)
            steps._parts[held.key] = _SliceCount(held.stripes(), held, n_pushes)
            at += 2 + n_words
        return steps

    def to_wire(self) -> Indices:
        words = [np.array([self.n_whole, 0], np.int64)]
        for part in self._parts.values():
            if part.n_pushes:
                head = [part.n_pushes, len(part.stripes) // _WORDS]
                words += [np.array(head, np.int64), part.stripes]
        return np.concatenate(words)

    @property
    def parts(self) -> tuple[tuple[IndexRanges, int], ...]:
        return tuple((part.ranges, part.n_pushes) for part in self._parts.values() if part.n_pushes)

    @property
    def n_pushes(self) -> int:
        # A push by all ranks of a partitioned replica counts once: the minimum over the elements
        # that were ever pushed.
        parts = self.parts
        if not parts:
            return self.n_whole
        bounds = IndexRanges.ends(held for held, _ in parts)
        counts = np.zeros(len(bounds) - 1, np.int64)
        for held, n_pushes in parts:
            counts += n_pushes * held.mask(bounds)
        return self.n_whole + int(counts[counts > 0].min())

    def register(self, shard_slice: ShardSlice) -> str | None:
        """Admit pushes of a client with this slice; return the reason if that is impossible."""
        if not shard_slice.n_elements or shard_slice.ranges is None:
            return None
        part = self._part(shard_slice)
        n = sum(len(part.stripes) // _WORDS for part in self._parts.values())
        if n <= N_STRIPES_MAX and len(part.stripes) // _WORDS <= N_STRIPES_OF_ONE:
            return None
        if not part.n_pushes:
            del self._parts[shard_slice.key]
        return (
            f"its clients need {n} stripes, of {N_STRIPES_MAX} at most, and "
            f"{N_STRIPES_OF_ONE} for one: partition replicas alike, or use more shards"
        )

    def add(self, shard_slice: ShardSlice, *, n_pushes: int = 1) -> None:
        if shard_slice.ranges is None:
            self.n_whole += n_pushes
        elif shard_slice.n_elements:
            self._part(shard_slice).n_pushes += n_pushes

    def at(self, inner: IndexRanges, *, shard_slice: ShardSlice) -> list[tuple[int, IndexRanges]]:
        """Return some of a client's elements by how many pushes they have received, fewest first.

        `inner` are these elements, `shard_slice` all of the client's.
        """
        n_pushes = self.n_whole
        others: list[_SliceCount] = []
        for key, part in self._parts.items():
            if key == shard_slice.key:
                n_pushes += part.n_pushes
            elif part.n_pushes and inner.overlaps(part.ranges):
                others.append(part)
        if not others:
            return [(n_pushes, inner)] if inner.n_elements else []
        bounds = IndexRanges.ends([inner, *(part.ranges for part in others)])
        counts = np.full(len(bounds) - 1, n_pushes)
        for part in others:
            counts += part.n_pushes * part.ranges.mask(bounds)
        inside = inner.mask(bounds)
        groups = [(int(count), inside & (counts == count)) for count in np.unique(counts[inside])]
        return [
            (count, IndexRanges.of(bounds[:-1][chosen], bounds[1:][chosen]))
            for count, chosen in groups
        ]

    def _part(self, shard_slice: ShardSlice) -> _SliceCount:
        part = self._parts.get(shard_slice.key)
        if part is None:
            assert shard_slice.ranges is not None
            part = _SliceCount(shard_slice.ranges.stripes(), shard_slice.ranges)
            self._parts[shard_slice.key] = part
        return part


def _count(n_pushes: int) -> int:
    if not 0 <= n_pushes <= _N_PUSHES_MAX:
        raise RemoteProtocolError(f"{n_pushes} pushes; a count is 0 to {_N_PUSHES_MAX}")
    return n_pushes
