"""What methods for smooth losses share: directions of their own, Wolfe's line search.

A method is its settings, and a `Descent` that chooses directions:

    class MyMethod(SmoothMethod, frozen=True, kw_only=True, tag="my_method"):
        def descent(self, memory: str | None) -> Descent: ...
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import msgspec
from typing_extensions import override

from distbelief.protocol.vector_commands import Command, LinearCombination, Term, VectorName
from sandblaster.optimizers.base import (
    Combination,
    IterationDone,
    Objective,
    Result,
    Steps,
    perform,
    stop_requested,
)
from sandblaster.optimizers.line_search import (
    DIRECTION,
    Line,
    Sample,
    Searched,
    Start,
    Straight,
    Trial,
    WolfeConditions,
)
from sandblaster.optimizers.termination import (
    Method,
    Reason,
    bound_reached,
    check,
    lost_in_rounding,
    noise,
    small_gradient,
    small_improvement,
)


# What descent methods share: search along a direction, accept, choose the next one.
#
#     until converged:
#         search along d for a step t                        evaluations: mostly one
#         accept x + t d, choose d from scalars              one request
#
# A method is a `Descent`: it says which dot products it wants of a trial, and which
# linear combination of vectors is the next direction. Rules that this file keeps:
#
# * "parameters" only ever becomes a point whose loss is no higher than before.
# * A direction that is no descent direction, and a search that fails, make the method
#   forget what it remembers and go along -g; if that fails too, the run ends and says so.
# * `IterationDone` comes when "parameters", "gradient" and "direction" are at one and the same
#   point, and no trial has begun: a run may resume there as if nothing had happened.


class Descent(Protocol):
    """How one method chooses its directions: all that differs between them."""

    @property
    def remembers(self) -> bool:
        """Whether the direction depends on more than the present gradient."""
        ...

    @property
    def vectors(self) -> Sequence[VectorName]:
        """The vectors that its memory lies in."""
        ...

    @property
    def memory(self) -> str:
        """Its memory besides those, as text; the constructor takes it back."""
        ...

    def measure(self, gradient: VectorName) -> tuple[Command, ...]:
        """Return what to do at a trial, in "trial", with this gradient."""
        ...

    def accept(self, trial: Trial, *, slope_at_start: float) -> None:
        """Remember a trial that becomes the present point."""
        ...

    def direction(self) -> Combination:
        """Return the direction as a combination of vectors."""
        ...

    def first_step(self, present: "Present") -> float:
        """Return the step to try first."""
        ...

    def forget(self, *, gradient_square: float) -> None:
        """Forget all but that the present gradient has this square."""
        ...


@final
class Present(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run is: scalars only.

    Attributes:
        iteration: Points accepted.
        n_evaluations: Evaluations done.
        loss_at_start: Of the whole run.
        loss: At "parameters".
        improvement: Of the loss by the last iteration; 0 at first.
        n_small: How many iterations in a row have improved it too little.
        gradient_norm: Largest element of "gradient", by size.
        gradient_square: Its dot product with itself.
        slope: Its dot product with "direction".
        step: To try first.
    """

    iteration: int
    n_evaluations: int
    loss_at_start: float
    loss: float
    improvement: float
    n_small: int
    gradient_norm: float
    gradient_square: float
    slope: float = 0.0
    step: float = 0.0


