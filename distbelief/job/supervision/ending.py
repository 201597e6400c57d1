"""How a job ends: in stages, each with a bound, and with a name for whoever is late.

    RUN     replicas train
    DRAIN   replicas finish their step and their last push (DB-6), and end
    KEEP    every shard takes a last snapshot; the evaluator measures all samples
    CLOSE   shards and evaluator end
    OVER    nothing is left

An interrupted job goes through the same stages, within little more than a second:
whoever is not done by then is ended by force.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from distbelief.roles import Seconds


class Stage(IntEnum):
    """How far the end has come; stages only rise."""

    RUN = 0
    DRAIN = 1
    KEEP = 2
    CLOSE = 3
    OVER = 4


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long each stage may take.

    Attributes:
        drain_seconds_max: A step, and acknowledgements of the last pushes.
        keep_seconds_max: The last snapshot, and the evaluation of all held-out samples.
        close_seconds_max: What is under way in shards and evaluator.
        failed_seconds_max: Instead of the first, where the job has failed.
    """

    drain_seconds_max: Seconds
    keep_seconds_max: Seconds
    close_seconds_max: Seconds
    failed_seconds_max: Seconds

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")

    def of(self, stage: Stage, *, failed: bool) -> Seconds:
        """Return that of this stage."""
        match stage:
            case Stage.DRAIN:
                return self.failed_seconds_max if failed else self.drain_seconds_max
            case Stage.KEEP:
                return self.keep_seconds_max
            case Stage.CLOSE:
                return self.close_seconds_max
            case _:
                return math.inf


USUAL = Bounds(
    drain_seconds_max=120.0,
    keep_seconds_max=1800.0,
    close_seconds_max=15.0,
    failed_seconds_max=20.0,
)
INTERRUPTED = Bounds(
    drain_seconds_max=0.3, keep_seconds_max=0.8, close_seconds_max=0.2, failed_seconds_max=0.3
)
"""1.3 s in all; two seconds after Ctrl+C nothing may be left, the model included."""


@final
class Ending:
    """Why, how, and how far a job has ended."""

    def __init__(self) -> None:
        self.stage = Stage.RUN
        self.reason: str | None = None
        self.error: str | None = None
        self.interrupted = False
        self.deadline: Seconds = math.inf
        self._bounds = USUAL

    def begin(self, reason: str, now: Seconds, *, error: str | None = None) -> None:
        """The job is to end; only the first reason, and the first error, count."""
        if self.stage is not Stage.RUN:
            self.error = self.error or error
            return
        self.reason, self.error = reason, error
        self.enter(Stage.DRAIN, now)

    def interrupt(self, reason: str, now: Seconds) -> None:
        """The user wants it to end at once, whatever stage it is in."""
        self._bounds = INTERRUPTED
        self.interrupted = True
        if self.stage is Stage.RUN:
            self.begin(reason, now)
        else:
            self.enter(self.stage, now)

    def enter(self, stage: Stage, now: Seconds) -> None:
        """Go on to this stage."""
        self.stage = stage
        bound = self._bounds.of(stage, failed=self.error is not None)
        self.deadline = now + bound

    def excuse(self, seconds: Seconds) -> None:
        """The supervisor itself stood still."""
        if not self.interrupted:
            self.deadline += seconds


def listed(names: Iterable[str]) -> str:
    """Return "shard 0, shard 1"."""
    return ", ".join(names)
