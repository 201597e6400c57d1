"""The function that is minimised: the loss over some data, and what is added to it.

What is added needs no request of its own: its commands ride on the evaluation.
"""

from dataclasses import dataclass
from typing import final

from distbelief.commands import Axpy, Command, Dot, Scalars, VectorName
from sandblaster.requests import Evaluate, Examples, Steps, evaluate


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """F(w) = loss(w) + l2 / 2 |w|^2."""

    l2: float = 0.0
    examples: Examples | None = None

    def at(
        self,
        point: VectorName,
        *,
        gradient: VectorName,
        before: tuple[Command, ...] = (),
        after: tuple[Command, ...] = (),
    ) -> Steps[tuple[float, Scalars]]:
        """Return F there, and what `after` measures; the gradient lies in `gradient`.

        Args:
            point: A vector.
            gradient: A vector.
            before: Commands to make the point with; they measure nothing.
            after: Commands to perform once the gradient is whole.
        """
        penalty: tuple[Command, ...] = ()
        if self.l2:
            penalty = (Dot(x=point, y=point), Axpy(target=gradient, a=self.l2, x=point))
        evaluation = yield from evaluate(
            Evaluate(
                point=point,
                gradient=gradient,
                before=before,
                after=penalty + after,
                examples=self.examples,
            )
        )
        if not self.l2:
            return evaluation.loss, evaluation.scalars
        square, *measured = evaluation.scalars
        return evaluation.loss + 0.5 * self.l2 * square, tuple(measured)
