"""Which elements of a shard's values the last pushes have changed, for fetches of those alone.

    clock      40        41           42        43
    changed       3 17      -            3 900             since 40: 3 17 900
                                                           since 42: 900's push is of 42 to 43

An element has changed if its bits have: so what a client has of one clock, with the changed
elements set, has the bits of the next. The log knows the last pushes only, as long as all of them
together name at most half as many elements as there are.
"""

from collections import deque
from typing import final

import numpy as np
from numpy.typing import NDArray

from distbelief.core.vectors import Vector
from distbelief.parameter_server.ranges import IndexRanges


Changed = NDArray[np.uint32]  # elements, rising


@final
class ChangeLog:
    def __init__(self, n_elements: int) -> None:
        self._n_elements = n_elements
        self._pushes: deque[Changed] = deque()  # of clocks up to `_clock`
        self._n_named = 0
        self._clock = 0

    def begin(self, clock: int) -> None:
        """Nothing is known of changes before this clock."""
        self._pushes.clear()
        self._n_named, self._clock = 0, clock

    def add(self, changed: Changed) -> None:
        """The next push has changed these."""
        self._pushes.append(changed)
        self._n_named += len(changed)
        self._clock += 1
        while self._n_named > self._n_elements // 2:
            self._n_named -= len(self._pushes.popleft())

    def since(self, clock: int) -> Changed | None:
        """Return what has changed since; None if that is not known, or a dense fetch is shorter."""
        n_pushes = self._clock - clock
        if not 0 <= n_pushes <= len(self._pushes):
            return None
        last = [self._pushes[len(self._pushes) - n] for n in range(n_pushes, 0, -1)]
        changed = np.unique(np.concatenate([np.zeros(0, np.uint32), *last]))
        return changed if 2 * len(changed) <= self._n_elements // 2 else None


def changed_of(before: Vector, after: Vector) -> Changed:
    """Return the elements whose bits differ."""
    bits = np.dtype(f"u{before.itemsize}")
    return np.flatnonzero(before.view(bits) != after.view(bits)).astype(np.uint32)


def compact(changed: Changed, ranges: IndexRanges | None) -> tuple[Changed, Changed]:
    """Return those that lie in the ranges: where in the compact vector, and in the whole one."""
    if ranges is None:
        return changed, changed
    n_before = np.searchsorted(ranges.starts, changed, "right")  # ranges that begin up to it
    is_here = changed < np.append(0, ranges.stops)[n_before]
    here, found = changed[is_here], n_before[is_here] - 1
    places = ranges.offsets[found] + here - ranges.starts[found]
    return places.astype(np.uint32), here
