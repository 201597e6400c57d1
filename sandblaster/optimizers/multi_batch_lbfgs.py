"""Multi-batch L-BFGS: a new large batch per iteration, overlapping the one before.

Berahas, Nocedal & Takac, A multi-batch L-BFGS method for machine learning, 2016. The
difference y of two gradients means curvature only if both are of the same examples, so
consecutive batches share some, and y is the change of the shared examples' gradient:

    batch k       [ head | body .......... | tail ]
    batch k + 1                            [ head | body .......... | tail ]

    g_k = mean gradient of batch k at x_k           the direction is -H g_k
    y_k = tail of batch k: gradient at x_k+1 - gradient at x_k
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import final

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from distbelief.protocol import vector_commands as vc
from sandblaster.optimizers import base, line_search as ls
from sandblaster.optimizers.descent import Present
from sandblaster.optimizers.lbfgs import QuasiNewton
from sandblaster.optimizers.termination import Method, Reason


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """Examples [start, start + size), the last `n_tail` of which the next batch repeats."""

    start: int
    size: int
    n_tail: int

    @property
    def rest(self) -> base.Examples:
        return base.Examples(self.start, self.tail.start)

    @property
    def tail(self) -> base.Examples:
        return base.Examples(self.start + self.size - self.n_tail, self.start + self.size)

    @property
    def body(self) -> base.Examples:
        return base.Examples(self.start + self.n_tail, self.tail.start)

    def next(self) -> "Batch":
        return Batch(self.tail.start, self.size, self.n_tail)


def mean_gradient(
    target: vc.VectorName, parts: Sequence[tuple[base.Examples, vc.VectorName]]
) -> vc.Command:
    """Return the command that forms the mean gradient of all parts from that of each."""
    n = sum(_n(examples) for examples, _ in parts)
    terms = tuple(vc.Term(_n(examples) / n, name) for examples, name in parts)
    return vc.LinearCombination(target=target, terms=terms)


def mean_loss(parts: Sequence[tuple[base.Examples, float]]) -> float:
    n = sum(_n(examples) for examples, _ in parts)
    return sum(_n(examples) / n * loss for examples, loss in parts)


def _n(examples: base.Examples) -> int:
    return examples.stop - examples.start


_REST = "rest_gradient"  # of all that is evaluated before the tail
_TAIL = "tail_gradient"  # at "parameters"
_TRIAL_TAIL = "trial_tail_gradient"  # of the same examples, at "trial"
_NEXT = "next_gradient"  # of the next batch, at "trial"
_NEXT_TAIL = "next_tail_gradient"
_N_TRIALS_MAX = 20


@final
class MultiBatchLBFGS(Method, frozen=True, kw_only=True, tag="multi_batch_lbfgs"):
    """Settings of multi-batch L-BFGS; `value_tolerance` is not used."""

    batch_size: int  # examples of one batch, at most all
    overlap: float = 0.25  # share of a batch that the next one repeats
    n_iterations_max: int = 100
    n_history: int = 10  # number of corrections remembered
    sufficient_decrease: float = 1e-4  # c1 of the line search

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 3:
            raise ValueError(f"batch_size is {self.batch_size}; use 3 or more")
        if not 0.0 < self.overlap <= 0.5:
            raise ValueError(f"overlap is {self.overlap}; use above 0, up to 0.5")

    def steps(self, state: str | None = None) -> base.Steps[base.Result]:
        """Run from "parameters", or resume from `IterationDone.state`."""
        resumed = None if state is None else msgspec.json.decode(state, type=_State)
        descent = QuasiNewton(
            n_history=self.n_history,
            memory=resumed.memory if resumed else None,
            gradient=_TAIL,
            trial_steepest=_NEXT,
        )
        n_tail_max = (self.batch_size - 1) // 2  # every batch has an example of its own
        n_tail = min(max(1, round(self.overlap * self.batch_size)), n_tail_max)
        batch = Batch(resumed.start if resumed else 0, self.batch_size, n_tail)
        return _Run(self, descent, base.Objective(l2=self.l2), batch).steps(resumed)


class _State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    present: Present
    start: int  # of the present batch
    memory: str
    n_refuted: int = 0
    n_unasked: int = 0


@final
@dataclass(slots=True)
class _Run:
    method: MultiBatchLBFGS
    descent: QuasiNewton
    objective: base.Objective
    batch: Batch
    any_finite: bool = True  # at a trial of the last search
    n_refuted: int = 0  # how often a batch's gradient was small, but that of all was not
    n_unasked: int = 0  # batches with a small gradient passed over since then

    def steps(self, resumed: _State | None) -> base.Steps[base.Result]:
        if resumed is not None:
            self.n_refuted, self.n_unasked = resumed.n_refuted, resumed.n_unasked
            return (yield from self._descend(resumed.present, None))
        loss, norm, square = yield from self._evaluate_batch()
        present = Present(
            n_evaluations=2,
            loss_at_start=loss,
            loss=loss,
            gradient_norm=norm,
            gradient_square=square,
        )
        if not present.is_finite:
            return self._result(present, Reason.NOT_FINITE)
        return (yield from self._descend(present, 0.0))

    def _descend(self, present: Present, step_length: float | None) -> base.Steps[base.Result]:
        while True:
            reason = present.bound_reached(self.method)
            if step_length is not None:
                stop = yield from base.stop_requested(self._iteration_done(present, step_length))
                reason = reason or (Reason.STOPPED if stop else None)
            if reason is not None:
                return self._result(present, reason)
            step_length = None
            if self.method.is_small(present.gradient_norm):
                present, reason = yield from self._check_all_examples(present)
                if reason is not None:
                    return self._result(present, reason)
                continue
            present = yield from self._choose_direction(present)
            moved = yield from self._search(present)
            if moved is not None:
                present, step_length = moved
            elif self.descent.remembers:
                self.descent.forget(gradient_square=present.gradient_square)
            else:
                reason = Reason.NO_FINITE_TRIAL
                if self.any_finite:
                    reason = Reason.LINE_SEARCH_FAILED
                return self._result(present, reason)

    # --- parts ---

    def _check_all_examples(self, present: Present) -> base.Steps[tuple[Present, Reason | None]]:
        # A small gradient of one batch says nothing of the others: the batch may be fitted
        # exactly, far from any minimum. So all examples are evaluated; after the k-th time
        # in vain, the next k such batches are passed over without that.
        if self.n_unasked >= self.n_refuted:
            loss, (norm,) = yield from self.objective.at(
                ls.PARAMETERS, gradient=_REST, after=(vc.Norm(x=_REST, order="inf"),)
            )
            present = present.counting(1)
            if self.method.is_small(norm):
                found = replace(present, loss=loss, gradient_norm=norm)
                return found, Reason.CONVERGED_GRADIENT
            self.n_refuted, self.n_unasked = self.n_refuted + 1, 0
        else:
            self.n_unasked += 1
        self.batch = self.batch.next()
        loss, norm, square = yield from self._evaluate_batch()
        present = present.counting(2)
        return replace(present, loss=loss, gradient_norm=norm, gradient_square=square), None

    def _evaluate_batch(self) -> base.Steps[tuple[float, float, float]]:
        # The tail is evaluated apart: it is the next batch's head, so overlap costs nothing.
        rest, tail = self.batch.rest, self.batch.tail
        rest_loss, _ = yield from self.objective.at(ls.PARAMETERS, gradient=_REST, examples=rest)
        mean = mean_gradient(ls.GRADIENT, ((rest, _REST), (tail, _TAIL)))
        tail_loss, (norm, square) = yield from self.objective.at(
            ls.PARAMETERS, gradient=_TAIL, after=(mean, *ls.size_of(ls.GRADIENT)), examples=tail
        )
        self.descent.forget(gradient_square=square)
        return mean_loss(((rest, rest_loss), (tail, tail_loss))), norm, square

    def _choose_direction(self, present: Present) -> base.Steps[Present]:
        terms = tuple(vc.Term(a, name) for name, a in self.descent.direction().items())
        (slope,) = yield from base.perform(
            vc.LinearCombination(target=ls.DIRECTION, terms=terms),
            vc.Dot(x=ls.GRADIENT, y=ls.DIRECTION),
        )
        step = self.descent.first_step(present)
        return replace(present, slope=slope, step=step)

    def _search(self, present: Present) -> base.Steps[tuple[Present, float] | None]:
        """Halve the step until the loss of the batch decreases enough; then move to the next."""
        self.any_finite = not present.slope < 0.0
        if self.any_finite:
            return None
        at, rest, tail, step = self.objective.at, self.batch.rest, self.batch.tail, present.step
        for _ in range(_N_TRIALS_MAX):
            before = (ls.point_at(step),)
            rest_loss, _ = yield from at(ls.TRIAL, gradient=_REST, before=before, examples=rest)
            tail_loss, _ = yield from at(ls.TRIAL, gradient=_TRIAL_TAIL, examples=tail)
            present = present.counting(2)
            loss = mean_loss(((rest, rest_loss), (tail, tail_loss)))
            self.any_finite |= math.isfinite(loss)
            expected, noise = -step * present.slope, present.noise(self.method)
            is_lost = expected <= noise  # shorter steps improve the loss even less
            least = noise if is_lost else self.method.sufficient_decrease * expected
            if loss <= present.loss - least:
                moved = yield from self._move(present, step, tail_loss)
                present = present.counting(2)
                if moved is not None:
                    return moved, step
            if is_lost and math.isfinite(loss):
                break
            step *= 0.5
        return None

    def _move(self, present: Present, step: float, head_loss: float) -> base.Steps[Present | None]:
        next_batch = self.batch.next()
        head, body, tail = self.batch.tail, next_batch.body, next_batch.tail
        parts = ((head, _TRIAL_TAIL), (body, _REST), (tail, _NEXT_TAIL))
        body_loss, _ = yield from self.objective.at(ls.TRIAL, gradient=_REST, examples=body)
        tail_loss, (norm, square, *measured) = yield from self.objective.at(
            ls.TRIAL,
            gradient=_NEXT_TAIL,
            examples=tail,
            after=(
                mean_gradient(_NEXT, parts),
                *ls.size_of(_NEXT),
                *self.descent.measure(_TRIAL_TAIL),
            ),
        )
        loss = mean_loss(((head, head_loss), (body, body_loss), (tail, tail_loss)))
        sample = ls.Sample(step, loss, norm)
        if not sample.finite:
            return None
        self.batch = next_batch
        trial = ls.Trial(sample, _TRIAL_TAIL, norm, square, tuple(measured))
        self.descent.accept(trial, slope_at_start=present.slope)
        yield from base.perform(
            vc.Copy(target=ls.PARAMETERS, x=ls.TRIAL),
            vc.Copy(target=ls.GRADIENT, x=_NEXT),
            vc.Copy(target=_TAIL, x=_NEXT_TAIL),
        )
        return replace(
            present.counting(2),
            iteration=present.iteration + 1,
            loss=loss,
            gradient_norm=norm,
            gradient_square=square,
        )

    # --- reports ---

    def _iteration_done(self, present: Present, step_length: float) -> base.IterationDone:
        state = _State(
            present=present,
            start=self.batch.start,
            memory=self.descent.memory,
            n_refuted=self.n_refuted,
            n_unasked=self.n_unasked,
        )
        return present.done(
            step_length=step_length,
            state=msgspec.json.encode(state).decode(),
            vectors=(ls.PARAMETERS, ls.GRADIENT, _TAIL, *self.descent.vectors),
        )

    def _result(self, present: Present, reason: Reason) -> base.Result:
        return base.Result(reason=reason, **asdict(self._iteration_done(present, 0.0)))
