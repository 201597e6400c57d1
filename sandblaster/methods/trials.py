"""A line search carried out: trial points are made, evaluated and measured.

"parameters" keeps the point that the search began at, so a search that fails has left
nothing to restore. Trials lie in "trial"; their gradients take turns in two vectors, so
that the best one's is still there if a later trial is worse.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, final

from distbelief.commands import (
    Command,
    Copy,
    Dot,
    LinearCombination,
    Norm,
    Scalars,
    Term,
    VectorName,
)
from sandblaster.methods.line_search import Sample, WolfeConditions, more_thuente
from sandblaster.methods.objective import Objective
from sandblaster.requests import Steps, perform


PARAMETERS = "parameters"
GRADIENT = "gradient"
DIRECTION = "direction"
TRIAL = "trial"
TRIAL_GRADIENTS = ("trial_gradient_0", "trial_gradient_1")

Measure = Callable[[VectorName], tuple[Command, ...]]
"""From the name of a trial's gradient: what to do with a trial besides."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A point on the line, and what was measured there.

    Attributes:
        sample: Step length, loss and slope.
        gradient: The vector that holds its gradient.
        gradient_norm: Largest element, by size, of what is to become 0.
        gradient_square: The dot product of that with itself.
        scalars: What the method's own commands measured.
    """

    sample: Sample
    gradient: VectorName
    gradient_norm: float
    gradient_square: float
    scalars: Scalars


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a search begins.

    Attributes:
        sample: Loss and slope there.
        step: To try first.
        noise: By how much losses may differ that would be equal but for rounding.
    """

    sample: Sample
    step: float
    noise: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The end of a search: the trial to accept, if any is better than the start.

    Attributes:
        trial: It.
        satisfied: It is all that was asked of a step.
        n_evaluations: Of the search.
        any_finite: At some step loss and slope were finite, or none was tried.
        by_slopes: What the last trial would improve the loss by if slopes were asked,
            which are content with it, and values cannot tell; None if it is not so.
    """

    trial: Trial | None
    satisfied: bool
    n_evaluations: int
    any_finite: bool = True
    by_slopes: float | None = None


class Line(Protocol):
    """How points are tried along "direction"; `Straight` is the plain way."""

    @property
    def vectors(self) -> tuple[VectorName, ...]:
        """Those that a run needs to go on, all in all."""
        ...

    def begin(self) -> Steps[tuple[float, float, float]]:
        """Evaluate "parameters"; return loss, and norm and square of its gradient."""
        ...

    def turned(self) -> tuple[Command, ...]:
        """Return what to do once "direction" is formed; it measures the slope."""
        ...

    def make_trial(self, step: float) -> tuple[Command, ...]:
        """Return what makes the trial point at this step."""
        ...

    def search(self, start: Start, *, n_trials_max: int, measure: Measure) -> Steps[Searched]:
        """Search from "parameters"; at the end "trial" is what was found.

        Args:
            start: What is known there; "trial" holds the point of the first step.
            n_trials_max: How many steps may be tried.
            measure: What to do with a trial besides.
        """
        ...

    def accepted(self, trial: Trial) -> tuple[Command, ...]:
        """Return what makes a trial the present point."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Straight:
    """Points x + t d, searched after More & Thuente."""

    objective: Objective
    wolfe: WolfeConditions

    @property
    def vectors(self) -> tuple[VectorName, ...]:
        """Those that a run needs to go on, all in all."""
        return (PARAMETERS, GRADIENT, DIRECTION)

    def begin(self) -> Steps[tuple[float, float, float]]:
        """Evaluate "parameters"; return loss, and norm and square of its gradient."""
        loss, (norm, square) = yield from self.objective.at(
            PARAMETERS,
            gradient=GRADIENT,
            after=(Norm(x=GRADIENT, order="inf"), Dot(x=GRADIENT, y=GRADIENT)),
        )
        return loss, norm, square

    def turned(self) -> tuple[Command, ...]:
        """Measure the slope."""
        return (Dot(x=GRADIENT, y=DIRECTION),)

    def make_trial(self, step: float) -> tuple[Command, ...]:
        """Form x + step d."""
        terms = (Term(1.0, PARAMETERS), Term(step, DIRECTION))
        return (LinearCombination(target=TRIAL, terms=terms),)

    def accepted(self, trial: Trial) -> tuple[Command, ...]:
        """Copy point and gradient."""
        return (Copy(target=PARAMETERS, x=TRIAL), Copy(target=GRADIENT, x=trial.gradient))

    def search(self, start: Start, *, n_trials_max: int, measure: Measure) -> Steps[Searched]:
        """Search for a step that satisfies the strong Wolfe conditions."""
        wolfe = replace(self.wolfe, n_trials_max=min(self.wolfe.n_trials_max, n_trials_max))
        begin, noise = start.sample, start.noise
        steps = more_thuente(begin, step=start.step, wolfe=wolfe, noise=noise)
        step = next(steps)
        before: tuple[Command, ...] = ()
        best: Trial | None = None
        n_evaluations, satisfied, any_finite = 0, False, False
        while True:
            taken = best is not None and best.gradient == TRIAL_GRADIENTS[0]
            gradient = TRIAL_GRADIENTS[1 if taken else 0]
            loss, scalars = yield from self.objective.at(
                TRIAL, gradient=gradient, before=before, after=_along(gradient) + measure(gradient)
            )
            n_evaluations += 1
            trial = _trial(Sample(step, loss, scalars[0]), gradient, scalars)
            best = trial if _better(trial.sample, best, start=start) else best
            any_finite |= trial.sample.finite
            try:
                step = steps.send(trial.sample)
            except StopIteration as end:
                satisfied = end.value.satisfied
                break
            before = self.make_trial(step)
        by_slopes = _by_slopes(begin, trial.sample, noise) if satisfied else None
        satisfied = satisfied and trial.sample.value <= begin.value
        if satisfied:
            best = trial  # a lower one before it may have been too short a step
        elif best is not None and best is not trial:
            scalars = yield from perform(
                *self.make_trial(best.sample.step), *_along(best.gradient), *measure(best.gradient)
            )
            best = _trial(best.sample, best.gradient, scalars)
        return Searched(
            trial=best,
            satisfied=satisfied,
            n_evaluations=n_evaluations,
            any_finite=any_finite,
            by_slopes=by_slopes,
        )


def _by_slopes(start: Sample, sample: Sample, noise: float) -> float | None:
    """Return what a step improves the loss by, if that is less than values can tell."""
    steadied = sample.steadied(start, noise)
    return None if steadied is sample else start.value - steadied.value


def _better(sample: Sample, best: Trial | None, *, start: Start) -> bool:
    """Whether this is the best so far, and seen to be better than the start."""
    least = start.sample.value - start.noise if best is None else best.sample.value
    return sample.finite and sample.value < least


def _along(gradient: VectorName) -> tuple[Command, ...]:
    return (
        Dot(x=gradient, y=DIRECTION),
        Norm(x=gradient, order="inf"),
        Dot(x=gradient, y=gradient),
    )


def _trial(sample: Sample, gradient: VectorName, scalars: Scalars) -> Trial:
    _slope, norm, square, *own = scalars
    return Trial(
        sample=sample,
        gradient=gradient,
        gradient_norm=norm,
        gradient_square=square,
        scalars=tuple(own),
    )
