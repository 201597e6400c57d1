"""Timers of one life, by name.

A watchdog is set anew at every message and hardly ever fires, so a timer that moves
later keeps its entry in the agenda: when that comes up early, it goes back. The agenda
thus holds a few entries per name, however often the timer is set.
"""

from collections.abc import Callable
from functools import partial

import msgspec

from distbelief.roles import Seconds
from distbelief.simulation.agenda import Agenda


class _Timer(msgspec.Struct, eq=False):
    at: Seconds
    entry: Seconds  # when its newest entry in the agenda comes up


class Timers:
    """Calls `fire(name)` when a timer comes due."""

    def __init__(self, agenda: Agenda, fire: Callable[[str], None]) -> None:
        self._agenda = agenda
        self._fire = fire
        self._timers: dict[str, _Timer] = {}

    def set(self, name: str, at: Seconds) -> None:
        """Let `name` come due at `at`, and at no other time."""
        timer = self._timers.get(name)
        if timer is not None and timer.entry <= at:
            timer.at = at
            return
        self._schedule(name, at)

    def cancel(self, name: str) -> None:
        """Forget the timer, if there is one."""
        self._timers.pop(name, None)

    def close(self) -> None:
        """Forget all of them."""
        self._timers.clear()

    def _schedule(self, name: str, at: Seconds) -> None:
        timer = _Timer(at=at, entry=at)
        self._timers[name] = timer
        self._agenda.at(at, partial(self._come_up, name, timer))

    def _come_up(self, name: str, timer: _Timer) -> None:
        if self._timers.get(name) is not timer:
            return  # cancelled, or moved to an earlier time, meanwhile
        if timer.at > self._agenda.now:
            self._schedule(name, timer.at)
            return
        del self._timers[name]
        self._fire(name)
