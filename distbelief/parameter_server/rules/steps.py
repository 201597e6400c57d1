"""How many pushes each element of a shard has met: the clock of its own update rule.

A shard's clock counts the pushes of all its clients. As long as every push is of the
whole vector, that is what each element has met. If clients hold parts, it is not: of
four machines of a replica each pushes its part, and the shard's clock rises by four
while every element meets one. Adam's correction of its bias, and a schedule of the
learning rate, then have to go by the element: so a replica trains alike, to the bit,
whether one machine pushes everything or several push a part each.

    pushes of everything          3
    pushes of [0, 64)             2      an element of [0, 64) has met 5
    pushes of [64, 128)           1

Elements are not counted one by one, but what was pushed, by what its client held: an
element has met the sum over all that hold it.

On the wire and in snapshots: per holding the count, its number of stripes, the stripes;
what is whole comes first, with none.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.layout import ranges
from distbelief.parameter_server.layout.holding import Holding
from distbelief.parameter_server.layout.ranges import Indices, Ranges
from distbelief.vectors import Vector


N_STRIPES_MAX = 1 << 14
"""Of all holdings together: with their counts they fit into one array frame."""

_N_PUSHES_MAX = 1 << 53

_WORDS = 4  # of a stripe


@final
class _Part:
    """Pushes of one holding."""

    def __init__(self, stripes: Indices, ranges: Ranges, n_pushes: int) -> None:
        self.stripes = stripes
        self.ranges = ranges
        self.n_pushes = n_pushes


@final
class Steps:
    """What the elements of one shard have met.

    Attributes:
        n_whole: Pushes of everything.
    """

    def __init__(self, n_whole: int = 0) -> None:
        self.n_whole = n_whole
        self._parts: dict[bytes, _Part] = {}

    @classmethod
    def read(cls, words: Vector, *, size: int) -> "Steps":
        """Return what another life, or copy, of the shard wrote.

        Raises:
            RemoteProtocolError: it cannot be of a shard of `size` elements.
        """
        if words.dtype != np.int64 or len(words) < 2 or words[1] != 0:
            raise RemoteProtocolError(
                f"{len(words)} numbers of {words.dtype} are no counts of pushes"
            )
        steps = cls(_count(int(words[0])))
        at = 2
        while at < len(words):
            n_pushes = _count(int(words[at]))
            n_words = int(words[at + 1]) * _WORDS if at + 1 < len(words) else 0
            stripes = words[at + 2 : at + 2 + max(n_words, 0)]
            if n_words <= 0 or len(stripes) < n_words:
                raise RemoteProtocolError("counts of pushes end within a holding")
            held = Ranges.read(stripes, size=size)
            steps._parts[held.key] = _Part(held.stripes(), held, n_pushes)
            at += 2 + n_words
        return steps

    def words(self) -> Indices:
        """Return it as on the wire."""
        words = [np.array([self.n_whole, 0], np.int64)]
        for part in self._parts.values():
            if part.n_pushes:
                head = [part.n_pushes, len(part.stripes) // _WORDS]
                words += [np.array(head, np.int64), part.stripes]
        return np.concatenate(words)

    @property
    def parts(self) -> tuple[tuple[Ranges, int], ...]:
        """What was pushed in parts: the ranges, and how often."""
        return tuple((part.ranges, part.n_pushes) for part in self._parts.values() if part.n_pushes)

    @property
    def n_pushes(self) -> int:
        """Pushes that are whole: what each element has met that was ever pushed.

        Of a replica of several machines that is one, though each pushes its part.
        """
        parts = self.parts
        if not parts:
            return self.n_whole
        ends = [end for held, _ in parts for end in (held.starts, held.stops)]
        bounds = np.unique(np.concatenate(ends))
        counts = np.zeros(len(bounds) - 1, np.int64)
        for held, n_pushes in parts:
            counts += n_pushes * held.marks(bounds)
        return self.n_whole + int(counts[counts > 0].min())

    def know(self, holding: Holding) -> str | None:
        """A client with this holding may push from now on; return why not, if so."""
        if not holding.n_elements or holding.ranges is None:
            return None
        part = self._part(holding)
        n = sum(len(part.stripes) // _WORDS for part in self._parts.values())
        if n <= N_STRIPES_MAX and len(part.stripes) // _WORDS <= ranges.N_STRIPES_MAX:
            return None
        if not part.n_pushes:
            del self._parts[holding.key]
        return (
            f"what its clients hold or held takes {n} stripes to write down; the most "
            f"is {N_STRIPES_MAX}, and {ranges.N_STRIPES_MAX} of one client: cut the "
            "model alike for all replicas, or use more shards"
        )

    def add(self, holding: Holding, *, n_pushes: int = 1) -> None:
        """Something was pushed by a client with this holding."""
        if holding.ranges is None:
            self.n_whole += n_pushes
        elif holding.n_elements:
            self._part(holding).n_pushes += n_pushes

    def at(self, inner: Ranges, *, holding: Holding) -> list[tuple[int, Ranges]]:
        """Return these elements by how many pushes they have met, fewest first.

        Args:
            inner: Some of what the client holds.
            holding: All of that.
        """
        n_pushes = self.n_whole
        others: list[_Part] = []
        for key, part in self._parts.items():
            if key == holding.key:
                n_pushes += part.n_pushes
            elif part.n_pushes and inner.meets(part.ranges):
                others.append(part)
        if not others:
            return [(n_pushes, inner)] if inner.n_elements else []
        all_ranges = [inner, *(part.ranges for part in others)]
        ends = [end for one in all_ranges for end in (one.starts, one.stops)]
        bounds = np.unique(np.concatenate(ends))
        counts = np.full(len(bounds) - 1, n_pushes)
        for part in others:
            counts += part.n_pushes * part.ranges.marks(bounds)
        inside = inner.marks(bounds)
        return [
            (int(count), _where(inside & (counts == count), bounds))
            for count in np.unique(counts[inside])
        ]

    def _part(self, holding: Holding) -> _Part:
        part = self._parts.get(holding.key)
        if part is None:
            assert holding.ranges is not None
            part = _Part(holding.ranges.stripes(), holding.ranges, 0)
            self._parts[holding.key] = part
        return part


def _where(chosen: NDArray[np.bool_], bounds: Indices) -> Ranges:
    return Ranges.of(bounds[:-1][chosen], bounds[1:][chosen])


def _count(n_pushes: int) -> int:
    if not 0 <= n_pushes <= _N_PUSHES_MAX:
        raise RemoteProtocolError(f"{n_pushes} pushes; a count is 0 to {_N_PUSHES_MAX}")
    return n_pushes
