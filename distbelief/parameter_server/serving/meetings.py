"""Which elements the recent pushes of a shard were of: how stale a push of a part is.

A push is as stale as the pushes are many that its elements have met since they were
fetched. As long as every push is of the whole vector these are all there were, which
the shard's clock counts. Of four machines of a replica each pushes its part: the clock
rises by four and no element meets more than one. So pushes of elements that this one
has none of are left out, and a replica counts alike on one machine and on several.
"""

from collections import deque
from typing import Final, final

from distbelief.parameter_server.layout.holding import Holding


_N_KEPT: Final = 4096
"""Pushes; what is older counts as if its elements were the same."""

_N_KNOWN_MAX: Final = 1 << 14


@final
class Meetings:
    """The recent pushes of one life of a shard."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, Holding]] = deque(maxlen=_N_KEPT)
        self._in_parts = False  # whether any push was not of everything
        self._known: dict[tuple[bytes, bytes], bool] = {}

    def add(self, holding: Holding, *, clock: int) -> None:
        """A push of what this client holds was applied at that clock, which rose."""
        self._in_parts |= holding.ranges is not None
        self._recent.append((clock, holding))

    def since(self, holding: Holding, *, fetched_clock: int, clock: int) -> int:
        """Return how many pushes these elements have met between two clocks."""
        n_met = clock - fetched_clock
        if not self._in_parts or n_met <= 0:
            return n_met
        for met, other in reversed(self._recent):
            if met < fetched_clock:
                break
            n_met -= not self._share(holding, other)
        return n_met

    def _share(self, one: Holding, other: Holding) -> bool:
        """Return whether they have an element in common."""
        if one.key == other.key or one.ranges is None or other.ranges is None:
            return True
        keys = (one.key, other.key)
        if keys not in self._known:
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()
            self._known[keys] = one.ranges.meets(other.ranges)
        return self._known[keys]
