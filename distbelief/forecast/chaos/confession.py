"""Kills dealt by chaos itself, told to the supervisor as such.

Who starts processes sees only that one was killed, and can but guess why: "out of
memory?". Here it is known.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import msgspec

from distbelief.roles import Action, Event, PeerLost, Role, Seconds


KILLED: Final = "was killed by chaos"
_SIGNAL: Final = "SIGKILL"


@final
class Confessed:
    """A supervisor who is told which kills were chaos's own.

    Args:
        role: The supervisor.
        owns: Whether chaos has killed the process of a role; asked once per death.
    """

    def __init__(self, role: Role, owns: Callable[[str], bool]) -> None:
        self._role = role
        self._owns = owns

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        # What ended by itself at the same moment keeps its own reason.
        if isinstance(event, PeerLost) and self._owns(event.peer) and _SIGNAL in event.reason:
            event = msgspec.structs.replace(event, reason=KILLED)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing."""
        return self._role.status()
