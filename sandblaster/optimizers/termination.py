"""When a run ends: tolerances and bounds that all methods share.

Symbols: f the loss, g its gradient, k the iteration.

    gradient    |g_k|_inf <= gradient_tolerance
    value       f_k-1 - f_k <= value_tolerance max(|f_k-1|, |f_k|, min(1, |f_0|))

The second is scipy's, with two differences. There a loss below 1 is measured
absolutely, and one of 1e-9 would be converged before it began; here it is measured by
its own beginning. And there one iteration is enough, which ends runs in narrow valleys
and near saddles (Wood's function at 7.9 of 0); here it takes a few in a row, for 2 %
more evaluations over all problems of More, Garbow & Hillstrom.

Losses are known to their rounding error, u times some, u = 2^-53 or 2^-24 as they are
computed in float64 or float32:

    noise       8 u max(|f|, min(1, |f_0|))

Two that differ by less may be equal; there slopes tell more than values do.
"""

import math
from enum import Enum
from typing import final

import msgspec


# Why a run of an optimiser ended: a closed list, each with its sentence.


@final
class Reason(Enum):
    """Why it ended; the value is the sentence for the user."""

    CONVERGED_GRADIENT = "the gradient is as small as was asked for"
    CONVERGED_VALUE = "an iteration improved the loss by less than was asked for"
    CONVERGED_ROUNDING = "no step improves the loss, and none could by more than its rounding error"
    MAX_ITERATIONS = "the number of iterations reached its bound"
    MAX_EVALUATIONS = "the number of evaluations reached its bound"
    LINE_SEARCH_FAILED = (
        "no step along the gradient improves the loss: are they of the same function?"
    )
    NOT_FINITE = "the loss or its gradient at the starting point is not finite"
    STOPPED = "it was told to stop"
    NO_FINITE_TRIAL = (
        "at no step along the gradient is the loss finite, nor its gradient: look at "
        "the model, its loss and the data"
    )

    @property
    def sentence(self) -> str:
        """For the user."""
        return self.value

    @property
    def converged(self) -> bool:
        """Whether this is an end that one hopes for."""
        return self in _CONVERGED


_CONVERGED = frozenset(
    {Reason.CONVERGED_GRADIENT, Reason.CONVERGED_VALUE, Reason.CONVERGED_ROUNDING}
)


class Method(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"
):
    """What the settings of every method have.

    Attributes:
        gradient_tolerance: Largest element of the gradient, by size, to end with.
        value_tolerance: Relative improvement of the loss to end with ...
        value_iterations: ... in so many iterations in a row.
        n_iterations_max: Bound on accepted points.
        n_evaluations_max: Bound on evaluations.
        l2: Adds l2 / 2 |w|^2 to the loss.
        rounding: u, of the arithmetic that losses come from.
    """

    gradient_tolerance: float = 1e-5
    value_tolerance: float = 2.2e-9
    value_iterations: int = 3
    n_iterations_max: int = 15000
    n_evaluations_max: int = 15000
    l2: float = 0.0
    rounding: float = 2.0**-53

    def __post_init__(self) -> None:
        check(self)


def check(method: Method) -> None:
    """Raise if a common setting cannot be.

    Raises:
        ValueError: naming it.
    """
    for name in ("gradient_tolerance", "value_tolerance", "l2", "rounding"):
        value = getattr(method, name)
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; use a finite number, 0 or more")
    for name in ("value_iterations", "n_iterations_max", "n_evaluations_max"):
        value = getattr(method, name)
        if value < 1:
            raise ValueError(f"{name} is {value}; use 1 or more")


def check_history(n_history: int) -> None:
    """Raise if so many corrections cannot be remembered.

    Raises:
        ValueError: naming the setting.
    """
    if n_history < 1:
        raise ValueError(f"n_history is {n_history}; use 1 or more")


def check_decrease(sufficient_decrease: float) -> None:
    """Raise if that is no c1 of a line search.

    Raises:
        ValueError: naming the setting.
    """
    if not 0.0 < sufficient_decrease < 1.0:
        raise ValueError(
            f"sufficient_decrease is {sufficient_decrease}; use a number between 0 and 1"
        )


def small_gradient(method: Method, gradient_norm: float) -> bool:
    """Whether the gradient is small enough."""
    return gradient_norm <= method.gradient_tolerance


def small_improvement(method: Method, before: float, after: float, *, loss_at_start: float) -> bool:
    """Whether an iteration improved the loss too little to go on."""
    size = max(abs(before), abs(after), min(1.0, abs(loss_at_start)))
    return before - after <= method.value_tolerance * size


def noise(method: Method, loss: float, *, loss_at_start: float) -> float:
    """Return by how much losses may differ that would be equal but for rounding."""
    size = max(abs(loss), min(1.0, abs(loss_at_start)))
    return _NOISE * method.rounding * size


def lost_in_rounding(
    method: Method, loss: float, improvement: float, *, loss_at_start: float
) -> bool:
    """Whether an improvement would be no larger than the loss's rounding error."""
    return improvement <= 4.0 * noise(method, loss, loss_at_start=loss_at_start)


def bound_reached(method: Method, *, iteration: int, n_evaluations: int) -> Reason | None:
    """Return which bound has been reached, if any."""
    if iteration >= method.n_iterations_max:
        return Reason.MAX_ITERATIONS
    if n_evaluations >= method.n_evaluations_max:
        return Reason.MAX_EVALUATIONS
    return None


_NOISE = 8.0
"""Times the rounding of one operation. Of a net of five layers in float32, 0.3 times
was seen; the sums of a loss of many terms that cancel each other have more."""
