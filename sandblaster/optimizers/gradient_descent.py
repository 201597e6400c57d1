"""Gradient descent with a line search: the plainest method, for comparison.

The first step to try is Barzilai & Borwein's (1988), s.y / y.y of the step before: with
the line search that is the global method of Raydan (1997).
"""

import math
from collections.abc import Sequence
from typing import final

from typing_extensions import override

from distbelief.protocol.vector_commands import Command, Dot, LinearCombination, Term, VectorName
from sandblaster.optimizers.base import Combination
from sandblaster.optimizers.descent import Present, SmoothMethod
from sandblaster.optimizers.line_search import GRADIENT, Trial


_DIFFERENCE = "gradient_difference"


@final
class GradientDescent(SmoothMethod, frozen=True, kw_only=True, tag="gradient_descent"):
    """Settings of gradient descent: those of every smooth method."""

    @override
    def descent(self, memory: str | None) -> "Steepest":
        return Steepest(memory=memory or "0.0")


@final
class Steepest:
    """Directions -g."""

    remembers = False
    vectors: Sequence[VectorName] = ()

    def __init__(self, *, memory: str = "0.0") -> None:
        self._step = float(memory)

    @property
    def memory(self) -> str:
        return repr(self._step)

    def measure(self, gradient: VectorName) -> tuple[Command, ...]:
        """Measure y.y, y = g_trial - g."""
        terms = (Term(1.0, gradient), Term(-1.0, GRADIENT))
        return (
            LinearCombination(target=_DIFFERENCE, terms=terms),
            Dot(x=_DIFFERENCE, y=_DIFFERENCE),
        )

    def accept(self, trial: Trial, *, slope_at_start: float) -> None:
        # s = step d, so s.y = step (g_trial - g).d
        (square,) = trial.scalars
        curvature = trial.sample.step * (trial.sample.slope - slope_at_start)
        step = curvature / square if square else 0.0
        self._step = step if math.isfinite(step) and step > 0.0 else trial.sample.step

    def direction(self) -> Combination:
        return {GRADIENT: -1.0}

    def first_step(self, present: Present) -> float:
        """Return Barzilai & Borwein's step; at first one of length 1."""
        return self._step or 1.0 / math.sqrt(present.gradient_square)

    def forget(self, *, gradient_square: float) -> None:
        del gradient_square
        self._step = 0.0
