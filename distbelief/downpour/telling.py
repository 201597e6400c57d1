"""What a replica's leader tells the supervisor of its progress, now and then."""

import math
from dataclasses import dataclass, field
from typing import final

from distbelief.messages import Progress
from distbelief.roles import Seconds
from distbelief.runtime.machine.done import Done
from distbelief.runtime.machine.leading import Leader


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What the supervisor was told last.

    Attributes:
        life: Of the group.
        at: When.
        steps: Of all lives.
        done: Of this life.
    """

    life: int = 0
    at: Seconds = -math.inf
    steps: int = 0
    done: Done = field(default_factory=Done)


@final
class Telling:
    """Tells of progress, and not too often.

    Args:
        every: Least time between two reports.
    """

    def __init__(self, *, every: Seconds) -> None:
        self._every = every
        self._told = _Told()

    def report(
        self, leader: Leader, now: Seconds, *, final: bool, computing: Seconds, elapsed: Seconds
    ) -> Progress | None:
        """Return what is new, if anything is and it is time.

        Args:
            leader: Of the group.
            now: The time.
            final: Whether it is the last report: it is always time.
            computing: Seconds of computing, of all lives.
            elapsed: Seconds since the first life began.
        """
        done = leader.life_done()
        told = self._told
        if told.life != leader.life:
            told = self._told = _Told(life=leader.life, at=told.at, steps=told.steps)
        n_new = done.samples + done.no_loss - told.done.samples - told.done.no_loss
        due = final or now - told.at >= self._every
        if not due or n_new <= 0:
            return None
        n_of_loss = done.samples - told.done.samples
        loss = (done.loss - told.done.loss) / n_of_loss if n_of_loss else math.nan
        steps = told.steps + max(done.steps - told.done.steps, 0)
        self._told = _Told(life=leader.life, at=now, steps=steps, done=done)
        return Progress(
            step=steps,
            samples=done.position + done.samples + done.no_loss,
            loss=loss,
            seconds_computing=computing,
            seconds_waiting=max(elapsed - computing, 0.0),
        )
