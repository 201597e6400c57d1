"""All that a supervisor keeps of its job: one set of books, for all who do its work."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self, final

from distbelief.config.job import Judge, done
from distbelief.roles.role import Seconds
from distbelief.supervisor.allowances import Allowances
from distbelief.supervisor.failover import ShardFailover
from distbelief.supervisor.membership import Kind, Membership
from distbelief.supervisor.metrics import JobMetrics, PreviousTotals
from distbelief.supervisor.rounds import Checkpoints, Evaluations
from distbelief.supervisor.stop_rules import StopRules


# How a job ends: in stages, each with a bound, and with a name for whoever is late.
#
#     RUN     replicas train
#     DRAIN   replicas finish their step and their last push (DB-6), and end
#     KEEP    every shard takes a last snapshot; the evaluator measures all samples
#     CLOSE   shards and evaluator end
#     OVER    nothing is left
#
# An interrupted job goes through the same stages, within little more than a second:
# whoever is not done by then is ended by force.


class ShutdownStage(IntEnum):
    """How far the end has come; stages only rise."""

    RUN = 0
    DRAIN = 1
    KEEP = 2
    CLOSE = 3
    OVER = 4


@dataclass(frozen=True, kw_only=True)
class ShutdownBounds:
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

    def of(self, stage: ShutdownStage, *, failed: bool) -> Seconds:
        """Return that of this stage."""
        match stage:
            case ShutdownStage.DRAIN:
                return self.failed_seconds_max if failed else self.drain_seconds_max
            case ShutdownStage.KEEP:
                return self.keep_seconds_max
            case ShutdownStage.CLOSE:
                return self.close_seconds_max
            case _:
                return math.inf


USUAL = ShutdownBounds(
    drain_seconds_max=120.0,
    keep_seconds_max=1800.0,
    close_seconds_max=15.0,
    failed_seconds_max=20.0,
)
INTERRUPTED = ShutdownBounds(
    drain_seconds_max=0.3, keep_seconds_max=0.8, close_seconds_max=0.2, failed_seconds_max=0.3
)
"""1.3 s in all; two seconds after Ctrl+C nothing may be left, the model included."""


@final
class ShutdownState:
    """Why, how, and how far a job has ended."""

    def __init__(self) -> None:
        self.stage = ShutdownStage.RUN
        self.reason: str | None = None
        self.error: str | None = None
        self.interrupted = False
        self.deadline: Seconds = math.inf
        self._bounds = USUAL

    def begin(self, reason: str, now: Seconds, *, error: str | None = None) -> None:
        """The job is to end; only the first reason, and the first error, count."""
        if self.stage is not ShutdownStage.RUN:
            self.error = self.error or error
            return
        self.reason, self.error = reason, error
        self.enter(ShutdownStage.DRAIN, now)

    def interrupt(self, reason: str, now: Seconds) -> None:
        """The user wants it to end at once, whatever stage it is in."""
        self._bounds = INTERRUPTED
        self.interrupted = True
        if self.stage is ShutdownStage.RUN:
            self.begin(reason, now)
        else:
            self.enter(self.stage, now)

    def enter(self, stage: ShutdownStage, now: Seconds) -> None:
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


# What a supervisor is told of its job, and the bounds it keeps.


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """What a supervisor is told of its job, and the bounds it keeps.

    Attributes:
        roster: Name and kind of every role to start.
        stop: When the job is over; None: when told to (a standing parameter server).
        admits_guests: Whether roles that somebody else started may join.
        metric_name: Of the held-out figure.
        higher_is_better: Of that figure.
        batch_size: Samples of a step of one replica.
        warm_start_steps: Steps of replica 0 before the other replicas begin.
        evaluate_every: Seconds between evaluations.
        snapshot_every: Seconds between snapshots.
        report_every: Seconds between points of the curve.
        first_incarnation: Of all roles; above all that a resumed run has used.
        first_label: Number of the first snapshot; likewise.
        before: What former lives of the run came to.
        fields: Which of a coordinator's counters are shown, by name.
        verdict: What its end means, by its last counters.
        silent_seconds: Without a sign of life, after which a role is named.
        dead_seconds: Likewise, after which it is taken for dead.
        start_seconds_max: From its launch to a role's first word.
        build_seconds_max: For building a role: its model, its data.
        stall_seconds: Without progress of any replica, after which that is told.
        settled_seconds: Of a life that got past joining, which forgives the deaths
            before it: where machines are taken away now and then, a long run sees many.
        replica_restarts_max: Of one replica in a row, or of one of its machines; then
            it is left out, with all its machines (DB-12).
        shard_restarts_max: Of one shard's process in a row; with the last of its
            copies the job fails. Likewise of the coordinator.
        evaluator_restarts_max: In a row; then nothing is measured any more.
    """

    roster: tuple[tuple[str, Kind], ...]
    stop: StopRules | None
    admits_guests: bool = False
    metric_name: str = "accuracy"
    higher_is_better: bool = True
    batch_size: int = 1
    warm_start_steps: int = 0
    evaluate_every: Seconds = 10.0
    snapshot_every: Seconds = 30.0
    report_every: Seconds = 2.0
    first_incarnation: int = 1
    first_label: int = 1
    before: PreviousTotals = field(default_factory=PreviousTotals)
    fields: tuple[str, ...] = ()
    verdict: Judge = done
    silent_seconds: Seconds = 3.0
    dead_seconds: Seconds = 10.0
    start_seconds_max: Seconds = 60.0
    build_seconds_max: Seconds = 1800.0
    stall_seconds: Seconds = 60.0
    settled_seconds: Seconds = 30.0
    replica_restarts_max: int = 3
    shard_restarts_max: int = 5
    evaluator_restarts_max: int = 2

    def __post_init__(self) -> None:
        names = [name for name, _ in self.roster]
        if len(set(names)) < len(names):
            raise ValueError(f"roster is {names}; each name may occur once")
        if not any(kind == "shard" for _, kind in self.roster):
            raise ValueError(f"roster is {names}; at least one shard is needed")
        for name in (
            "evaluate_every",
            "snapshot_every",
            "report_every",
            "silent_seconds",
            "start_seconds_max",
            "build_seconds_max",
            "stall_seconds",
            "settled_seconds",
        ):
            value = getattr(self, name)
            if not value > 0 or math.isnan(value):
                raise ValueError(f"{name} is {value}; use more than 0")
        if not self.dead_seconds > self.silent_seconds:
            raise ValueError(
                f"dead_seconds is {self.dead_seconds} and silent_seconds "
                f"{self.silent_seconds}; use more for the first"
            )

    def restarts_max(self, kind: Kind, *, trains: bool) -> int:
        """Return how often in a row a role of this kind is restarted."""
        match kind:
            case "shard" | "coordinator":
                return self.shard_restarts_max
            case "replica" | "evaluator" | "machine":
                if trains:
                    return self.replica_restarts_max
                return self.evaluator_restarts_max
            case "guest":
                return 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What is known and what is under way.

    Attributes:
        config: What the supervisor was told.
        members: All roles.
        pairs: Which copy of each shard leads.
        figures: What is shown.
        evaluations: Requests to the evaluator.
        saves: Rounds of snapshots.
        ending: How far the job has ended.
        allowances: How far each replica may train.
    """

    config: SupervisorConfig
    members: Membership
    pairs: ShardFailover
    figures: JobMetrics
    evaluations: Evaluations
    saves: Checkpoints
    ending: ShutdownState
    allowances: Allowances

    @classmethod
    def open(cls, config: SupervisorConfig) -> Self:
        """Return the books of a job that has not begun."""
        members = Membership(
            config.roster, incarnation=config.first_incarnation, admits_guests=config.admits_guests
        )
        figures = JobMetrics(
            metric_name=config.metric_name,
            higher_is_better=config.higher_is_better,
            before=config.before,
        )
        return cls(
            config=config,
            members=members,
            pairs=ShardFailover(
                members, first=config.first_incarnation, clocks=config.before.clocks
            ),
            figures=figures,
            evaluations=Evaluations(every=config.evaluate_every),
            saves=Checkpoints(every=config.snapshot_every, first=config.first_label),
            ending=ShutdownState(),
            allowances=Allowances(members, figures, stop=config.stop, batch_size=config.batch_size),
        )
