"""Staleness of a push: the clock when it is applied, minus that when its parameters were fetched.

Clients and shards count it; where clients push parts, pushes of other elements do not count. What
bounds it, and who waits, is in `ticks`.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.parameter_server.slices import ShardSlice


_N_KEPT: Final = 1 << 14
"""Recent pushes of a part; an older one counts as overlapping."""

_N_KNOWN_MAX: Final = 1 << 14


@final
class Staleness:
    """Mean and maximum of all pushes, 95th percentile of the last 1024."""

    def __init__(self) -> None:
        self._n = self._sum = self._max = 0
        self._recent: deque[int] = deque(maxlen=1024)
        self._new: list[int] = []  # since the last look, which is once a heartbeat
        self.add = self._new.append

    def counters(self) -> dict[str, float]:
        self._n += len(self._new)
        self._sum += sum(self._new)
        self._max = max([self._max, *self._new])
        self._recent.extend(self._new)
        self._new.clear()
        recent = sorted(self._recent)
        p95 = recent[(95 * len(recent) - 1) // 100] if recent else 0
        return {
            "staleness_mean": self._sum / self._n if self._n else 0.0,
            "staleness_p95": float(p95),
            "staleness_max": float(self._max),
        }


@final
@dataclass(slots=True)
class _Recent:
    """The clocks of recent pushes of one slice."""

    of: ShardSlice
    clocks: list[int] = field(default_factory=list)
    n_dropped: int = 0  # the first ones in the list

    @property
    def n(self) -> int:
        return len(self.clocks) - self.n_dropped

    def n_since(self, clock: int) -> int:
        return len(self.clocks) - bisect_left(self.clocks, clock, lo=self.n_dropped)

    def drop_first(self) -> None:
        self.n_dropped += 1
        if 2 * self.n_dropped > len(self.clocks):
            del self.clocks[: self.n_dropped]
            self.n_dropped = 0


@final
class PartialPushes:
    """Recent pushes that did not cover everything.

    A push is as stale as the number of pushes that its own elements received since the fetch. The
    ranks of a partitioned replica push disjoint parts, so the clock rises once per rank while each
    element receives one push. Counting overlaps gives the same staleness on one rank or several.
    """

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque()  # keys of slices
        self._of: dict[bytes, _Recent] = {}
        self.are_some = False
        self._known: dict[tuple[bytes, bytes], bool] = {}

    def add(self, shard_slice: ShardSlice, *, clock: int) -> None:
        """Note a push that was applied at this clock, which rises."""
        self.are_some = True
        self._recent.append(shard_slice.key)
        of = self._of.setdefault(shard_slice.key, _Recent(shard_slice))
        of.clocks.append(clock)
        if len(self._recent) > _N_KEPT:
            key = self._recent.popleft()
            self._of[key].drop_first()
            if not self._of[key].n:
                del self._of[key]

    def n_elsewhere(self, shard_slice: ShardSlice, *, since: int) -> int:
        """Return how many pushes since this clock have changed none of these elements."""
        others = [one for one in self._of.values() if not self._overlap(shard_slice, one.of)]
        return sum(one.n_since(since) for one in others)

    def _overlap(self, one: ShardSlice, other: ShardSlice) -> bool:
        if one.key == other.key or one.ranges is None or other.ranges is None:
            return True
        keys = (one.key, other.key)
        if keys not in self._known:
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()
            self._known[keys] = one.ranges.overlaps(other.ranges)
        return self._known[keys]
