"""Roles, rules and time limits of a supervisor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distbelief.config.algorithms import Verdict, done
from distbelief.core.spans import Epochs
from distbelief.protocol.role import Address, Seconds
from distbelief.supervisor.membership import Kind, Presence, RoleRecord
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.stop_rules import StopRules


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """Roles, rules and time limits of a supervisor."""

    # Name and kind of every role to start. Without shards, roles only compute.
    roster: tuple[tuple[str, Kind], ...]
    # When the job ends; None for a standalone server, which ends at a `Stop`
    stop: StopRules | None
    admits_guests: bool = False  # whether roles that somebody else started may join
    metric_name: str = "accuracy"  # name of the held-out metric
    higher_is_better: bool = True
    judged_by: str = ""  # what the metric is of (`task.judged_by`)
    other_metrics: tuple[str, ...] = ()  # names of those measured beside it
    min_delta: float = 0.0  # of this metric: a smaller improvement is none
    batch_size: int = 1  # samples of a step of one replica
    warm_start_steps: int = 0  # steps that replica 0 takes before the others begin
    in_ring: bool = False  # replicas sum gradients among themselves
    replicas_min: int = 1  # that must be there before training begins
    dealt: Epochs | None = None  # how samples are cut that the supervisor deals
    # Of split replicas, to which samples are dealt: the ranks that push to each shard.
    parts: Mapping[Address, Sequence[int]] | None = None
    epoch_share: float = 1.0  # of an epoch that must be done; the rest is left out
    cuts_pushes: bool = False  # whether the last ones of the job may be dealt in parts
    evaluate_every: Seconds = 10.0  # seconds between evaluations
    first_evaluation: Seconds | None = None  # after the start of training; None: as between them
    evaluate_samples: int | None = None  # trained on between evaluations, in place of seconds
    snapshot_every: Seconds = 30.0  # seconds between checkpoints
    report_every: Seconds = 2.0  # seconds between points of the curve
    first_incarnation: int = 1  # of all roles; above all that a resumed run has used
    first_label: int = 1  # number of the first checkpoint; above all that a resumed run has used
    # Totals of previous sessions of the run
    before: PreviousTotals = field(default_factory=PreviousTotals)
    fields: tuple[str, ...] = ()  # names of the coordinator's counters that are shown
    # Judges the job's end by the coordinator's last counters
    verdict: Callable[[Mapping[str, float]], Verdict] = done
    heartbeat_seconds: Seconds = 0.5  # between two of a replica
    # Without a heartbeat: when a role is reported, and when it counts as dead. If heartbeats of
    # replicas are few, later: after two and four of them.
    silent_seconds: Seconds = 3.0
    dead_seconds: Seconds = 10.0
    # From its launch until a role's process begins here: the fork server may import meanwhile
    import_seconds_max: Seconds = 0.0
    start_seconds_max: Seconds = 60.0  # from then to its first message
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
        for name in ("evaluate_every", "snapshot_every", "report_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")

    def silence_max(self, kind: Kind) -> tuple[Seconds, Seconds]:
        """Return after how much silence a role is reported, and counts as dead."""
        beat = 0.0 if kind in {"shard", "guest"} else self.heartbeat_seconds
        return max(self.silent_seconds, 2 * beat), max(self.dead_seconds, 4 * beat)

    def restarts_max(self, kind: Kind, *, trains: bool) -> int:
        match kind:
            case "shard" | "coordinator":
                return self.shard_restarts_max
            case "replica" | "evaluator" | "rank":
                return self.replica_restarts_max if trains else self.evaluator_restarts_max
            case "guest":
                return 0

    def cause_of_death(
        self, record: RoleRecord, now: Seconds, *, dead_after: Seconds
    ) -> str | None:
        silence, building = now - record.heard_at, now - record.launched_at
        limit = self.start_seconds_max + (0.0 if record.begins else self.import_seconds_max)
        if record.presence is Presence.LAUNCHED and silence > limit:
            return f"has sent nothing for {silence:.0f} s since it was started"
        if record.presence is not Presence.PRESENT or record.kind == "guest":
            return None
        if silence > dead_after:
            return f"silent for {silence:.1f} s"
        if record.state == "building" and building > self.build_seconds_max:
            return f"has been building its model and data for {building:.0f} s"
        return None
