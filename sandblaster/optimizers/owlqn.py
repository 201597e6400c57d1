"""OWL-QN: L-BFGS for a loss with an L1 penalty, F(w) = f(w) + l1 |w|_1.

Andrew & Gao, Scalable training of L1-regularized log-linear models, 2007. Within one
orthant F is as smooth as f, so each iteration stays in one, and ends at its boundary:

    v = pseudo-gradient of F at x             their equation 4
    d = -H v, 0 where its sign is not -v's    H from differences of f's gradient alone
    o = sign of x, or of -v where x is 0      the orthant
    x(t) = x + t d, 0 where its sign is not o's
    t = the first of t0, t0 / 2, t0 / 4, ... with F(x(t)) <= F(x) + c1 v.(x(t) - x)
"""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from distbelief.protocol import vector_commands as vc
from sandblaster.optimizers import line_search as ls
from sandblaster.optimizers.base import Objective, Steps
from sandblaster.optimizers.descent import DescentMethod
from sandblaster.optimizers.lbfgs import QuasiNewton


PSEUDO_GRADIENT = "pseudo_gradient"
TRIAL_PSEUDO_GRADIENT = "trial_pseudo_gradient"

_ORTHANT = "orthant"
_MOVE = "move"  # x(t) - x
_N_TRIALS_MAX = 30


@final
class OWLQN(DescentMethod, frozen=True, kw_only=True, tag="owlqn"):
    """Settings of OWL-QN."""

    l1: float  # adds l1 |w|_1 to the loss, over all parameters, biases included
    history: int = 10  # number of corrections remembered
    sufficient_decrease: float = 1e-4  # c1 of the line search

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.l1 > 0.0:
            raise ValueError(f"l1 is {self.l1}; use a number above 0, or method 'l-bfgs'")

    @override
    def line(self) -> "WithinOrthant":
        return WithinOrthant(
            Objective(l2=self.l2), l1=self.l1, sufficient_decrease=self.sufficient_decrease
        )

    @override
    def descent(self, memory: str | None) -> QuasiNewton:
        return QuasiNewton(
            history=self.history,
            memory=memory,
            steepest=PSEUDO_GRADIENT,
            trial_steepest=TRIAL_PSEUDO_GRADIENT,
        )


@final
@dataclass(frozen=True, slots=True)
class WithinOrthant:
    """A `Line` of points x(t), searched by halving the step."""

    objective: Objective
    l1: float
    sufficient_decrease: float

    vectors: ClassVar = (ls.PARAMETERS, ls.GRADIENT, PSEUDO_GRADIENT, ls.DIRECTION, _ORTHANT)

    def begin(self) -> Steps[tuple[float, float, float]]:
        return (
            yield from self._at(
                ls.PARAMETERS, gradient=ls.GRADIENT, pseudo_gradient=PSEUDO_GRADIENT
            )
        )[:3]

    def measure_direction(self) -> tuple[vc.Command, ...]:
        # The first command drops elements of d that do not agree with -v.
        return (
            vc.Pointwise(target=ls.DIRECTION, function="oppose", x=ls.DIRECTION, y=PSEUDO_GRADIENT),
            vc.Pointwise(target=_ORTHANT, function="orthant", x=ls.PARAMETERS, y=PSEUDO_GRADIENT),
            vc.Dot(x=PSEUDO_GRADIENT, y=ls.DIRECTION),
        )

    def make_trial(self, step: float) -> tuple[vc.Command, ...]:
        return (
            ls.point_at(step),
            vc.Pointwise(target=ls.TRIAL, function="align", x=ls.TRIAL, y=_ORTHANT),
        )

    def accepted(self, trial: ls.Trial) -> tuple[vc.Command, ...]:
        return (
            vc.Copy(target=ls.PARAMETERS, x=ls.TRIAL),
            vc.Copy(target=ls.GRADIENT, x=trial.gradient),
            vc.Copy(target=PSEUDO_GRADIENT, x=TRIAL_PSEUDO_GRADIENT),
        )

    def search(
        self,
        begin: ls.Sample,
        *,
        step: float,
        longest: float,
        noise: float,
        n_trials_max: int,
        measure: ls.Measure,
    ) -> Steps[ls.Searched]:
        """Halve the step until F decreases enough, or can no longer be seen to decrease."""
        del longest  # the way bends
        gradient = ls.TRIAL_GRADIENTS[0]
        move = (vc.Term(1.0, ls.TRIAL), vc.Term(-1.0, ls.PARAMETERS))
        before: tuple[vc.Command, ...] = ()
        n_evaluations, any_finite = 0, False
        while n_evaluations < min(_N_TRIALS_MAX, n_trials_max):
            n_evaluations += 1
            value, norm, square, (slope, *scalars) = yield from self._at(
                ls.TRIAL,
                gradient=gradient,
                pseudo_gradient=TRIAL_PSEUDO_GRADIENT,
                before=before,
                after=(
                    vc.LinearCombination(target=_MOVE, terms=move),
                    vc.Dot(x=PSEUDO_GRADIENT, y=_MOVE),
                    *measure(gradient),
                ),
            )
            sample, expected = ls.Sample(step, value, slope), -min(slope, 0.0)
            any_finite |= sample.finite
            is_lost = expected <= noise  # shorter steps improve F even less
            least = noise if is_lost else self.sufficient_decrease * expected
            if sample.finite and value <= begin.value - least:
                trial = ls.Trial(sample, gradient, norm, square, tuple(scalars))
                return ls.Searched(trial=trial, satisfied=True, n_evaluations=n_evaluations)
            if sample.finite and is_lost:
                break
            step *= 0.5
            before = self.make_trial(step)
        return ls.Searched(
            trial=None, satisfied=False, n_evaluations=n_evaluations, any_finite=any_finite
        )

    def _at(
        self,
        point: vc.VectorName,
        *,
        gradient: vc.VectorName,
        pseudo_gradient: vc.VectorName,
        before: tuple[vc.Command, ...] = (),
        after: tuple[vc.Command, ...] = (),
    ) -> Steps[tuple[float, float, float, tuple[float, ...]]]:
        """Return F, norm and square of v, and what `after` measures."""
        loss, (size, norm, square, *measured) = yield from self.objective.at(
            point,
            gradient=gradient,
            before=before,
            after=(
                vc.Pointwise(
                    target=pseudo_gradient,
                    function="pseudo_gradient",
                    x=point,
                    y=gradient,
                    a=self.l1,
                ),
                vc.Norm(x=point, order="1"),
                *ls.size_of(pseudo_gradient),
                *after,
            ),
        )
        return loss + self.l1 * size, norm, square, tuple(measured)
