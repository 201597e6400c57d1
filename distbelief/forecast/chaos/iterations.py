"""Iterations of a job with a coordinator: which were done again, which were lost.

A shard without a second copy comes back from a snapshot, and all go on from there. So
the coordinator tells of iterations that it has told of before.
"""

from collections.abc import Mapping, Sequence
from typing import final

from distbelief.forecast.virtual_run import first_word
from distbelief.messages import Progress
from distbelief.roles import Action, Event, Received, Role, Seconds


@final
class Iterations:
    """Counts them by what the supervisor hears; a message that is lost is not counted.

    Attributes:
        n_again: Told of once more.
    """

    def __init__(self) -> None:
        self.n_again = 0
        self._last = self._highest = -1  # the first is told of as 0

    @property
    def n_lost(self) -> int:
        """How many the last one is behind the highest that there was."""
        return self._highest - self._last

    def heard(self, event: Event) -> None:
        """Take note of what the supervisor is told."""
        if (
            isinstance(event, Received)
            and isinstance(event.message, Progress)
            and first_word(event.sender) == "coordinator"
        ):
            self._last = event.message.step
            if self._last <= self._highest:
                self.n_again += 1
            self._highest = max(self._highest, self._last)

    def around(self, supervisor: Role) -> "Overheard":
        """Return the supervisor as one at whom this listens."""
        return Overheard(supervisor, self)


@final
class Overheard:
    """A supervisor of whose iterations count is kept."""

    def __init__(self, role: Role, iterations: Iterations) -> None:
        self._role = role
        self._iterations = iterations

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        self._iterations.heard(event)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing."""
        return self._role.status()
