"""What a run does when a direction is none, or a search fails."""

import numpy as np
import pytest
from numpy.typing import NDArray

from distbelief.protocol.vector_commands import Command, LinearCombination, Term
from sandblaster.optimizers.base import IterationDone, Steps
from sandblaster.optimizers.descent import DescentRun
from sandblaster.optimizers.lbfgs import LBFGS, QuasiNewton
from sandblaster.optimizers.line_search import Sample, Trial
from sandblaster.optimizers.termination import Reason
from tests.sandblaster.local import Local, minimize_flat
from tests.sandblaster.optimizers.problems import Seen, bowl


Doubles = NDArray[np.float64]


class Perverse:
    """L-BFGS whose k-th direction is not what it should be."""

    def __init__(self, scale: float, *, at: int) -> None:
        self._scale = scale
        self._at = at
        self._inner = QuasiNewton(history=5)
        self.n_directions = 0
        self.n_forgotten = 0
        self.measure = self._inner.measure
        self.first_step = self._inner.first_step

    @property
    def remembers(self) -> bool:
        return self._inner.remembers

    @property
    def vectors(self) -> tuple[str, ...]:
        return tuple(self._inner.vectors)

    @property
    def memory(self) -> str:
        return self._inner.memory

    def accept(self, trial: Trial, *, slope_at_start: float) -> None:
        self._inner.accept(trial, slope_at_start=slope_at_start)

    def form_direction(self, accepted: tuple[Command, ...]) -> Steps[tuple[Command, ...]]:
        self.n_directions += 1
        scale = self._scale if self.n_directions == self._at else 1.0
        *before, last = yield from self._inner.form_direction(accepted)
        assert isinstance(last, LinearCombination)
        terms = tuple(Term(scale * term.a, term.x) for term in last.terms)
        return (*before, LinearCombination(target=last.target, terms=terms))

    def forget(self, *, gradient_square: float) -> None:
        self.n_forgotten += 1
        self._inner.forget(gradient_square=gradient_square)


@pytest.mark.parametrize("scale", [-1.0, 0.0, float("nan")])
def test_a_direction_that_is_no_descent_direction_is_replaced_by_the_steepest(scale: float) -> None:
    seen, descent, method = Seen(), Perverse(scale, at=4), LBFGS()
    local = Local(np.ones(6), bowl, n_shards=2, callback=seen)
    run = DescentRun(method, descent, method.line())
    result = local.run(run.steps(None))
    assert result.reason.converged
    assert descent.n_forgotten == 2  # once at the start
    losses = [done.loss for done in seen]
    assert losses == sorted(losses, reverse=True)


def test_a_search_that_fails_drops_the_history_and_tries_the_gradient() -> None:
    """The search along the quasi-Newton direction always fails."""
    descent = Perverse(1.0, at=0)
    n_calls = 0

    def function(x: Doubles) -> tuple[float, Doubles]:
        nonlocal n_calls
        n_calls += 1
        loss, gradient = bowl(x)
        lies = n_calls > 5 and descent.n_forgotten == 1
        return (loss + 1e3 if lies else loss), gradient

    method = LBFGS()
    local = Local(np.full(6, 2.0), function)
    run = DescentRun(method, descent, method.line())
    result = local.run(run.steps(None))
    assert result.reason.converged
    assert descent.n_forgotten == 2
    assert result.n_evaluations == n_calls
    np.testing.assert_allclose(local.get("parameters"), 0.0, atol=1e-4)


def test_the_rounding_floor_is_an_end_of_its_own() -> None:
    """ARWHEAD ends in scipy as "ABNORMAL" at the minimum."""

    def arwhead(x: Doubles) -> tuple[float, Doubles]:
        head, last = x[:-1], x[-1]
        squares = head**2 + last**2
        loss = float(np.sum(-4.0 * head + 3.0 + squares**2))
        gradient = np.zeros(len(x))
        gradient[:-1] = -4.0 + 4.0 * squares * head
        gradient[-1] = float(np.sum(4.0 * squares * last))
        return loss, gradient

    method = LBFGS(tolerance=0.0, value_tolerance=0.0)
    x, result = minimize_flat(arwhead, np.ones(100), method, n_shards=2)
    assert result.reason in {
        Reason.CONVERGED_ROUNDING,
        Reason.CONVERGED_VALUE,
        Reason.CONVERGED_GRADIENT,
    }
    assert abs(arwhead(x)[0]) <= 1e-11


