"""Signs of life of the machines of a rehearsal: a file of each, touched twice a second.

A machine whose file is not touched any more is named, and after longer silence taken
for dead, as in a job; the thread that touches it needs nothing of what is computed.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from distbelief.errors import DistBeliefError
from distbelief.roles import Seconds


BEAT_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 3.0
"""After which a machine is named."""

DEAD_SECONDS: Final = 10.0
"""After which all are ended."""

START_SECONDS_MAX: Final = 120.0
"""Until the first sign of life: it imports torch before."""

STILL_SECONDS: Final = 1.0
"""Between two looks, after which whoever looks stood still itself."""


def beat(path: Path) -> None:
    """Touch this file from now on, as long as the process lives."""

    def touch() -> None:
        while True:
            with suppress(OSError):  # the folder is gone at the end
                path.touch()
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=touch, daemon=True).start()


@final
class Pulse:
    """What is known of the signs of life of some machines.

    Args:
        paths: The file of each.
        pids: The process of each.
        now: They were started.
    """

    def __init__(self, paths: Sequence[Path], *, pids: Sequence[int], now: Seconds) -> None:
        self._paths = paths
        self._pids = pids
        self._stamps = [0] * len(paths)  # of the newest touch, in ns; 0: none
        self._heard_at = [now] * len(paths)
        self._named: set[int] = set()
        self._looked_at = now

    def look(self, now: Seconds, *, left: Sequence[int]) -> list[str]:
        """Look at the files; return what is to be told of who is silent, or back.

        Args:
            now: The time.
            left: Machines that have not ended.

        Raises:
            DistBeliefError: one has been silent for too long; it is named.
        """
        gap, self._looked_at = now - self._looked_at, now
        told = []
        for machine in left:
            if gap > STILL_SECONDS:  # nobody else is to blame
                self._heard_at[machine] += gap
            text = self._look_at(machine, now)
            if text is not None:
                told.append(text)
        return told

    def _look_at(self, machine: int, now: Seconds) -> str | None:
        stamp = _stamp(self._paths[machine])
        silence = now - self._heard_at[machine]
        label = f"machine {machine} (process {self._pids[machine]})"
        if stamp != self._stamps[machine]:
            self._stamps[machine], self._heard_at[machine] = stamp, now
            if machine not in self._named:
                return None
            self._named.discard(machine)
            return f"{label} is back after {silence:.1f} s"
        bound = DEAD_SECONDS if stamp else START_SECONDS_MAX
        if silence > bound:
            raise DistBeliefError(
                f"{label} has been silent for {silence:.1f} s, and all are ended with "
                "it: it was stopped, or its host is overloaded. Try again"
            )
        if not stamp or silence <= SILENT_SECONDS or machine in self._named:
            return None
        self._named.add(machine)
        return f"{label} silent for {silence:.1f} s: in {bound - silence:.0f} s giving up"


def _stamp(path: Path) -> int:
    """Return when this file was touched; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
