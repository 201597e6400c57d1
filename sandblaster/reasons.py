"""Why a run of an optimiser ended: a closed list, each with its sentence."""

from enum import Enum
from typing import final


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
