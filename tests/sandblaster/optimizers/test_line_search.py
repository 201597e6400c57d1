"""The line search against MINPACK-2's, as scipy has it, and on hostile functions."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize._dcsrch import DCSRCH

from sandblaster.optimizers.line_search import Found, Sample, WolfeConditions, more_thuente
from tests.sandblaster.optimizers.problems import search_to_end


Curve = Callable[[float], tuple[float, float]]
"""From a step to value and slope."""


def run(
    curve: Curve, *, step: float, wolfe: WolfeConditions | None = None
) -> tuple[Found, list[float]]:
    """Search along a curve; return the end, and the steps tried."""
    search = more_thuente(Sample(0.0, *curve(0.0)), step=step, wolfe=wolfe or WolfeConditions())
    return search_to_end(search, lambda t: Sample(t, *curve(t)))


def scipys(curve: Curve, *, step: float, wolfe: WolfeConditions) -> list[float]:
    """The steps that scipy's `DCSRCH` tries."""
    tried: list[float] = []

    def value(t: float) -> float:
        if t:
            tried.append(float(t))
        return curve(t)[0]

    search = DCSRCH(
        value,
        lambda t: curve(t)[1],
        wolfe.sufficient_decrease,
        wolfe.curvature,
        wolfe.narrowest,
        0.0,
        1e10,
    )
    search(step, maxiter=wolfe.n_trials_max + 1)
    return tried


def more_thuente_1(t: float) -> tuple[float, float]:
    b = 2.0
    return -t / (t * t + b), (t * t - b) / (t * t + b) ** 2


def more_thuente_2(t: float) -> tuple[float, float]:
    b = 0.004
    return (t + b) ** 5 - 2 * (t + b) ** 4, 5 * (t + b) ** 4 - 8 * (t + b) ** 3


def more_thuente_3(t: float) -> tuple[float, float]:
    b, k = 0.01, 39
    wave = 2 * (1 - b) / (k * math.pi) * math.sin(k * math.pi / 2 * t)
    slope = (1 - b) * math.cos(k * math.pi / 2 * t)
    if t <= 1 - b:
        return 1 - t + wave, -1 + slope
    if t >= 1 + b:
        return t - 1 + wave, 1 + slope
    return ((t - 1) ** 2 / b + b) / 2 + wave, (t - 1) / b + slope


def yanai(b1: float, b2: float) -> Curve:
    def gamma(b: float) -> float:
        return math.sqrt(1 + b * b) - b

    def curve(t: float) -> tuple[float, float]:
        left, right = math.hypot(1 - t, b2), math.hypot(t, b1)
        value = gamma(b1) * left + gamma(b2) * right
        return value, gamma(b1) * (t - 1) / left + gamma(b2) * t / right

    return curve


