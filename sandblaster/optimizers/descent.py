"""Descent runs: what the methods for smooth losses share, and the two smallest of them.

    until converged:
        search along d for a step t                        evaluations: mostly one
        accept x + t d, choose d from scalars              one request

A method is its settings and a `Descent` that chooses directions. "parameters" only becomes
a point with a lower loss. When a search fails, the method drops its memory and tries -g;
if that fails too, the run ends. `IterationDone` comes when "parameters", "gradient" and
"direction" are of one point and no trial has begun: so a run may resume there.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, final

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from distbelief.protocol import vector_commands as vc
from sandblaster.optimizers import base, line_search as ls
from sandblaster.optimizers.termination import Method, Reason


Commands = tuple[vc.Command, ...]


class Descent(Protocol):
    """How a method chooses its directions: all that differs between them."""

    @property
    def remembers(self) -> bool: ...  # the direction depends on more than the present gradient

    @property
    def vectors(self) -> Sequence[vc.VectorName]: ...  # those of its memory

    @property
    def memory(self) -> str: ...  # the scalars of its memory; the constructor takes them back

    def measure(self, gradient: vc.VectorName) -> tuple[vc.Command, ...]:
        """Return commands to execute at a trial, in "trial", with this gradient."""
        ...

    # A trial becomes the present point: remember it.
    def accept(self, trial: ls.Trial, *, slope_at_start: float) -> None: ...

    # Returns commands that form "direction", after those that were `accepted`.
    def form_direction(self, accepted: Commands) -> base.Steps[Commands]: ...

    def first_step(self, present: "Present") -> float: ...  # the step to try first

    # Drops all memory but the square of the present gradient.
    def forget(self, *, gradient_square: float) -> None: ...


@final
class Present(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a run: scalars only."""

    iteration: int = 0  # points accepted
    n_evaluations: int  # evaluations done
    loss_at_start: float  # loss at the first point of the run
    loss: float  # at "parameters"
    improvement: float = 0.0  # decrease of the loss in the last iteration; 0 at first
    n_small: int = 0  # consecutive iterations with too small a decrease
    gradient_norm: float  # largest absolute element of "gradient"
    gradient_square: float  # its dot product with itself
    slope: float = 0.0  # its dot product with "direction"
    step: float = 0.0  # to try first; 0 at the end of a run
    reach: float = 0.0  # one over the longest step


