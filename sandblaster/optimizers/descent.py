"""Descent runs: what the methods for smooth losses share.

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


class Descent(Protocol):
    """How a method chooses its directions: all that differs between them."""

    @property
    def remembers(self) -> bool:
        """Whether the direction depends on more than the present gradient."""
        ...

    @property
    def vectors(self) -> Sequence[VectorName]:
        """The vectors of its memory."""
        ...

    @property
    def memory(self) -> str:
        """The scalars of its memory, as text; the constructor takes it back."""
        ...

    def measure(self, gradient: VectorName) -> tuple[Command, ...]:
        """Return commands to execute at a trial, in "trial", with this gradient."""
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
        """Drop all memory but the square of the present gradient."""
        ...


@final
class Present(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a run: scalars only."""

    iteration: int  # points accepted
    n_evaluations: int  # evaluations done
    loss_at_start: float  # loss at the first point of the run
    loss: float  # at "parameters"
    improvement: float  # decrease of the loss in the last iteration; 0 at first
    n_small: int  # consecutive iterations with too small a decrease
    gradient_norm: float  # largest absolute element of "gradient"
    gradient_square: float  # its dot product with itself
    slope: float = 0.0  # its dot product with "direction"
    step: float = 0.0  # to try first; 0 at the end of a run


@final
class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `IterationDone.state` encodes."""

    present: Present
    memory: str


def read_state(text: str) -> State:
    """Return the state that `IterationDone.state` encodes.

    Raises:
        ValueError: the text is not such a state.
    """
    return msgspec.json.decode(text, type=State)


@final
@dataclass(slots=True)
class DescentRun:
    """One run of one method, with its descent and its line search."""

    method: Method
    descent: Descent
    line: Line

    def steps(self, present: Present | None) -> Steps[Result]:
        """Run from "parameters", or resume from a state."""
        if present is None:
            present = yield from self._begin()
            reason = self._stop_reason_at_start(present)
            if reason is not None:
                return self._result(present, reason)
            present = yield from self._choose_direction(present, accepted=())
            if (yield from stop_requested(self._iteration_done(present, step_length=0.0))):
                return self._result(present, Reason.STOPPED)
        elif present.step == 0.0:  # the run had ended here; bounds may have changed since
            reason = self._stop_reason(present)
            if reason is not None:
                return self._result(present, reason)
            present = yield from self._choose_direction(present, accepted=())
        else:
            yield from perform(*self.line.make_trial(present.step))
        return (yield from self._descend(present))

    def _descend(self, present: Present) -> Steps[Result]:
        expected = math.inf  # least improvement that a failed search expected
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
            done = self._iteration_done(present, step_length=trial.sample.step)
            stop = yield from stop_requested(done)
            if reason is not None or stop:
                return self._result(present, reason or Reason.STOPPED)

    # --- parts ---

    def _begin(self) -> Steps[Present]:
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
        # One request moves to the accepted point, forms the direction and the first trial.
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

    # --- reasons to stop ---

    def _stop_reason_at_start(self, present: Present) -> Reason | None:
        if not math.isfinite(present.loss) or not math.isfinite(present.gradient_norm):
            return Reason.NOT_FINITE
        return self._stop_reason(present)

    def _stop_reason(self, present: Present) -> Reason | None:
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
        loss = trial.sample.value
        # A search that gave up may have moved very little, far from a minimum.
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

    # --- reports ---

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
    return Result(
        reason=reason,
        iteration=present.iteration,
        n_evaluations=present.n_evaluations,
        loss=present.loss,
        gradient_norm=present.gradient_norm,
        state=state,
    )


def _expected(present: Present, searched: Searched) -> float:
    if searched.by_slopes is not None:
        return searched.by_slopes
    return -present.slope * present.step if present.slope < 0.0 else math.inf


def _counted(present: Present, searched: Searched) -> Present:
    n_evaluations = present.n_evaluations + searched.n_evaluations
    return msgspec.structs.replace(present, n_evaluations=n_evaluations)


class SmoothMethod(Method, frozen=True, kw_only=True):
    """Settings of a method that searches along straight lines."""

    sufficient_decrease: float = 1e-4  # c1 of the line search
    curvature: float = 0.9  # c2 of the line search

    @override
    def __post_init__(self) -> None:
        check(self)
        _ = self.wolfe  # checks its two numbers

    @property
    def wolfe(self) -> WolfeConditions:
        return WolfeConditions(
            sufficient_decrease=self.sufficient_decrease, curvature=self.curvature
        )

    def descent(self, memory: str | None) -> Descent:
        """Return what chooses directions; `memory` is that of a state, if any."""
        raise NotImplementedError

    def steps(self, state: str | None = None) -> Steps[Result]:
        """Run from "parameters", or resume from `IterationDone.state`."""
        resumed = None if state is None else read_state(state)
        line = Straight(Objective(l2=self.l2), self.wolfe)
        descent = self.descent(resumed.memory if resumed else None)
        run = DescentRun(self, descent, line)
        return run.steps(resumed.present if resumed else None)
