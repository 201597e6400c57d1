"""The view of a running job, as structs: what its supervisor shows, once a second.

The display draws it, metrics and summary keep parts of it, and as JSON it is `status.json`, which
`distbelief status` reads. It contains no estimate in place of a measurement: what was not measured
yet is None.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec


Seconds = float  # as in `role`, whose import takes a quarter second

Phase = Literal[
    "waiting for hosts",  # hosts must join first
    "starting",  # nobody trains yet
    "resuming",  # nobody trains now, but something was trained before
    "warm start",  # one replica trains
    "training",
    "stopping",  # replicas finish, or roles end
    "saving",  # the last checkpoint, and the evaluation of all held-out samples
    "done",
    "interrupted",
    "failed",
]

HISTORY_MAX = 400  # points of the curve; with more, every other one is dropped
MESSAGES_MAX = 50  # the latest ones


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    name: str  # "shard-0"
    state: str  # as it reports it ("computing"), or the supervisor's view ("restarting")
    rate: float | None = None  # samples/s of a replica, pushes applied/s of a shard
    last_heartbeat_age: Seconds | None = None  # since its last heartbeat
    silent_seconds: Seconds = 3.0  # of this age it counts as silent
    restarts: int = 0  # previous sessions included
    pid: int | None = None  # of its process, on its own host; once it has joined
    counters: dict[str, float] = field(default_factory=dict)  # of its heartbeat
    at: str = ""  # the host that it runs on, if that is another one


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    name: str  # "host-3f2a9c01"
    label: str  # for display
    cores: int  # that roles may use
    state: str  # "preparing", "ready", "leaving", "gone"
    memory_bytes: int = 0  # of the host; 0 if unknown
    flops: float | None = None  # floating-point operations a second, of one core
    bandwidth: float | None = None  # bytes a second from the supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the curve."""

    seconds: Seconds  # of the job, as in `JobView`
    samples: int  # trained on until then, by all replicas together
    loss: float | None = None  # of training, mean since the point before
    held_out_loss: float | None = None  # mean over the held-out samples
    metric: float | None = None  # held out; a share if the metric is an accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message to the user; `number` rises by one over the job: a display knows what is new."""

    number: int
    seconds: Seconds
    text: str
    level: Literal["info", "warning", "error"] = "info"
    what: str = ""  # of the log event


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured of a job at a moment: of a view, a line of metrics, or the end of a run.

    What was not measured yet is None.
    """

    step: int = 0  # steps of all replicas together
    samples: int = 0  # samples trained on, by all replicas together
    loss: float | None = None  # of training, mean over the samples since the one before
    held_out_loss: float | None = None  # mean over the held-out samples, as last measured
    metric_name: str = "accuracy"  # the first metric of [evaluation]
    metric: float | None = None  # held out, as last measured
    # By name: this one, and the others that are measured; None in files is NaN
    metrics: dict[str, float | None] = {}
    samples_per_second: float | None = None  # over the last few seconds
    staleness_mean: float | None = None  # of the pushes applied, in pushes
    staleness_p95: float | None = None  # quantile 95 % of them, in pushes
    staleness_max: float | None = None  # the largest of them, in pushes
    bytes_in: int = 0  # bytes received by all shards, in total
    bytes_out: int = 0  # bytes sent by all shards, in total
    figures: dict[str, float] = {}  # what else the algorithm counts, by name

    @property
    def others(self) -> dict[str, float]:
        """The metrics beside the first, without the loss."""
        shown = {self.metric_name, "loss"}
        return {
            name: math.nan if value is None else value
            for name, value in self.metrics.items()
            if name not in shown
        }


class Totals(Measured, frozen=True, kw_only=True):
    """What is counted over a whole run."""

    seconds: Seconds = 0.0  # how long it has run, previous sessions included
    stop_reason: str | None = None  # why it is stopping, or has stopped
    error: str | None = None  # why it has failed, if it has
    best_metric: float | None = None  # best held-out metric of all evaluations so far
    best_metric_seconds: Seconds | None = None  # when that was measured
    # For [stop] patience: the metric that an evaluation must beat by `min_delta`
    metric_to_beat: float | None = None
    evaluations_without_gain: int = 0  # in a row, until the last one
    n_evaluations: int = 0  # that have ended
    # Pushes in the values of every shard. A push is one push, however many shards it goes to, and
    # however many ranks of a replica push parts of it.
    pushes_applied: int = 0
    pushes_refused: int = 0  # at least: from an earlier incarnation of a replica, or too late
    # At least: acknowledged, and missing in the values of a shard that was restarted. None if
    # unknown, because the status file of an earlier session was damaged.
    pushes_lost: int | None = 0


class JobView(Totals, frozen=True, kw_only=True):
    now: Seconds = 0.0  # the supervisor's clock; only differences mean anything
    # The part of `seconds` since the first replica began to train in each session; samples are
    # divided by it for a mean rate
    training_seconds: Seconds = 0.0
    phase: Phase = "starting"  # "training", "saving", "done", "interrupted", "failed", ...
    total_samples: int | None = None  # how many there will be, if a stop rule says so
    # Estimate of the time left, over all stop rules that allow one
    eta_seconds: Seconds | None = None
    progress: float | None = None  # share of the job done, 0 to 1, if known (by samples or by time)
    roles: tuple[RoleView, ...] = ()  # one entry per role, in roster order
    hosts: tuple[HostView, ...] = ()  # hosts that have joined, those that are gone included
    history: tuple[Point, ...] = ()  # at most `HISTORY_MAX` points, oldest first
    judged_by: str = ""  # what the metrics are of (`task.judged_by`)
    n_checkpoints: int = 0  # of all shards, in this session
    messages: tuple[Message, ...] = ()  # the latest `MESSAGES_MAX` messages, oldest first


S = TypeVar("S", bound=msgspec.Struct)


def filled(struct: type[S], own: Mapping[str, object], *sources: object) -> S:
    """Return a struct of these values, and for other fields the attributes of the sources."""
    found = dict(own)
    for name in struct.__struct_fields__:
        for source in sources:
            if name not in found and hasattr(source, name):
                found[name] = getattr(source, name)
    return msgspec.convert(found, struct, from_attributes=True)