@final
class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes into `IterationDone.state`."""

    present: Present
    memory: str


def read_state(text: str) -> State:
    """Return the state that `IterationDone` told.

    Raises:
        ValueError: it is no such state.
    """
    return msgspec.json.decode(text, type=State)


@final
@dataclass(slots=True)
class DescentRun:
    """One run of one method.

    Attributes:
        method: Its tolerances and bounds.
        descent: How it chooses directions.
        line: How it searches along them.
    """

    method: Method
    descent: Descent
    line: Line

    def steps(self, present: Present | None) -> Steps[Result]:
        """Run from "parameters", or on from where a run was cut."""
        if present is None:
            present = yield from self._begin()
            reason = self._stop_reason_at_start(present)
            if reason is not None:
                return self._result(present, reason)
            present = yield from self._choose_direction(present, accepted=())
            if (yield from stop_requested(self._iteration_done(present, step_length=0.0))):
                return self._result(present, Reason.STOPPED)
        elif present.step == 0.0:  # it had ended there, by the bounds of then
            reason = self._stop_reason(present)
            if reason is not None:
                return self._result(present, reason)
            present = yield from self._choose_direction(present, accepted=())
        else:
            yield from perform(*self.line.make_trial(present.step))
        return (yield from self._descend(present))

    def _descend(self, present: Present) -> Steps[Result]:
        expected = math.inf  # improvement, by the most modest of the failed searches
        while True:
            searched = yield from self._search(present)
            present = _counted(present, searched)
            if searched.trial is None:
                expected = min(expected, _expected(present, searched))
                reason = self._stop_reason_on_failure(present, searched, expected)
                if reason is not None:
                    return self._result(present, reason)
                self.descent.forget(gradient_square=present.gradient_square)
                present = yield from self._choose_direction(present, accepted=())
                continue

            expected, trial = math.inf, searched.trial
            self.descent.accept(trial, slope_at_start=present.slope)
            present = self._moved(present, searched, trial)
            reason = self._stop_reason(present)
            accepted = self.line.accepted(trial)
            if reason is None:
                present = yield from self._choose_direction(present, accepted=accepted)
            else:
                yield from perform(*accepted)
            cut = self._iteration_done(present, step_length=trial.sample.step)
            stop = yield from stop_requested(cut)
            if reason is not None or stop:
                return self._result(present, reason or Reason.STOPPED)

    # --------------------------------------------------------------------- parts

    def _begin(self) -> Steps[Present]:
        """Evaluate the starting point."""
        loss, norm, square = yield from self.line.begin()
        self.descent.forget(gradient_square=square)
        return Present(
            iteration=0,
            n_evaluations=1,
            loss_at_start=loss,
            loss=loss,
            improvement=0.0,
            n_small=0,
            gradient_norm=norm,
            gradient_square=square,
        )

    def _choose_direction(
        self, present: Present, *, accepted: tuple[Command, ...]
    ) -> Steps[Present]:
        """Move to the accepted point, form the direction and the first trial."""
        step = self.descent.first_step(present)
        terms = tuple(Term(a, name) for name, a in self.descent.direction().items())
        (slope,) = yield from perform(
            *accepted,
            LinearCombination(target=DIRECTION, terms=terms),
            *self.line.measure_direction(),
            *self.line.make_trial(step),
        )
        return msgspec.structs.replace(present, slope=slope, step=step)

    def _search(self, present: Present) -> Steps[Searched]:
        if not present.slope < 0.0:  # or NaN: no descent direction
            return Searched(trial=None, satisfied=False, n_evaluations=0)
        method, loss = self.method, present.loss
        start = Start(
            sample=Sample(0.0, loss, present.slope),
            step=present.step,
            noise=noise(method, loss, loss_at_start=present.loss_at_start),
        )
        return (
            yield from self.line.search(
                start,
                n_trials_max=self.method.n_evaluations_max - present.n_evaluations,
                measure=self.descent.measure,
            )
        )

    # ------------------------------------------------------------------ verdicts

    def _stop_reason_at_start(self, present: Present) -> Reason | None:
        if not math.isfinite(present.loss) or not math.isfinite(present.gradient_norm):
            return Reason.NOT_FINITE
        return self._stop_reason(present)

    def _stop_reason(self, present: Present) -> Reason | None:
        """Return why to end at a point that was accepted, if at all."""
        if small_gradient(self.method, present.gradient_norm):
            return Reason.CONVERGED_GRADIENT
        if present.n_small >= self.method.value_iterations:
            return Reason.CONVERGED_VALUE
        return self._bound(present)

    def _stop_reason_on_failure(
        self, present: Present, searched: Searched, expected: float
    ) -> Reason | None:
        bound = self._bound(present)
        if bound is not None:
            return bound
        if self.descent.remembers:
            return None
        if not searched.any_finite:
            return Reason.NO_FINITE_TRIAL
        loss, at_start = present.loss, present.loss_at_start
        if lost_in_rounding(self.method, loss, expected, loss_at_start=at_start):
            return Reason.CONVERGED_ROUNDING
        return Reason.LINE_SEARCH_FAILED

    def _bound(self, present: Present) -> Reason | None:
        return bound_reached(
            self.method, iteration=present.iteration, n_evaluations=present.n_evaluations
        )

    def _moved(self, before: Present, searched: Searched, trial: Trial) -> Present:
        """Return what is known of the trial's point; its direction is not yet."""
        loss = trial.sample.value
        # A search that gave up may have moved next to nothing, far from a minimum.
        small = searched.satisfied and small_improvement(
            self.method, before.loss, loss, loss_at_start=before.loss_at_start
        )
        return msgspec.structs.replace(
            before,
            iteration=before.iteration + 1,
            loss=loss,
            improvement=before.loss - loss,
            n_small=before.n_small + 1 if small else 0,
            gradient_norm=trial.gradient_norm,
            gradient_square=trial.gradient_square,
            slope=0.0,
            step=0.0,
        )

    # -------------------------------------------------------------------- report

    def _state(self, present: Present) -> str:
        state = State(present=present, memory=self.descent.memory)
        return msgspec.json.encode(state).decode()

    def _iteration_done(self, present: Present, *, step_length: float) -> IterationDone:
        return iteration_done_at(
            present,
            step_length=step_length,
            state=self._state(present),
            vectors=(*self.line.vectors, *self.descent.vectors),
        )

    def _result(self, present: Present, reason: Reason) -> Result:
        return result_at(present, reason, state=self._state(present))


