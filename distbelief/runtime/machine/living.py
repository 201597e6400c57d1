"""A machine in the life of its group: what it was told, and what it has done."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import final

from distbelief.errors import JobError, RemoteProtocolError
from distbelief.messages import Gather, Gathered, Proceed, Stepped
from distbelief.runtime.execution.execution import Found


class Phase(Enum):
    """Where in a life a machine is."""

    ALONE = "waiting for its leader"
    GATHERING = "gathering"
    GATHERED = "gathered"
    RUNNING = "running"
    ENDED = "finishing"


@dataclass(slots=True)
class _Sums:
    """What this machine knows of the loss, in one life."""

    loss: float = 0.0
    samples: int = 0
    no_loss: int = 0


@final
class Living:
    """One machine's life.

    Args:
        name: Of the machine.
        plan: Hash of its plan.

    Attributes:
        life: The present one; 0 before the first.
        phase: Where in it.
        n_lives: So far.
        granted: Steps of this life that may be taken.
        is_last: There will be no others.
        has_ended: And the leader knows that they are taken.
        agreed: Steps of this life that all machines have computed.
        square: Of the gradient of the last of them, over all machines.
        sample: To blame for it, if one of them blames one.
    """

    def __init__(self, name: str, *, plan: str) -> None:
        self.life = 0
        self.phase = Phase.ALONE
        self.n_lives = 0
        self.granted = 0
        self.is_last = False
        self.has_ended = False
        self.agreed = 0
        self.square = 0.0
        self.sample: int | None = None
        self._name = name
        self._plan = plan
        self._sums = _Sums()

    def is_over(self, step: int) -> bool:
        """Return whether the step before this one was the last."""
        return self.is_last and step >= self.granted

    def gather(self, message: Gather) -> bool:
        """Obey the leader; return whether a new life begins.

        Raises:
            RemoteProtocolError: it is of a life that is over.
            JobError: the leader has another plan.
        """
        self._check(message)
        if message.plan != self._plan:
            raise JobError(
                f"the leader of {self._name} has plan {message.plan}, {self._name} has "
                f"{self._plan}: start all machines of a replica with one plan"
            )
        if message.life == self.life:
            return False
        self.life, self.phase = message.life, Phase.GATHERING
        self.n_lives += 1
        self.granted, self.is_last, self.has_ended = 0, False, False
        self.agreed, self.square, self.sample = 0, 0.0, None
        self._sums = _Sums()
        return True

    def proceed(self, message: Proceed) -> bool:
        """Obey the leader; return whether the first step may be taken now.

        Raises:
            RemoteProtocolError: it is of another life, or too early.
        """
        self._check(message)
        gathered = self.phase not in {Phase.ALONE, Phase.GATHERING}
        if message.life > self.life or not gathered:
            raise RemoteProtocolError(
                f"{self._name} is told to proceed in life {message.life} before it has gathered"
            )
        self.granted = max(self.granted, message.steps)
        self.is_last |= message.is_last
        self.has_ended |= message.ended
        if message.agreed > self.agreed:
            self.agreed, self.square = message.agreed, message.square
            self.sample = message.sample
        begins = self.phase is Phase.GATHERED
        if begins:
            self.phase = Phase.RUNNING
        return begins

    def add(self, found: Found, n_samples: int) -> None:
        """Add what a step has found of the loss, if this machine computes it."""
        if found.loss is None:
            return
        sums = self._sums
        if math.isfinite(found.loss):
            sums.loss += found.loss
            sums.samples += n_samples
        else:
            sums.no_loss += n_samples

    def gathered(self, pushed: int | None) -> Gathered:
        """Return what the leader is told: so many samples are pushed."""
        return Gathered(life=self.life, pushes=pushed is not None, samples=pushed or 0)

    def stepped(
        self, steps: int, *, clock: float | None, square: float, sample: int | None = None
    ) -> Stepped:
        """Return what the leader is told: so many steps are taken."""
        return Stepped(
            life=self.life,
            steps=steps,
            loss=self._sums.loss,
            samples=self._sums.samples,
            no_loss=self._sums.no_loss,
            clock=-1.0 if clock is None else clock,
            ended=self.phase is Phase.ENDED,
            square=square,
            sample=sample,
        )

    def _check(self, message: Gather | Proceed) -> None:
        if message.life < self.life:
            raise RemoteProtocolError(
                f"{self._name} was sent {type(message).__name__} of life "
                f"{message.life}, after life {self.life} had begun"
            )
