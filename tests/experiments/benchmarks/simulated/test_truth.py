"""Forecasts beside what happens."""

from pathlib import Path

import pytest

from distbelief.simulation.chaos.schedule import FaultEvent
from distbelief.simulation.forecast.calibration import Rate, Rates, save_rates
from distbelief.supervisor.view import JobView, Point, RoleView
from experiments.benchmarks.simulated import truth as simulated_truth
from experiments.benchmarks.simulated.truth import (
    CASES,
    Agreement,
    Case,
    Side,
    as_dealt,
    side_of,
    simulated_side,
    steady_rate,
    truth,
)
from tests.distbelief.simulation.forecast.jobs import small


RATES = Rates(work={"replica replica:step by times": Rate(unit="times", seconds=0.02, n=10)})


def course(*samples: int) -> tuple[Point, ...]:
    return tuple(Point(seconds=float(i), samples=n) for i, n in enumerate(samples))


def test_the_rate_is_that_of_the_steady_part() -> None:
    history = course(0, 0, 0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1000)
    assert steady_rate(history) == 100.0
    assert steady_rate(course(0, 1000)) is None
    assert steady_rate(()) is None
    # Batches come all at once, and reports more often: the first in a batch says nothing.
    history = course(*(100 * (second // 3) for second in range(32)))
    assert steady_rate(history) == pytest.approx(100 / 3)


def a_view(*, rate: int, coordinator: bool = False) -> JobView:
    name = "coordinator" if coordinator else "replica-1"
    return JobView(
        samples=10 * rate,
        step=10,
        training_seconds=12.0,
        history=course(*range(0, 10 * rate + 1, rate)),
        roles=(RoleView(name=name, state="done"),),
        bytes_in=7,
    )


def test_steps_of_replicas_go_on_side_by_side_and_errors_are_shares_of_what_is_real() -> None:
    real = side_of(a_view(rate=100), small(), error=None)
    assert real.samples_per_second == 100.0
    assert real.step_seconds == 2.0  # two replicas, 100 samples a step
    driven = side_of(a_view(rate=100, coordinator=True), small(), error=None)
    assert driven.step_seconds == 1.0
    simulated = side_of(a_view(rate=110), small(), error=None)
    both = Agreement(job="small", simulated=simulated, real=real)
    assert both.error_of("samples_per_second") == pytest.approx(0.1)
    assert both.error_of("pushed_bytes") == 0.0
    assert both.error_of("staleness_mean") is None


def test_a_pause_costs_time_and_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blows begin when the supervisor hears of the first samples."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = small("cluster.replicas=1", "algorithm.max_steps=60", "stop.samples=1000000")
    save_rates(job, RATES)
    plain, constants = simulated_side(job, seed=0)
    pause = FaultEvent(kind="pause", role="replica-0", at=0.01, lasts=0.2)
    paused, _ = simulated_side(job, seed=0, blows=[pause], horizon=10.0)
    assert plain.error is paused.error is None
    assert paused.seconds == pytest.approx(plain.seconds + 2.0, abs=0.3)
    assert paused.pushed_bytes == plain.pushed_bytes
    assert dict(constants)["core time of an event"] == "120 us"


def test_who_is_slowed_down_stands_still_most_of_the_time() -> None:
    blow = FaultEvent(kind="slow", role="replica-0", at=0.1, lasts=0.03, factor=4.0)
    pauses = as_dealt(blow, horizon=10.0, roles=["replica-0"])
    assert [p.at for p in pauses] == pytest.approx([1.025, 1.125, 1.225])
    assert [getattr(p, "seconds", None) for p in pauses] == pytest.approx([0.075] * 3)


def side(*, step: float, staleness: float | None = None, pushed: int = 8) -> Side:
    return Side(
        step_seconds=step,
        samples_per_second=64.0 / step,
        staleness_mean=staleness,
        pushed_bytes=pushed,
        fetched_bytes=8,
        steps=10,
        seconds=10 * step,
        error=None,
    )


def test_there_are_jobs_of_every_algorithm_that_end_by_themselves() -> None:
    jobs = [case.job for case in CASES.values()]
    assert {job.algorithm_name for job in jobs} == {"downpour", "sandblaster"}
    assert any(job.cluster.is_split for job in jobs)
    assert all(job.data.test is None for job in jobs)
    blown = {blow.kind for case in CASES.values() for blow in case.blows}
    assert blown == {"pause", "slow"}


def test_the_worst_of_all_jobs_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = {
        "a": (side(step=1.1, staleness=0.0), side(step=1.0, staleness=0.01)),
        "b": (side(step=1.0, staleness=0.8), side(step=1.25, staleness=1.0, pushed=9)),
    }
    both = {
        job: Agreement(job=job, simulated=one, real=other, constants=(("latency", "1 us"),))
        for job, (one, other) in sides.items()
    }
    cases = {
        name: Case(name=name, overrides=(f"algorithm.batch_size={i}",))
        for i, name in enumerate(both, 1)
    }
    monkeypatch.setattr(simulated_truth, "CASES", cases)
    monkeypatch.setattr(
        simulated_truth, "both_ways", lambda job, **_: both["a" if job.batch_size == 1 else "b"]
    )
    figures = truth(["a", "b"])
    assert figures.pop("others") >= 0.0  # of this machine, whatever it does
    errors = {"step_time_error": 0.2, "samples_per_second_error": 0.25, "staleness_error": 0.2}
    assert figures == pytest.approx({**errors, "bytes_differ": 1.0})
    told = capsys.readouterr().out
    assert "latency: 1 us" in told
    assert "others " in told
