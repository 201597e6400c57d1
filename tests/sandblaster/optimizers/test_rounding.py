"""Searches among losses that differ by less than their rounding error.

A float32 net of five layers, at a loss of 2.0759246 and a gradient of 2.6e-5, was
searched for 8, 4 and 33 evaluations an iteration, by steps down to 1e-8: each rounded
loss was taken for a hill or a hollow. Two of three evaluations of the run were such.
"""

import itertools
import zlib
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from sandblaster.optimizers import AnyMethod
from sandblaster.optimizers.descent import ConjugateGradient, GradientDescent
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.line_search import Sample, WolfeConditions, more_thuente
from sandblaster.optimizers.owlqn import OWLQN
from sandblaster.optimizers.termination import Reason
from tests.sandblaster.local import minimize_flat
from tests.sandblaster.optimizers.problems import Seen, search_to_end


Doubles = NDArray[np.float64]

SINGLE = 2.0**-24
NOISE = 8.0 * SINGLE * 3.0

METHODS: dict[str, AnyMethod] = {
    "lbfgs": LBFGS(rounding=SINGLE),
    "cg": ConjugateGradient(rounding=SINGLE),
    "gd": GradientDescent(rounding=SINGLE),
    "owlqn": OWLQN(l1=1e-9, rounding=SINGLE),
}


def rounded(x: Doubles, loss: float) -> float:
    """Return the loss as float32 has it, one unit off or not: by the point alone."""
    units = zlib.crc32(x.tobytes()) % 3 - 1.0
    return float(np.float32(loss)) + units * float(np.spacing(np.float32(loss)))


def basin(x: Doubles) -> tuple[float, Doubles]:
    """Return a loss near 3, and a gradient that is much better known."""
    curvatures = 1e-3 * np.arange(1.0, len(x) + 1.0)
    loss = 3.0 + 0.5 * float(curvatures @ (x - 1.0) ** 2)
    return rounded(x, loss), curvatures * (x - 1.0)


@pytest.mark.parametrize("name", METHODS)
def test_a_search_within_the_rounding_error_is_short_and_explained(name: str) -> None:
    seen = Seen()
    asked = {"tolerance": 0.0, "value_tolerance": 0.0}
    method = msgspec.structs.replace(METHODS[name], **asked)
    x, result = minimize_flat(basin, np.zeros(9), method, callback=seen)
    assert result.reason in {Reason.CONVERGED_ROUNDING, Reason.CONVERGED_VALUE}
    assert 0.5 * 1e-3 * float(np.arange(1.0, 10.0) @ (x - 1.0) ** 2) < NOISE
    searches = [b.n_evaluations - a.n_evaluations for a, b in pairwise(seen)]
    assert max(searches[1:]) <= 6
    assert result.n_evaluations - seen[-1].n_evaluations <= 12  # two that fail
    losses = [cut.loss for cut in seen]
    assert losses == sorted(losses, reverse=True)
    assert result.loss == losses[-1]
    assert result.loss == pytest.approx(basin(x)[0], abs=1e-7)  # less the penalty


def curve(t: float) -> Sample:
    """Return a parabola with its minimum at 1, 1e-7 below where it begins."""
    value = 3.0 + 1e-7 * ((t - 1.0) ** 2 - 1.0)
    return Sample(t, rounded(np.array([t]), value), 2e-7 * (t - 1.0))


@pytest.mark.parametrize("step", [1e-3, 0.1, 0.7, 1.0, 3.0, 50.0])
def test_slopes_find_what_values_cannot_show(step: float) -> None:
    start = Sample(0.0, 3.0, -2e-7)
    search = more_thuente(start, step=step, wolfe=WolfeConditions(), noise=NOISE)
    found, tried = search_to_end(search, curve)
    assert found.satisfied
    assert 0.0 < found.best.step < 2.0
    assert abs(curve(found.best.step).slope) <= 0.9 * 2e-7
    assert len(tried) <= 5


def test_slopes_that_are_noise_too_end_a_search_soon() -> None:
    start = Sample(0.0, 3.0, -1e-9)
    wolfe = WolfeConditions(curvature=1e-3, narrowest=1e-12)
    search = more_thuente(start, step=1.0, wolfe=wolfe, noise=NOISE)
    signs = itertools.cycle((1.0, -1.0))
    found, tried = search_to_end(search, lambda t: Sample(t, 3.0, 1e-9 * next(signs)))
    assert not found.satisfied
    assert len(tried) <= 6


@pytest.mark.parametrize("name", METHODS)
def test_another_functions_gradient_is_no_rounding_error(name: str) -> None:
    """At tiny steps all losses are alike; slopes must have found a minimum there."""

    def liar(x: Doubles) -> tuple[float, Doubles]:
        return rounded(x, 3.0 + float(x @ x)), -2.0 * x

    x, result = minimize_flat(liar, np.ones(5), METHODS[name])
    assert result.loss <= liar(np.ones(5))[0] + 1e-8  # the penalty
    assert float(x @ x) == pytest.approx(5.0, abs=1e-3)
    assert result.reason is Reason.LINE_SEARCH_FAILED


def test_a_plain_that_values_cannot_show_is_crossed() -> None:
    """The loss falls by 1e-8 a step of length 1, and by 1 in the end."""

    def plain(x: Doubles) -> tuple[float, Doubles]:
        return rounded(x, 3.0 + float(np.cos(x[0]))), -np.sin(x)

    method = LBFGS(tolerance=0.0, rounding=SINGLE)
    x, result = minimize_flat(plain, np.array([1e-8]), method)
    assert result.reason.converged
    assert float(x[0]) == pytest.approx(np.pi, abs=2e-3)
