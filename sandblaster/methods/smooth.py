"""What methods for smooth losses share: directions of their own, Wolfe's line search.

A method is its settings, and a `Descent` that chooses directions:

    class MyMethod(SmoothMethod, frozen=True, kw_only=True, tag="my_method"):
        def descent(self, memory: str | None) -> Descent: ...
"""

from typing_extensions import override

from sandblaster.methods.descent import Descent, DescentRun, read_state
from sandblaster.methods.line_search import WolfeConditions
from sandblaster.methods.objective import Objective
from sandblaster.methods.stopping import Method, check
from sandblaster.methods.trials import Straight
from sandblaster.requests import Result, Steps


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
        """Run from "parameters", or on from `Iterated.state`."""
        resumed = None if state is None else read_state(state)
        line = Straight(Objective(l2=self.l2), self.wolfe)
        descent = self.descent(resumed.memory if resumed else None)
        run = DescentRun(self, descent, line)
        return run.steps(resumed.present if resumed else None)
