"""Staleness of a push: the clock when it is applied, minus that when its parameters were fetched.

Clients and shards count it; a shard whose clients push parts counts overlaps.
"""

from collections import deque
from typing import Final, final

from distbelief.parameter_server.slices import ShardSlice


_N_KEPT: Final = 4096
"""Recent pushes; an older one counts as overlapping."""

_N_KNOWN_MAX: Final = 1 << 14


@final
class Staleness:
    """Mean and maximum of all pushes, 95th percentile of the last 1024."""

    def __init__(self) -> None:
        self._n = self._sum = self._max = 0
        self._recent: deque[int] = deque(maxlen=1024)

    def add(self, staleness: int) -> None:
        self._n += 1
        self._sum += staleness
        self._max = max(self._max, staleness)
        self._recent.append(staleness)

    def counters(self) -> dict[str, float]:
        recent = sorted(self._recent)
        p95 = recent[(95 * len(recent) - 1) // 100] if recent else 0
        return {
            "staleness_mean": self._sum / self._n if self._n else 0.0,
            "staleness_p95": float(p95),
            "staleness_max": float(self._max),
        }


@final
class PartialStaleness:
    """Staleness of pushes that cover a part of the shard.

    A push is as stale as the number of pushes that its own elements received since the fetch. The
    ranks of a partitioned replica push disjoint parts, so the clock rises once per rank while each
    element receives one push. Counting overlaps gives the same staleness on one rank or several.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, ShardSlice]] = deque(maxlen=_N_KEPT)
        self._in_parts = False  # whether any push was not of everything
        self._known: dict[tuple[bytes, bytes], bool] = {}

    def add(self, shard_slice: ShardSlice, *, clock: int) -> None:
        self._in_parts |= shard_slice.ranges is not None
        self._recent.append((clock, shard_slice))

    def since(self, shard_slice: ShardSlice, *, fetched_clock: int, clock: int) -> int:
        """Return how many pushes these elements received between two clocks."""
        n_pushes = clock - fetched_clock
        # As long as every push covers everything, the clock is exact.
        if not self._in_parts or n_pushes <= 0:
            return n_pushes
        for applied_at, other in reversed(self._recent):
            if applied_at < fetched_clock:
                break
            n_pushes -= not self._overlap(shard_slice, other)
        return n_pushes

    def _overlap(self, one: ShardSlice, other: ShardSlice) -> bool:
        if one.key == other.key or one.ranges is None or other.ranges is None:
            return True
        keys = (one.key, other.key)
        if keys not in self._known:
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()
            self._known[keys] = one.ranges.overlaps(other.ranges)
        return self._known[keys]
