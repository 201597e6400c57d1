"""Termination: tolerances and bounds that all methods share, and the reasons to stop.

With f the loss, g its gradient, k the iteration, u the rounding of one operation:

    gradient    |g_k|_inf <= tolerance
    value       f_k-1 - f_k <= value_tolerance max(|f_k-1|, |f_k|, min(1, |f_0|))
    noise       8 u max(|f|, min(1, |f_0|)): losses that differ by less may be equal

The value test is scipy's with two differences: a loss below 1 is measured by its start,
not absolutely, and several iterations in a row must pass, for one ends runs in narrow
valleys and near saddles (Wood's function at 7.9 of 0). It costs 2 % more evaluations.
"""

import math
from enum import Enum
from typing import Final, final

import msgspec


@final
class Reason(Enum):
    """Why a run ended; the value is the sentence for the user."""

    CONVERGED_GRADIENT = "the gradient is as small as requested"
    CONVERGED_VALUE = "iterations improved the loss by less than requested"
    CONVERGED_ROUNDING = "no step improves the loss, and none could by more than its rounding error"
    MAX_ITERATIONS = "the number of iterations reached its bound"
    MAX_EVALUATIONS = "the number of evaluations reached its bound"
    LINE_SEARCH_FAILED = (
        "no step along the gradient improves the loss: check that both are of the same function"
    )
    NOT_FINITE = "the loss, or its gradient at the starting point, is not finite"
    STOPPED = "stopped by the caller"
    NO_FINITE_TRIAL = (
        "no step along the gradient has a finite loss and gradient: check the model, its "
        "loss and the data"
    )
    CONVERGED_GAP = "the duality gap is as small as requested"
    HELD_OUT = "evaluations of held-out data were no better for as long as requested"
    ROSE = "rounding has raised the objective: use a larger regularization, or scale the data"

    @property
    def sentence(self) -> str:
        """The reason, for people."""
        return self.value

    @property
    def converged(self) -> bool:
        """Whether a minimum was found."""
        return self in _CONVERGED


_CONVERGED = frozenset(
    {
        Reason.CONVERGED_GRADIENT,
        Reason.CONVERGED_VALUE,
        Reason.CONVERGED_ROUNDING,
        Reason.CONVERGED_GAP,
        Reason.HELD_OUT,
    }
)


_NOISE: Final = 8.0
"""In units of u. A net of five layers in float32 shows 0.3; losses whose terms cancel show
more."""


class Method(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"
):
    """Settings that all methods have, and the tests that they set."""

    tolerance: float = 1e-5  # ends at this largest absolute element of the gradient
    value_tolerance: float = 2.2e-9  # ends at this relative improvement of the loss ...
    value_iterations: int = 3  # ... in so many iterations in a row
    max_iterations: int = 15000  # bound on accepted points
    max_evaluations: int = 15000  # bound on evaluations
    l2: float = 0.0  # adds l2 / 2 |w|^2 to the loss
    rounding: float = 2.0**-53  # u, of the arithmetic that computes losses

    def __post_init__(self) -> None:
        for name in ("tolerance", "value_tolerance", "l1", "l2", "rounding"):
            value = getattr(self, name, 0.0)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; use a finite number, 0 or more")
        for name in ("value_iterations", "max_iterations", "max_evaluations", "history"):
            value = getattr(self, name, 1)
            if value < 1:
                raise ValueError(f"{name} is {value}; use 1 or more")
        decrease = getattr(self, "sufficient_decrease", 0.5)
        if not 0.0 < decrease < 1.0:
            raise ValueError(f"sufficient_decrease is {decrease}; use a number between 0 and 1")

    def is_small(self, gradient_norm: float) -> bool:
        return gradient_norm <= self.tolerance

    def is_small_improvement(self, before: float, after: float, *, loss_at_start: float) -> bool:
        size = max(abs(before), abs(after), min(1.0, abs(loss_at_start)))
        return before - after <= self.value_tolerance * size

    def noise(self, loss: float, *, loss_at_start: float) -> float:
        """Return the largest difference between losses that rounding alone may cause."""
        return _NOISE * self.rounding * max(abs(loss), min(1.0, abs(loss_at_start)))
