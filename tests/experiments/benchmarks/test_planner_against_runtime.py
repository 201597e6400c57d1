import pytest

from experiments.benchmarks.planner_against_runtime import compared
from tests.experiments.benchmarks.runs import figures_of


def test_predictions_are_judged_by_error_rank_and_regret() -> None:
    predicted = {"a": 1.0, "b": 2.0, "c": 4.0}
    measured = {"a": 1.25, "b": 1.0, "c": 4.0}
    found = compared(predicted, measured)
    assert found["error"] == pytest.approx((0.2 + 1.0 + 0.0) / 3)
    assert found["rank"] == pytest.approx(0.5)
    assert found["regret"] == pytest.approx(0.25)
    assert found["plans"] == 3


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_plans_are_run_and_the_last_line_says_how_wrong_predictions_are() -> None:
    figures = figures_of(
        *("planner_against_runtime", "--small", "--rounds=1", "--seconds=0.2"),
        *("--nets", "speech"),
    )
    assert figures["plans_speech"] >= 8
    assert figures["error_speech"] >= 0
    assert -1 <= figures["rank_speech"] <= 1
