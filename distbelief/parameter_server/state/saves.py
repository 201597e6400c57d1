"""The snapshots that a shard was asked for, until they are taken.

    Save -> waits -> being taken -> Saved

Rules:

* One that is safe is not taken again: whoever asks again for the last is told so.
* At most `N_SAVES_MAX` wait; whoever asks for more is told that it is too much.
* Without a supervisor nobody asks: what is in no snapshot is saved once, after those
  that wait.
"""

from collections import deque
from typing import Final, final

from distbelief.messages import Saved
from distbelief.roles import NEWEST, SUPERVISOR, Action, Address, Persisted, Report, Send


N_SAVES_MAX: Final = 8
"""Snapshots that may wait to be taken."""


@final
class Saves:
    """Snapshots asked of one life of a shard."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Address]] = deque()  # label, who asked for it
        self._last = ""
        self._clock = 0  # of the newest, or of what this life began with
        self._saves_rest = False

    def begin_at(self, clock: int) -> None:
        """What the values are at this clock can be had from where they came from."""
        self._clock = clock

    def save_rest(self) -> None:
        """After those that wait save what is in none of them."""
        self._saves_rest = True

    def begin_next(self, *, clock: int) -> str | None:
        """Return the label of the one that is taken now, if one is to be."""
        if self._saves_rest and not self._waiting and clock != self._clock:
            self._saves_rest = False  # there is no time to try again
            self._waiting.append((NEWEST, SUPERVISOR))
        return self._waiting[0][0] if self._waiting else None

    def ask(self, sender: Address, label: str, *, clock: int) -> list[Action]:
        """Let this snapshot wait, or say at once how it stands with it."""
        if label == self._last:
            return [_saved(sender, label, clock=clock)]
        if (label, sender) in self._waiting:
            return []
        if len(self._waiting) >= N_SAVES_MAX:
            error = f"{N_SAVES_MAX} snapshots wait to be taken already: ask less often"
            return [_saved(sender, label, clock=clock, error=error)]
        self._waiting.append((label, sender))
        return []

    def refuse(self, sender: Address, label: str, *, clock: int, why_not: str) -> list[Action]:
        """Say that this shard takes none when it is asked by this sender."""
        return [_saved(sender, label, clock=clock, error=why_not)]

    def taken(self, event: Persisted, *, clock: int) -> list[Action]:
        """The oldest is safe, or failed."""
        label, requester = self._waiting.popleft()
        if event.error is None:
            self._last, self._clock = label, clock
        saved = _saved(requester, label, clock=clock, error=event.error)
        said = [_rest_saved(event, clock=clock)] if label == NEWEST else []
        return [*said, saved]


def _rest_saved(event: Persisted, *, clock: int) -> Report:
    if event.error is None:
        return Report(text=f"saved at clock {clock}")
    return Report(text=f"could not save: {event.error}", level="error")


def _saved(receiver: Address, label: str, *, clock: int, error: str | None = None) -> Action:
    return Send(receiver=receiver, message=Saved(label=label, clock=clock, error=error))
