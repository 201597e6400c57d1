"""Jobs that are run beside their forecasts: each is a valid one, none of them twice."""

import math

import pytest

from distbelief.config.load import parse_job
from distbelief.supervisor.view import JobView, Point
from experiments.benchmarks.forecast_of_loss import KINDS, setting
from experiments.benchmarks.lan import N_PLANS, drawn_plans
from experiments.benchmarks.network.forecasts import (
    N_MACHINES,
    OVERRIDES,
    reading_at_once,
    steady_rate,
)
from experiments.benchmarks.simulated.task import slow_samples
from experiments.benchmarks.simulated.truth import Case
from experiments.benchmarks.suggest import TRIED


def test_plans_of_any_draw_and_ten_combinations_fit_the_hosts() -> None:
    plans = [own for draw in range(20) for _, own in drawn_plans(draw, N_PLANS)]
    combinations = [tuple(f"{key}={value}" for key, value in each.items()) for each in TRIED]
    assert (len(plans), len(set(combinations))) == (240, 10)
    for own in (*plans, *combinations):
        cluster = Case(name="", overrides=(*OVERRIDES, *own)).job.cluster
        assert cluster.n_replicas * cluster.partitions_max <= N_MACHINES - 1


def test_runs_that_are_forecast_are_drawn_again_from_another_number() -> None:
    def jobs(draw: int) -> list[str]:
        return [setting(draw, n, KINDS).job for n in range(2 * len(KINDS))]

    assert jobs(1) == jobs(1)
    assert not set(jobs(1)) & set(jobs(2))
    for text in jobs(3):
        parse_job(f'{text}directory = "unused"\n', path="forecast.toml")


def test_virtual_time_does_not_wait_for_a_slow_disk() -> None:
    data = slow_samples(seconds=1e6)
    with reading_at_once():
        inputs, targets = data.__getitems__([3, 4])
    assert len(inputs) == len(targets) == 2


def test_the_rate_of_few_steps_is_that_of_a_line_through_all_reports() -> None:
    """Two reports, a quarter of a second apart from a step's end, had been wrong by up to 4 %."""

    def view(seconds: float, step: float) -> JobView:
        times = [0.25 * n for n in range(int(4 * seconds) + 1)]
        points = [Point(seconds=at, samples=8 * int(at / step)) for at in times]
        return JobView(samples=points[-1].samples, history=tuple(points))

    for step in (0.27, 0.3, 0.41):
        assert steady_rate(view(16.0, step)) == pytest.approx(8 / step, rel=0.015)
    assert math.isnan(steady_rate(view(0.5, 0.3)))
