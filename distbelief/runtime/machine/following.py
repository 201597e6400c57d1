"""What a machine hears from its leader, and says to it; the leader is a machine too.

    Gather      a new life: give up the step under way     -> Gathered, once nothing is
    Proceed     begin, or go on; so many steps in all      -> Stepped, after each

What machine 0 says to itself it obeys at once; to the others it is sent. Whatever may
have been lost is said again from time to time.
"""

from collections.abc import Sequence
from typing import final

from distbelief.messages import Gather, Gathered, Proceed, Stepped
from distbelief.roles import Action, Seconds, Send
from distbelief.runtime.machine.equipment import Equipment
from distbelief.runtime.machine.leading import Outgoing
from distbelief.runtime.machine.living import Phase


@final
class Following:
    """One machine's talk with its leader.

    Args:
        own: All that the machine has.

    Attributes:
        incarnation: Of the machine.
    """

    def __init__(self, own: Equipment) -> None:
        self.incarnation = 0
        self._own = own

    # -------------------------------------------------------------------------- spoken

    def tell(self, out: Outgoing, now: Seconds) -> list[Action]:
        """Send what the leader says; what it says to itself is obeyed at once."""
        own = self._own
        actions: list[Action] = []
        for machine, message in out:
            if machine != own.machine:
                actions.append(Send(receiver=own.names[machine], message=message))
            else:
                assert isinstance(message, Gather | Proceed), message
                actions += self.obey(message, now)
        return actions

    def gathered(self, now: Seconds) -> list[Action]:
        """Say that nothing is under way, and what is pushed."""
        own = self._own
        return self._say(own.living.gathered(own.duty.pushed), now)

    def stepped(self, now: Seconds) -> list[Action]:
        """Say how many steps are taken, and what this machine has of the last."""
        own = self._own
        said = own.living.stepped(
            own.stepping.step,
            clock=own.duty.clock,
            square=own.voting.square,
            sample=own.voting.sample,
        )
        return self._say(said, now)

    def say_again(self, now: Seconds) -> Sequence[Action]:
        """Say again what may have been lost."""
        own = self._own
        match own.living.phase:
            case Phase.ALONE if own.leader is None:
                return self._say(Gathered(life=0, pushes=False, samples=0), now)
            case Phase.GATHERED:
                return self.gathered(now)
            case Phase.RUNNING | Phase.ENDED:
                waits = own.voting.is_open or not own.may_step
                return self.stepped(now) if waits else []
            case _:
                return []

    def _say(self, message: Gathered | Stepped, now: Seconds) -> list[Action]:
        """Say something to the leader, who may be this machine."""
        leader = self._own.leader
        if leader is None:
            return [Send(receiver=self._own.names[0], message=message)]
        return self.tell(leader.hear(0, self.incarnation, message, now), now)

    # --------------------------------------------------------------------------- heard

    def obey(self, message: Gather | Proceed, now: Seconds) -> list[Action]:
        """Do what the leader says.

        Raises:
            RemoteProtocolError: it is of a life that is over, or too early.
            JobError: the leader has another plan.
        """
        own, living = self._own, self._own.living
        if isinstance(message, Gather):
            if living.gather(message):
                own.stepping.begin(message.life)
                own.renewing.begin(message.life)
            elif living.phase is Phase.GATHERED:
                return self.gathered(now)
            return []
        if not living.proceed(message):
            return []
        own.course.start(message.position)
        own.portions.begin(message.life)
        own.duty.begin(message.position, now)
        return own.stepping.place(now)
