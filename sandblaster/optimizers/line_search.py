"""Line search for the strong Wolfe conditions, after More & Thuente (1994).

On phi(t) = f(x + t d), with c1 < c2, as in MINPACK-2's `dcsrch`:

    sufficient decrease   phi(t) <= phi(0) + c1 t phi'(0)
    curvature             |phi'(t)| <= c2 |phi'(0)|

"parameters" keeps the starting point, so a failed search leaves nothing to restore.
Trials are in "trial"; their gradients alternate between two vectors, so that of the best
trial is still there if a later one is worse.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, final

from distbelief.protocol import vector_commands as vc
from sandblaster.optimizers.base import Objective, Steps, perform


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """phi at one step: its value and its slope."""

    step: float
    value: float
    slope: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value) and math.isfinite(self.slope)

    def denoised(self, start: "Sample", noise: float) -> "Sample":
        """Return it with the value that slopes imply, if the difference may be rounding."""
        # Near a minimum values differ by less than their rounding error, while slopes are
        # still exact to some digits: a search that trusts values tried 20 steps there.
        by_slopes = start.value + 0.5 * self.step * (start.slope + self.slope)
        off = max(abs(self.value - start.value), abs(self.value - by_slopes))
        return replace(self, value=by_slopes) if off <= noise else self

    def tilted(self, slope: float) -> "Sample":
        """Return the sample of phi(t) - slope t."""
        return Sample(self.step, self.value - self.step * slope, self.slope - slope)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WolfeConditions:
    """What a step must satisfy."""

    sufficient_decrease: float = 1e-3  # c1
    curvature: float = 0.9  # c2
    narrowest: float = 0.1  # width of the interval, relative to its far end, at which to give up
    n_trials_max: int = 20  # largest number of steps tried

    def __post_init__(self) -> None:
        if not 0.0 < self.sufficient_decrease <= self.curvature < 1.0:
            raise ValueError(
                f"sufficient_decrease is {self.sufficient_decrease}, curvature is "
                f"{self.curvature}; use 0 < sufficient_decrease <= curvature < 1"
            )


@final
@dataclass(frozen=True, slots=True)
class Found:
    best: Sample  # if its step is 0, no step is better than none
    satisfied: bool  # whether it satisfies both conditions


Search = Generator[float, Sample, Found]

_STEP_MAX = 1e10
_BISECT_WIDTH = 0.66  # of the interval two trials ago
_BACK_OFF = 0.1  # from a trial that was not finite, if no other step is known
_N_NOISY_MAX = 4  # trials within an interval whose values may be noise only


def more_thuente(
    start: Sample,
    *,
    step: float,
    wolfe: WolfeConditions,
    noise: float = 0.0,
    longest: float = math.inf,
) -> Search:
    """Yield steps to try, expect their samples, return the step found.

    Differences from MINPACK-2: a trial that is not finite bounds later steps, and a shorter
    one is tried; if the interval gets too narrow, `best` is not evaluated once more. Values
    within `noise` of each other are replaced by those that slopes imply, which makes of
    sufficient decrease the approximate Wolfe condition of Hager & Zhang (2005). `step` is the
    first one to try; `start`, at 0, has a negative slope. No step is above `longest`, where
    sufficient decrease is enough if it still goes down.
    """
    interval = _Interval(start, start, bracketed=False)
    least = wolfe.sufficient_decrease * start.slope  # slope of the line to stay below
    lowest_seen = False
    step_max = _STEP_MAX
    low, high = 0.0, 5.0 * step
    widths = (math.inf, math.inf)
    n_noisy = 0
    for _ in range(wolfe.n_trials_max):
        measured = yield step
        trial = measured.denoised(start, noise)
        best = interval.best
        if not trial.finite:
            step_max = min(step, step_max) if step > best.step else step_max
            step = best.step + (0.5 if best.step else _BACK_OFF) * (step - best.step)
            continue
        enough = trial.value <= start.value + trial.step * least
        if enough and abs(trial.slope) <= -wolfe.curvature * start.slope:
            return Found(trial, satisfied=True)
        if enough and trial.step >= longest and trial.slope <= least:
            return Found(trial, satisfied=True)
        lowest_seen = lowest_seen or (enough and trial.slope >= 0.0)
        # Until a step with enough decrease and a rising slope is seen, search for a
        # minimizer of phi(t) - c1 t phi'(0), which must exist (section 2).
        ahead = lowest_seen or enough or trial.value > best.value
        tilt = 0.0 if ahead else least
        tilted, tilted_trial = interval.tilted(tilt), trial.tilted(tilt)
        step = dcstep(tilted, tilted_trial, low=low, high=high)
        interval = tilted.narrowed(tilted_trial).tilted(-tilt)
        best, other = interval.best, interval.other

        if not interval.bracketed:
            low = step + 1.1 * (step - best.step)
            high = step + 4.0 * (step - best.step)
            step = min(step, 0.5 * (best.step + step_max), longest)
            low, high = min(low, longest), min(high, longest)
            continue
        width = abs(other.step - best.step)
        if width >= _BISECT_WIDTH * widths[0]:
            step = best.step + 0.5 * (other.step - best.step)
        widths = (widths[1], width)
        low, high = sorted((best.step, other.step))
        n_noisy += trial is not measured
        if high - low <= wolfe.narrowest * high or not low < step < high:
            break
        if n_noisy == _N_NOISY_MAX:
            break
    return Found(interval.best, satisfied=False)


@final
@dataclass(frozen=True, slots=True)
class _Interval:
    best: Sample
    other: Sample
    bracketed: bool

    def tilted(self, slope: float) -> "_Interval":
        if slope == 0.0:
            return self
        return _Interval(self.best.tilted(slope), self.other.tilted(slope), self.bracketed)

    def narrowed(self, trial: Sample) -> "_Interval":
        if trial.value > self.best.value:
            return _Interval(self.best, trial, bracketed=True)
        if trial.slope * math.copysign(1.0, self.best.slope) < 0.0:
            return _Interval(trial, self.best, bracketed=True)
        return replace(self, best=trial)


def dcstep(interval: _Interval, trial: Sample, *, low: float, high: float) -> float:
    """Return the next step to try (More & Thuente 1994, section 4).

    Until a minimizer is bracketed it is between `low` and `high`. `interval` is without the trial.
    """
    best, other = interval.best, interval.other
    if trial.value > best.value:  # a minimizer lies between them
        cubic = _cubic(best, trial)
        quadratic = _quadratic(best, trial)
        if abs(cubic - best.step) <= abs(quadratic - best.step):
            return cubic
        return cubic + 0.5 * (quadratic - cubic)
    if trial.slope * math.copysign(1.0, best.slope) < 0.0:  # and here too
        cubic, secant = _cubic(trial, best), _secant(trial, best)
        further = abs(cubic - trial.step) > abs(secant - trial.step)
        return cubic if further else secant
    if abs(trial.slope) < abs(best.slope):  # the slope flattens: extrapolate
        return _extrapolated(interval, trial, low=low, high=high)
    if interval.bracketed:
        return _cubic(trial, other)
    return high if trial.step > best.step else low


def _extrapolated(interval: _Interval, trial: Sample, *, low: float, high: float) -> float:
    best, other = interval.best, interval.other
    ahead = trial.step > best.step
    beyond = _cubic_beyond(trial, best)
    cubic = beyond if beyond is not None else (high if ahead else low)
    secant = _secant(trial, best)
    nearer = abs(cubic - trial.step) < abs(secant - trial.step)
    if not interval.bracketed:
        return min(max(secant if nearer else cubic, low), high)
    bound = trial.step + _BISECT_WIDTH * (other.step - trial.step)
    step = cubic if nearer else secant
    return min(bound, step) if ahead else max(bound, step)


def _cubic(a: Sample, b: Sample) -> float:
    """Return the minimizer of the cubic through two samples, or their middle."""
    theta, gamma = _cubic_terms(a, b)
    numerator = (gamma - a.slope) + theta
    denominator = ((gamma - a.slope) + gamma) + b.slope
    ratio = numerator / denominator if denominator else math.nan
    return a.step + (ratio if math.isfinite(ratio) else 0.5) * (b.step - a.step)


def _cubic_beyond(a: Sample, b: Sample) -> float | None:
    """Return the minimizer of the cubic if it lies beyond a, seen from b."""
    theta, gamma = _cubic_terms(a, b)
    numerator = (gamma - a.slope) + theta
    denominator = (gamma + (b.slope - a.slope)) + gamma
    ratio = numerator / denominator if denominator else math.nan
    if gamma == 0.0 or not -math.inf < ratio < 0.0:
        return None
    return a.step + ratio * (b.step - a.step)


def _cubic_terms(a: Sample, b: Sample) -> tuple[float, float]:
    theta = 3.0 * (a.value - b.value) / (b.step - a.step) + a.slope + b.slope
    size = max(abs(theta), abs(a.slope), abs(b.slope))
    if size == 0.0:
        return 0.0, 0.0
    square = (theta / size) ** 2 - (a.slope / size) * (b.slope / size)
    gamma = size * math.sqrt(max(0.0, square))
    return theta, gamma if b.step > a.step else -gamma


def _quadratic(a: Sample, b: Sample) -> float:
    length = b.step - a.step
    # The middle of the two, if there is no such parabola.
    bend = (a.value - b.value) / length + a.slope  # 0 in rounding, where all is flat
    return a.step + (a.slope / bend if bend else 1.0) / 2.0 * length


def _secant(a: Sample, b: Sample) -> float:
    return a.step + a.slope / (a.slope - b.slope) * (b.step - a.step)


PARAMETERS = "parameters"
GRADIENT = "gradient"
DIRECTION = "direction"
TRIAL = "trial"
TRIAL_GRADIENTS = ("trial_gradient_0", "trial_gradient_1")

LOWER = "lower"  # these two are constants of the shards
UPPER = "upper"
PROJECTED = "projected"  # gradient: x - P(x - g), with P the nearest point within the bounds
BLOCKED = "blocked"  # 1 where x is at a bound and -g points out, else 0
_ROOM = "room"

Measure = Callable[[vc.VectorName], tuple[vc.Command, ...]]
"""From the name of a trial's gradient to the method's own commands at the trial."""


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """A point on the line, and what was measured there."""

    sample: Sample  # step length, loss and slope
    gradient: vc.VectorName  # the vector that holds its gradient
    gradient_norm: float  # largest absolute element of the (pseudo-)gradient
    gradient_square: float  # dot product of that with itself
    scalars: vc.Scalars  # what the method's own commands measured


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    trial: Trial | None  # the trial to accept, if any is better than the start
    satisfied: bool  # whether it satisfies all conditions
    n_evaluations: int  # of the search
    any_finite: bool = True  # whether some step had a finite loss and slope, or none was tried
    # Improvement that slopes imply, if it is too small for values to show.
    by_slopes: float | None = None


class Line(Protocol):
    """How points are tried along "direction"; `Straight` is the plain way."""

    @property
    def vectors(self) -> tuple[vc.VectorName, ...]: ...  # all that a run needs to resume

    # Evaluates "parameters"; returns loss, and norm and square of its gradient.
    def begin(self) -> Steps[tuple[float, float, float]]: ...

    # Commands to execute once "direction" is formed; they measure the slope, and perhaps numbers
    # whose largest is one over the longest step.
    def measure_direction(self) -> tuple[vc.Command, ...]: ...

    def make_trial(self, step: float) -> tuple[vc.Command, ...]: ...  # form the trial point

    # Searches from "parameters", where `begin` is; at first "trial" is at `step`, and at the end
    # at what was found. Rounding alone may change losses by `noise`.
    def search(
        self,
        begin: Sample,
        *,
        step: float,
        longest: float,
        noise: float,
        n_trials_max: int,
        measure: Measure,
    ) -> Steps[Searched]: ...

    def accepted(self, trial: Trial) -> tuple[vc.Command, ...]: ...  # make it the present point


@final
@dataclass(frozen=True, slots=True)
class Straight:
    """Points x + t d, searched after More & Thuente.

    With bounds all points up to t = 1 are within them, at least (`bounds`).
    """

    objective: Objective
    wolfe: WolfeConditions
    bounded: bool = False

    vectors: ClassVar = (PARAMETERS, GRADIENT, DIRECTION)

    def begin(self) -> Steps[tuple[float, float, float]]:
        loss, (norm, square) = yield from self.objective.at(
            PARAMETERS,
            gradient=GRADIENT,
            before=within(PARAMETERS) if self.bounded else (),
            after=self._size_at(PARAMETERS, GRADIENT),
        )
        return loss, norm, square

    def measure_direction(self) -> tuple[vc.Command, ...]:
        slope = vc.Dot(x=GRADIENT, y=DIRECTION)
        if not self.bounded:
            return (slope,)
        to_lower, to_upper = (
            (
                difference(_ROOM, bound, PARAMETERS),
                vc.Pointwise(target=_ROOM, function="share", x=DIRECTION, y=_ROOM),
                vc.Norm(x=_ROOM, order="inf"),
            )
            for bound in (LOWER, UPPER)
        )
        return (slope, *to_lower, *to_upper)

    def make_trial(self, step: float) -> tuple[vc.Command, ...]:
        return (point_at(step), *(within(TRIAL) if self.bounded else ()))

    def accepted(self, trial: Trial) -> tuple[vc.Command, ...]:
        return (vc.Copy(target=PARAMETERS, x=TRIAL), vc.Copy(target=GRADIENT, x=trial.gradient))

    def search(
        self,
        begin: Sample,
        *,
        step: float,
        longest: float,
        noise: float,
        n_trials_max: int,
        measure: Measure,
    ) -> Steps[Searched]:
        wolfe = replace(self.wolfe, n_trials_max=min(self.wolfe.n_trials_max, n_trials_max))
        steps = more_thuente(begin, step=step, wolfe=wolfe, noise=noise, longest=longest)
        step = next(steps)
        before: tuple[vc.Command, ...] = ()
        best: Trial | None = None
        n_evaluations, satisfied, any_finite = 0, False, False
        while True:
            taken = best is not None and best.gradient == TRIAL_GRADIENTS[0]
            gradient = TRIAL_GRADIENTS[1 if taken else 0]
            loss, scalars = yield from self.objective.at(
                TRIAL,
                gradient=gradient,
                before=before,
                after=(*self._along(gradient), *measure(gradient)),
            )
            n_evaluations += 1
            slope, norm, square, *own = scalars
            trial = Trial(Sample(step, loss, slope), gradient, norm, square, tuple(own))
            least = begin.value - noise if best is None else best.sample.value
            best = trial if trial.sample.finite and trial.sample.value < least else best
            any_finite |= trial.sample.finite
            try:
                step = steps.send(trial.sample)
            except StopIteration as end:
                satisfied = end.value.satisfied
                break
            before = self.make_trial(step)
        denoised = trial.sample.denoised(begin, noise)
        is_noisy = satisfied and denoised is not trial.sample
        by_slopes = begin.value - denoised.value if is_noisy else None
        satisfied = satisfied and trial.sample.value <= begin.value
        if satisfied:
            best = trial  # an earlier trial may be lower, but its step was too short
        elif best is not None and best is not trial:
            # What was measured is of the last trial: measure again at the best.
            _, norm, square, *own = yield from perform(
                *self.make_trial(best.sample.step),
                *self._along(best.gradient),
                *measure(best.gradient),
            )
            best = Trial(best.sample, best.gradient, norm, square, tuple(own))
        return Searched(
            trial=best,
            satisfied=satisfied,
            n_evaluations=n_evaluations,
            any_finite=any_finite,
            by_slopes=by_slopes,
        )

    def _along(self, gradient: vc.VectorName) -> tuple[vc.Command, ...]:
        return (vc.Dot(x=gradient, y=DIRECTION), *self._size_at(TRIAL, gradient))

    def _size_at(self, point: vc.VectorName, gradient: vc.VectorName) -> tuple[vc.Command, ...]:
        if not self.bounded:
            return size_of(gradient)
        return (*project(point, gradient), *size_of(PROJECTED))


def within(target: vc.VectorName) -> tuple[vc.Command, ...]:
    return (
        vc.Pointwise(target=target, function="max", x=target, y=LOWER),
        vc.Pointwise(target=target, function="min", x=target, y=UPPER),
    )


def difference(target: vc.VectorName, x: vc.VectorName, y: vc.VectorName) -> vc.Command:
    return vc.LinearCombination(target=target, terms=(vc.Term(1.0, x), vc.Term(-1.0, y)))


def project(point: vc.VectorName, gradient: vc.VectorName) -> tuple[vc.Command, ...]:
    return (
        difference(PROJECTED, point, gradient),
        *within(PROJECTED),
        difference(PROJECTED, point, PROJECTED),
        vc.Pointwise(target=BLOCKED, function="only", x=PROJECTED, y=gradient),
    )


def size_of(gradient: vc.VectorName) -> tuple[vc.Command, ...]:
    """Return commands that measure its norm and square."""
    return (vc.Norm(x=gradient, order="inf"), vc.Dot(x=gradient, y=gradient))


def point_at(step: float) -> vc.Command:
    """Return the command that forms the trial point x + t d."""
    terms = (vc.Term(1.0, PARAMETERS), vc.Term(step, DIRECTION))
    return vc.LinearCombination(target=TRIAL, terms=terms)
