"""What became of pushes: how stale they were, and which were lost.

    number   1  2  3  4  5  6  7  8       seen = 8
    kept     x  x  x        x  x  x       4 and 5 were lost by a shard that restarted

A shard that restarts from a snapshot loses its newest pushes. A lost push is known by its number
in the order of its client's pushes; lost by several shards, it counts once.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, final

from distbelief.parameter_server.slices import ShardSlice


# --- lost pushes ---

Lost = tuple[range, ...]  # of numbers, rising, without overlaps


def lost_after(lost: Lost, *, seen: int, kept: int) -> Lost:
    """Return the lost pushes if `kept` of the pushes seen so far are in the values.

    Args:
        lost: Pushes lost before.
        seen: Number of the newest push that ever was in the values.
        kept: How many pushes are in the values.
    """
    if kept + n_lost([lost]) > seen:  # another copy of the shard had them after all
        lost = ()
    first, before = kept + 1, list[range]()
    for part in lost:
        if part.start > first:
            break
        first += len(part)
        before.append(part)
    return (*before, *([range(first, seen + 1)] if first <= seen else []))


def n_lost(of_shards: Iterable[Lost]) -> int:
    """Return how many pushes at least one of these shards has lost."""
    parts = sorted((part.start, part.stop) for lost in of_shards for part in lost)
    n, end = 0, 0
    for start, stop in parts:
        n += max(0, stop - max(start, end))
        end = max(end, stop)
    return n


# --- staleness ---

_N_KEPT: Final = 4096
"""Recent pushes; an older one counts as overlapping."""

_N_KNOWN_MAX: Final = 1 << 14


@final
class Staleness:
    """Staleness of pushes: mean and maximum of all, 95th percentile of the last 1024.

    The staleness of a push is the shard's clock when the push is applied, minus its clock when the
    parameters were fetched.
    """

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
