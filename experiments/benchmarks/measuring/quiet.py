"""Was the machine ours? Cores that others took while we measured.

A machine on which something else computes is slower than it says, and work takes less
of a core there: forecasts and what happens are spoilt alike, each its own way.
"""

import os
import resource
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from distbelief.roles.role import Seconds


_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_IDLE: Final = (3, 4)
"""Fields of /proc/stat in which nobody computes: idle, and waiting for a disk."""

_N_FIELDS: Final = 8
"""The others of a line are of guests, and counted in these."""


@final
class Quiet:
    """What others took of the processors meanwhile. A context manager.

    Attributes:
        others: Cores on average; of processes that are neither this one nor children
            that have ended by then. 0 where there is no /proc/stat.
    """

    def __init__(self, *, stat: Path = Path("/proc/stat")) -> None:
        self.others = 0.0
        self._stat = stat
        self._begun: tuple[Seconds, Seconds, Seconds] = (0.0, 0.0, 0.0)

    def __enter__(self) -> Self:
        self._begun = time.monotonic(), self._busy(), _own()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        at, busy, own = self._begun
        seconds = max(time.monotonic() - at, 1e-9)
        others = (self._busy() - busy) - (_own() - own)
        self.others = max(0.0, others / seconds)

    def _busy(self) -> Seconds:
        if not self._stat.is_file():
            return 0.0
        line = self._stat.read_text().partition("\n")[0]
        fields = [int(field) for field in line.split()[1 : 1 + _N_FIELDS]]
        ticks = sum(n for index, n in enumerate(fields) if index not in _IDLE)
        return ticks / _TICKS_PER_SECOND


def _own() -> Seconds:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    usages = [resource.getrusage(who) for who in whose]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
