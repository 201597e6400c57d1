"""How a job ends: in stages, each with a time limit, which Ctrl+C shortens.

A second Ctrl+C ends it at once (`Supervisor._stop_by_user`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, final

from distbelief.protocol import role as rl
from distbelief.supervisor.view import Phase


class ShutdownStage(IntEnum):
    """Stages of the shutdown of a job; they only rise.

    A role that exceeds the time limit of a stage is named and killed. An interrupted job goes
    through the same stages in little more than a second.
    """

    RUN = 0  # replicas train
    DRAIN = 1  # replicas finish their step and their last push (DB-6), and end
    KEEP = 2  # every shard saves a last checkpoint; the evaluator measures all samples
    CLOSE = 3  # shards and evaluator end
    OVER = 4  # nothing is left


FAILED_DRAIN_SECONDS: Final = 20.0  # in place of the usual limit if the job has failed

_USUAL: Final[Mapping[ShutdownStage, rl.Seconds]] = {
    ShutdownStage.DRAIN: 120.0,  # a step, and acknowledgements of the last pushes
    ShutdownStage.KEEP: 1800.0,  # the last checkpoint, and the evaluation of all samples
    ShutdownStage.CLOSE: 15.0,  # work in progress in shards and evaluator
}
# 1.3 s in all: two seconds after Ctrl+C nothing may be left running.
_INTERRUPTED: Final[Mapping[ShutdownStage, rl.Seconds]] = {
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
    deadline: rl.Seconds = math.inf

    def begin(self, reason: str, now: rl.Seconds, *, error: str | None = None) -> None:
        """Begin the shutdown; only the first reason, and the first error, count."""
        if self.stage is not ShutdownStage.RUN:
            self.error = self.error or error
            return
        self.reason, self.error = reason, error
        self.enter(ShutdownStage.DRAIN, now)

    def interrupt(self, reason: str, now: rl.Seconds) -> None:
        """Shorten all limits: the user wants the job to end now."""
        self.interrupted = True
        if self.stage is ShutdownStage.RUN:
            self.begin(reason, now)
        else:
            self.enter(self.stage, now)

    def enter(self, stage: ShutdownStage, now: rl.Seconds) -> None:
        self.stage = stage
        bound = (_INTERRUPTED if self.interrupted else _USUAL).get(stage, math.inf)
        if stage is ShutdownStage.DRAIN and self.error is not None:
            bound = min(bound, FAILED_DRAIN_SECONDS)
        self.deadline = now + bound

    def add_delay(self, seconds: rl.Seconds) -> None:
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
