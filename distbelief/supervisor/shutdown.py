"""Stages of the shutdown of a job, and the time limit of each.

    RUN     replicas train
    DRAIN   replicas finish their step and their last push (DB-6), and end
    KEEP    every shard saves a last checkpoint; the evaluator measures all samples
    CLOSE   shards and evaluator end
    OVER    nothing is left

A role that exceeds a limit is named and killed. An interrupted job goes through the same stages in
little more than a second.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, final

from distbelief.roles.role import Seconds
from distbelief.supervisor.view import Phase


class ShutdownStage(IntEnum):
    """Stages of the shutdown; they only rise."""

    RUN = 0
    DRAIN = 1
    KEEP = 2
    CLOSE = 3
    OVER = 4


FAILED_DRAIN_SECONDS: Final = 20.0  # in place of the usual limit if the job has failed

_USUAL: Final[Mapping[ShutdownStage, Seconds]] = {
    ShutdownStage.DRAIN: 120.0,  # a step, and acknowledgements of the last pushes
    ShutdownStage.KEEP: 1800.0,  # the last checkpoint, and the evaluation of all samples
    ShutdownStage.CLOSE: 15.0,  # work in progress in shards and evaluator
}
# 1.3 s in all: two seconds after Ctrl+C nothing may be left running.
_INTERRUPTED: Final[Mapping[ShutdownStage, Seconds]] = {
    ShutdownStage.DRAIN: 0.3,
    ShutdownStage.KEEP: 0.8,
    ShutdownStage.CLOSE: 0.2,
}


@final
@dataclass(slots=True)
class Shutdown:
    """Why and how far a job has been shut down."""

    stage: ShutdownStage = ShutdownStage.RUN
    reason: str | None = None
    error: str | None = None
    interrupted: bool = False
    deadline: Seconds = math.inf

    def begin(self, reason: str, now: Seconds, *, error: str | None = None) -> None:
        """Begin the shutdown; only the first reason, and the first error, count."""
        if self.stage is not ShutdownStage.RUN:
            self.error = self.error or error
            return
        self.reason, self.error = reason, error
        self.enter(ShutdownStage.DRAIN, now)

    def interrupt(self, reason: str, now: Seconds) -> None:
        """Shorten all limits: the user wants the job to end now."""
        self.interrupted = True
        if self.stage is ShutdownStage.RUN:
            self.begin(reason, now)
        else:
            self.enter(self.stage, now)

    def enter(self, stage: ShutdownStage, now: Seconds) -> None:
        self.stage = stage
        bound = (_INTERRUPTED if self.interrupted else _USUAL).get(stage, math.inf)
        if stage is ShutdownStage.DRAIN and self.error is not None:
            bound = min(bound, FAILED_DRAIN_SECONDS)
        self.deadline = now + bound

    def add_delay(self, seconds: Seconds) -> None:
        """Extend the deadline by a time in which the supervisor was suspended."""
        if not self.interrupted:
            self.deadline += seconds

    @property
    def phase(self) -> Phase:
        """What the user sees of the stages after `RUN`."""
        if self.stage is ShutdownStage.KEEP:
            return "saving"
        if self.stage is not ShutdownStage.OVER:
            return "stopping"
        if self.interrupted:
            return "interrupted"
        return "done" if self.error is None else "failed"
