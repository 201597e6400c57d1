"""Metrics of a running job: samples, losses, rates, the curve.

The training loss is a mean over the samples between two points of the curve, over all replicas.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from msgspec.structs import replace

from distbelief.protocol import EvaluationDone, Progress
from distbelief.protocol.role import Seconds
from distbelief.supervisor.membership import Rate, RoleRecord
from distbelief.supervisor.view import HISTORY_MAX, JobView, Point


@dataclass(frozen=True, kw_only=True)
class PreviousTotals:
    view: JobView = field(default_factory=JobView)  # the last one
    # Of each replica, in the values of all shards
    samples: Mapping[str, int] = field(default_factory=dict)
    # Pushes in each shard's newest checkpoint
    clocks: Mapping[str, int] = field(default_factory=dict)


@final
class JobMetrics:
    """Metrics of the job as a whole, previous sessions included."""

    def __init__(
        self,
        *,
        metric_name: str,
        higher_is_better: bool,
        before: PreviousTotals,
        min_delta: float = 0.0,  # of the metric, for [stop] patience
        others: Sequence[str] = (),  # further metrics
        judged_by: str = "",  # what they are of (`task.judged_by`)
    ) -> None:
        self._names = (metric_name, *others)
        self._higher_is_better = higher_is_better
        self._min_delta = min_delta
        self.before = before.view
        known = before.view  # as last measured
        # Figures of another metric, or of other data, say nothing of this one.
        if (known.metric_name, known.judged_by) != (metric_name, judged_by):
            known = replace(
                known,
                metric_name=metric_name,
                judged_by=judged_by,
                held_out_loss=None,
                metric=None,
                metrics={},
                best_metric=None,
                best_metric_seconds=None,
                metric_to_beat=None,
                evaluations_without_gain=0,
            )
        self._known = known
        self.started_at: Seconds = 0.0
        self.training_since: Seconds | None = None
        self.ended_at: Seconds | None = None
        self.step = self.before.step
        self._history: list[Point] = list(self.before.history)
        self._samples_of = dict(before.samples)  # of each replica
        self._n_samples = sum(self._samples_of.values())  # these may be thousands
        self.dealt: int | None = None  # done so far, once that is known where samples are dealt
        self._loss_sum = 0.0
        self._n_in_sum = 0
        self._rate = Rate()

    def adopt(self, view: JobView, samples: Mapping[str, int], now: Seconds) -> None:
        """Go on where the supervisor before this one was killed.

        Roles went on meanwhile, so that time counts, as their samples do: the clock is that of the
        same host.
        """
        self.step, self._history, self._known = view.step, list(view.history), view
        self._samples_of, self._n_samples = dict(samples), sum(samples.values())
        self.dealt = None if view.samples == sum(samples.values()) else view.samples
        at = min(view.now, now)
        self.started_at = at - (view.seconds - self.before.seconds)
        if view.training_seconds > self.before.training_seconds:
            self.training_since = at - (view.training_seconds - self.before.training_seconds)

    @property
    def samples(self) -> int:
        return self._n_samples if self.dealt is None else self.dealt

    @property
    def samples_of(self) -> dict[str, int]:
        """Of each replica, in all of its incarnations; to be read only."""
        return self._samples_of

    def count(self, name: str, samples: int) -> None:
        """Note how many samples a replica has trained in all."""
        self._n_samples += samples - self._samples_of.get(name, 0)
        self._samples_of[name] = samples

    def seconds(self, now: Seconds) -> Seconds:
        end = now if self.ended_at is None else self.ended_at
        return self.before.seconds + end - self.started_at

    def view(self, now: Seconds) -> JobView:
        end = now if self.ended_at is None else self.ended_at
        since = end if self.training_since is None else self.training_since
        return replace(
            self._known,
            now=now,
            seconds=self.seconds(now),
            training_seconds=self.before.training_seconds + end - since,
            samples=self.samples,
            step=self.step,
            samples_per_second=self._rate.per_second,
            history=tuple(self._history),
        )

    def progress(self, record: RoleRecord, message: Progress, now: Seconds) -> None:
        """Add the steps of a replica, or the iteration of a coordinator."""
        if self.training_since is None:
            began = now - message.seconds_computing - message.seconds_waiting
            self.training_since = max(began, self.started_at)
        before = self._samples_of.get(record.name, 0)
        n_new = message.samples - before if record.progressed else 0
        weight = max(n_new, 1)
        if record.kind == "coordinator":
            # Its loss is that of the whole batch, and its step counts all incarnations.
            self._loss_sum, self._n_in_sum = 0.0, 0
            if math.isfinite(message.loss):
                self._known = replace(self._known, loss=message.loss)
            self.step = record.step = message.step
        if math.isfinite(message.loss):  # nothing is learned from a step with another loss
            self._loss_sum += weight * message.loss
            self._n_in_sum += weight
        self.count(record.name, message.samples)
        self.step += max(0, message.step - record.step)
        record.step = max(record.step, message.step)
        record.rate.add(now, message.samples)
        self._rate.add(now, self.samples)

    def measured(self, message: EvaluationDone, now: Seconds, *, counts: bool = True) -> None:
        """Store an evaluation, on the usual subset or on all held-out samples.

        Unless it `counts`, no stop rule looks at it any more.
        """
        values = (message.metric, *message.others)
        found = replace(
            self._known,
            metric=message.metric,
            metrics=dict(zip(self._names, values, strict=False)),
            held_out_loss=message.loss,
            n_evaluations=self._known.n_evaluations + 1,
        )
        best = found.best_metric
        sign = 1.0 if self._higher_is_better else -1.0
        if (best is None or sign * message.metric > sign * best) and math.isfinite(message.metric):
            seconds = self.seconds(now)
            found = replace(found, best_metric=message.metric, best_metric_seconds=seconds)
        if counts and math.isfinite(message.metric) and self._is_gain(message.metric):
            found = replace(found, metric_to_beat=message.metric, evaluations_without_gain=0)
        elif counts:
            n = found.evaluations_without_gain + 1
            found = replace(found, evaluations_without_gain=n)
        self._known = found

    def _is_gain(self, metric: float) -> bool:
        before, sign = self._known.metric_to_beat, 1.0 if self._higher_is_better else -1.0
        return before is None or sign * metric - self._min_delta > sign * before

    def close_interval(self, now: Seconds) -> None:
        """Add a point to the curve and start a new mean of the loss."""
        if self._n_in_sum:
            self._known = replace(self._known, loss=self._loss_sum / self._n_in_sum)
        point = Point(
            seconds=self.seconds(now),
            samples=self.samples,
            loss=self._known.loss if self._n_in_sum else None,
            held_out_loss=self._known.held_out_loss,
            metric=self._known.metric,
        )
        self._loss_sum, self._n_in_sum = 0.0, 0
        self._history.append(point)
        if len(self._history) > HISTORY_MAX:
            del self._history[1:-1:2]  # every other one; first and last stay
