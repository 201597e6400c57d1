"""Jobs of which forecasts are compared with what happens."""

import pytest

from experiments.benchmarks.simulated import truth as simulated_truth
from experiments.benchmarks.simulated.agreement import Agreement, Side
from experiments.benchmarks.simulated.truth import CASES, Case, truth


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
    both = {
        "a": Agreement(
            job="a",
            simulated=side(step=1.1, staleness=0.0),
            real=side(step=1.0, staleness=0.01),
            constants=(("latency", "1 us"),),
        ),
        "b": Agreement(
            job="b",
            simulated=side(step=1.0, staleness=0.8),
            real=side(step=1.25, staleness=1.0, pushed=9),
            constants=(("latency", "1 us"),),
        ),
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
    assert figures == pytest.approx(
        {
            "step_time_error": 0.2,
            "samples_per_second_error": 0.25,
            "staleness_error": 0.2,
            "bytes_differ": 1.0,
        }
    )
    told = capsys.readouterr().out
    assert "latency: 1 us" in told
    assert "others " in told
