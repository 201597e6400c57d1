"""Hands on real processes: kill them, stop them, let them go on; by their ids.

A process that is slowed down is stopped most of the time: of each tenth of a second it
runs the `1 / factor`-th part.
"""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from distbelief.roles import Seconds


PERIOD_SECONDS: Final = 0.1


@final
@dataclass(slots=True)
class _Held:
    """A process that is stopped now and then."""

    until: Seconds
    factor: float | None  # None: it stands still all the time
    begun: Seconds
    stopped: bool = False


@final
class Hands:
    """What they hold is let go when its time is up, or by `release`."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def kill(self, pid: int) -> bool:
        """End a process; return whether there was one."""
        self._held.pop(pid, None)
        return _send(pid, signal.SIGKILL)

    def pause(self, pid: int, *, now: Seconds, seconds: Seconds) -> bool:
        """Stop a process for so long; return whether there is one."""
        return self._hold(pid, _Held(until=now + seconds, factor=None, begun=now))

    def slow(self, pid: int, *, now: Seconds, seconds: Seconds, factor: float) -> bool:
        """Let a process run a part of the time only; return whether there is one."""
        return self._hold(pid, _Held(until=now + seconds, factor=factor, begun=now))

    def turn(self, now: Seconds) -> None:
        """Stop and let go what is due: to be called often."""
        for pid, held in list(self._held.items()):
            if now >= held.until:
                self._let_go(pid)
            else:
                self._set(pid, held, stopped=_is_to_stand(held, now))

    def release(self) -> None:
        """Let everything go."""
        for pid in list(self._held):
            self._let_go(pid)

    def _hold(self, pid: int, held: _Held) -> bool:
        before = self._held.get(pid)
        held.stopped = before is not None and before.stopped
        self._held[pid] = held
        return self._set(pid, held, stopped=_is_to_stand(held, held.begun))

    def _set(self, pid: int, held: _Held, *, stopped: bool) -> bool:
        if held.stopped == stopped:
            return True
        there = _send(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
        held.stopped = stopped
        if not there:
            self._held.pop(pid, None)
        return there

    def _let_go(self, pid: int) -> None:
        held = self._held.pop(pid)
        if held.stopped:
            _send(pid, signal.SIGCONT)


def _is_to_stand(held: _Held, now: Seconds) -> bool:
    if held.factor is None:
        return True
    phase = ((now - held.begun) % PERIOD_SECONDS) / PERIOD_SECONDS
    return phase >= 1.0 / held.factor


def _send(pid: int, what: signal.Signals) -> bool:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, what)
        return True
    return False
