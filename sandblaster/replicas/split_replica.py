"""One machine of a replica of several, in a Sandblaster job: the role "replica-R.M".

Within it is a machine as any algorithm has them (`distbelief.runtime.machine.machine`),
whose duty is to sum (`part_sums`). This role hears besides what only Sandblaster says:

    coordinator -> leader    Assignment      for its foreman
    leader -> machine        Gather          which set the life is about, too
                             PushPart        for the sums
    machine -> leader        PartStaged      for the foreman; now and then, too: I live
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

from distbelief.messages import Assignment, Gather, PartStaged, PushPart
from distbelief.roles import (
    Action,
    Address,
    Event,
    Halt,
    PeerJoined,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from distbelief.runtime.machine.machine import Machine
from sandblaster.names import COORDINATOR
from sandblaster.replicas.foreman import TIMER as FOREMAN_TIMER, Foreman
from sandblaster.replicas.part_sums import PartSums
from sandblaster.replicas.set_course import SetCourse


SAY: Final = "split:say"


@final
class SplitReplica:
    """The role "replica-R.M".

    Args:
        machine: Which computes.
        names: Of all machines of the replica, its leader first.
        course: Of the machine.
        sums: Its duty.
        foreman: If it leads.
        retry_seconds: After which it says again how it stands.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        names: Sequence[Address],
        course: SetCourse,
        sums: PartSums,
        foreman: Foreman | None,
        retry_seconds: Seconds,
    ) -> None:
        self._machine = machine
        self._names = names
        self._places = {name: index for index, name in enumerate(names)}
        self._course = course
        self._sums = sums
        self._foreman = foreman
        self._retry_seconds = retry_seconds
        self._is_over = False

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            JobError: model, data or loss make it impossible to go on.
            PeerLostError: a shard has been silent for too long.
        """
        if self._is_over:
            return []
        actions = [*self._happened(event, now)]
        if self._sums.pushes.has_work():
            actions += self._machine.wake(now)
        if self._sums.pushes.has_news():
            actions += self._tell(now)
        if any(isinstance(action, Halt) for action in actions):
            self._is_over = True
        elif self._foreman is not None:
            actions += self._foreman.words(now)
        return actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters."""
        return self._machine.status()

    # -------------------------------------------------------------------------- events

    def _happened(self, event: Event, now: Seconds) -> Sequence[Action]:
        match event:
            case Started():
                return self._start(event, now)
            case Received():
                return self._receive(event, now)
            case TimerFired(name=name) if name == SAY:
                return self._tell(now)
            case TimerFired(name=name) if name == FOREMAN_TIMER:
                return self._say_again(now)
            case PeerJoined(peer=peer) if peer == COORDINATOR:
                if self._foreman is not None:
                    self._foreman.ask()
                return []
            case _:
                return self._machine.handle(event, now)

    def _start(self, event: Started, now: Seconds) -> Sequence[Action]:
        if self._foreman is not None:
            self._foreman.start(event.incarnation)
            return self._machine.handle(event, now)
        return [*self._machine.handle(event, now), *self._tell(now)]

    def _receive(self, event: Received, now: Seconds) -> Sequence[Action]:
        message, machine = event.message, self._places.get(event.sender)
        if self._foreman is not None and machine is not None:
            self._foreman.heard(machine, now)
        match message:
            case Assignment() if self._foreman is not None:
                self._foreman.take(message)
                return self._machine.wake(now)
            case PartStaged() if self._foreman is not None and machine is not None:
                self._foreman.staged(machine, message.grants)
                return self._machine.wake(now)
            case PushPart() if machine == 0:
                self._sums.push(message)
                return self._tell(now) if message.grant in self._sums.pushes.staged else []
            case Gather() if machine == 0:
                self._course.know(message.life, message.order)
                return self._machine.handle(event, now)
            case _:
                return self._machine.handle(event, now)

    # --------------------------------------------------------------------------- words

    def _tell(self, now: Seconds) -> Sequence[Action]:
        """Tell the leader, who may be this machine, what is staged."""
        grants = tuple(self._sums.pushes.staged)
        if self._foreman is not None:
            self._foreman.staged(0, grants)
            return self._machine.wake(now)
        staged = PartStaged(grants=grants)
        again = SetTimer(name=SAY, at=now + self._retry_seconds)
        return [Send(receiver=self._names[0], message=staged), again]

    def _say_again(self, now: Seconds) -> Sequence[Action]:
        """Say again, as the leader, what may have been lost."""
        assert self._foreman is not None
        actions: list[Action] = []
        for machine, message in self._foreman.again():
            if machine != 0:
                actions.append(Send(receiver=self._names[machine], message=message))
            elif isinstance(message, PushPart):
                self._sums.push(message)
        return [*actions, *self._machine.wake(now)]
