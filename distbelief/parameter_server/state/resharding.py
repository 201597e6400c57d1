"""Another cut: what lay on S shards, as S' shards of the same tensors hold it.

    S = 2     shard 0   a[0:128] | b[0:5]      shard 1   a[128:300]
    S' = 3    shard 0   a[0:128]   shard 1   a[128:192] | b[0:5]   shard 2   a[192:300]

Rules:

* Every element takes along, bit for bit, its value and what the rule remembers of it.
  There and back again is the same, to the bit.
* Padding is as on a shard that begins: zero in the values, and in each vector of the
  rule's state whatever the rule begins with. No push ever changes it.
* Shards need not be at one clock: they never were (DB-5). A new one begins at the
  largest of those whose elements it holds, for then no element's clock falls: no
  schedule goes back, no momentum begins anew, and Adam does not correct again for a
  bias that is gone. Elements that are some pushes behind count as having met pushes
  of nothing. Staleness needs clocks to rise, no more. What was pushed in parts is
  counted element by element, as it was (`steps`).
* No shard is needed whole: what a new one lacks is read by ranges.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from distbelief.parameter_server.layout.holding import Holding
from distbelief.parameter_server.layout.layout import Layout
from distbelief.parameter_server.layout.ranges import Ranges
from distbelief.parameter_server.rules.steps import Steps
from distbelief.parameter_server.rules.update_rules import State, UpdateRule
from distbelief.vectors import Vector


Read = Callable[[int, str, int, int], Vector]
"""read(shard_index, array, start, stop) -> elements [start, stop) of an old array.

Arrays have the names that they have in a snapshot: "values", "state.NAME".
"""

_VALUES: Final = "values"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What one new shard holds."""

    values: Vector  # (shard_size,)
    state: State  # each (n_gradient,)
    clock: int
    steps: Steps


@final
@dataclass(frozen=True, slots=True)
class Move:
    """Elements that stay together: where they were, and where they come to lie."""

    source_index: int  # of the old shard
    start: int  # in the old shard's vectors
    stop: int
    offset: int  # in the new shard's

    @property
    def end(self) -> int:
        """First element after them, in the new shard's vectors."""
        return self.offset + self.stop - self.start


@final
class Resharding:
    """From one layout to another.

    Args:
        old: Of the shards that are.
        new: Of those that are to be.

    Raises:
        ValueError: they are not of the same tensors.
    """

    def __init__(self, old: Layout, new: Layout) -> None:
        if old.tensors != new.tensors or old.dtype != new.dtype:
            raise ValueError(
                f"layout {old.fingerprint} is of other tensors than {new.fingerprint}: "
                "only the number of shards may differ"
            )
        self._new = new
        self._places: dict[int, list[tuple[int, int, int, int]]] = {}
        for source in range(old.n_shards):
            for segment in old.segments(source):
                place = (source, segment.start, segment.stop, segment.offset)
                self._places.setdefault(segment.tensor_index, []).append(place)

    def moves(self, k: int) -> Iterator[Move]:
        """Yield what comes to lie on new shard k, by rising offset."""
        for segment in self._new.segments(k):
            for source, start, stop, offset in self._places[segment.tensor_index]:
                first, last = max(start, segment.start), min(stop, segment.stop)
                if first < last:
                    yield Move(
                        source,
                        offset + first - start,
                        offset + last - start,
                        segment.offset + first - segment.start,
                    )

    def shard(
        self, k: int, *, rule: UpdateRule, clocks: Sequence[int], steps: Sequence[Steps], read: Read
    ) -> Content:
        """Return what new shard k holds.

        Args:
            k: Index of the new shard.
            rule: Whose state it is.
            clocks: Of the old shards, in order.
            steps: Likewise.
            read: Reads the old shards' arrays.
        """
        n_gradient, dtype = self._new.n_gradient(k), self._new.dtype
        values: Vector = np.zeros(self._new.shard_size(k), dtype)
        state = rule.state(n_gradient, dtype)
        sources: set[int] = set()
        for move in self.moves(k):
            sources.add(move.source_index)
            here = slice(move.offset, move.end)
            there = (move.start, move.stop)
            values[here] = read(move.source_index, _VALUES, *there)
            if move.offset >= n_gradient:
                continue  # a buffer: the rule knows nothing of it
            for name, vector in state.items():
                vector[here] = read(move.source_index, f"state.{name}", *there)
        # A shard that holds nothing counts pushes all the same.
        of_sources = tuple(sources or range(len(clocks)))
        return Content(
            values=values,
            state=state,
            clock=max(clocks[source] for source in of_sources),
            steps=self._steps(k, [(source, steps[source]) for source in of_sources]),
        )

    def _steps(self, k: int, sources: Sequence[tuple[int, Steps]]) -> Steps:
        """Return what the elements of new shard k have met on these old ones."""
        result = Steps(max(steps.n_whole for _, steps in sources))
        moves = list(self.moves(k))
        for source, steps in sources:
            for ranges, n_pushes in steps.parts:
                moved = Ranges.union(
                    ranges.clipped(move.start, move.stop).shifted(move.offset - move.start)
                    for move in moves
                    if move.source_index == source
                )
                result.add(Holding.of(moved, self._new), n_pushes=n_pushes)
        return result
