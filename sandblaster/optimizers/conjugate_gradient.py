"""Nonlinear conjugate gradients: directions that remember one vector.

    d_k+1 = -g_k+1 + beta_k d_k,    y_k = g_k+1 - g_k
    beta_k = max(0, y_k.g_k+1 / g_k.g_k)        Polak & Ribiere, as Gilbert & Nocedal 1992

It needs four vectors besides the parameters and two for trials, where L-BFGS needs 2 m
more; but mostly more evaluations.
"""

import math
from collections.abc import Sequence
from typing import final

import msgspec
from typing_extensions import override

from distbelief.protocol.vector_commands import Command, Gram, LinearCombination, Term, VectorName
from sandblaster.optimizers.base import Combination
from sandblaster.optimizers.descent import Present, SmoothMethod
from sandblaster.optimizers.line_search import DIRECTION, GRADIENT, Trial


_DIFFERENCE = "gradient_difference"


@final
class ConjugateGradient(SmoothMethod, frozen=True, kw_only=True, tag="conjugate_gradient"):
    """Settings of conjugate gradients."""

    value_tolerance: float = 0.0
    sufficient_decrease: float = 1e-4  # c1 of the line search
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
    """Directions -g + beta d."""

    vectors: Sequence[VectorName] = ()

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

    def measure(self, gradient: VectorName) -> tuple[Command, ...]:
        terms = (Term(1.0, gradient), Term(-1.0, GRADIENT))
        return (
            LinearCombination(target=_DIFFERENCE, terms=terms),
            Gram(rows=(_DIFFERENCE,), columns=(gradient,)),
        )

    def accept(self, trial: Trial, *, slope_at_start: float) -> None:
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

    def direction(self) -> Combination:
        if not self.remembers:
            return {GRADIENT: -1.0}
        return {GRADIENT: -1.0, DIRECTION: self._last.beta}

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
