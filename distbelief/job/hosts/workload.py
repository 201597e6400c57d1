"""What runs on a host: a process for each duty, and one that tries the run out.

Rules:

* Duties say all that is to run: what is not among them is ended, what is and has not
  been begun yet is begun, once. So a message that is lost costs half a second.
* A process may outlive its duty, and the life of the host that it was begun in. None
  of the same name is begun before it has ended.
* That a process has ended is remembered as long as it is a duty: the supervisor
  answers with another one.
"""

import re
from typing import Final, final

from distbelief.errors import RemoteProtocolError
from distbelief.messages import Duties, DutyEnded
from distbelief.roles import Action, Address, Launch, PeerLost, Terminate


PREPARE: Final = Address("prepare")
"""The process that tries out whether the run's roles can be built here."""

_REASON_MAX: Final = 2048
_NAME: Final = re.compile(r"[a-z]{1,32}(-\d{1,9})?(\.\d{1,9})?")


@final
class Workload:
    """Of one host, in all its lives."""

    def __init__(self) -> None:
        self._wanted: dict[Address, int] = {}
        self._running: dict[Address, int] = {}  # of former lives, too, until they end
        self._ended: dict[Address, DutyEnded] = {}

    @property
    def n_running(self) -> int:
        """Processes that have not ended."""
        return len(self._running)

    @property
    def ended(self) -> tuple[DutyEnded, ...]:
        """Duties whose process has ended."""
        return tuple(self._ended.values())

    def is_over(self, name: Address, incarnation: int) -> bool:
        """Return whether this is a duty whose process has ended."""
        ended = self._ended.get(name)
        return ended is not None and ended.incarnation == incarnation

    def prepare(self, life: int) -> list[Action]:
        """Begin `PREPARE` for a life of the host, unless an older one has to end."""
        if PREPARE in self._running:
            return []
        self._running[PREPARE] = life
        return [Launch(name=PREPARE, incarnation=life)]

    def assign(self, message: Duties) -> None:
        """Take over the duties of the host (`reconcile`).

        Raises:
            RemoteProtocolError: there is one that cannot be run.
        """
        self._wanted = {_role(duty.name): duty.incarnation for duty in message.duties}
        self._ended = {
            name: ended
            for name, ended in self._ended.items()
            if self._wanted.get(name) == ended.incarnation
        }

    def reconcile(self) -> list[Action]:
        """End what is not wanted, and begin what is and has not been begun."""
        actions: list[Action] = [
            Terminate(name=name)
            for name, incarnation in self._running.items()
            if self._wanted.get(name) != incarnation
        ]
        for name, incarnation in self._wanted.items():
            # An older one ends first.
            if name not in self._running and not self.is_over(name, incarnation):
                self._running[name] = incarnation
                actions.append(Launch(name=name, incarnation=incarnation))
        return actions

    def lose(self, event: PeerLost) -> bool:
        """A process has ended; return whether it was one of these."""
        if self._running.get(event.peer) != event.incarnation:
            return False
        del self._running[event.peer]
        if self._wanted.get(event.peer) == event.incarnation:
            self._ended[event.peer] = DutyEnded(
                name=event.peer, incarnation=event.incarnation, reason=event.reason[:_REASON_MAX]
            )
        return True

    def drop(self) -> list[Action]:
        """Forget all duties, and end what runs."""
        self._wanted, self._ended = {}, {}
        return self.end()

    def end(self) -> list[Action]:
        """End what runs."""
        return [Terminate(name=name) for name in self._running]


def _role(name: str) -> Address:
    """Return the name of a role that may run here: it names files, too."""
    if _NAME.fullmatch(name) is None or name == PREPARE:
        raise RemoteProtocolError(f"a host cannot run a role {name!r:.80}")
    return Address(name)
