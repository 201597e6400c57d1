"""How stale pushes were: shard clock at application minus clock at fetch."""

from collections import deque
from typing import final


_N_RECENT = 1024


@final
class Staleness:
    """Mean and maximum over all pushes, 95th percentile over the recent 1024."""

    def __init__(self) -> None:
        self._n = 0
        self._sum = 0
        self._max = 0
        self._recent: deque[int] = deque(maxlen=_N_RECENT)

    def add(self, staleness: int) -> None:
        """Count one push."""
        self._n += 1
        self._sum += staleness
        self._max = max(self._max, staleness)
        self._recent.append(staleness)

    def counters(self) -> dict[str, float]:
        """Return mean, p95 and max, under the names that roles report them by."""
        recent = sorted(self._recent)
        p95 = recent[(95 * len(recent) - 1) // 100] if recent else 0
        return {
            "staleness_mean": self._sum / self._n if self._n else 0.0,
            "staleness_p95": float(p95),
            "staleness_max": float(self._max),
        }
