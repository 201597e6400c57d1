"""The warm start: one replica trains alone for a while, then the others are released.

"Warmstarting" model training with only a single replica before unleashing the other
replicas makes more of them usable (Dean et al. 2012, section 4.1).
"""

from typing import final

from distbelief.job.supervision.allowances import Allowances
from distbelief.job.supervision.membership import Membership, RoleRecord
from distbelief.messages import Progress
from distbelief.roles import Action, Send


@final
class WarmStart:
    """Lets replicas begin.

    Args:
        members: Of the job.
        allowances: How far they may train.
        n_steps: Of replica 0, in all its lives, before the others begin.
    """

    def __init__(self, members: Membership, allowances: Allowances, *, n_steps: int) -> None:
        self._members = members
        self._allowances = allowances
        self._n_left = n_steps

    @property
    def is_over(self) -> bool:
        """Whether all replicas may train; so too if nobody is left to wait for."""
        replicas = self._members.of("replica")
        return self._n_left <= 0 or len(replicas) < 2 or not replicas[0].is_alive

    def progressed(self, record: RoleRecord, message: Progress) -> None:
        """A replica has taken steps; `record` is as it was before."""
        if record.index == 0:
            self._n_left -= max(0, message.step - record.step)

    def release(self) -> list[Action]:
        """Return what to say to those who may begin, and have not been told."""
        replicas = self._members.of("replica")
        actions: list[Action] = []
        first = self._members.of("coordinator")
        for record in first + (replicas if self.is_over else replicas[:1]):
            if record.introduced_at is None or record.begun or not record.is_alive:
                continue
            record.begun = True
            begin = self._allowances.begin(record)
            actions.append(Send(receiver=record.name, message=begin))
        return actions