def iteration_done_at(
    present: Present, *, step_length: float, state: str, vectors: tuple[VectorName, ...]
) -> IterationDone:
    """Return what is told of a point that was accepted."""
    return IterationDone(
        iteration=present.iteration,
        n_evaluations=present.n_evaluations,
        loss=present.loss,
        gradient_norm=present.gradient_norm,
        step_length=step_length,
        state=state,
        vectors=vectors,
    )


def result_at(present: Present, reason: Reason, *, state: str) -> Result:
    """Return how a run ended, at the best point that it accepted."""
    return Result(
        reason=reason,
        iteration=present.iteration,
        n_evaluations=present.n_evaluations,
        loss=present.loss,
        gradient_norm=present.gradient_norm,
        state=state,
    )


def _expected(present: Present, searched: Searched) -> float:
    """Return what a search that failed could have improved the loss by."""
    if searched.by_slopes is not None:
        return searched.by_slopes
    return -present.slope * present.step if present.slope < 0.0 else math.inf


def _counted(present: Present, searched: Searched) -> Present:
    n_evaluations = present.n_evaluations + searched.n_evaluations
    return msgspec.structs.replace(present, n_evaluations=n_evaluations)


class SmoothMethod(Method, frozen=True, kw_only=True):
    """Settings of a method that searches along straight lines.

    Attributes:
        sufficient_decrease: c1 of the line search.
        curvature: c2 of the line search.
    """

    sufficient_decrease: float = 1e-4
    curvature: float = 0.9

    @override
    def __post_init__(self) -> None:
        check(self)
        _ = self.wolfe  # checks its two numbers

    @property
    def wolfe(self) -> WolfeConditions:
        """What the line search asks of a step.

        Raises:
            ValueError: there is no such step.
        """
        return WolfeConditions(
            sufficient_decrease=self.sufficient_decrease, curvature=self.curvature
        )

    def descent(self, memory: str | None) -> Descent:
        """Return what chooses directions; `memory` is that of the state, if any."""
        raise NotImplementedError

    def steps(self, state: str | None = None) -> Steps[Result]:
        """Run from "parameters", or on from `IterationDone.state`."""
        resumed = None if state is None else read_state(state)
        line = Straight(Objective(l2=self.l2), self.wolfe)
        descent = self.descent(resumed.memory if resumed else None)
        run = DescentRun(self, descent, line)
        return run.steps(resumed.present if resumed else None)
