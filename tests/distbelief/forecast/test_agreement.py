"""What two runs are compared by."""

import pytest

from distbelief.forecast.agreement import Agreement, side_of, steady_rate
from distbelief.job.view import Point, RoleView, SupervisorView
from tests.distbelief.forecast.jobs import small


def course(*samples: int) -> tuple[Point, ...]:
    return tuple(Point(seconds=float(i), samples=n) for i, n in enumerate(samples))


def test_the_rate_is_that_of_the_steady_part() -> None:
    history = course(0, 0, 0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1000)
    assert steady_rate(history) == 100.0
    assert steady_rate(course(0, 1000)) is None
    assert steady_rate(()) is None


def a_view(*, rate: int, coordinator: bool = False) -> SupervisorView:
    name = "coordinator" if coordinator else "replica-1"
    return SupervisorView(
        samples=10 * rate,
        step=10,
        training_seconds=12.0,
        history=course(*range(0, 10 * rate + 1, rate)),
        roles=(RoleView(name=name, state="done"),),
        bytes_in=7,
    )


def test_steps_of_replicas_go_on_side_by_side() -> None:
    side = side_of(a_view(rate=100), small(), error=None)
    assert side.samples_per_second == 100.0
    assert side.step_seconds == 2.0  # two replicas, 100 samples a step
    driven = side_of(a_view(rate=100, coordinator=True), small(), error=None)
    assert driven.step_seconds == 1.0


def test_errors_are_shares_of_what_is_real() -> None:
    simulated = side_of(a_view(rate=110), small(), error=None)
    real = side_of(a_view(rate=100), small(), error=None)
    both = Agreement(job="small", simulated=simulated, real=real)
    assert both.error_of("samples_per_second") == pytest.approx(0.1)
    assert both.error_of("pushed_bytes") == 0.0
    assert both.error_of("staleness_mean") is None
