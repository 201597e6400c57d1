"""State of a job, shared by the parts of its supervisor; its config and shutdown stages."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self, final

from distbelief.config.job import VerdictOf, done
from distbelief.roles.role import Seconds
from distbelief.supervisor.allowances import Allowances
from distbelief.supervisor.failover import ShardFailover
from distbelief.supervisor.membership import Kind, Membership
from distbelief.supervisor.metrics import JobMetrics, PreviousTotals
from distbelief.supervisor.rounds import Checkpoints, Evaluations
from distbelief.supervisor.stop_rules import StopRules


class ShutdownStage(IntEnum):
    """Stages of the shutdown (see `shutdown`); they only rise."""

    RUN = 0
    DRAIN = 1
    KEEP = 2
    CLOSE = 3
    OVER = 4


@dataclass(frozen=True, kw_only=True)
class ShutdownBounds:
    """Time limit of each stage."""

    drain_seconds_max: Seconds  # a step, and acknowledgements of the last pushes
    keep_seconds_max: Seconds  # the last checkpoint, and the evaluation of all held-out samples
    close_seconds_max: Seconds  # work in progress in shards and evaluator
    failed_seconds_max: Seconds  # replaces the first limit if the job has failed

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")

    def of(self, stage: ShutdownStage, *, failed: bool) -> Seconds:
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
# 1.3 s in all: two seconds after Ctrl+C nothing may be left running.
INTERRUPTED = ShutdownBounds(
    drain_seconds_max=0.3, keep_seconds_max=0.8, close_seconds_max=0.2, failed_seconds_max=0.3
)


@final
class ShutdownState:
    """Why and how far a job has been shut down."""

    def __init__(self) -> None:
        self.stage = ShutdownStage.RUN
        self.reason: str | None = None
        self.error: str | None = None
        self.interrupted = False
        self.deadline: Seconds = math.inf
        self._bounds = USUAL

    def begin(self, reason: str, now: Seconds, *, error: str | None = None) -> None:
        """Begin the shutdown; only the first reason, and the first error, count."""
        if self.stage is not ShutdownStage.RUN:
            self.error = self.error or error
            return
        self.reason, self.error = reason, error
        self.enter(ShutdownStage.DRAIN, now)

    def interrupt(self, reason: str, now: Seconds) -> None:
        """Shorten all limits: the user wants the job to end now."""
        self._bounds = INTERRUPTED
        self.interrupted = True
        if self.stage is ShutdownStage.RUN:
            self.begin(reason, now)
        else:
            self.enter(self.stage, now)

    def enter(self, stage: ShutdownStage, now: Seconds) -> None:
        self.stage = stage
        bound = self._bounds.of(stage, failed=self.error is not None)
        self.deadline = now + bound

    def add_delay(self, seconds: Seconds) -> None:
        """Extend the deadline by a time in which the supervisor was suspended."""
        if not self.interrupted:
            self.deadline += seconds


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """Roles, rules and time limits of a supervisor."""

    roster: tuple[tuple[str, Kind], ...]  # name and kind of every role to start
    # When the job ends; None for a standalone server, which ends at a `Stop`
    stop: StopRules | None
    admits_guests: bool = False  # whether roles that somebody else started may join
    metric_name: str = "accuracy"  # name of the held-out metric
    higher_is_better: bool = True
    batch_size: int = 1  # samples of a step of one replica
    warm_start_steps: int = 0  # steps of replica 0 before the other replicas begin
    evaluate_every: Seconds = 10.0  # seconds between evaluations
    snapshot_every: Seconds = 30.0  # seconds between checkpoints
    report_every: Seconds = 2.0  # seconds between points of the curve
    first_incarnation: int = 1  # of all roles; above all that a resumed run has used
    first_label: int = 1  # number of the first checkpoint; above all that a resumed run has used
    # Totals of previous sessions of the run
    before: PreviousTotals = field(default_factory=PreviousTotals)
    fields: tuple[str, ...] = ()  # names of the coordinator's counters that are shown
    verdict: VerdictOf = done  # judges the job's end by the coordinator's last counters
    silent_seconds: Seconds = 3.0  # without a heartbeat, after which a role is reported
    dead_seconds: Seconds = 10.0  # without a heartbeat, after which it counts as dead
    start_seconds_max: Seconds = 60.0  # from its launch to a role's first message
    build_seconds_max: Seconds = 1800.0  # for building a role: its model, its data
    stall_seconds: Seconds = 60.0  # without progress of any replica, after which that is reported
    # An incarnation that got past joining and lasts this long resets the count of restarts: a
    # long run on preemptible hosts sees many.
    stable_seconds: Seconds = 30.0
    # In a row, for one replica or rank; then it is left out with all its ranks (DB-12).
    replica_restarts_max: int = 3
    # In a row, for one process of a shard, or the coordinator. The job fails with the last copy.
    shard_restarts_max: int = 5
    evaluator_restarts_max: int = 2  # in a row; then there are no more evaluations

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
            "stable_seconds",
        ):
            value = getattr(self, name)
            if not value > 0 or math.isnan(value):
                raise ValueError(f"{name} is {value}; use more than 0")
        if not self.dead_seconds > self.silent_seconds:
            raise ValueError(
                f"dead_seconds is {self.dead_seconds}; use more than silent_seconds, "
                f"{self.silent_seconds}"
            )

    def restarts_max(self, kind: Kind, *, trains: bool) -> int:
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
    """Everything that the parts of one supervisor share."""

    config: SupervisorConfig
    members: Membership
    failover: ShardFailover
    metrics: JobMetrics
    evaluations: Evaluations
    checkpoints: Checkpoints
    shutdown: ShutdownState
    allowances: Allowances

    @classmethod
    def open(cls, config: SupervisorConfig) -> Self:
        """Return the state of a job that has not begun."""
        members = Membership(
            config.roster, incarnation=config.first_incarnation, admits_guests=config.admits_guests
        )
        metrics = JobMetrics(
            metric_name=config.metric_name,
            higher_is_better=config.higher_is_better,
            before=config.before,
        )
        return cls(
            config=config,
            members=members,
            failover=ShardFailover(
                members, first=config.first_incarnation, clocks=config.before.clocks
            ),
            metrics=metrics,
            evaluations=Evaluations(every=config.evaluate_every),
            checkpoints=Checkpoints(every=config.snapshot_every, first=config.first_label),
            shutdown=ShutdownState(),
            allowances=Allowances(members, metrics, stop=config.stop, batch_size=config.batch_size),
        )