@final
class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `IterationDone.state` encodes."""

    present: Present
    memory: str


@final
@dataclass(slots=True)
class DescentRun:
    """One run of one method, with its descent and its line search."""

    method: Method
    descent: Descent
    line: ls.Line

    def steps(self, present: Present | None) -> base.Steps[base.Result]:
        """Run from "parameters", or resume from a state."""
        if present is None:
            loss, norm, square = yield from self.line.begin()
            self.descent.forget(gradient_square=square)
            present = Present(
                n_evaluations=1,
                loss_at_start=loss,
                loss=loss,
                gradient_norm=norm,
                gradient_square=square,
            )
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            reason = self._stop_reason(present) if is_finite else Reason.NOT_FINITE
            if reason is not None:
                return self._result(present, reason)
            present = yield from self._choose_direction(present)
            if (yield from base.stop_requested(self._iteration_done(present, step_length=0.0))):
                return self._result(present, Reason.STOPPED)
        elif present.step == 0.0:  # the run had ended here; bounds may have changed since
            reason = self._stop_reason(present)
            if reason is not None:
                return self._result(present, reason)
            present = yield from self._choose_direction(present)
        else:
            yield from base.perform(*self.line.make_trial(present.step))
        return (yield from self._descend(present))

    def _descend(self, present: Present) -> base.Steps[base.Result]:
        expected = math.inf  # least improvement that a failed search expected
        while True:
            searched = ls.Searched(trial=None, satisfied=False, n_evaluations=0)
            if present.slope < 0.0:  # otherwise, or if NaN, it is no descent direction
                searched = yield from self.line.search(
                    ls.Sample(0.0, present.loss, present.slope),
                    step=present.step,
                    longest=max(1.0, 1.0 / present.reach) if present.reach else math.inf,
                    noise=self._noise(present),
                    n_trials_max=self.method.max_evaluations - present.n_evaluations,
                    measure=self.descent.measure,
                )
            n_evaluations = present.n_evaluations + searched.n_evaluations
            present = replace(present, n_evaluations=n_evaluations)
            if searched.trial is None:
                expected = min(expected, _expected(present, searched))
                reason = self._stop_reason_on_failure(present, searched, expected)
                if reason is not None:
                    return self._result(present, reason)
                self.descent.forget(gradient_square=present.gradient_square)
                present = yield from self._choose_direction(present)
                continue

            expected, trial = math.inf, searched.trial
            self.descent.accept(trial, slope_at_start=present.slope)
            present = self._moved(present, searched, trial)
            reason = self._stop_reason(present)
            accepted = self.line.accepted(trial)
            if reason is None:
                present = yield from self._choose_direction(present, accepted)
            else:
                yield from base.perform(*accepted)
            done = self._iteration_done(present, step_length=trial.sample.step)
            stop = yield from base.stop_requested(done)
            if reason is not None or stop:
                return self._result(present, reason or Reason.STOPPED)

    def _choose_direction(
        self, present: Present, accepted: tuple[vc.Command, ...] = ()
    ) -> base.Steps[Present]:
        # Without bounds one request moves to the accepted point, forms the direction and the trial.
        formed = yield from self.descent.form_direction(accepted)
        step = self.descent.first_step(present)
        slope, *reaches = yield from base.perform(
            *formed, *self.line.measure_direction(), *self.line.make_trial(step)
        )
        return replace(present, slope=slope, step=step, reach=max(reaches, default=0.0))

    def _moved(self, before: Present, searched: ls.Searched, trial: ls.Trial) -> Present:
        loss = trial.sample.value
        # A search that gave up may have moved very little, far from a minimum.
        small = searched.satisfied and self.method.is_small_improvement(
            before.loss, loss, loss_at_start=before.loss_at_start
        )
        return replace(
            before,
            iteration=before.iteration + 1,
            loss=loss,
            improvement=before.loss - loss,
            n_small=before.n_small + 1 if small else 0,
            gradient_norm=trial.gradient_norm,
            gradient_square=trial.gradient_square,
            slope=0.0,
            step=0.0,
            reach=0.0,
        )

    def _stop_reason(self, present: Present) -> Reason | None:
        if self.method.is_small(present.gradient_norm):
            return Reason.CONVERGED_GRADIENT
        if present.n_small >= self.method.value_iterations:
            return Reason.CONVERGED_VALUE
        return self._bound_reached(present)

    def _bound_reached(self, present: Present) -> Reason | None:
        if present.iteration >= self.method.max_iterations:
            return Reason.MAX_ITERATIONS
        is_last = present.n_evaluations >= self.method.max_evaluations
        return Reason.MAX_EVALUATIONS if is_last else None

    def _noise(self, present: Present) -> float:
        return self.method.noise(present.loss, loss_at_start=present.loss_at_start)

    def _stop_reason_on_failure(
        self, present: Present, searched: ls.Searched, expected: float
    ) -> Reason | None:
        bound = self._bound_reached(present)
        if bound is not None or self.descent.remembers:
            return bound
        if not searched.any_finite:
            return Reason.NO_FINITE_TRIAL
        is_lost = expected <= 4.0 * self._noise(present)
        return Reason.CONVERGED_ROUNDING if is_lost else Reason.LINE_SEARCH_FAILED

    def _iteration_done(self, present: Present, *, step_length: float) -> base.IterationDone:
        state = State(present=present, memory=self.descent.memory)
        return base.IterationDone(
            iteration=present.iteration,
            n_evaluations=present.n_evaluations,
            loss=present.loss,
            gradient_norm=present.gradient_norm,
            step_length=step_length,
            state=msgspec.json.encode(state).decode(),
            vectors=(*self.line.vectors, *self.descent.vectors),
        )

    def _result(self, present: Present, reason: Reason) -> base.Result:
        return base.Result(reason=reason, **asdict(self._iteration_done(present, step_length=0.0)))


def formed(combination: base.Combination) -> vc.Command:
    terms = tuple(vc.Term(a, name) for name, a in combination.items())
    return vc.LinearCombination(target=ls.DIRECTION, terms=terms)


def _expected(present: Present, searched: ls.Searched) -> float:
    if searched.by_slopes is not None:
        return searched.by_slopes
    return -present.slope * present.step if present.slope < 0.0 else math.inf


class DescentMethod(Method, frozen=True, kw_only=True):
    """Settings of a method, its way of trying points, and how it chooses directions."""

    def line(self) -> ls.Line:
        raise NotImplementedError

    def descent(self, memory: str | None) -> Descent:
        """Return what chooses directions; `memory` is that of a state, if any."""
        raise NotImplementedError

    def steps(self, state: str | None = None) -> base.Steps[base.Result]:
        """Run from "parameters", or resume from `IterationDone.state`."""
        resumed = None if state is None else msgspec.json.decode(state, type=State)
        descent = self.descent(resumed.memory if resumed else None)
        return DescentRun(self, descent, self.line()).steps(resumed.present if resumed else None)


class SmoothMethod(DescentMethod, frozen=True, kw_only=True):
    """Settings of a method that searches along straight lines."""

    sufficient_decrease: float = 1e-4  # c1 of the line search
    curvature: float = 0.9  # c2 of the line search

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.line()  # checks these two

    @override
    def line(self) -> ls.Straight:
        wolfe = ls.WolfeConditions(
            sufficient_decrease=self.sufficient_decrease, curvature=self.curvature
        )
        bounded = bool(getattr(self, "bounds", ""))
        return ls.Straight(base.Objective(l2=self.l2), wolfe, bounded)


# --- gradient descent ---

_DIFFERENCE = "gradient_difference"


@final
class GradientDescent(SmoothMethod, frozen=True, kw_only=True, tag="gradient_descent"):
    """Settings of gradient descent: the plainest method, for comparison.

    The first step to try is Barzilai & Borwein's (1988), s.y / y.y of the step before: with
    the line search that is the global method of Raydan (1997).
    """

    @override
    def descent(self, memory: str | None) -> "Steepest":
        return Steepest(memory=memory or "0.0")


@final
class Steepest:
    """Directions -g."""

    remembers = False
    vectors: Sequence[vc.VectorName] = ()

    def __init__(self, *, memory: str = "0.0") -> None:
        self._step = float(memory)

    @property
    def memory(self) -> str:
        return repr(self._step)

    def measure(self, gradient: vc.VectorName) -> tuple[vc.Command, ...]:
        """Measure y.y, y = g_trial - g."""
        terms = (vc.Term(1.0, gradient), vc.Term(-1.0, ls.GRADIENT))
        return (
            vc.LinearCombination(target=_DIFFERENCE, terms=terms),
            vc.Dot(x=_DIFFERENCE, y=_DIFFERENCE),
        )

    def accept(self, trial: ls.Trial, *, slope_at_start: float) -> None:
        # s = step d, so s.y = step (g_trial - g).d
        (square,) = trial.scalars
        curvature = trial.sample.step * (trial.sample.slope - slope_at_start)
        step = curvature / square if square else 0.0
        self._step = step if math.isfinite(step) and step > 0.0 else trial.sample.step

    def form_direction(
        self, accepted: tuple[vc.Command, ...]
    ) -> base.Steps[tuple[vc.Command, ...]]:
        yield from ()
        return (*accepted, formed({ls.GRADIENT: -1.0}))

    def first_step(self, present: Present) -> float:
        """Return Barzilai & Borwein's step; at first one of length 1."""
        return self._step or 1.0 / math.sqrt(present.gradient_square)

    def forget(self, *, gradient_square: float) -> None:
        del gradient_square
        self._step = 0.0