def test_rounding_ends_a_run_that_asks_for_more_than_there_is() -> None:
    def raised(x: Doubles) -> tuple[float, Doubles]:
        loss, gradient = bowl(x - np.pi)
        return 1e6 + loss, gradient

    method = LBFGS(tolerance=0.0, value_tolerance=0.0)
    x, result = minimize_flat(raised, np.zeros(5), method)
    assert result.reason in {Reason.CONVERGED_ROUNDING, Reason.CONVERGED_VALUE}
    np.testing.assert_allclose(x, np.pi, atol=1e-4)


@pytest.mark.parametrize("history", [1, 3, 10])
def test_history_is_bounded(history: int) -> None:
    def rough(x: Doubles) -> tuple[float, Doubles]:
        loss, gradient = bowl(x)
        return loss + float(np.sum(x**4)), gradient + 4.0 * x**3

    seen = Seen()
    local = Local(np.linspace(1.0, 3.0, 30), rough, callback=seen)
    local.run(LBFGS(history=history, tolerance=1e-9).steps())
    assert max(len(done.vectors) for done in seen) == 3 + 2 * history
    assert len(local.algebras[0].names()) <= 3 + 2 * (history + 1) + 3


def test_a_pair_without_curvature_is_not_remembered() -> None:
    def flat(x: Doubles) -> tuple[float, Doubles]:
        return -float(x.sum()), -np.ones(len(x))

    seen: list[IterationDone] = []

    def watch(cut: IterationDone) -> bool:
        seen.append(cut)
        return len(seen) == 4

    _, result = minimize_flat(flat, np.zeros(3), LBFGS(), callback=watch)
    assert result.reason is Reason.STOPPED
    assert all(cut.vectors == seen[0].vectors for cut in seen)


@pytest.mark.parametrize("curvature", [1.0, -1.0])
def test_a_pair_of_negative_curvature_is_not_remembered(curvature: float) -> None:
    local, step = Local(np.zeros(2), bowl), np.array([1.0, 2.0])
    local.put("trial", step)
    local.put("gradient", np.ones(2))
    local.put("trial_gradient_0", np.ones(2) + curvature * step)
    descent = QuasiNewton(history=3)
    descent.forget(gradient_square=2.0)
    scalars = local.perform(descent.measure("trial_gradient_0"))
    trial = Trial(Sample(1.0, 0.0, 0.0), "trial_gradient_0", 1.0, 2.0, scalars)
    descent.accept(trial, slope_at_start=-1.0)
    assert descent.remembers == (curvature > 0.0)


def test_float32_shards_come_as_near_as_float32_allows() -> None:
    local = Local(np.zeros(40), lambda x: bowl(x - 1.0), n_shards=3, dtype="float32")
    result = local.run(LBFGS(tolerance=1e-4).steps())
    assert result.reason.converged
    np.testing.assert_allclose(local.get("parameters"), 1.0, atol=1e-4)


def test_improvements_are_relative_to_the_loss_and_its_start() -> None:
    method = LBFGS(value_tolerance=1e-3)
    for before, after, at_start, is_small in (
        (100.0, 99.95, 1e4, True),
        (100.0, 99.8, 1e4, False),
        (1e-6, 0.0, 1.0, True),
        (1e-6, 0.0, 1e-6, False),
    ):
        assert method.is_small_improvement(before, after, loss_at_start=at_start) == is_small
    assert method.noise(1.0, loss_at_start=5.0) > 1e-16
    assert method.noise(1e-20, loss_at_start=1e-18) < 1e-20
