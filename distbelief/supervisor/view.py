"""What the supervisor shows of a running job: one frozen picture, made once a second.

The supervisor makes it, `progress` draws it, `metrics` and `summary` keep parts of it,
and as JSON it lies in `status.json`, where `distbelief status` reads it. Nothing in it
is guessed: a figure that nobody has measured yet is None.
"""

from dataclasses import dataclass, field
from typing import Literal


Seconds = float  # `roles` has this name too, but its import takes a quarter second

Phase = Literal[
    "waiting for machines",  # others are to join first
    "starting",  # nobody trains yet
    "resuming",  # nobody trains now, but something was trained before
    "warm start",  # one replica trains
    "training",
    "stopping",  # replicas finish, or roles end
    "saving",  # the last snapshot, and the evaluation of all held-out samples
    "done",
    "interrupted",
    "failed",
]

HISTORY_MAX = 400
"""Points of a view's history, at most; a supervisor that has more thins them out."""

MESSAGES_MAX = 50
"""Messages of a view, at most: the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """One role as the supervisor last heard of it."""

    name: str  # "shard-0"
    state: str  # its own word ("computing"), or the supervisor's ("restarting")
    rate: float | None = None  # samples/s of a replica, pushes applied/s of a shard
    last_heartbeat_age: Seconds | None = None
    restarts: int = 0
    pid: int | None = None  # of its process, on its own host; once it has joined
    counters: dict[str, float] = field(default_factory=dict)  # of its heartbeat
    at: str = ""  # the machine that it runs on, if that is another one


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """One machine that has joined."""

    name: str  # "host-3f2a9c01"
    label: str  # what people call it
    cores: int
    state: str  # "preparing", "ready", "leaving", "gone"
    memory_bytes: int = 0
    flops: float | None = None  # a second, of one core
    bandwidth: float | None = None  # bytes a second from the supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One moment of the curve."""

    seconds: Seconds  # of the job, as in `JobView`
    samples: int
    loss: float | None = None  # of training, mean since the point before
    held_out_loss: float | None = None
    metric: float | None = None  # held out; a share if the metric is an accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One thing worth telling the user at once.

    `number` rises by one from message to message, over the whole job, so that a
    display knows which ones it has shown.
    """

    number: int
    seconds: Seconds
    text: str
    level: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The whole job at one moment.

    Attributes:
        now: The supervisor's clock; only differences mean anything.
        seconds: How long the job has run, the lives before a resume included.
        training_seconds: The part of `seconds` since the first replica began to train
            in each life; what samples are divided by for a mean rate.
        phase: What the job as a whole is doing.
        stop_reason: Why it is stopping, or has stopped.
        error: Why it has failed, if it has.
        samples: Samples trained on, by all replicas together.
        total_samples: How many there will be, if a stop rule says so.
        eta_seconds: Estimate of the time left, over all stop rules that allow one.
        progress: Share of the job done, 0 to 1, if known (by samples or by time).
        step: Steps of all replicas together.
        samples_per_second: Over the last few seconds.
        loss: Of training, mean since the view before.
        metric_name: "accuracy", ...
        metric: Held out, last measured.
        held_out_loss: Held out, last measured.
        best_metric: Best held-out metric of all evaluations so far.
        best_metric_seconds: When that was measured.
        bytes_in: Received by all shards.
        bytes_out: Sent by all shards.
        pushes_applied: In the values of every shard. A push is one push, however many
            shards it goes to, and however many machines of a replica push parts of it.
        pushes_refused: Of a former life of a replica, and too late, for a shard; at
            least so many.
        pushes_lost: Acknowledged, and missing in the values of a shard that had to be
            restarted; at least so many. None: unknown, for the status file of an
             earlier life was damaged.
        figures: What else the algorithm counts, by name.
        roles: One entry per role, in roster order.
        hosts: Machines that have joined, those that are gone, too.
        history: At most `HISTORY_MAX` points, oldest first.
        messages: The latest `MESSAGES_MAX` messages, oldest first.
    """

    now: Seconds = 0.0
    seconds: Seconds = 0.0
    training_seconds: Seconds = 0.0
    phase: Phase = "starting"
    stop_reason: str | None = None
    error: str | None = None
    samples: int = 0
    total_samples: int | None = None
    eta_seconds: Seconds | None = None
    progress: float | None = None
    step: int = 0
    samples_per_second: float | None = None
    loss: float | None = None
    metric_name: str = "accuracy"
    metric: float | None = None
    held_out_loss: float | None = None
    best_metric: float | None = None
    best_metric_seconds: Seconds | None = None
    staleness_mean: float | None = None
    staleness_p95: float | None = None
    staleness_max: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    pushes_applied: int = 0
    pushes_refused: int = 0
    pushes_lost: int | None = 0
    figures: dict[str, float] = field(default_factory=dict)
    roles: tuple[RoleView, ...] = ()
    hosts: tuple[HostView, ...] = ()
    history: tuple[Point, ...] = ()
    messages: tuple[Message, ...] = ()
