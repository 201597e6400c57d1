"""Metrics of a running job: samples, losses, rates, the curve, messages to the user.

The training loss is a mean over the samples between two points of the curve, over all replicas.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from distbelief.protocol import EvaluationDone, Progress
from distbelief.roles.log_events import LogEvent
from distbelief.roles.role import Report, Seconds
from distbelief.supervisor.membership import Rate, RoleRecord
from distbelief.supervisor.stop_rules import Reached
from distbelief.supervisor.view import HISTORY_MAX, MESSAGES_MAX, Message, Point


@dataclass(frozen=True, kw_only=True)
class PreviousTotals:
    """Totals of the previous sessions of this run."""

    seconds: Seconds = 0.0  # how long they ran
    training_seconds: Seconds = 0.0  # the part of it in which replicas trained
    step: int = 0  # steps of all replicas together
    # Of each replica, in the values of all shards
    samples: Mapping[str, int] = field(default_factory=dict)
    # Pushes in each shard's newest checkpoint
    clocks: Mapping[str, int] = field(default_factory=dict)
    pushes_applied: int = 0  # as last shown; counts where a coordinator drives the shards
    # Lower bound of pushes that were in a shard's values and no longer are; None if unknown
    pushes_lost: int | None = 0
    pushes_refused: int = 0  # pushes that came too late for a shard
    bytes_in: int = 0  # received by all shards
    bytes_out: int = 0  # sent by all shards
    restarts: Mapping[str, int] = field(default_factory=dict)
    loss: float | None = None
    metric: float | None = None
    held_out_loss: float | None = None
    best_metric: float | None = None
    best_metric_seconds: Seconds | None = None  # when `best_metric` was measured
    history: tuple[Point, ...] = ()


@final
class JobMetrics:
    """Metrics of the job as a whole, previous sessions included."""

    def __init__(self, *, metric_name: str, higher_is_better: bool, before: PreviousTotals) -> None:
        self.metric_name = metric_name
        self._higher_is_better = higher_is_better
        self.before = before
        self.started_at: Seconds = 0.0
        self.training_since: Seconds | None = None
        self.ended_at: Seconds | None = None
        self.step = before.step
        self.metric = before.metric
        self.held_out_loss = before.held_out_loss
        self.best_metric = before.best_metric
        self.best_metric_seconds = before.best_metric_seconds
        self.loss = before.loss  # at the last point
        self.history: list[Point] = list(before.history)
        self.messages: deque[Message] = deque(maxlen=MESSAGES_MAX)
        self._n_messages = 0
        self.samples_of = dict(before.samples)  # of each replica
        self._loss_sum = 0.0
        self._n_in_sum = 0
        self._rate = Rate()

    @property
    def samples(self) -> int:
        return sum(self.samples_of.values())

    @property
    def samples_per_second(self) -> float | None:
        return self._rate.per_second

    def seconds(self, now: Seconds) -> Seconds:
        """Return how long the job has run, previous sessions included."""
        end = now if self.ended_at is None else self.ended_at
        return self.before.seconds + end - self.started_at

    def training_seconds(self, now: Seconds) -> Seconds:
        """Return how long replicas have trained, previous sessions included."""
        end = now if self.ended_at is None else self.ended_at
        since = end if self.training_since is None else self.training_since
        return self.before.training_seconds + end - since

    def reached(self, now: Seconds) -> Reached:
        return Reached(
            samples=self.samples,
            seconds=self.training_seconds(now),
            samples_per_second=self.samples_per_second,
            metric=self.metric,
            held_out_loss=self.held_out_loss,
            loss=self.loss,
        )

    def progress(self, record: RoleRecord, message: Progress, now: Seconds) -> None:
        """Add the steps of a replica, or the iteration of a coordinator."""
        if self.training_since is None:
            began = now - message.seconds_computing - message.seconds_waiting
            self.training_since = max(began, self.started_at)
        before = self.samples_of.get(record.name, 0)
        n_new = message.samples - before if record.progressed else 0
        weight = max(n_new, 1)
        if record.kind == "coordinator":
            # Its loss is that of the whole batch, and its step counts all incarnations.
            self._loss_sum, self._n_in_sum = 0.0, 0
            self.loss = message.loss if math.isfinite(message.loss) else self.loss
            self.step = record.step = message.step
        if math.isfinite(message.loss):  # nothing is learned from a step with another loss
            self._loss_sum += weight * message.loss
            self._n_in_sum += weight
        self.samples_of[record.name] = message.samples
        self.step += max(0, message.step - record.step)
        record.step = message.step
        record.rate.add(now, message.samples)
        self._rate.add(now, self.samples)

    def measured(self, message: EvaluationDone, now: Seconds) -> None:
        """Store an evaluation, on the usual subset or on all held-out samples."""
        self.metric, self.held_out_loss = message.metric, message.loss
        if not math.isfinite(message.metric):
            return
        best = self.best_metric
        gain = 0.0 if best is None else message.metric - best
        if best is None or (gain > 0 if self._higher_is_better else gain < 0):
            self.best_metric = message.metric
            self.best_metric_seconds = self.seconds(now)

    def close_interval(self, now: Seconds) -> Point:
        """Add a point to the curve and start a new mean of the loss."""
        if self._n_in_sum:
            self.loss = self._loss_sum / self._n_in_sum
        point = Point(
            seconds=self.seconds(now),
            samples=self.samples,
            loss=self.loss if self._n_in_sum else None,
            held_out_loss=self.held_out_loss,
            metric=self.metric,
        )
        self._loss_sum, self._n_in_sum = 0.0, 0
        self.history.append(point)
        if len(self.history) > HISTORY_MAX:
            del self.history[1:-1:2]  # every other one; first and last stay
        return point

    def log(self, event: LogEvent, now: Seconds) -> Report:
        """Store a message for the user; return it as a log line."""
        report = Report.of(event)
        self._n_messages += 1
        self.messages.append(
            Message(
                number=self._n_messages,
                seconds=self.seconds(now),
                text=report.text,
                level=event.level,
            )
        )
        return report
