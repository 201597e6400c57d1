"""What a supervisor is told of its job, and the bounds it keeps."""

import math
from dataclasses import dataclass, field

from distbelief.job.configuration.verdicts import Judge, done
from distbelief.job.supervision.figures import Before
from distbelief.job.supervision.membership import Kind
from distbelief.job.supervision.stop_rules import StopRules
from distbelief.roles import Seconds


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
    before: Before = field(default_factory=Before)
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
