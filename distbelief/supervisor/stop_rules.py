"""Stop rules of a job: the rules of table [stop], whichever is met first.

Samples are those of all replicas together. An epoch is as many samples as the training data has,
whichever replica read them.
"""

import math
from collections.abc import Iterator
from typing import final

from distbelief.config.job import StopTable
from distbelief.core import formatting
from distbelief.supervisor.view import JobView, Seconds


@final
class StopRules:
    """The rules of one job.

    `accuracy` is compared with the held-out metric, which may have to fall; without held-out data
    `loss` is that of training.
    """

    def __init__(
        self,
        table: StopTable,
        *,
        n_train: int,
        batch_size: int = 1,
        higher_is_better: bool = True,
        has_test: bool = True,
    ) -> None:
        self._table = table
        self._higher_is_better = higher_is_better
        self._has_test = has_test
        self._steps_samples: int | None = None  # those of [stop] steps
        limits = [] if table.samples is None else [table.samples]
        if table.epochs is not None:
            limits.append(math.ceil(table.epochs * n_train))
        if table.steps is not None:
            limits.append(table.steps * batch_size)
            self._steps_samples = limits[-1]
        self.total_samples: int | None = min(limits, default=None)

    def reason(self, view: JobView) -> str | None:
        return next(self._met(view), None)

    def _met(self, view: JobView) -> Iterator[str]:
        table, total = self._table, self.total_samples
        if total is not None and view.samples >= total:
            if table.steps is not None and total == self._steps_samples:
                yield f"{table.steps:,} step{'s' if table.steps > 1 else ''} done"
            elif table.epochs is not None and total != table.samples:
                noun = "epoch" if table.epochs == 1 else "epochs"
                yield f"{table.epochs:g} {noun} done"
            yield f"{total:,} samples done"
        if table.seconds is not None and view.training_seconds >= table.seconds:
            yield f"{formatting.duration(table.seconds)} of training are over"
        goal, metric, name = table.accuracy, view.metric, view.metric_name
        sign = 1.0 if self._higher_is_better else -1.0
        if goal is not None and metric is not None and sign * metric >= sign * goal:
            yield f"held-out {name} {formatting.metric(metric, name)} reached"
        loss = view.held_out_loss if self._has_test else view.loss
        if table.loss is not None and loss is not None and loss <= table.loss:
            kind = "held-out" if self._has_test else "training"
            yield f"{kind} loss {formatting.figure(loss)} reached"
        n = view.evaluations_without_gain
        if table.patience is not None and n >= table.patience:
            noun = "evaluation" if n == 1 else "evaluations"
            best = formatting.metric(view.metric_to_beat, name)
            yield (
                f"held-out {name} has not got better than {best} in {n} {noun} "
                "(a larger patience goes on)"
            )

    def progress(self, view: JobView) -> float | None:
        """Return the share of the job that is done, 0 to 1; None without a rule that tells."""
        shares = []
        if self.total_samples is not None:
            shares.append(view.samples / self.total_samples)
        if self._table.seconds is not None:
            shares.append(view.training_seconds / self._table.seconds)
        return min(max(shares), 1.0) if shares else None

    def eta_seconds(self, view: JobView) -> Seconds | None:
        """Return an estimate of the time left; None without a rule on samples or time."""
        times = []
        if self.total_samples is not None and view.samples_per_second:
            left = self.total_samples - view.samples
            times.append(left / view.samples_per_second)
        if self._table.seconds is not None and view.training_seconds:
            times.append(self._table.seconds - view.training_seconds)
        return max(min(times), 0.0) if times else None