# --- conjugate gradients ---


@final
class ConjugateGradient(SmoothMethod, frozen=True, kw_only=True, tag="conjugate_gradient"):
    """Settings of nonlinear conjugate gradients: directions that remember one vector.

    It needs four vectors besides the parameters and two for trials, where L-BFGS needs 2 m
    more; but mostly more evaluations.
    """

    value_tolerance: float = 0.0
    curvature: float = 0.4  # c2 of the line search; directions stay conjugate only if it is small

    @override
    def descent(self, memory: str | None) -> "Conjugate":
        return Conjugate(memory)


class _Memory(msgspec.Struct, frozen=True, kw_only=True):
    # Scalars of the last step; the state encodes them.
    beta: float = 0.0
    gradient_square: float = 0.0  # at the present point
    along: float = 0.0  # present gradient . direction that led here
    slope: float = 0.0  # where that direction began
    step: float = 0.0  # along it


@final
class Conjugate:
    """Directions -g + beta d.

    d_k+1 = -g_k+1 + beta_k d_k,    y_k = g_k+1 - g_k
    beta_k = max(0, y_k.g_k+1 / g_k.g_k)        Polak & Ribiere, as Gilbert & Nocedal 1992
    """

    vectors: Sequence[vc.VectorName] = ()

    def __init__(self, memory: str | None = None) -> None:
        self._last = _Memory()
        if memory is not None:
            self._last = msgspec.json.decode(memory, type=_Memory)

    @property
    def remembers(self) -> bool:
        return self._last.beta != 0.0

    @property
    def memory(self) -> str:
        return msgspec.json.encode(self._last).decode()

    def measure(self, gradient: vc.VectorName) -> tuple[vc.Command, ...]:
        terms = (vc.Term(1.0, gradient), vc.Term(-1.0, ls.GRADIENT))
        return (
            vc.LinearCombination(target=_DIFFERENCE, terms=terms),
            vc.Gram(rows=(_DIFFERENCE,), columns=(gradient,)),
        )

    def accept(self, trial: ls.Trial, *, slope_at_start: float) -> None:
        (change,) = trial.scalars  # y.g
        square = self._last.gradient_square
        beta = max(0.0, change / square) if square else 0.0
        self._last = _Memory(
            beta=beta if math.isfinite(beta) else 0.0,
            gradient_square=trial.gradient_square,
            along=trial.sample.slope,
            slope=slope_at_start,
            step=trial.sample.step,
        )

    def form_direction(
        self, accepted: tuple[vc.Command, ...]
    ) -> base.Steps[tuple[vc.Command, ...]]:
        yield from ()
        before = {ls.DIRECTION: self._last.beta} if self.remembers else {}
        return (*accepted, formed({ls.GRADIENT: -1.0, **before}))

    def first_step(self, present: Present) -> float:
        """Return a step that promises the improvement of the last one."""
        last = self._last
        slope = -last.gradient_square + last.beta * last.along
        if last.step == 0.0 or not slope < 0.0:
            return 1.0 / math.sqrt(present.gradient_square)
        step = 2.02 * present.improvement / -slope
        return step if 0.0 < step < math.inf else last.step

    def forget(self, *, gradient_square: float) -> None:
        self._last = _Memory(gradient_square=gradient_square)