CURVES: dict[str, Curve] = {
    "1": more_thuente_1,
    "2": more_thuente_2,
    "3": more_thuente_3,
    "4": yanai(0.001, 0.001),
    "5": yanai(0.01, 0.001),
    "6": yanai(0.001, 0.01),
}


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())
@pytest.mark.parametrize("step", [1e-3, 1e-1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("conditions", [(1e-3, 0.9), (1e-3, 0.1), (1e-1, 0.1)])
def test_it_tries_the_steps_that_minpack_tries(
    curve: Curve, step: float, conditions: tuple[float, float]
) -> None:
    """Functions of More & Thuente 1994, section 5."""
    wolfe = WolfeConditions(
        sufficient_decrease=conditions[0], curvature=conditions[1], narrowest=1e-10
    )
    found, tried = run(curve, step=step, wolfe=wolfe)
    expected = scipys(curve, step=step, wolfe=wolfe)
    np.testing.assert_allclose(tried, expected[: len(tried)], rtol=1e-9)
    assert len(expected) - len(tried) in {0, 1}  # MINPACK tries its best step again
    assert found.satisfied
    check(curve, found, wolfe)


def check(curve: Curve, found: Found, wolfe: WolfeConditions) -> None:
    value, slope = curve(0.0)
    best = found.best
    assert best.value <= value + wolfe.sufficient_decrease * best.step * slope
    assert abs(best.slope) <= -wolfe.curvature * slope


def test_random_curves_are_searched_as_by_minpack() -> None:
    rng = np.random.default_rng(0)
    wolfe = WolfeConditions(curvature=0.1)
    for _ in range(200):
        a, b, c, d = rng.normal(size=4)

        def curve(
            t: float, a: float = a, b: float = b, c: float = c, d: float = d
        ) -> tuple[float, float]:
            value = 0.1 * t**4 + a * t**3 + b * t * t - abs(c) * t + d * math.sin(3 * t)
            slope = 0.4 * t**3 + 3 * a * t * t + 2 * b * t - abs(c)
            return value, slope + 3 * d * math.cos(3 * t)

        if curve(0.0)[1] >= 0.0:
            continue
        _, tried = run(curve, step=1.0, wolfe=wolfe)
        expected = scipys(curve, step=1.0, wolfe=wolfe)
        np.testing.assert_allclose(tried, expected[: len(tried)], rtol=1e-6)


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wall", [1e-4, 0.3, 2.0])
def test_a_step_that_is_not_finite_is_shortened(hole: float, wall: float) -> None:
    def curve(t: float) -> tuple[float, float]:
        return (hole, hole) if t >= wall else ((t - 1.0) ** 2, 2.0 * (t - 1.0))

    found, tried = run(curve, step=1.0)
    assert 0.0 < found.best.step < wall
    assert found.best.value < 1.0
    assert max(tried) <= max(1.0, 5.0 * wall)


@pytest.mark.parametrize(
    ("is_hole", "minimum", "curvature", "best"),
    [
        (lambda t: t > 0.2, 1.0, 0.9, (0.0, 0.2)),  # a wall of slopes that are none
        (lambda t: 0.45 < t < 0.55, 0.3, 1e-3, (0.29, 0.31)),  # a hole between two steps
    ],
)
def test_holes_are_got_round(
    is_hole: Callable[[float], bool], minimum: float, curvature: float, best: tuple[float, float]
) -> None:
    def curve(t: float) -> tuple[float, float]:
        return (t - minimum) ** 2, math.nan if is_hole(t) else 2.0 * (t - minimum)

    found, _ = run(curve, step=1.0, wolfe=WolfeConditions(curvature=curvature))
    assert best[0] < found.best.step <= best[1]


def test_nothing_finite_anywhere_ends_where_it_began() -> None:
    def curve(t: float) -> tuple[float, float]:
        return (math.nan, math.nan) if t else (1.0, -1.0)

    found, tried = run(curve, step=1.0)
    assert found == Found(Sample(0.0, 1.0, -1.0), satisfied=False)
    assert len(tried) == WolfeConditions().n_trials_max


def test_a_curve_without_end_is_followed_within_bounds() -> None:
    found, tried = run(lambda t: (-t, -1.0), step=1.0)
    assert not found.satisfied
    assert found.best.step == max(tried)
    assert len(tried) == WolfeConditions().n_trials_max


def test_a_slope_that_lies_ends_where_it_began() -> None:
    found, tried = run(lambda t: (t, -1.0), step=1.0)
    assert found.best.step == 0.0
    assert len(tried) <= WolfeConditions().n_trials_max


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1e150, 1e300])
def test_the_size_of_the_loss_does_not_matter(size: float) -> None:
    def curve(t: float) -> tuple[float, float]:
        value, slope = more_thuente_1(t)
        return size * value, size * slope

    _, tried = run(curve, step=10.0)
    _, expected = run(more_thuente_1, step=10.0)
    np.testing.assert_allclose(tried, expected, rtol=1e-6)


def test_values_at_the_end_of_the_numbers_do_no_harm() -> None:
    def curve(t: float) -> tuple[float, float]:
        return (1.7e308, 1.7e308) if t > 1e-3 else (-1.7e308 * t, -1.7e308)

    found, _ = run(curve, step=1.0)
    assert math.isfinite(found.best.step)
