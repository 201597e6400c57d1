"""Counters of training, and progress reports to the supervisor.

A gradient with NaN or infinity is skipped: neither it nor anything computed from it reaches
the shards. A single one is harmless; many in a row mean that training has diverged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from distbelief.errors import JobError
from distbelief.protocol import Progress
from distbelief.roles.role import SUPERVISOR, Action, Report, Seconds, Send
from distbelief.worker.config import DownpourConfig
from distbelief.worker.group_leader import GroupLeader, GroupProgress


@dataclass(slots=True, kw_only=True)
class Counters:
    steps: int = 0
    fetches: int = 0
    pushes: int = 0
    local_steps: int = 0
    gradients: int = 0  # accrued
    gradients_pushed: int = 0
    non_finite: int = 0  # gradients skipped
    torn: int = 0  # attempts dropped because a fetch met a half-applied update


@final
class TrainingMetrics:
    """Counters and sums of one incarnation of a replica."""

    def __init__(self, config: DownpourConfig) -> None:
        self._config = config
        self.counters = Counters()
        self.position = 0  # samples consumed since the replica's first incarnation
        self.seconds_computing: Seconds = 0.0  # installing parameters and computing steps
        self._begun_at: Seconds = 0.0
        self._n_bad_in_row = 0
        self._loss = 0.0  # of the last step
        self._unreported_loss = 0.0  # sum over the samples since the last report
        self._n_unreported = 0  # samples
        self._n_of_no_loss = 0  # of them, those without a finite loss
        self._reported_at: Seconds = -math.inf

    def figures(self) -> dict[str, float]:
        counters = self.counters
        figures = {name: float(getattr(counters, name)) for name in counters.__dataclass_fields__}
        figures["samples"] = float(self.position)
        figures["seconds_computing"] = self.seconds_computing
        return figures

    def begin(self, position: int, now: Seconds) -> None:
        self.position, self._begun_at = position, now

    # -------------------------------------------------------------------- progress

    def stepped(self, *, n_samples: int, loss: float) -> None:
        self.counters.steps += 1
        self.position += n_samples
        self._loss = loss
        self._n_unreported += n_samples
        if math.isfinite(loss):
            self._unreported_loss += n_samples * loss
        else:
            self._n_of_no_loss += n_samples

    def progress_if_due(self, now: Seconds) -> Sequence[Action]:
        if now - self._reported_at < self._config.progress_seconds:
            return []
        return self.progress(now)

    def progress(self, now: Seconds) -> Sequence[Action]:
        """Report to the supervisor if anything was done since the last report."""
        if not self._n_unreported:
            return []
        n_of_loss = self._n_unreported - self._n_of_no_loss
        message = Progress(
            step=self.counters.steps,
            samples=self.position,
            loss=self._unreported_loss / n_of_loss if n_of_loss else math.nan,
            seconds_computing=self.seconds_computing,
            seconds_waiting=max(now - self._begun_at - self.seconds_computing, 0.0),
        )
        self._reported_at, self._unreported_loss = now, 0.0
        self._n_unreported = self._n_of_no_loss = 0
        return [Send(receiver=SUPERVISOR, message=message)]

    # ----------------------------------------------------------- good and bad gradients

    def good(self) -> None:
        self._n_bad_in_row = 0

    def skip(self, blame: str | None = None, *, samples: Sequence[int] = ()) -> Sequence[Action]:
        """Count the gradient of the last step, which is not finite.

        Args:
            blame: A sentence on the bad sample, if one was found.
            samples: Indices of the step in the data set; empty if `blame` is enough.
        """
        of = f" of {_samples(samples)}" if len(samples) else ""
        text = (
            f"step {self.counters.steps}: the gradient{of} is NaN or infinite (loss "
            f"{self._loss:g}); it is skipped" + (f": {blame}" if blame else "")
        )
        return self.bad(1, [Report(text=text, level="warning")], blame=blame)

    def bad(
        self, n_gradients: int, warning: Sequence[Action], *, blame: str | None = None
    ) -> Sequence[Action]:
        """Count gradients that were not finite; return the warning once per row of them.

        Raises:
            JobError: there were too many in a row.
        """
        # One warning per row of bad gradients keeps the log short.
        is_first = self._n_bad_in_row == 0
        self.counters.non_finite += n_gradients
        self._n_bad_in_row += n_gradients
        config = self._config
        if self._n_bad_in_row < config.non_finite_limit:
            return warning if is_first else []
        if blame:
            raise JobError(
                f"{self._n_bad_in_row} gradients in a row were NaN or infinite (step "
                f"{self.counters.steps}): {blame}"
            )
        clip = config.clip_norm
        raise JobError(
            f"{self._n_bad_in_row} gradients in a row were NaN or infinite (step "
            f"{self.counters.steps}, loss {self._loss:g}, learning_rate "
            f"{config.learning_rate:g}): training has diverged. Use a lower "
            "learning_rate, or "
            + ("a clip_norm" if clip is None else f"a clip_norm below {clip:g}")
        )


def _samples(indices: Sequence[int]) -> str:
    n, first = len(indices), indices[0]
    if n > 1 and list(indices) == list(range(first, first + n)):
        return f"samples {first} to {indices[-1]}"
    if n <= 4:
        return f"sample{'s' if n > 1 else ''} {', '.join(map(str, indices))}"
    few = ", ".join(map(str, indices[:3]))
    return f"samples {few}, ... ({n} from {min(indices)} to {max(indices)})"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    generation: int = 0
    at: Seconds = -math.inf
    steps: int = 0
    done: GroupProgress = field(default_factory=GroupProgress)


@final
class ProgressReporter:
    """Reports a group's progress, from its leader.

    Args:
        every: Least time between two reports.
    """

    def __init__(self, *, every: Seconds) -> None:
        self._every = every
        self._reported = _Reported()

    def report(
        self,
        leader: GroupLeader,
        now: Seconds,
        *,
        final: bool,
        computing: Seconds,
        elapsed: Seconds,
    ) -> Progress | None:
        """Return a report if there is progress and it is time.

        Args:
            leader: Of the group.
            now: The time.
            final: Report regardless of the time.
            computing: Seconds of computing, in all generations.
            elapsed: Seconds since the first generation began.
        """
        done = leader.generation_done()
        reported = self._reported
        # A new generation counts from zero; steps of earlier ones stay counted.
        if reported.generation != leader.generation:
            reported = self._reported = _Reported(
                generation=leader.generation, at=reported.at, steps=reported.steps
            )
        n_new = done.samples + done.no_loss - reported.done.samples - reported.done.no_loss
        due = final or now - reported.at >= self._every
        if not due or n_new <= 0:
            return None
        n_of_loss = done.samples - reported.done.samples
        loss = (done.loss - reported.done.loss) / n_of_loss if n_of_loss else math.nan
        steps = reported.steps + max(done.steps - reported.done.steps, 0)
        self._reported = _Reported(generation=leader.generation, at=now, steps=steps, done=done)
        return Progress(
            step=steps,
            samples=done.position + done.samples + done.no_loss,
            loss=loss,
            seconds_computing=computing,
            seconds_waiting=max(elapsed - computing, 0.0),
        )
